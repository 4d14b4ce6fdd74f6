"""A sparse weight written out dense, each time or where it changed, and a dense matrix read at its stored places: one
launch each, for CSR."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature, size_bucket
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.strided import name_of
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.lowering.sparse.random_sparse import density_of, random_pattern, row_lengths, sizes_and_entries
from sparsecomp.lowering.tuning.template import Operation


class WriteOut(NamedTuple):
    """A CSR matrix (rows, cols) with room for `entries`, to be written out dense."""

    rows: int
    cols: int
    entries: int
    dtype: str
    index_dtype: str


def write_out(pointers: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """The matrix (rows, columns), contiguous and of the dtype of the values; zero where it stores nothing.

    Args:
        pointers: (rows + 1,) and indices (entries,), contiguous, int32 or int64.
        values: (entries,), contiguous.
    """
    out = allocate(shape, (shape[1], 1), values.dtype, values.device)
    launch = _writing(values.device, shape, values.shape, values.dtype, pointers.dtype, indices.dtype)
    if launch is not None:
        launch(pointers, indices, values, out)
    return out


@dispatch.recorded
def _writing(
    device: torch.device, shape: tuple[int, int], stored: torch.Size, dtype: torch.dtype, *index: torch.dtype
) -> Callable[..., None] | None:
    """To find the launch by the tensors' looks takes the host less than to describe it anew; None if there is none.
    Pointers and indices may differ in their dtypes, of which the problem says one."""
    if not shape[0] * shape[1]:
        return None
    problem = WriteOut(*shape, stored.numel(), name_of(dtype), name_of(index[0]))
    return dispatch.prepared(WRITE_OUT, problem, device, alike=index)


def refresh(pointers: Tensor, indices: Tensor, values: Tensor, dense: Tensor, seen: Tensor) -> None:
    """Write rows of a dense copy (rows, columns) anew that are not the matrix's any more.

    Args:
        pointers, indices: as in `write_out`.
        values: (entries,), contiguous, of two or four bytes each.
        dense: contiguous and of the dtype of the values; zeros at first.
        seen: (rows,) int64, zeros at first: what tells rows apart, written with them.
    """
    if dense.numel():
        _refreshing(dense.device, dense.shape, values.shape, values.dtype, pointers.dtype, indices.dtype)(
            pointers, indices, values, dense, seen
        )


@dispatch.recorded
def _refreshing(
    device: torch.device, shape: tuple[int, int], stored: torch.Size, *dtypes: torch.dtype
) -> Callable[..., None]:
    """A launch of a device for tensors of these dtypes, which belongs to them."""
    from sparsecomp.lowering.sparse.kernels.stored_places import refresh_launch

    return refresh_launch(*shape, stored.numel())


def read_at(dense: Tensor, pointers: Tensor, indices: Tensor, out: Tensor) -> None:
    """out (entries,) = dense (rows, columns) at the stored places; spare capacity is not written."""
    if out.numel() and dense.numel():
        dtypes = (tensor.dtype for tensor in (pointers, indices, dense, out))
        _reading(dense.shape[0], *dense.stride(), out.numel(), pointers.device, *dtypes)(dense, pointers, indices, out)


@lru_cache(maxsize=4096)
def _reading(
    rows: int, row: int, column: int, entries: int, device: torch.device, *dtypes: torch.dtype
) -> Launch:  # fmt: skip
    from sparsecomp.lowering.sparse.kernels.stored_places import read_kernel

    block = min(max(size_bucket(-(-entries // max(rows, 1))), 32), 1024)
    return Launch(read_kernel, (rows,), (row, column), {"ENTRIES": block}, num_warps=4 if block > 128 else 1)


def _signature(problem: WriteOut, device: Device) -> KernelSignature:
    p = problem
    entries = min(p.entries, p.rows * p.cols)
    return KernelSignature(
        "write_out", device, dtypes=(p.dtype,), formats=("csr",), index=p.index_dtype,
        sizes=(("rows", p.rows), ("cols", p.cols)), density=density_of(entries, p.rows, p.cols),
        rows=row_lengths(entries, p.rows, 0.0),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> WriteOut:
    rows, cols, entries, _ = sizes_and_entries(signature, "rows", "cols")
    return WriteOut(rows, cols, entries, signature.dtypes[0], signature.index)


def _operands(problem: WriteOut, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random, dtype = problem, torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    pattern = random_pattern(p.rows, p.cols, min(p.entries, p.rows * p.cols), 0, p.index_dtype, random)
    spare = p.entries - pattern.col.numel()
    values = torch.randn(p.entries, generator=random, device=device).to(dtype)
    out = torch.full((p.rows, p.cols), float("nan"), dtype=dtype, device=device)
    return pattern.crow, torch.nn.functional.pad(pattern.col, (0, spare)), values, out


def _reference(problem: WriteOut, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    crow, col, values, out = operands
    assert crow is not None and col is not None and values is not None and out is not None
    row = torch.repeat_interleave(torch.arange(problem.rows, device=crow.device), crow.diff().long())
    right = torch.zeros_like(out, dtype=torch.float64)
    right[row, col[: row.numel()].long()] = values[: row.numel()].double()
    return (right,)


WRITE_OUT = Operation("write_out", _signature, _representative, _operands, (3,), _reference, lambda _: 0.0)
