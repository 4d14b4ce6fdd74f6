"""The batched product of two tensors of counts, on int8 tensor cores.

Attention of spikes is many small products: a head has some 64 tokens of width 32. Such a product is bound by memory,
and bytes are a quarter of float32's. Each program computes a block of one matrix; sums are exact in int32 and rounded
once, as they are written.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.spike_matmul import SpikeMatmul
from sparsecomp.lowering.tuning.cost import Cost, sizes, waves
from sparsecomp.lowering.tuning.limits import fits_registers, fits_shared
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def spike_matmul_kernel(
    a_ptr, b_ptr, out_ptr, M, N, K, INNER,
    a_outer, a_inner, a_row, a_column, b_outer, b_inner, b_row, b_column, scale,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[o, i, m, n] = scale · Σ_k a[o, i, m, k] · b[o, i, k, n], of int8 by strides; out is contiguous."""
    pid = tl.program_id(0)
    blocks_n = tl.cdiv(N, BN)
    blocks = tl.cdiv(M, BM) * blocks_n
    # blocks of one matrix run side by side and share their operands in L2
    batch = (pid // blocks).to(tl.int64)
    block = pid % blocks
    rows = block // blocks_n * BM + tl.arange(0, BM)
    columns = block % blocks_n * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    row_ok = rows < M
    column_ok = columns < N
    a_ptr += batch // INNER * a_outer + batch % INNER * a_inner
    b_ptr += batch // INNER * b_outer + batch % INNER * b_inner
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * a_row
    b_ptrs = b_ptr + columns.to(tl.int64)[None, :] * b_column
    sums = tl.zeros((BM, BN), tl.int32)
    for start in range(0, K, BK):
        k = start + depth
        k_ok = k < K
        a = tl.load(a_ptrs + k.to(tl.int64)[None, :] * a_column, mask=row_ok[:, None] & k_ok[None, :], other=0)
        b = tl.load(b_ptrs + k.to(tl.int64)[:, None] * b_row, mask=k_ok[:, None] & column_ok[None, :], other=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
    out_ptrs = out_ptr + batch * M * N + rows.to(tl.int64)[:, None] * N + columns[None, :]
    ok = row_ok[:, None] & column_ok[None, :]
    if out_ptr.dtype.element_ty.is_floating():
        tl.store(out_ptrs, (sums.to(tl.float32) * scale).to(out_ptr.dtype.element_ty), mask=ok)
    else:
        tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=ok)


def _space(problem: SpikeMatmul, device: Device) -> list[Config]:
    p = problem
    return [
        Config(BM=bm, BN=bn, BK=bk, warps=warps, stages=stages)
        for bm in _blocks(p.m) for bn in _blocks(p.n) for bk in _blocks(p.k)
        for warps in (2, 4, 8) for stages in ((2, 4) if p.k > bk else (1,))
        if bm * bn >= 512 * warps and fits_registers(bm * bn, warps) and fits_shared(stages * bk * (bm + bn), device)
    ]  # fmt: skip


def _blocks(size: int) -> list[int]:
    """Sides of a block, none of which is more than half empty where a smaller one would do."""
    return [side for side in (32, 64, 128) if side == 32 or size > side // 2]


def _prepare(problem: SpikeMatmul, config: Config) -> Launch:
    p, sides = problem, {name: config[name] for name in ("BM", "BN", "BK")}
    grid = (triton.cdiv(p.m, sides["BM"]) * triton.cdiv(p.n, sides["BN"]) * p.batch,)
    return Launch(
        spike_matmul_kernel, grid, p.numbers, sides, num_warps=config["warps"], num_stages=config["stages"]
    )  # fmt: skip


_m, _n, _k, _batch, _itemsize = sizes("m n k batch itemsize")
_bm, _bn, _bk, _warps, _stages = sizes("BM BN BK warps stages")
_int8, _int8_portable, _processors, _shared_rate, _bandwidth = sizes(
    "int8 int8_portable processors shared_rate bandwidth"
)
_LATENCY = 5e-7
"""Seconds from a load to its first byte."""
_START = 3e-6
"""Seconds before the first product and after the last."""

_tiles = sympy.ceiling(_m / _bm) * sympy.ceiling(_n / _bn) * _batch
_steps = sympy.ceiling(_k / _bk)
_resident = sympy.Max(1, sympy.floor(32 / _warps))
_walks = waves(_tiles, _processors) * _steps
_products = _walks * 2 * _bm * _bn * _bk * _processors / (_int8 * _int8_portable)
_copies = _walks * (_bm + _bn) * _bk / (_shared_rate / 2)
_wait = waves(_tiles, _processors * _resident) * (1 + _steps / _stages) * _LATENCY
_traffic = _batch * (_m * _k + _k * _n + _itemsize * _m * _n) / _bandwidth

SPIKE_MATMUL = Template(
    name="spike_matmul",
    op="spike_matmul",
    sources=(spike_matmul_kernel,),
    space=_space,
    # what overlaps, if not wholly: products, copies to the processors, waits for these, and the traffic
    cost=Cost(
        bytes=sympy.Integer(0),
        seconds=sympy.sqrt(_products**2 + _copies**2 + _wait**2 + _traffic**2) + _START,
    ),
    prepare=_prepare,
)
