"""CSR times dense as an operation: out = activation(scale · (S @ dense) + bias + residual), summed in float32.

Its kernels differ in what they do with a nonzero of S. Gathering ones read the row of `dense` it points at, so that
what S does not store is never multiplied: 0 · inf cannot arise. The densified one writes S out and uses tensor cores,
and gives every tile whose sums are not finite to a gathering kernel, so that all of them agree.
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
    strides_from,
    strides_of,
)
from sparsecomp.lowering.sparse.random_sparse import SKEWS, density_of, random_pattern, row_lengths, sizes_and_entries
from sparsecomp.lowering.sparse.transposed import transposed_matrix
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.patterns import Layout, compressed

TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Relative Frobenius error of a product by dtype of its result; float32 runs as three products of its halves."""


class SpmmCsr(NamedTuple):
    """The sizes, strides and types of a product; its launch adds the addresses.

    Attributes:
        m, k, n: S is (m, k), dense (k, n).
        batch: products with one pattern.
        nnz: entries there is room for.
        variation: deviation over mean of the entries a row, as one of `SKEWS`.
        values_batch: stride of the values by batch.
        dense: strides of dense.
        dtype: of the values.
        dense_dtype: of dense.
        index_dtype: of the indices.
        output: the output and its epilogue.
        filled: rows are filled up with zeros, which are no elements.
    """

    m: int
    k: int
    n: int
    batch: int
    nnz: int
    variation: int
    values_batch: int
    dense: Strides
    dtype: str
    dense_dtype: str
    index_dtype: str
    output: Output
    filled: bool = False

    @classmethod
    def of(
        cls, crow: Tensor, col: Tensor, values: Tensor, dense: Tensor, out: Tensor, described: Output, skew: str
    ) -> "SpmmCsr":
        """The product of these tensors, as `spmm_csr` takes them, values' neighbours side by side.

        Raises:
            FormatError: shapes that do not belong together, or an unknown word.
        """
        check_shapes(crow.numel() - 1, values.dim() == 2, values.shape[:-1], dense, out)
        if skew not in SKEWS:
            raise FormatError(f"skew is {skew!r}, needs one of {', '.join(SKEWS)}")
        if values.shape[-1] != col.numel() or crow.dtype != col.dtype:
            raise FormatError(
                f"values {tuple(values.shape)} and col {tuple(col.shape)}, crow {crow.dtype} and col {col.dtype}: one "
                "column index a value is needed, of the pointers' dtype"
            )
        m, n = out.shape[-2:]
        return cls(
            m, dense.shape[-2], n, out.shape[0] if out.dim() == 3 else 1, col.numel(), SKEWS[skew],
            values.stride(0) if values.dim() == 2 else 0, strides_of(dense), dtype_name(values), dtype_name(dense),
            dtype_name(crow), described,
        )  # fmt: skip


def spmm_csr(
    crow: Tensor, col: Tensor, values: Tensor, dense: Tensor, out: Tensor, *, bias: Tensor | None = None,
    bias_axis: str = "column", residual: Tensor | None = None, activation: str = "none", scale: float = 1.0,
    skew: str = "even", filled: bool = False,
) -> None:  # fmt: skip
    """Write activation(scale · (S @ dense) + bias + residual) to `out`.

    Args:
        crow: (m + 1,) int32 or int64, contiguous: row i of S holds the entries crow[i] to crow[i + 1] - 1.
        col: (entries,), of the same dtype, contiguous.
        values: (entries,) or (batch, entries); float16, bfloat16 or float32.
        dense: (k, n) or (batch, k, n), of any strides and of those dtypes.
        out: (m, n) or (batch, m, n), of any strides without overlap.
        bias: (m,) with bias_axis "row", (n,) with "column".
        residual: of the shape of `out` and any strides.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid" or "tanh".
        skew: how uneven the rows are: "even", "mixed", "skewed" or "extreme" (deviation over mean below 0.5, below 2,
            below 16, or above).
        filled: a value of zero only fills its row up, and is not multiplied, so that NaN stays out.

    Raises:
        FormatError: shapes that do not belong together, or an unknown word.
        TuningError: no kernel takes these dtypes.
    """
    values = values if values.stride(-1) == 1 or values.numel() < 2 else values.contiguous()
    described = output_of(out, bias, bias_axis, residual, activation, scale)
    problem = SpmmCsr.of(crow, col, values, dense, out, described, skew)._replace(filled=filled)
    if out.numel():
        dispatch.launch(SPMM_CSR, problem, crow, col, values, dense, bias, residual, out)


