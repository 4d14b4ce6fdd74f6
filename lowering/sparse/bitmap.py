"""Bitmap times dense as an operation: out = activation(scale · (S @ dense) + bias + residual), summed in float32.

For few columns of `dense`, the rows of a layer's input: the weight's bytes are the time, and only what is stored and
its bits are read. Sums that are not finite are added up again from what S stores alone, so that 0 · inf cannot arise.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats import BITMAP, CSR
from sparsecomp.formats.bitmap import words_of
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import Output, finished, output_from_text, output_of, random_operands
from sparsecomp.lowering.launch.strided import (
    Strides,
    dtype_name,
    gather_product,
    order_of,
    random_tensor,
    strides_from,
    strides_of,
)
from sparsecomp.lowering.sparse import spmm_csr
from sparsecomp.lowering.sparse.random_sparse import density_of, random_pattern, row_lengths, sizes_and_entries
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.patterns import Layout


class SpmmBitmap(NamedTuple):
    """The sizes, strides and types of a product; its launch adds the addresses.

    Attributes:
        m, k, n: S is (m, k), dense (k, n).
        batch: of dense; kernels want 1.
        nnz: values that S stores.
        dense: strides of dense.
        dtype, dense_dtype: of values and dense; kernels want the same.
        index_dtype: of `starts`.
        output: the output and its epilogue.
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
    output: Output

    @property
    def words(self) -> int:
        """Of a row."""
        return words_of(self.k)

    @property
    def density(self) -> float:
        """Share of places that are stored."""
        return density_of(self.nnz, self.m, self.k)


def multiply(
    values: Tensor, pattern: Sequence[Tensor], layout: Layout, transpose: bool, dense: Tensor, out: Tensor,
    **finish: Any,
) -> None:  # fmt: skip
    """As `Launcher.multiply`; a batch is multiplied by columns that are made of the bits in each call."""
    if values.dim() > 1 or dense.dim() > 2 or values.dtype is not dense.dtype:
        spmm_csr.multiply(values, pattern, layout, transpose, dense, out, **finish)
    elif out.numel():
        values, arrays = values.contiguous(), [array.contiguous() for array in pattern[: layout.own]]
        described = output_of(out, *(finish.get(name, usual) for name, usual in _USUAL.items()))
        problem = problem_of(values, layout, dense, out, described, arrays[0].dtype)
        beside = finish.get("bias"), finish.get("residual")
        dispatch.launch(SPMM_BITMAP, problem, *arrays, values, dense, *beside, out)


_USUAL: dict[str, Any] = {"bias": None, "bias_axis": "column", "residual": None, "activation": "none", "scale": 1.0}


def problem_of(
    values: Tensor, layout: Layout, dense: Tensor, out: Tensor, described: Output, index: torch.dtype = torch.int32
) -> SpmmBitmap:
    """As `Launcher.problem_of`.

    Raises:
        FormatError: shapes that do not belong together.
    """
    spmm_csr.check_shapes(layout.shape[0], values.dim() == 2, values.shape[:-1], dense, out)
    if dense.shape[-2] != layout.shape[1]:
        raise FormatError(f"dense has {dense.shape[-2]} rows, needs {layout.shape[1]}, the columns of the matrix")
    (m, k), batch = layout.shape, out.shape[0] if out.dim() == 3 else 1
    return SpmmBitmap(
        m, k, dense.shape[-1], batch, values.shape[-1], strides_of(dense), dtype_name(values), dtype_name(dense),
        str(index)[6:], described,
    )  # fmt: skip


def operations(layout: Layout) -> tuple[Operation[Any], ...]:
    """As `Launcher.operations`."""
    return (SPMM_BITMAP,)


def _signature(problem: SpmmBitmap, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "spmm_bitmap", device, dtypes=(p.dtype, p.dense_dtype, p.output.dtype), accumulator="float32",
        formats=("bitmap",), index=p.index_dtype, layouts=(order_of(p.dense, p.n), order_of(p.output.strides, p.n)),
        epilogue=p.output.text, sizes=(("m", p.m), ("k", p.k), ("n", p.n), ("batch", p.batch)), density=p.density,
        rows=row_lengths(p.nnz, p.m, 0.0),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> SpmmBitmap:
    n, batch = (int(dict(signature.sizes)[name]) for name in ("n", "batch"))
    m, k, entries, _ = sizes_and_entries(signature, "m", "k")
    dense, out = strides_from(signature.layouts[0], k, n), strides_from(signature.layouts[1], m, n)
    output = output_from_text(signature.epilogue, signature.dtypes[2], out)
    return SpmmBitmap(m, k, n, batch, entries, dense, *signature.dtypes[:2], signature.index, output)


def _operands(problem: SpmmBitmap, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    pattern = random_pattern(p.m, p.k, p.nnz, 0, p.index_dtype, random)
    values = random_tensor((p.nnz,), (1,), p.dtype, random)
    matrix = CSR(pattern.crow, pattern.col, values, (p.m, p.k)).to(BITMAP)
    dense = random_tensor((1, p.k, p.n), p.dense, p.dense_dtype, random)[0]
    bias, residual, out = random_operands(p.output, (1, p.m, p.n), random)
    return *matrix.arrays.values(), dense, bias, residual if residual is None else residual[0], out[0]


def _reference(problem: SpmmBitmap, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    starts, offsets, indices, values, dense, bias, residual, _ = operands
    assert starts is not None and offsets is not None and indices is not None
    assert values is not None and dense is not None
    matrix = BITMAP(starts, offsets, indices, values, (problem.m, problem.k))
    product = gather_product(*matrix._positions(), values[None], dense[None], problem.m)[0]
    return (finished(problem.output, product, bias, residual),)


SPMM_BITMAP = Operation(
    "spmm_bitmap", _signature, _representative, _operands, (7,), _reference,
    lambda problem: spmm_csr.TOLERANCE[problem.output.dtype],
)  # fmt: skip
