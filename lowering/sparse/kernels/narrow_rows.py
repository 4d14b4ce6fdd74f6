"""Narrow CSR times few columns: values are multiplied as they lie, by rows of dense that are gathered.

A program takes some rows as one stream, of which it loads a step ahead, across the ends of rows too. A row's columns
ascend, so that what neighbouring threads gather lies close together. Several columns of dense are transposed first, so
that what belongs to a value is one load.
"""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.formats.narrow import CHUNK
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, finish
from sparsecomp.lowering.sparse.narrow import MOST, SpmmNarrow
from sparsecomp.lowering.sparse.spmm_csr import unsupported_dtypes
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template

_TRANSPOSED = 64
"""Rows of dense that a program transposes."""


@triton.jit
def transpose_kernel(
    dense_ptr, lying_ptr, N, K, dense_k, dense_n, BK: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """lying (K, BN) = dense (K, N), zero beyond N."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    n = tl.arange(0, BN)
    inside = (k < K)[None, :]
    places = dense_ptr + k.to(tl.int64)[None, :] * dense_k + n.to(tl.int64)[:, None] * dense_n
    found = tl.load(places, mask=inside & (n < N)[:, None], other=0.0)
    tl.store(lying_ptr + k[None, :] * BN + n[:, None], found, mask=inside)


@triton.jit
def _step(values_ptr, indices_ptr, bases_ptr, at, chunk, limit, E: tl.constexpr, CHUNK: tl.constexpr):
    """The values from `at` on and their columns; behind the end of the row another's, from `limit` on 0."""
    entry = tl.arange(0, E)
    values_ptr += at
    indices_ptr += at
    bases_ptr += chunk
    # masks take the processor as long as half of the rest
    if at + E <= limit:
        value = tl.load(values_ptr + entry)
        distance = tl.load(indices_ptr + entry)
        base = tl.load(bases_ptr + entry // CHUNK)
    else:
        ok = entry < limit - at
        value = tl.load(values_ptr + entry, mask=ok, other=0.0)
        distance = tl.load(indices_ptr + entry, mask=ok, other=0)
        base = tl.load(bases_ptr + entry // CHUNK, mask=ok, other=0)
    return value, _unsigned(distance) + _unsigned(base)


@triton.jit
def _unsigned(number):
    """As uint32; widening by the sign takes an instruction more."""
    if number.dtype == tl.int16:
        number = number.to(tl.uint16, bitcast=True)
    return number.to(tl.uint32)


@triton.jit
def _terms(acc, value, column, left, dense_ptr, dense_k, E: tl.constexpr, BN: tl.constexpr):
    """acc + the first `left` values times their rows of dense (K, BN)."""
    entry = tl.arange(0, E)
    if BN == 1:
        places = dense_ptr + column * dense_k
    else:
        places = dense_ptr + (column * BN)[:, None] + tl.arange(0, BN)[None, :]
        value = value[:, None]
        entry = entry[:, None]
    # sums within the branches, or a product and its sum are two instructions
    if left >= E:
        found = tl.load(places).to(tl.float32)
        acc = tl.fma(value.to(tl.float32), found, acc)
    else:
        ok = entry < left
        found = tl.load(places, mask=ok, other=0.0).to(tl.float32)
        acc = tl.fma(tl.where(ok, value, 0.0).to(tl.float32), found, acc)
    return acc


@triton.jit
def opened(
    starts_ptr, chunks_ptr, bases_ptr, indices_ptr, values_ptr, first, M, ROWS: tl.constexpr, E: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The stream of ROWS rows from `first` on: the end of them all, and where it stands as `walked_row` takes it."""
    at = tl.load(starts_ptr + first)
    end = tl.load(starts_ptr + first + 1)
    chunk = tl.load(chunks_ptr + first)
    last_chunk = tl.load(chunks_ptr + first + 1)
    limit = tl.load(starts_ptr + tl.minimum(first + ROWS, M))
    value, column = _step(values_ptr, indices_ptr, bases_ptr, at, chunk, limit, E, CHUNK)
    return limit, at, end, chunk, last_chunk, value, column


@triton.jit
def next_ends(starts_ptr, chunks_ptr, row, M):
    """Where the row behind `row` ends, in values and in chunks."""
    ahead = tl.minimum(row + 2, M)
    return tl.load(starts_ptr + ahead), tl.load(chunks_ptr + ahead)


@triton.jit
def walked_row(
    bases_ptr, indices_ptr, values_ptr, dense_ptr, dense_k, limit, at, end, chunk, last_chunk, value, column,
    BN: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The sums of a row that ends at `end`, by columns of dense, and where the stream stands behind it."""
    if BN == 1:
        acc = tl.zeros((E,), tl.float32)
    else:
        acc = tl.zeros((E, BN), tl.float32)
    while at < end:
        after = tl.minimum(at + E, end)
        chunk = tl.minimum(chunk + E // CHUNK, last_chunk)
        next_value, next_column = _step(values_ptr, indices_ptr, bases_ptr, after, chunk, limit, E, CHUNK)
        acc = _terms(acc, value, column, end - at, dense_ptr, dense_k, E, BN)
        at, value, column = after, next_value, next_column
    return tl.sum(acc, 0), at, chunk, value, column


@triton.jit
def finished_rows(
    starts_ptr, chunks_ptr, bases_ptr, indices_ptr, values_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr,
    first, M, N, dense_k, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """ROWS rows from `first` on, E values a step; dense is (K, BN) where BN is not 1."""
    cols = tl.arange(0, BN)
    limit, at, end, chunk, last_chunk, value, column = opened(
        starts_ptr, chunks_ptr, bases_ptr, indices_ptr, values_ptr, first, M, ROWS, E, CHUNK
    )
    for row in range(first, tl.minimum(first + ROWS, M)):
        next_end, next_last_chunk = next_ends(starts_ptr, chunks_ptr, row, M)
        total, at, chunk, value, column = walked_row(
            bases_ptr, indices_ptr, values_ptr, dense_ptr, dense_k, limit, at, end, chunk, last_chunk, value, column,
            BN, E, CHUNK,
        )  # fmt: skip
        rows = row + tl.zeros((1,), tl.int32)
        finish(
            total + tl.zeros((1, BN), tl.float32), bias_ptr, residual_ptr, out_ptr, 0, rows, cols, (cols < N)[None, :],
            out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
        )  # fmt: skip
        end, last_chunk = next_end, next_last_chunk


@triton.jit
def narrow_rows_kernel(
    starts_ptr, chunks_ptr, bases_ptr, indices_ptr, values_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, dense_k, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """See `finished_rows`."""
    finished_rows(
        starts_ptr, chunks_ptr, bases_ptr, indices_ptr, values_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr,
        tl.program_id(0) * ROWS, M, N, dense_k, out_b, out_m, out_n, res_b, res_m, res_n, scale,
        BIAS_ROWS, ACTIVATION, CHUNK, ROWS, BN, E,
    )  # fmt: skip


def _refuse(problem: SpmmNarrow, device: Device) -> str | None:
    p = problem
    if p.batch != 1 or p.n > MOST:
        return f"a batch of {p.batch} by {p.n} columns is multiplied by CSR's kernels"
    if p.k * MOST >= 2**31:
        return "there are too many columns for 32-bit places"
    return unsupported_dtypes(p.dtype, p.dense_dtype, p.output.dtype)


def _usual_config(rows: int, columns: int) -> Config:
    """The fastest of all, or within 5 % of it, for 4096x11008 and 11008x4096 at 50 to 90 % zeros (H200)."""
    bn = triton.next_power_of_2(columns)
    if bn == 1:
        return Config(ROWS=4, BN=bn, E=256, warps=1) if rows >= MANY else Config(ROWS=2, BN=bn, E=256, warps=2)
    if bn <= 4:
        return Config(ROWS=1, BN=bn, E=128, warps=1)
    return Config(ROWS=1, BN=bn, E=256, warps=2) if bn == 8 else Config(ROWS=2, BN=bn, E=128, warps=1)


MANY = 8192
"""Rows from which on four a program are enough programs."""


def _space(problem: SpmmNarrow, device: Device) -> list[Config]:
    """A thread has 1 to 16 values of a step, and at most 64 sums; the usual configuration comes first."""
    bn = triton.next_power_of_2(problem.n)
    found = [
        Config(ROWS=rows, BN=bn, E=entries, warps=warps)
        for rows in (1, 2, 4, 8) for entries in (32, 64, 128, 256) for warps in (1, 2)
        if 32 * warps <= entries <= 16 * 32 * warps and entries * bn <= 64 * 32 * warps
    ]  # fmt: skip
    usual = _usual_config(problem.m, problem.n)
    return [usual, *(one for one in found if one != usual)]


def _prepare(problem: SpmmNarrow, config: Config) -> Launch | Launches:
    p, bn = problem, config["BN"]
    constants = {**p.output.constants, "CHUNK": CHUNK, "ROWS": config["ROWS"], "BN": bn, "E": config["E"]}
    product = Launch(
        narrow_rows_kernel, (triton.cdiv(p.m, config["ROWS"]),), (p.m, p.n, p.dense.row, *p.output.numbers),
        constants, num_warps=config["warps"],
    )  # fmt: skip
    return behind_transpose(p, bn, product, 5, 9)


def behind_transpose(problem: SpmmNarrow, bn: int, product: Launch, dense: int, tensors: int) -> Launch | Launches:
    """A product that reads dense as (K, `bn`): several columns are transposed first.

    Args:
        dense: which of so many `tensors` of the product dense is.
    """
    p = problem
    if bn == 1:
        return product
    transpose = Launch(
        transpose_kernel, (triton.cdiv(p.k, _TRANSPOSED),), (p.n, p.k, *p.dense[1:]), {"BK": _TRANSPOSED, "BN": bn},
        num_warps=4,
    )  # fmt: skip
    takes = tuple(tensors if place == dense else place for place in range(tensors))
    steps = [Step(transpose, (dense, tensors)), Step(product, takes)]
    return Launches([((p.k, bn), getattr(torch, p.dense_dtype))], steps)


_m, _n, _nnz, _processors, _values, _lines = sizes("m n nnz processors narrow_values narrow_rows")
_rows, _bn, _e, _warps = sizes("ROWS BN E warps")


def far_from(rows: sympy.Expr, entries: sympy.Expr, warps: sympy.Expr) -> sympy.Expr:
    """How far a configuration is from a usual one with these ROWS, E and warps."""
    return sum(abs(sympy.log(one / usual)) for one, usual in ((_rows, rows), (_e, entries), (_warps, warps)))


FAR = far_from(
    sympy.Piecewise((4, (_bn < 2) & (_m >= MANY)), (1, (_bn >= 2) & (_bn < 16)), (2, True)),
    sympy.Piecewise((256, (_bn < 2) | sympy.Eq(_bn, 8)), (128, True)),
    sympy.Piecewise((2, ((_bn < 2) & (_m < MANY)) | sympy.Eq(_bn, 8)), (1, True)),
)
"""How far one is from that of `_usual_config`."""
_columns = sympy.Max(1, 0.2 * _bn)
"""What the columns of dense, each a load and a sum a value, take: up to five nothing."""

_AHEAD = 1e-6

WALK = (_step, _unsigned, _terms, opened, next_ends, walked_row, transpose_kernel)
"""What a kernel that walks rows is made of."""


def stream_seconds(rows: sympy.Expr, entries: sympy.Expr, far: sympy.Expr = FAR) -> sympy.Expr:
    """Seconds to walk so many rows with so many values, so far from the usual configuration.

    Not by bytes: a program waits for a step and the next, and takes what is in flight at most, and first it waits for
    where its rows lie.
    """
    return _AHEAD + (entries * _columns / _values + rows * (1 + _bn / 6) / _lines) / _processors * (1 + far / 10)


NARROW_ROWS = Template(
    name="narrow_rows",
    op="spmm_narrow",
    sources=(narrow_rows_kernel, finished_rows, *WALK, *FINISH),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=sympy.Integer(0), launches=sympy.Piecewise((1, _n <= 1), (2, True)), seconds=stream_seconds(_m, _nnz)
    ),
    prepare=_prepare,
)  # fmt: skip