def multiply(
    values: Tensor, pattern: Sequence[Tensor], layout: Layout, transpose: bool, dense: Tensor, out: Tensor,
    **finish: Any,
) -> None:  # fmt: skip
    """As `Launcher.multiply`, for every layout whose entries are elements."""
    matrix = transposed_matrix(values, pattern, layout) if transpose else compressed(values, pattern, layout, False)
    arrays = matrix.pointers.contiguous(), matrix.indices.contiguous(), matrix.values
    spmm_csr(*arrays, dense, out, **finish, skew=matrix.skew, filled=layout.kind.FILLED)


def problem_of(
    values: Tensor, layout: Layout, dense: Tensor, out: Tensor, described: Output, index: torch.dtype = torch.int32
) -> SpmmCsr:
    """As `Launcher.problem_of`."""
    pointers = values.new_empty(layout.shape[0] + 1, dtype=index)
    return SpmmCsr.of(pointers, values.to(index), values, dense, out, described, layout.skews[0])


def operations(layout: Layout) -> tuple[Operation[Any], ...]:
    """As `Launcher.operations`."""
    return (SPMM_CSR,)


def check_shapes(rows: int, batched: bool, batch: torch.Size, dense: Tensor, out: Tensor) -> None:
    """That a product of `rows` rows with `dense` fits `out`.

    Raises:
        FormatError: it does not.
    """
    wanted = (dense.shape[0] if dense.dim() == 3 else batch[0],) if batched or dense.dim() == 3 else ()
    fits = out.shape == (*wanted, rows, dense.shape[-1]) and (not batched or wanted == tuple(batch))
    if not fits:
        raise FormatError(
            f"a product of {rows} rows (batch {tuple(batch)}) with dense {tuple(dense.shape)} does not fit out "
            f"{tuple(out.shape)}"
        )


def unsupported_dtypes(*dtypes: str) -> str | None:
    """Why kernels of this family cannot take these dtypes, None if they can."""
    other = [dtype for dtype in dtypes if dtype not in TOLERANCE]
    return f"{other[0]} is not summed in float32: use the reference" if other else None


def _signature(problem: SpmmCsr, device: Device) -> KernelSignature:
    p = problem
    entries = min(p.nnz, p.m * p.k)
    return KernelSignature(
        "spmm_csr", device, dtypes=(p.dtype, p.dense_dtype, p.output.dtype), accumulator="float32", formats=("csr",),
        index=p.index_dtype, layouts=(order_of(p.dense, p.n), order_of(p.output.strides, p.n)),
        epilogue=p.output.text, sizes=(("m", p.m), ("k", p.k), ("n", p.n), ("batch", p.batch)),
        density=density_of(entries, p.m, p.k), rows=row_lengths(entries, p.m, p.variation),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> SpmmCsr:
    n, batch = (int(dict(signature.sizes)[name]) for name in ("n", "batch"))
    m, k, entries, variation = sizes_and_entries(signature, "m", "k")
    dense, out = strides_from(signature.layouts[0], k, n), strides_from(signature.layouts[1], m, n)
    output = output_from_text(signature.epilogue, signature.dtypes[2], out)
    values, dense_dtype, _ = signature.dtypes
    return SpmmCsr(
        m, k, n, batch, entries, variation, entries, dense, dtype=values, dense_dtype=dense_dtype,
        index_dtype=signature.index, output=output,
    )  # fmt: skip


def _operands(problem: SpmmCsr, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    pattern = random_pattern(p.m, p.k, min(p.nnz, p.m * p.k), p.variation, p.index_dtype, random)
    col = torch.zeros(p.nnz, dtype=pattern.col.dtype, device=device)
    col[: pattern.col.numel()] = pattern.col
    values = random_tensor((p.batch, p.nnz), (p.values_batch, 1), p.dtype, random)
    dense = random_tensor((p.batch, p.k, p.n), p.dense, p.dense_dtype, random)
    return pattern.crow, col, values, dense, *random_operands(p.output, (p.batch, p.m, p.n), random)


def _reference(problem: SpmmCsr, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    crow, col, values, dense, bias, residual, _ = operands
    assert crow is not None and col is not None and values is not None and dense is not None
    counts = crow.long().diff()
    row = torch.repeat_interleave(torch.arange(problem.m, device=crow.device), counts)
    stored = slice(int(crow[0]), int(crow[-1]))
    col, values = col[stored], values[:, stored]
    elements = values != 0 if problem.filled else torch.ones_like(values, dtype=torch.bool)
    parts = [
        gather_product(row[one], col[one], value[None, one], right[None], problem.m)
        for value, right, one in zip(values, dense, elements, strict=True)
    ]
    return (finished(problem.output, torch.cat(parts), bias, residual),)


SPMM_CSR = Operation(
    "spmm_csr", _signature, _representative, _operands, (6,), _reference,
    lambda problem: TOLERANCE[problem.output.dtype],
)  # fmt: skip
