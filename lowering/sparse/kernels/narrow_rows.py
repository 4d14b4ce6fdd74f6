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
def _entries(values_ptr, indices_ptr, bases, at, place, ok, CHUNK: tl.constexpr):
    value = tl.load(values_ptr + at, mask=ok, other=0.0)
    column = tl.load(indices_ptr + at, mask=ok, other=0).to(tl.int32)
    column += tl.load(bases + place // CHUNK, mask=ok, other=0).to(tl.int32)
    return value, column


@triton.jit
def narrow_rows_kernel(
    starts_ptr, chunks_ptr, bases_ptr, indices_ptr, values_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, dense_k, dense_n, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """BM rows, E values of each a step, loaded a step ahead."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.arange(0, BN)
    begin = tl.load(starts_ptr + rows, mask=rows < M, other=0)
    end = tl.load(starts_ptr + rows + 1, mask=rows < M, other=0)
    count = (end - begin).to(tl.int32)
    values_ptr += begin[:, None]
    indices_ptr += begin[:, None]
    bases = bases_ptr + tl.load(chunks_ptr + rows, mask=rows < M, other=0)[:, None]
    entry = tl.arange(0, E)[None, :]
    value, column = _entries(values_ptr, indices_ptr, bases, entry, entry, entry < count[:, None], CHUNK)
    if BN == 1:
        acc = tl.zeros((BM, E), tl.float32)
    else:
        acc = tl.zeros((BM, E, BN), tl.float32)
    for step in range(0, tl.max(count, 0), E):
        at = step + entry
        after = at + E
        next_value, next_column = _entries(
            values_ptr, indices_ptr, bases, after, after, after < count[:, None], CHUNK
        )  # fmt: skip
        ok = at < count[:, None]
        gathered = dense_ptr + column.to(tl.int64) * dense_k
        if BN == 1:
            b = tl.load(gathered, mask=ok, other=0.0)
            acc += value.to(tl.float32) * b.to(tl.float32)
        else:
            b = tl.load(
                gathered[:, :, None] + cols.to(tl.int64)[None, None, :] * dense_n,
                mask=ok[:, :, None] & (cols < N)[None, None, :], other=0.0,
            )  # fmt: skip
            acc += value.to(tl.float32)[:, :, None] * b.to(tl.float32)
        value, column = next_value, next_column
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
    sources=(narrow_rows_kernel, _entries, finish),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=sympy.Integer(0), seconds=sympy.sqrt(_walk**2 + sympy.Max(_work, _traffic) ** 2),
    ),
    prepare=_prepare,
)  # fmt: skip
