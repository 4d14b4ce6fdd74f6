"""Bitmap times one or two columns of dense, without tensor cores: each thread sums over its own places."""

import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.sparse.bitmap import SpmmBitmap
from sparsecomp.lowering.sparse.kernels.bitmap import FINISHING, finishing, quad_words, spread_quads
from sparsecomp.lowering.sparse.kernels.bitmap_cost import SPLIT_COUNTS, cost, refusal
from sparsecomp.lowering.tuning.template import Config, Template

_MOST = 2
"""Columns of dense."""


@triton.jit
def bitmap_rows_kernel(
    starts_ptr, offsets_ptr, bits_ptr, values_ptr, dense_ptr, sums_ptr,
    M, K, words, span, dense_k, dense_n, N: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """sums[split, n, m] of BM rows over the `span` places of a split, a multiple of BK."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, K)
    row_ok = (rows < M)[:, None]
    values = values_ptr + tl.load(starts_ptr + rows, mask=rows < M, other=0)[:, None]
    line = rows.to(tl.int64)[:, None] * words
    quads = tl.arange(0, BK // 4)[None, :]
    word, offset = quad_words(offsets_ptr, bits_ptr, line, row_ok, first // 4 + quads, words)
    acc = tl.zeros((BM, BK // 4), tl.float32)
    more = tl.zeros((BM, BK // 4), tl.float32)
    for start in range(first, last, BK):
        quad = start // 4 + quads
        next_word, next_offset = quad_words(offsets_ptr, bits_ptr, line, row_ok, quad + BK // 4, words)
        v0, v1, v2, v3, _, _, _, _ = spread_quads(values, word, offset, quad)
        acc = _quad_terms(acc, v0, v1, v2, v3, dense_ptr, quad * 4, K, dense_k)
        if N == 2:
            more = _quad_terms(more, v0, v1, v2, v3, dense_ptr + dense_n, quad * 4, K, dense_k)
        word, offset = next_word, next_offset
    sums_ptr += tl.program_id(1).to(tl.int64) * N * M
    tl.store(sums_ptr + rows, tl.sum(acc, 1), mask=rows < M)
    if N == 2:
        tl.store(sums_ptr + M + rows, tl.sum(more, 1), mask=rows < M)


@triton.jit
def _quad_terms(acc, v0, v1, v2, v3, dense_ptr, k, K, dense_k):
    """acc + the quads' values times one column of dense, (1, quads) from k on."""
    at = dense_ptr + k.to(tl.int64) * dense_k
    acc += v0.to(tl.float32) * tl.load(at, mask=k < K, other=0.0).to(tl.float32)
    acc += v1.to(tl.float32) * tl.load(at + dense_k, mask=k + 1 < K, other=0.0).to(tl.float32)
    acc += v2.to(tl.float32) * tl.load(at + 2 * dense_k, mask=k + 2 < K, other=0.0).to(tl.float32)
    acc += v3.to(tl.float32) * tl.load(at + 3 * dense_k, mask=k + 3 < K, other=0.0).to(tl.float32)
    return acc


def _refuse(problem: SpmmBitmap, device: Device) -> str | None:
    if problem.n > _MOST:
        return f"{problem.n} columns are more than {_MOST}"
    return refusal(problem)


def _space(problem: SpmmBitmap, device: Device) -> list[Config]:
    """A thread has 16 to 64 places of a step."""
    p = problem
    return [
        Config(BM=bm, BN=p.n, BK=bk, warps=warps, splits=splits)
        for bm in (4, 8, 16, 32, 64) for bk in (128, 256, 512) for warps in (1, 2, 4, 8) for splits in SPLIT_COUNTS
        if 16 <= bm * bk // (32 * warps) <= 64 and (splits == 1 or splits * bk <= p.k) and (bm == 4 or bm < 2 * p.m)
    ]  # fmt: skip


def _prepare(problem: SpmmBitmap, config: Config) -> Launches:
    p = problem
    span = triton.cdiv(triton.cdiv(p.k, config["splits"]), config["BK"]) * config["BK"]
    splits = triton.cdiv(p.k, span)
    product = Launch(
        bitmap_rows_kernel, (triton.cdiv(p.m, config["BM"]), splits), (p.m, p.k, p.words, span, *p.dense[1:]),
        {"N": p.n, "BM": config["BM"], "BK": config["BK"]}, num_warps=config["warps"], num_stages=1,
    )  # fmt: skip
    return Launches(
        [((splits, p.n, p.m), torch.float32)],
        [Step(product, (0, 1, 2, 3, 4, 8)), Step(finishing(p, splits), (0, 1, 2, 3, 4, 5, 6, 7, 8))],
    )  # fmt: skip


BITMAP_ROWS = Template(
    name="bitmap_rows",
    op="spmm_bitmap",
    sources=(bitmap_rows_kernel, _quad_terms, *FINISHING),
    refuse=_refuse,
    space=_space,
    cost=cost("spread_rows"),
    prepare=_prepare,
)
