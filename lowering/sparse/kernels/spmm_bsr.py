"""BSR times dense on tensor cores: a block row is one deep product of its blocks, side by side, with gathered rows.

The depth of a block row is the columns of all its blocks. A step takes BK of it, several small blocks or a part of a
large one, and the rows of `dense` that they meet, so that blocks of 4 feed tensor cores as whole steps too. Blocks
lower than a tile leave rows of it idle, which costs arithmetic that is not the bound.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, dot, finish, precision
from sparsecomp.lowering.sparse.spmm_bsr import SpmmBsr
from sparsecomp.lowering.sparse.spmm_csr import unsupported_dtypes
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.limits import fits_registers, fits_shared
from sparsecomp.lowering.tuning.template import Config, Template

_STAGES = (3, 5, 7)
"""Half of them are of the columns' loads, which the loads of `dense` wait for."""


@triton.jit
def spmm_bsr_kernel(
    crow_ptr, col_ptr, values_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, K, block_rows, values_b, values_block, values_i, values_j, dense_b, dense_k, dense_n,
    out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A program does BM rows of a block row by BN columns. WHOLE: blocks do not reach beyond K."""
    PARTS: tl.constexpr = (HEIGHT + BM - 1) // BM
    col_blocks = tl.cdiv(N, BN)
    # columns of one block row run side by side: they share its values in L2, and neighbours share dense
    pid = tl.program_id(0)
    block_n = pid % col_blocks
    part = pid // col_blocks % PARTS
    block_row = pid // (col_blocks * PARTS) % block_rows
    batch = (pid // (col_blocks * PARTS * block_rows)).to(tl.int64)
    within = part * BM + tl.arange(0, BM)
    cols = block_n * BN + tl.arange(0, BN)
    col_ok = (cols < N)[None, :]
    first = tl.load(crow_ptr + block_row).to(tl.int64)
    last = tl.load(crow_ptr + block_row + 1).to(tl.int64)
    depth = (last - first).to(tl.int32) * WIDTH
    turn = tl.arange(0, BK)
    a_rows = values_ptr + batch * values_b + first * values_block + within.to(tl.int64)[:, None] * values_i
    b_cols = dense_ptr + batch * dense_b + cols.to(tl.int64)[None, :] * dense_n
    row_ok = (within < HEIGHT)[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        at = start + turn
        ok = at < depth
        block = at // WIDTH
        j = at % WIDTH
        # a vector even where all of it is one block: loads of single numbers are not made ahead
        k = tl.load(col_ptr + first + block, mask=ok, other=0).to(tl.int64) * WIDTH + j
        a = tl.load(
            a_rows + (block.to(tl.int64) * values_block + j.to(tl.int64) * values_j)[None, :],
            mask=row_ok & ok[None, :], other=0.0,
        )  # fmt: skip
        stored = ok if WHOLE else ok & (k < K)
        b = tl.load(b_cols + (k * dense_k)[:, None], mask=stored[:, None] & col_ok, other=0.0)
        acc = dot(a, b, acc, PRECISION)
    rows = block_row * HEIGHT + within
    mask = row_ok & (rows < M)[:, None] & col_ok
    finish(
        acc, bias_ptr, residual_ptr, out_ptr, batch, rows, cols, mask,
        out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


def _refuse(problem: SpmmBsr, device: Device) -> str | None:
    p = problem
    if p.dtype != p.dense_dtype:
        return f"tensor cores multiply one dtype, not {p.dtype} with {p.dense_dtype}"
    if p.block_columns * p.width >= 2**31:
        return "a block row is deeper than 2^31"
    return unsupported_dtypes(p.dtype, p.dense_dtype, p.output.dtype)


def _space(problem: SpmmBsr, device: Device) -> list[Config]:
    p = problem
    itemsize = 4 if p.dtype == "float32" else 2
    tall = min(max(triton.next_power_of_2(p.height), 16), 128)
    n = max(triton.next_power_of_2(p.n), 16)
    heights = (tall,) if tall < 128 else (64, 128)
    columns = [bn for bn in (16, 32, 64, 128, 256) if bn <= n and (bn >= 64 or bn == n)]
    found = [
        Config(BM=bm, BN=bn, BK=bk, warps=warps, stages=stages)
        for bm in heights for bn in columns for bk in ((32, 64) if itemsize == 4 else (32, 64, 128))
        for warps in (2, 4, 8) for stages in _STAGES
        if bm * bn >= 256 * warps and fits_registers(bm * bn * (2 if itemsize == 4 else 1), warps)
        and (warps > 2 or bm == 16)
        and (bn >= 8 * warps or bm >= 64) and (itemsize == 2 or (bm + bn) * bk <= 256 * 32 * warps // 4)
        and fits_shared((stages // 2 + 1 + (itemsize == 4)) * bk * (bm + bn) * itemsize, device)
    ]  # fmt: skip
    return found or [Config(BM=min(tall, 64), BN=16, BK=32, warps=4, stages=3)]


def _prepare(problem: SpmmBsr, config: Config) -> Launch:
    p = problem
    parts = triton.cdiv(p.height, config["BM"])
    grid = (triton.cdiv(p.n, config["BN"]) * parts * p.block_rows * p.batch,)
    numbers = (p.m, p.n, p.k, p.block_rows, *p.values, *p.dense, *p.output.numbers)
    constants = {**p.output.constants, "PRECISION": precision(p.dtype), "HEIGHT": p.height, "WIDTH": p.width}
    constants |= {"WHOLE": p.k == p.block_columns * p.width, **{name: config[name] for name in ("BM", "BN", "BK")}}
    options = {"num_warps": config["warps"], "num_stages": config["stages"]}
    return Launch(spmm_bsr_kernel, grid, numbers, constants, **options)


_m, _k, _n, _batch, _blocks, _block_rows = sizes("m k n batch blocks block_rows")
_height, _width, _variation, _itemsize, _bm, _bn, _dense_col = sizes(
    "height width variation itemsize BM BN dense.column"
)

_bk, _warps, _stages, _processors = sizes("BK warps stages processors")
_half_rate, _tf32, _block_half, _tile_tf32x3, _fill_blocks = sizes("half tf32 block_half tile_tf32x3 fill_blocks")

programs = _block_rows * sympy.ceiling(_height / _bm) * sympy.ceiling(_n / _bn) * _batch
_depth = _blocks / _block_rows * _width * (1 + _variation / 2)
_half = sympy.Piecewise((1, sympy.Eq(_itemsize, 2)), (0, True))
# fitted to 900 timings of 16 patterns on an H100 (a choice is within 8 % of the best of them)
_tile = _block_half * _half_rate * _half + _tile_tf32x3 * _tf32 * (1 - _half)
_rate = _tile / _processors * sympy.Piecewise((0.5, _bm < 64), (1, True))
_copies = (_bm + _bn) * _bk * _itemsize / _fill_blocks
_shared = (sympy.floor(_stages / 2) + 2 - _half) * _bk * (_bm + _bn) * _itemsize
_registers = (_bm * _bn / (32 * _warps) * (2 - _half) + 70) * 32 * _warps
_resident = sympy.Max(sympy.Min(sympy.floor(sympy.Min(220e3 / _shared, 65536 / _registers, 64 / _warps)), 8), 1)
_busy = sympy.Min(_resident, sympy.Max(programs / _processors, 1))
# the loads of dense wait for those of columns: a microsecond, as often as half of the stages are under way
_step = sympy.Max(1e-6 / sympy.floor(_stages / 2), _busy * sympy.Max(2 * _bm * _bn * _bk / _rate, _copies))
_walk = sympy.ceiling(programs / (_processors * _resident)) * (sympy.ceiling(_depth / _bk) * _step + 4e-6)
# gathering columns instead of rows pulls a sector for every element that is no neighbour
_strided = sympy.Piecewise((1, sympy.Eq(_dense_col, 1)), (1.3, True))

# rows of narrow blocks are read in pieces
_narrow = sympy.Piecewise((3.2, _width < 8), (2.1, _width < 16), (1, True))

SPMM_BSR = Template(
    name="spmm_bsr",
    op="spmm_bsr",
    sources=(spmm_bsr_kernel, dot, *FINISH),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=_batch * (_blocks * _height * _width * _itemsize + (_k + _m) * _n * _itemsize),
        seconds=_strided * _narrow * _walk,
    ),
    prepare=_prepare,
)
