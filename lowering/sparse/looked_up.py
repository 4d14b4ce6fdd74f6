"""Looked-up rows of a CSR matrix, and their gradient: one launch each, whatever the rows hold when it runs."""

from functools import lru_cache

import torch
from torch import Tensor

from sparsecomp.lowering.launch.launch import Launch


def write_rows(index: Tensor, pointers: Tensor, columns: Tensor, values: Tensor, out: Tensor) -> None:
    """out (..., width) = the rows that `index` (...) names; all are contiguous."""
    if out.numel():
        _launch(out.shape, index, pointers, columns, values, False)(index.contiguous(), pointers, columns, values, out)


def add_rows(index: Tensor, pointers: Tensor, columns: Tensor, grad: Tensor, out: Tensor) -> None:
    """out (entries,) += the elements of `grad` (..., width) at the places of the rows that `index` (...) names."""
    if grad.numel() and out.numel():
        _launch(grad.shape, index, pointers, columns, grad, True)(index.contiguous(), pointers, columns, grad, out)


def _launch(
    dense: torch.Size, index: Tensor, pointers: Tensor, columns: Tensor, values: Tensor, gradient: bool
) -> Launch:  # fmt: skip
    sizes = dense[:-1].numel(), pointers.numel() - 1, dense[-1], columns.numel()
    return _prepared(*sizes, gradient, values.device, values.dtype, index.dtype, pointers.dtype)


@lru_cache(maxsize=4096)
def _prepared(
    count: int, rows: int, width: int, entries: int, gradient: bool, device: torch.device, *dtypes: torch.dtype
) -> Launch:  # fmt: skip
    from sparsecomp.lowering.sparse.kernels.looked_up import rows_launch

    return rows_launch(count, rows, width, entries, gradient=gradient)
