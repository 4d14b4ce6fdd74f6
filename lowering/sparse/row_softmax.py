"""Softmax over the stored elements of rows, and its gradient: one launch each, whatever the rows hold when it runs."""

from functools import lru_cache

import torch
from torch import Tensor

from sparsecomp.lowering.launch.launch import Launch


def write_softmax(values: Tensor, pointers: Tensor, out: Tensor) -> None:
    """out = softmax of values (batch, entries) or (entries,), contiguous; spare entries of `out` stay."""
    _prepared("softmax", *_described(values, pointers))(values, pointers, out)


def write_softmax_gradient(grad: Tensor, weights: Tensor, pointers: Tensor, out: Tensor) -> None:
    """out = the gradient by the values whose softmax is `weights`; spare entries of `out` stay."""
    _prepared("gradient", *_described(weights, pointers))(grad, weights, pointers, out)


def _described(
    values: Tensor, pointers: Tensor
) -> tuple[int, int, int, torch.device, torch.dtype, torch.dtype]:
    entries = values.shape[-1]
    batch = values.numel() // entries
    return pointers.numel() - 1, entries, batch, values.device, values.dtype, pointers.dtype


@lru_cache(maxsize=4096)
def _prepared(
    which: str, rows: int, entries: int, batch: int, device: torch.device, dtype: torch.dtype, index: torch.dtype
) -> Launch:
    from sparsecomp.lowering.sparse.kernels.row_softmax import softmax_launch

    return softmax_launch(which, rows, entries, batch)
