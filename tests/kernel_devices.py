"""Where tests run: operators on the CPU or a CUDA device, kernels through Triton's interpreter or on that device.

On a device a call can also run in a CUDA graph.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")

_has_cuda = torch.cuda.is_available()
_interpreting = os.environ.get("TRITON_INTERPRET") == "1"

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install -e '.[gpu]'"
)

KERNEL_DEVICES = [
    pytest.param(
        "cpu",
        id="interpreter",
        marks=[
            pytest.mark.skipif(not _interpreting, reason="TRITON_INTERPRET is off: kernels are compiled for a GPU"),
            needs_triton,
        ],
    ),
    pytest.param(
        "cuda",
        id="cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not _has_cuda or _interpreting, reason="no CUDA device")],
    ),
]

def interpreted(test: T) -> T:
    """For tests whose kernels run in the interpreter alone."""
    for mark in KERNEL_DEVICES[0].marks:
        test = mark(test)
    return test


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not _has_cuda, reason="no CUDA device")]),
]
"""For operators: what a CPU runs is plain torch."""


def graph_of(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A CUDA graph of a call, after one call outside of it; and what the call returned, which each replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = call()
    torch.cuda.synchronize()
    return graph, result
