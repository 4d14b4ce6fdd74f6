"""Where tests run: operators on the CPU or a CUDA device, kernels through Triton's interpreter or on that device."""

import os

import pytest
import torch

_has_cuda = torch.cuda.is_available()
_interpreting = os.environ.get("TRITON_INTERPRET") == "1"

KERNEL_DEVICES = [
    pytest.param(
        "cpu",
        id="interpreter",
        marks=pytest.mark.skipif(not _interpreting, reason="TRITON_INTERPRET is off: kernels are compiled for a GPU"),
    ),
    pytest.param(
        "cuda",
        id="cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not _has_cuda or _interpreting, reason="no CUDA device")],
    ),
]

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not _has_cuda, reason="no CUDA device")]),
]
"""For operators: what a CPU runs is plain torch."""
