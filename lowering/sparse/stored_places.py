"""A sparse weight written out dense, and a dense matrix read at its stored places: one launch each, for CSR."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import size_bucket
from sparsecomp.lowering.launch.launch import Launch


def write_out(pointers: Tensor, indices: Tensor, values: Tensor, out: Tensor) -> None:
    """out (rows, columns) = the matrix, zero where it stores nothing.

    Args:
        pointers: (rows + 1,) and indices (entries,), contiguous, int32 or int64.
        values: (entries,), contiguous.
        out: contiguous, of any floating dtype.
    """
    if out.numel():
        _writing(out.shape[0], out.shape[1], values.numel(), *_kinds(pointers, values, out))(
            pointers, indices, values, out
        )


def read_at(dense: Tensor, pointers: Tensor, indices: Tensor, out: Tensor) -> None:
    """out (entries,) = dense (rows, columns) at the stored places; spare capacity is not written."""
    if out.numel() and dense.numel():
        _reading(dense.shape[0], *dense.stride(), out.numel(), *_kinds(pointers, dense, out))(
            dense, pointers, indices, out
        )


def _kinds(*tensors: Tensor) -> tuple[Any, ...]:
    return tensors[0].device, *(tensor.dtype for tensor in tensors)


@lru_cache(maxsize=4096)
def _writing(rows: int, cols: int, entries: int, device: torch.device, *dtypes: torch.dtype) -> Launch:
    from sparsecomp.lowering.sparse.kernels.spmm_csr_dense import densify_kernel

    constants = {"ZEROS": min(size_bucket(cols), 4096), "ENTRIES": 256}
    return Launch(densify_kernel, (rows,), (rows, 0, cols), constants, num_warps=8 if cols > 1024 else 4)


@lru_cache(maxsize=4096)
def _reading(
    rows: int, row: int, column: int, entries: int, device: torch.device, *dtypes: torch.dtype
) -> Launch:  # fmt: skip
    from sparsecomp.lowering.sparse.kernels.stored_places import read_kernel

    block = min(max(size_bucket(-(-entries // max(rows, 1))), 32), 1024)
    return Launch(read_kernel, (rows,), (row, column), {"ENTRIES": block}, num_warps=4 if block > 128 else 1)
