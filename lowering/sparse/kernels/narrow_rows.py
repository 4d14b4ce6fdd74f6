"""Narrow CSR times few columns: each row's values are multiplied as they lie, by columns that are gathered.

A row's columns ascend, so that what neighbouring threads gather lies close together.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.formats.narrow import CHUNK
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels.epilogue import finish
from sparsecomp.lowering.sparse.narrow import MOST, SpmmNarrow
from sparsecomp.lowering.sparse.spmm_csr import unsupported_dtypes
from sparsecomp.lowering.tuning.cost import Cost, sizes, waves
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def _whole_step(values, indices, bases, step, entry, more, CHUNK: tl.constexpr):
    """Values and columns of a step that every row has, anything if there is no such."""
    more = more & (entry >= 0)
    value = tl.load(values + step + entry, mask=more)
    column = tl.load(indices + step + entry, mask=more).to(tl.uint32)
    # a step is a whole number of chunks
    base = tl.load(bases + step // CHUNK + entry // CHUNK, mask=more)
    return value, column + _unsigned(base)


@triton.jit
def _unsigned(base):
    """Bases as uint32; widening by the sign takes an instruction more."""
    if base.dtype == tl.int16:
        base = base.to(tl.uint16, bitcast=True)
    return base.to(tl.uint32)


@triton.jit
def _last_step(values, indices, bases, step, entry, count, CHUNK: tl.constexpr):
    """Values and columns of a step that some rows have but a part of, 0 beyond."""
    ok = entry < count[:, None] - step
    value = tl.load(values + step + entry, mask=ok, other=0.0)
    column = tl.load(indices + step + entry, mask=ok, other=0).to(tl.uint32)
    base = tl.load(bases + step // CHUNK + entry // CHUNK, mask=ok, other=0)
    return value, column + _unsigned(base), ok


@triton.jit
def _terms(acc, value, column, ok, dense_ptr, cols, N, dense_k, dense_n, BN: tl.constexpr):
    """acc + values times what they find of each column of dense, under `ok`."""
    gathered = dense_ptr + column * dense_k
    if BN == 1:
        b = tl.load(gathered, mask=ok, other=0.0)
        acc += value.to(tl.float32) * b.to(tl.float32)
    else:
        places = gathered[:, :, None] + cols.to(tl.int64)[None, None, :] * dense_n
        b = tl.load(places, mask=ok[:, :, None] & (cols < N)[None, None, :], other=0.0)
        acc += value.to(tl.float32)[:, :, None] * b.to(tl.float32)
    return acc


@triton.jit
def narrow_rows_kernel(
    starts_ptr, chunks_ptr, bases_ptr, indices_ptr, values_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, dense_k, dense_n, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """BM rows, E values of each a step, loaded a step ahead while every row has as many."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.arange(0, BN)
    begin = tl.load(starts_ptr + rows, mask=rows < M, other=0)
    end = tl.load(starts_ptr + rows + 1, mask=rows < M, other=0)
    count = (end - begin).to(tl.int32)
    values = values_ptr + begin[:, None]
    indices = indices_ptr + begin[:, None]
    bases = bases_ptr + tl.load(chunks_ptr + rows, mask=rows < M, other=0)[:, None]
    entry = tl.arange(0, E)[None, :]
    if BN == 1:
        acc = tl.zeros((BM, E), tl.float32)
    else:
        acc = tl.zeros((BM, E, BN), tl.float32)
    whole = tl.min(count, 0) // E * E
    value, column = _whole_step(values, indices, bases, 0, entry, whole > 0, CHUNK)
    for step in range(0, whole, E):
        after = step + E
        next_value, next_column = _whole_step(values, indices, bases, after, entry, after < whole, CHUNK)
        every = entry + tl.zeros((BM, E), tl.int32) >= 0
        acc = _terms(acc, value, column, every, dense_ptr, cols, N, dense_k, dense_n, BN)
        value, column = next_value, next_column
    for step in range(whole, tl.max(count, 0), E):
        value, column, ok = _last_step(values, indices, bases, step, entry, count, CHUNK)
        acc = _terms(acc, value, column, ok, dense_ptr, cols, N, dense_k, dense_n, BN)
    total = tl.sum(acc, 1)
    if BN == 1:
        total = total[:, None]
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    finish(
        total, bias_ptr, residual_ptr, out_ptr, 0, rows, cols, mask, out_b, out_m, out_n, res_b, res_m, res_n, scale,
        BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


def _refuse(problem: SpmmNarrow, device: Device) -> str | None:
    p = problem
    if p.batch != 1 or p.n > MOST:
        return f"a batch of {p.batch} by {p.n} columns is multiplied by CSR's kernels"
    return unsupported_dtypes(p.dtype, p.dense_dtype, p.output.dtype)


def _space(problem: SpmmNarrow, device: Device) -> list[Config]:
    """A thread has 1 to 16 values of a step, and at most 64 sums."""
    p = problem
    bn = triton.next_power_of_2(p.n)
    return [
        Config(BM=bm, BN=bn, E=entries, warps=warps)
        for bm in (1, 2, 4, 8, 16) for entries in (64, 128, 256, 512) for warps in (1, 2, 4, 8)
        if 32 * warps <= bm * entries <= 16 * 32 * warps and bm * entries * bn <= 64 * 32 * warps
    ]  # fmt: skip


def _prepare(problem: SpmmNarrow, config: Config) -> Launch:
    p = problem
    numbers = (p.m, p.n, *p.dense[1:], *p.output.numbers)
    constants = {**p.output.constants, "CHUNK": CHUNK, **{name: config[name] for name in ("BM", "BN", "E")}}
    return Launch(
        narrow_rows_kernel, (triton.cdiv(p.m, config["BM"]),), numbers, constants, num_warps=config["warps"]
    )  # fmt: skip


_m, _n, _nnz, _itemsize, _processors, _bandwidth = sizes("m n nnz itemsize processors bandwidth")
_bm, _bn, _e, _warps, _narrow, _latency = sizes("BM BN E warps narrow_values spread_latency")
_programs = sympy.ceiling(_m / _bm)
_steps = sympy.ceiling(_nnz / sympy.Max(_m, 1) / _e)
_resident = sympy.Max(
    1, sympy.Min(sympy.floor(64 / _warps), sympy.floor(65536 / ((32 + _bm * _e * (3 + 2 * _bn) / (32 * _warps)) * 32
                                                                 * _warps)), 32)
)  # fmt: skip
_walk = waves(_programs, _processors * _resident) * (_steps + 1) * _latency
# values and columns, then a row of dense for each
_work = waves(_programs, _processors) * _steps * _bm * _e * (1 + _bn / 4) / _narrow
_traffic = _nnz * (_itemsize + 1.125) / _bandwidth

NARROW_ROWS = Template(
    name="narrow_rows",
    op="spmm_narrow",
    sources=(narrow_rows_kernel, _whole_step, _last_step, _unsigned, _terms, finish),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=sympy.Integer(0), seconds=sympy.sqrt(_walk**2 + sympy.Max(_work, _traffic) ** 2),
    ),
    prepare=_prepare,
)  # fmt: skip
