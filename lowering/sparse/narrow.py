"""Narrow CSR times few columns as an operation: out = activation(scale · (S @ dense) + bias + residual).

Summed in float32. Each value that is stored is multiplied by itself, so that 0 · inf cannot arise; more columns than a
few are other kernels', by columns that are made in each call.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats import CSR, NARROW
from sparsecomp.formats.narrow import CHUNK
from sparsecomp.lowering.cache.signature import Device, KernelSignature, size_bucket
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import Output, finished, output_from_text, output_of, random_operands
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.strided import (
    Strides,
    dtype_name,
    gather_product,
    name_of,
    order_of,
    random_tensor,
    strides_from,
    strides_of,
)
from sparsecomp.lowering.sparse import spmm_csr
from sparsecomp.lowering.sparse.random_sparse import density_of, random_pattern, row_lengths, sizes_and_entries
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.patterns import Layout

MOST = 16
"""Columns of dense that a kernel takes."""


class SpmmNarrow(NamedTuple):
    """The sizes, strides and types of a product; its launch adds the addresses.

    Attributes:
        m, k, n: S is (m, k), dense (k, n).
        batch: of dense; kernels want 1.
        nnz: values that S stores.
        dense: strides of dense.
        dtype, dense_dtype: of values and dense; kernels want the same.
        index_dtype: of `starts`.
        distance: dtype of the distances; of a pair of weights see `lowering.sparse.gated_pair`.
        output: the output and its epilogue.
        parts: rows of each of several weights; see `lowering.sparse.siblings`.
    """

    m: int
    k: int
    n: int
    batch: int
    nnz: int
    dense: Strides
    dtype: str
    dense_dtype: str
    index_dtype: str
    distance: str
    output: Output
    parts: tuple[int, ...] = ()

    @property
    def density(self) -> float:
        """Share of places that are stored."""
        return density_of(self.nnz, self.m, self.k)


def multiply(
    values: Tensor, pattern: Sequence[Tensor], layout: Layout, transpose: bool, dense: Tensor, out: Tensor,
    **finish: Any,
) -> None:  # fmt: skip
    """As `Launcher.multiply`."""
    if values.dim() > 1 or dense.dim() > 2 or dense.shape[-1] > MOST:
        spmm_csr.multiply(*csr_matrix(values, pattern, layout), transpose, dense, out, **finish)
    elif out.numel():
        values, arrays = values.contiguous(), [array.contiguous() for array in pattern[: layout.own]]
        described = output_of(out, **finish)
        problem = problem_of(values, layout, dense, out, described, arrays[0].dtype, arrays[-1].dtype)
        beside = finish.get("bias"), finish.get("residual")
        dispatch.launch(SPMM_NARROW, problem, *arrays, values, dense, *beside, out)


def csr_matrix(
    values: Tensor, pattern: Sequence[Tensor], layout: Layout
) -> tuple[Tensor, list[Tensor], Layout]:  # fmt: skip
    """The same matrix in CSR, whose columns are made in each call; what is kept of its transpose stays."""
    starts, chunks, bases, indices = (array.contiguous() for array in pattern[: layout.own])
    columns = torch.empty(indices.shape, dtype=starts.dtype, device=indices.device)
    if indices.numel():
        kinds = (array.dtype for array in (starts, bases, indices))
        launch = _columns(starts.device, layout.shape[0], indices.numel(), *kinds)
        launch(starts, chunks, bases, indices, columns)
    return values, [starts, columns, *pattern[layout.own :]], layout._replace(format="csr")


@lru_cache(maxsize=4096)
def _columns(device: torch.device, rows: int, entries: int, *dtypes: torch.dtype) -> Launch:
    """A launch of a device for arrays of these dtypes, which belongs to them."""
    from sparsecomp.lowering.sparse.kernels.narrow_columns import narrow_columns_kernel

    block = min(max(size_bucket(-(-entries // max(rows, 1))), 32), 1024)
    constants = {"E": block, "CHUNK": CHUNK}
    return Launch(narrow_columns_kernel, (rows,), (), constants, num_warps=4 if block > 128 else 1)


def problem_of(
    values: Tensor, layout: Layout, dense: Tensor, out: Tensor, described: Output, index: torch.dtype = torch.int32,
    last: torch.dtype = torch.uint8,
) -> SpmmNarrow:  # fmt: skip
    """As `Launcher.problem_of`.

    Raises:
        FormatError: shapes that do not belong together.
    """
    spmm_csr.check_shapes(layout.shape[0], values.dim() == 2, values.shape[:-1], dense, out)
    if dense.shape[-2] != layout.shape[1]:
        raise FormatError(f"dense has {dense.shape[-2]} rows, needs {layout.shape[1]}, the columns of the matrix")
    (m, k), batch = layout.shape, out.shape[0] if out.dim() == 3 else 1
    return SpmmNarrow(
        m, k, dense.shape[-1], batch, values.shape[-1], strides_of(dense), dtype_name(values), dtype_name(dense),
        name_of(index), name_of(last), described,
    )  # fmt: skip


def operations(layout: Layout) -> tuple[Operation[Any], ...]:
    """As `Launcher.operations`."""
    return (SPMM_NARROW,)


def _signature(problem: SpmmNarrow, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "spmm_narrow", device, dtypes=(p.dtype, p.dense_dtype, p.output.dtype), accumulator="float32",
        formats=("narrow",), index=f"{p.index_dtype} {p.distance}",
        layouts=(order_of(p.dense, p.n), order_of(p.output.strides, p.n)), epilogue=p.output.text,
        sizes=(("m", p.m), ("k", p.k), ("n", p.n), ("batch", p.batch)), density=p.density,
        rows=row_lengths(p.nnz, p.m, 0.0),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> SpmmNarrow:
    n, batch = (int(dict(signature.sizes)[name]) for name in ("n", "batch"))
    m, k, entries, _ = sizes_and_entries(signature, "m", "k")
    dense, out = strides_from(signature.layouts[0], k, n), strides_from(signature.layouts[1], m, n)
    output = output_from_text(signature.epilogue, signature.dtypes[2], out)
    (values, dense_dtype, _), (index, distance) = signature.dtypes, signature.index.split()
    return SpmmNarrow(m, k, n, batch, entries, dense, values, dense_dtype, index, distance, output)


def _operands(problem: SpmmNarrow, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    pattern = random_pattern(p.m, p.k, p.nnz, 0, p.index_dtype, random)
    values = random_tensor((p.nnz,), (1,), p.dtype, random)
    matrix = CSR(pattern.crow, pattern.col, values, (p.m, p.k)).to(NARROW)
    arrays = {**matrix.arrays, "indices": matrix.indices.to(getattr(torch, p.distance))}
    dense = random_tensor((1, p.k, p.n), p.dense, p.dense_dtype, random)[0]
    bias, residual, out = random_operands(p.output, (1, p.m, p.n), random)
    return *arrays.values(), dense, bias, residual if residual is None else residual[0], out[0]


def _reference(problem: SpmmNarrow, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    starts, chunks, bases, indices, values, dense, bias, residual, _ = operands
    assert starts is not None and chunks is not None and bases is not None and indices is not None
    assert values is not None and dense is not None
    matrix = NARROW(starts, chunks, bases, indices, values, (problem.m, problem.k))
    product = gather_product(*matrix._positions(), values[None], dense[None], problem.m)[0]
    return (finished(problem.output, product, bias, residual),)


SPMM_NARROW = Operation(
    "spmm_narrow", _signature, _representative, _operands, (8,), _reference,
    lambda problem: spmm_csr.TOLERANCE[problem.output.dtype],
)  # fmt: skip
