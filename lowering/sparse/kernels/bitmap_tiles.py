"""Bitmap times dense on tensor cores: values are spread to dense tiles on chip.

A program takes BM rows and a part of the depth. The words of a step are loaded a step ahead, since where its
values lie is not known before.
"""

import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.sparse.bitmap import SpmmBitmap
from sparsecomp.lowering.sparse.kernels.bitmap import FINISHING, finishing, quad_words, spread_quads
from sparsecomp.lowering.sparse.kernels.bitmap_cost import SPLIT_COUNTS, cost, refusal
from sparsecomp.lowering.sparse.kernels.epilogue import dot, precision
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def bitmap_tiles_kernel(
    starts_ptr, offsets_ptr, bits_ptr, values_ptr, dense_ptr, sums_ptr,
    M, N, K, words, span, dense_k, dense_n, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """sums[split, n, m] of BM rows and BN columns over the `span` places of a split, a multiple of BK."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    first = tl.program_id(2) * span
    last = tl.minimum(first + span, K)
    row_ok = (rows < M)[:, None]
    col_ok = (cols < N)[None, :]
    values = values_ptr + tl.load(starts_ptr + rows, mask=rows < M, other=0)[:, None]
    line = rows.to(tl.int64)[:, None] * words
    b_cols = dense_ptr + cols.to(tl.int64)[None, :] * dense_n
    quads = tl.arange(0, BK // 4)[None, :]
    depth = tl.arange(0, BK)
    word, offset = quad_words(offsets_ptr, bits_ptr, line, row_ok, first // 4 + quads, words)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(first, last, BK):
        quad = start // 4 + quads
        next_word, next_offset = quad_words(offsets_ptr, bits_ptr, line, row_ok, quad + BK // 4, words)
        v0, v1, v2, v3, _, _, _, _ = spread_quads(values, word, offset, quad)
        a = tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), (BM, BK))
        k = start + depth
        b = tl.load(b_cols + k.to(tl.int64)[:, None] * dense_k, mask=(k < K)[:, None] & col_ok, other=0.0)
        acc = dot(a, b, acc, PRECISION)
        word, offset = next_word, next_offset
    place = (tl.program_id(2).to(tl.int64) * N + cols[None, :]) * M + rows[:, None]
    tl.store(sums_ptr + place, acc, mask=row_ok & col_ok)


def _space(problem: SpmmBitmap, device: Device) -> list[Config]:
    """A thread spreads 16 to 64 places of a step."""
    p = problem
    columns = min(max(triton.next_power_of_2(p.n), 16), 64)
    return [
        Config(BM=bm, BN=columns, BK=bk, warps=warps, stages=stages, splits=splits)
        for bm in (16, 32, 64, 128) for bk in (64, 128, 256) for warps in (1, 2, 4, 8) for stages in (1, 2)
        for splits in SPLIT_COUNTS
        if 16 <= bm * bk // (32 * warps) <= 64 and 16 * warps <= max(bm, 16) * 2
        and (splits == 1 or splits * bk <= p.k) and (bm == 16 or bm < 2 * p.m)
    ]  # fmt: skip


def _prepare(problem: SpmmBitmap, config: Config) -> Launches:
    p = problem
    span = triton.cdiv(triton.cdiv(p.k, config["splits"]), config["BK"]) * config["BK"]
    splits = triton.cdiv(p.k, span)
    grid = (triton.cdiv(p.m, config["BM"]), triton.cdiv(p.n, config["BN"]), splits)
    numbers = (p.m, p.n, p.k, p.words, span, *p.dense[1:])
    constants = {"PRECISION": precision(p.dtype), **{name: config[name] for name in ("BM", "BN", "BK")}}
    product = Launch(
        bitmap_tiles_kernel, grid, numbers, constants, num_warps=config["warps"], num_stages=config["stages"]
    )  # fmt: skip
    return Launches(
        [((splits, p.n, p.m), torch.float32)],
        [Step(product, (0, 1, 2, 3, 4, 8)), Step(finishing(p, splits), (0, 1, 2, 3, 4, 5, 6, 7, 8))],
    )  # fmt: skip


BITMAP_TILES = Template(
    name="bitmap_tiles",
    op="spmm_bitmap",
    sources=(bitmap_tiles_kernel, dot, *FINISHING),
    refuse=lambda problem, device: refusal(problem),
    space=_space,
    cost=cost("spread_tiles"),
    prepare=_prepare,
)
