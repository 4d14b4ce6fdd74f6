"""Triton reads TRITON_INTERPRET when it is imported, so it is set before anything else."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
