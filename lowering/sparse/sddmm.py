"""The sampled dense-dense product as an operation: values = scale · (a @ b.T) at the stored places of a CSR pattern."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import Strides, dtype_name, order_of, random_tensor, strides_from, strides_of
from sparsecomp.lowering.sparse.random_sparse import SKEWS, density_of, random_pattern, row_lengths, sizes_and_entries
from sparsecomp.lowering.sparse.spmm_csr import TOLERANCE
from sparsecomp.lowering.tuning.template import Operation

_CHUNK = 2**24


class Sddmm(NamedTuple):
    """The sizes, strides and types of a product; its launch adds the addresses.

    Attributes:
        m, n, d: a is (m, d), b (n, d).
        batch: products with one pattern.
        nnz: entries there is room for.
        variation: deviation over mean of the entries a row, as one of `SKEWS`.
        a, b: their strides.
        out_batch: stride of the values by batch; neighbours lie side by side.
        scale: of the product.
        dtype: of a and b.
        out_dtype: of the values.
        index_dtype: of the indices.
    """

    m: int
    n: int
    d: int
    batch: int
    nnz: int
    variation: int
    a: Strides
    b: Strides
    out_batch: int
    scale: float
    dtype: str
    out_dtype: str
    index_dtype: str

    @classmethod
    def of(
        cls, crow: Tensor, col: Tensor, a: Tensor, b: Tensor, out: Tensor, scale: float, skew: str
    ) -> "Sddmm":
        """The product of these tensors, as `sddmm` takes them.

        Raises:
            FormatError: shapes or dtypes that do not belong together, or an unknown word.
        """
        batched = out.dim() == 2
        sizes = {matrix.shape[0] for matrix in (a, b) if matrix.dim() == 3}
        fits = sizes <= {out.shape[0]} if batched else not sizes
        if not fits or a.shape[-1] != b.shape[-1] or a.shape[-2] != crow.numel() - 1 or a.dtype != b.dtype:
            raise FormatError(
                f"a {tuple(a.shape)} {a.dtype} and b {tuple(b.shape)} {b.dtype} do not give values {tuple(out.shape)} "
                f"of {crow.numel() - 1} rows: (m, d) and (n, d) of one dtype are needed"
            )
        if out.shape[-1] != col.numel() or crow.dtype != col.dtype or skew not in SKEWS or (
            out.numel() > 1 and out.stride(-1) != 1
        ):
            raise FormatError(
                f"values {tuple(out.shape)} with strides {out.stride()}, col {tuple(col.shape)} {col.dtype}, crow "
                f"{crow.dtype}, skew {skew!r}: one value a column index, side by side, and one of {', '.join(SKEWS)}"
            )
        return cls(
            a.shape[-2], b.shape[-2], a.shape[-1], out.shape[0] if batched else 1, col.numel(), SKEWS[skew],
            strides_of(a), strides_of(b), out.stride(0) if batched else 0, float(scale), dtype_name(a), dtype_name(out),
            dtype_name(crow),
        )  # fmt: skip


def weight_gradient(
    count: int, rows: int, columns: int, entries: int, dtype: torch.dtype, index: torch.dtype, skew: str
) -> Sddmm:
    """The gradient by the values of a weight (rows, columns) from `count` rows of input and of the output's gradient,
    contiguous all."""
    out = torch.empty(entries, dtype=dtype, device="meta")
    a, b = (out.new_empty(count, size).mT for size in (rows, columns))
    return Sddmm.of(out.new_empty(rows + 1, dtype=index), out.to(index), a, b, out, 1.0, skew)


def sddmm(
    crow: Tensor, col: Tensor, a: Tensor, b: Tensor, out: Tensor, *, scale: float = 1.0, skew: str = "even"
) -> None:
    """Write scale · a[i] · b[j], summed in float32, to `out` for each stored place (i, j).

    Args:
        crow: (m + 1,) int32 or int64, contiguous: row i holds the entries crow[i] to crow[i + 1] - 1.
        col: (entries,), of the same dtype, contiguous.
        a: (m, d) or (batch, m, d), b: (n, d) or (batch, n, d); float16, bfloat16 or float32, of any strides.
        out: (entries,) or (batch, entries), neighbours side by side. Spare capacity is not written.
        skew: how uneven the rows are, as in `spmm_csr`.

    Raises:
        FormatError: shapes or dtypes that do not belong together, or an unknown word.
        TuningError: no kernel takes these dtypes.
    """
    problem = Sddmm.of(crow, col, a, b, out, scale, skew)
    if out.numel() and a.shape[-2]:
        dispatch.launch(SDDMM, problem, crow, col, a, b, out)


def _signature(problem: Sddmm, device: Device) -> KernelSignature:
    p = problem
    entries = min(p.nnz, p.m * p.n)
    return KernelSignature(
        "sddmm", device, dtypes=(p.dtype, p.out_dtype), accumulator="float32", formats=("csr",), index=p.index_dtype,
        layouts=(order_of(p.a, p.d), order_of(p.b, p.d)),
        sizes=(("m", p.m), ("n", p.n), ("d", p.d), ("batch", p.batch)),
        density=density_of(entries, p.m, p.n), rows=row_lengths(entries, p.m, p.variation),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> Sddmm:
    d, batch = (int(dict(signature.sizes)[name]) for name in ("d", "batch"))
    m, n, entries, variation = sizes_and_entries(signature, "m", "n")
    a, b = strides_from(signature.layouts[0], m, d), strides_from(signature.layouts[1], n, d)
    operands, out = signature.dtypes
    return Sddmm(
        m, n, d, batch, entries, variation, a, b, out_batch=entries, scale=1.0, dtype=operands, out_dtype=out,
        index_dtype=signature.index,
    )  # fmt: skip


def _operands(problem: Sddmm, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    entries = min(p.nnz, p.m * p.n)
    pattern = random_pattern(p.m, p.n, entries, p.variation, p.index_dtype, random)
    col = torch.zeros(p.nnz, dtype=pattern.col.dtype, device=device)
    col[:entries] = pattern.col
    a = random_tensor((p.batch, p.m, p.d), p.a, p.dtype, random)
    b = random_tensor((p.batch, p.n, p.d), p.b, p.dtype, random)
    # what no entry points at is not written
    out = torch.zeros(p.batch * max(p.out_batch, p.nnz), dtype=getattr(torch, p.out_dtype), device=device)
    out = out.as_strided((p.batch, p.nnz), (p.out_batch, 1))
    out[:, :entries] = float("nan")
    return pattern.crow, col, a, b, out


def _reference(problem: Sddmm, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    crow, col, a, b, out = operands
    assert crow is not None and col is not None and a is not None and b is not None and out is not None
    row = torch.repeat_interleave(torch.arange(problem.m, device=crow.device), crow.long().diff())
    first = int(crow[0])
    right = out.double()
    step = max(_CHUNK // max(problem.d * problem.batch, 1), 1)
    for start in range(0, row.numel(), step):
        rows, stored = row[start : start + step], slice(first + start, first + start + step)
        cols = col[stored][: rows.numel()].long()
        right[:, first + start : first + start + rows.numel()] = (
            a[:, rows].double() * b[:, cols].double()
        ).sum(-1) * problem.scale  # fmt: skip
    return (right,)


SDDMM = Operation(
    "sddmm", _signature, _representative, _operands, (4,), _reference, lambda problem: TOLERANCE[problem.out_dtype]
)
