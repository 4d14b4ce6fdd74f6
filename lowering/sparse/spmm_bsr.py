"""BSR times dense as an operation: out = activation(scale · (S @ dense) + bias + residual), summed in float32.

A stored block is dense: its zeros count, and 0 · inf within it is NaN.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import Output, finished, output_from_text, output_of, random_operands
from sparsecomp.lowering.launch.strided import (
    Strides,
    dtype_name,
    gather_product,
    order_of,
    random_tensor,
    strided,
    strides_from,
    strides_of,
)
from sparsecomp.lowering.sparse.random_sparse import SKEWS, density_of, random_pattern, row_lengths, sizes_and_entries
from sparsecomp.lowering.sparse.spmm_csr import TOLERANCE, check_shapes
from sparsecomp.lowering.sparse.transposed import transposed_matrix
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.patterns import Layout, compressed


class BlockStrides(NamedTuple):
    """Of a batch of lists of blocks; 0 by batch where one is shared."""

    batch: int
    block: int
    row: int
    column: int


class SpmmBsr(NamedTuple):
    """The sizes, strides and types of a product; its launch adds the addresses.

    Attributes:
        m, k, n: S is (m, k), dense (k, n); the last blocks may reach beyond m and k, and hold zeros there.
        batch: products with one pattern.
        height, width: of a block.
        block_rows, block_columns: of the pattern.
        blocks: blocks there is room for.
        variation: deviation over mean of the blocks a block row, as one of `SKEWS`.
        values: strides of the values.
        dense: strides of dense.
        dtype: of values and dense.
        dense_dtype: of dense; kernels want the same.
        index_dtype: of the indices.
        output: the output and its epilogue.
    """

    m: int
    k: int
    n: int
    batch: int
    height: int
    width: int
    block_rows: int
    block_columns: int
    blocks: int
    variation: int
    values: BlockStrides
    dense: Strides
    dtype: str
    dense_dtype: str
    index_dtype: str
    output: Output

    @classmethod
    def of(
        cls, crow: Tensor, col: Tensor, values: Tensor, dense: Tensor, out: Tensor, described: Output, skew: str
    ) -> "SpmmBsr":
        """The product of these tensors, as `spmm_bsr` takes them.

        Raises:
            FormatError: shapes that do not belong together, or an unknown word.
        """
        m, n = out.shape[-2:]
        height, width = values.shape[-2:]
        batched = values.dim() == 4
        check_shapes(m, batched, values.shape[:-3], dense, out)
        if skew not in SKEWS:
            raise FormatError(f"skew is {skew!r}, needs one of {', '.join(SKEWS)}")
        block_rows = crow.numel() - 1
        if block_rows != -(-m // height) or values.shape[-3] != col.numel() or crow.dtype != col.dtype:
            raise FormatError(
                f"{block_rows} block rows of height {height} for {m} rows, values {tuple(values.shape)} for "
                f"{col.numel()} columns of blocks, crow {crow.dtype} and col {col.dtype}: they must agree"
            )
        strides = BlockStrides(*(values.stride() if batched else (0, *values.stride())))
        k = dense.shape[-2]
        return cls(
            m, k, n, out.shape[0] if out.dim() == 3 else 1, height, width, block_rows, -(-k // width), col.numel(),
            SKEWS[skew], strides, strides_of(dense), dtype_name(values), dtype_name(dense), dtype_name(crow), described,
        )  # fmt: skip


def spmm_bsr(
    crow: Tensor, col: Tensor, values: Tensor, dense: Tensor, out: Tensor, *, bias: Tensor | None = None,
    bias_axis: str = "column", residual: Tensor | None = None, activation: str = "none", scale: float = 1.0,
    skew: str = "even",
) -> None:  # fmt: skip
    """Write activation(scale · (S @ dense) + bias + residual) to `out`.

    Args:
        crow: (block rows + 1,) int32 or int64, contiguous.
        col: (blocks,) of the same dtype, contiguous: columns of blocks.
        values: (blocks, height, width) or (batch, blocks, height, width), of any strides, zero beyond m and k.

    Everything else is as in `spmm_csr`; `skew` is of the blocks a block row.

    Raises:
        FormatError: shapes that do not belong together, or an unknown word.
        TuningError: no kernel takes these dtypes.
    """
    described = output_of(out, bias, bias_axis, residual, activation, scale)
    problem = SpmmBsr.of(crow, col, values, dense, out, described, skew)
    if out.numel():
        dispatch.launch(SPMM_BSR, problem, crow, col, values, dense, bias, residual, out)


def multiply(
    values: Tensor, pattern: Sequence[Tensor], layout: Layout, transpose: bool, dense: Tensor, out: Tensor,
    **finish: Any,
) -> None:  # fmt: skip
    """As `Launcher.multiply`, for every layout whose entries are blocks."""
    matrix = transposed_matrix(values, pattern, layout) if transpose else compressed(values, pattern, layout, False)
    arrays = matrix.pointers.contiguous(), matrix.indices.contiguous(), matrix.values
    spmm_bsr(*arrays, dense, out, **finish, skew=matrix.skew)


def problem_of(
    values: Tensor, layout: Layout, dense: Tensor, out: Tensor, described: Output, index: torch.dtype = torch.int32
) -> SpmmBsr:
    """As `Launcher.problem_of`."""
    lines = layout.padded_shape[0] // layout.block[0]
    pointers, indices = (values.new_empty(n, dtype=index) for n in (lines + 1, values.shape[0]))
    return SpmmBsr.of(pointers, indices, values, dense, out, described, layout.skews[0])


def operations(layout: Layout) -> tuple[Operation[Any], ...]:
    """As `Launcher.operations`."""
    return (SPMM_BSR,)


def _signature(problem: SpmmBsr, device: Device) -> KernelSignature:
    p = problem
    entries = min(p.blocks, p.block_rows * p.block_columns)
    return KernelSignature(
        "spmm_bsr", device, dtypes=(p.dtype, p.dense_dtype, p.output.dtype), accumulator="float32",
        formats=(f"bsr{p.height}x{p.width}",), index=p.index_dtype,
        layouts=(
            "rows" if p.values.column == 1 else "columns", order_of(p.dense, p.n), order_of(p.output.strides, p.n)
        ),
        epilogue=p.output.text, sizes=(
            ("block_rows", p.block_rows), ("block_columns", p.block_columns), ("n", p.n), ("batch", p.batch)
        ),
        parameters=(("height", p.height), ("width", p.width)),
        density=density_of(entries, p.block_rows, p.block_columns),
        rows=row_lengths(entries, p.block_rows, p.variation),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> SpmmBsr:
    sizes, block = dict(signature.sizes), dict(signature.parameters)
    n, batch, height, width = int(sizes["n"]), int(sizes["batch"]), int(block["height"]), int(block["width"])
    rows, columns, blocks, variation = sizes_and_entries(signature, "block_rows", "block_columns")
    m, k = rows * height, columns * width
    dense, out = strides_from(signature.layouts[1], k, n), strides_from(signature.layouts[2], m, n)
    area = height * width
    within = (width, 1) if signature.layouts[0] == "rows" else (1, height)
    values = BlockStrides(blocks * area, area, *within)
    output = output_from_text(signature.epilogue, signature.dtypes[2], out)
    return SpmmBsr(
        m, k, n, batch, height, width, rows, columns, blocks, variation, values, dense,
        dtype=signature.dtypes[0], dense_dtype=signature.dtypes[1], index_dtype=signature.index, output=output,
    )  # fmt: skip


def _operands(problem: SpmmBsr, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    entries = min(p.blocks, p.block_rows * p.block_columns)
    pattern = random_pattern(p.block_rows, p.block_columns, entries, p.variation, p.index_dtype, random)
    col = torch.zeros(p.blocks, dtype=pattern.col.dtype, device=device)
    col[:entries] = pattern.col

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=random, device=device).to(getattr(torch, p.dtype))

    values = strided((p.batch, p.blocks, p.height, p.width), p.values, normal)
    row = pattern.row[:, None] * p.height + torch.arange(p.height, device=device)
    column = pattern.col[:, None].long() * p.width + torch.arange(p.width, device=device)
    beyond = (row >= p.m)[:, :, None] | (column >= p.k)[:, None, :]
    if bool(beyond.any()):
        values[:, :entries].masked_fill_(beyond, 0.0)
    dense = random_tensor((p.batch, p.k, p.n), p.dense, p.dense_dtype, random)
    return pattern.crow, col, values, dense, *random_operands(p.output, (p.batch, p.m, p.n), random)


def _reference(problem: SpmmBsr, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    crow, col, values, dense, bias, residual, _ = operands
    assert crow is not None and col is not None and values is not None and dense is not None
    p, device = problem, crow.device
    block_row = torch.repeat_interleave(torch.arange(p.block_rows, device=device), crow.long().diff())
    stored = slice(int(crow[0]), int(crow[-1]))
    row = block_row[:, None, None] * p.height + torch.arange(p.height, device=device)[:, None]
    column = col[stored].long()[:, None, None] * p.width + torch.arange(p.width, device=device)
    row, column = torch.broadcast_tensors(row, column)
    inside = (row < p.m) & (column < p.k)
    product = gather_product(row[inside], column[inside], values[:, stored][:, inside], dense, p.m)
    return (finished(p.output, product, bias, residual),)


SPMM_BSR = Operation(
    "spmm_bsr", _signature, _representative, _operands, (6,), _reference,
    lambda problem: TOLERANCE[problem.output.dtype],
)  # fmt: skip
