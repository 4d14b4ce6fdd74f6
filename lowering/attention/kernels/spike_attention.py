"""Attention of spikes over listed blocks, a tile of queries a program: two products, and a mask between them."""

from math import frexp

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.attention.kernels.block_tiles import (
    Walk,
    kept_pairs,
    launch_options,
    load_rows,
    load_words,
    store_rows,
    tile_space,
)
from sparsecomp.lowering.attention.kernels.tile_cost import cost_by_tiles
from sparsecomp.lowering.attention.problem import BlockAttention
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels.epilogue import dot, precision
from sparsecomp.lowering.tuning.cost import sizes
from sparsecomp.lowering.tuning.template import Config, Template

_LEAST = -8
"""Power of two by which scores are multiplied, at least, before they are rounded: counts stay exact in float16."""


@triton.jit
def add_blocks(
    acc, q, k_ptrs, v_ptrs, k_row, v_row, index_ptr, tile_ptr, bits_ptr, first, last, rows, K_LEN, power, MASKED:
    tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BN: tl.constexpr, CHECK_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums after the entries `first` to `last` of a list."""
    column, depth, v_depth = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)
    PARTS: tl.constexpr = BLOCK_K // BN
    # the next place is loaded a step ahead: loads of tiles are in flight while none waits for its place
    block = tl.load(index_ptr + first, mask=first < last, other=0)
    if MASKED:
        tile = tl.load(tile_ptr + first, mask=first < last, other=0)
    for at in range(first * PARTS, last * PARTS):
        within = at % PARTS * BN
        start = block * BLOCK_K + within
        if MASKED:
            now = tile
            words = load_words(bits_ptr, now, rows, within, BLOCK_Q, BLOCK_K, BN)
            tile = tl.load(tile_ptr + (at + 1) // PARTS, mask=at + 1 < last * PARTS, other=0)
        block = tl.load(index_ptr + (at + 1) // PARTS, mask=at + 1 < last * PARTS, other=0)
        start = tl.multiple_of(start, BN)
        keys = start + column
        k = load_rows(k_ptrs + start.to(tl.int64) * k_row, keys, depth, K_LEN, MASKED and CHECK_ROWS, D, BD)
        score = dot(q, tl.trans(k), tl.zeros((q.shape[0], BN), tl.float32), PRECISION)
        if MASKED:
            if now >= 0:
                score = tl.where(kept_pairs(words[0], words[1], words[2], words[3], BN), score, 0.0)
        v = load_rows(v_ptrs + start.to(tl.int64) * v_row, keys, v_depth, K_LEN, MASKED and CHECK_ROWS, DV, BDV)
        acc = dot((score * power).to(v.dtype), v, acc, PRECISION)
    return acc


@triton.jit
def spike_attention_kernel(
    q_ptr, k_ptr, v_ptr, count_ptr, partial_ptr, index_ptr, tile_ptr, bits_ptr, out_ptr, HEADS, Q_LEN, K_LEN, power,
    rest, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    list_batch, list_head, WIDTH, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BLOCK_Q:
    tl.constexpr, BLOCK_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHECK_ROWS: tl.constexpr, JOINT:
    tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of BM queries of one head: rest · Σ (power · (M ⊙ q kᵀ)) v."""
    head, batch = (tl.program_id(0) % HEADS).to(tl.int64), (tl.program_id(0) // HEADS).to(tl.int64)
    first_query = tl.program_id(1) * BM
    queries = first_query + tl.arange(0, BM)
    rows = first_query % BLOCK_Q + tl.arange(0, BM)
    column, depth, v_depth = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)
    q_ptrs = q_ptr + batch * q_batch + head * q_head + queries.to(tl.int64)[:, None] * q_row + depth[None, :]
    q = load_rows(q_ptrs, queries, depth, Q_LEN, True, D, BD)
    k_ptrs = k_ptr + batch * k_batch + head * k_head + column[:, None] * k_row + depth[None, :]
    v_ptrs = v_ptr + batch * v_batch + head * v_head + column[:, None] * v_row + v_depth[None, :]

    block = batch * list_batch + head * list_head + first_query // BLOCK_Q
    count, partial = tl.load(count_ptr + block), tl.load(partial_ptr + block)
    index_ptr += block * WIDTH
    tile_ptr += block * WIDTH
    acc = tl.zeros((BM, BDV), tl.float32)
    # blocks that are kept in part come first
    checked = count if JOINT else partial
    acc = add_blocks(
        acc, q, k_ptrs, v_ptrs, k_row, v_row, index_ptr, tile_ptr, bits_ptr, 0, checked, rows, K_LEN, power, True, D,
        DV, BD, BDV, BLOCK_Q, BLOCK_K, BN, CHECK_ROWS, PRECISION,
    )  # fmt: skip
    if not JOINT:
        acc = add_blocks(
            acc, q, k_ptrs, v_ptrs, k_row, v_row, index_ptr, tile_ptr, bits_ptr, partial, count, rows, K_LEN, power,
            False, D, DV, BD, BDV, BLOCK_Q, BLOCK_K, BN, CHECK_ROWS, PRECISION,
        )  # fmt: skip
    out_ptrs = out_ptr + batch * out_batch + head * out_head + queries.to(tl.int64)[:, None] * out_row
    store_rows(out_ptrs + v_depth[None, :], acc * rest, queries, v_depth, Q_LEN, DV)


def _prepare(problem: BlockAttention, config: Config) -> Launch:
    p = problem
    power, rest = _parted(p.scale)
    strides = (stride for one in p.strides for stride in one)
    numbers = (p.heads, p.q_len, p.k_len, power, rest, *strides, *p.lists[0], p.width)
    fixed = {
        "D": p.depth, "DV": p.v_depth, "BD": p.padded_depth, "BDV": p.padded_v_depth, "BLOCK_Q": p.block_q, "BLOCK_K":
        p.block_k, "BM": config["BM"], "BN": config["BN"], "CHECK_ROWS": p.k_len % p.block_k != 0, "JOINT":
        bool(config["joint"]), "PRECISION": "tf32" if p.single else precision(p.dtype),
    }  # fmt: skip
    grid = (p.heads * p.batch, triton.cdiv(p.q_len, config["BM"]))
    return Launch(spike_attention_kernel, grid, numbers, fixed, **launch_options(config))


def _parted(scale: float) -> tuple[float, float]:
    """A power of two and a factor: so scores come no nearer to overflow than where they are scaled first."""
    power = 2.0 ** min(max(frexp(scale)[1], _LEAST), 0)
    return power, scale / power


def _space(problem: BlockAttention, device: Device) -> list[Config]:
    return tile_space(problem, device, Walk(by_key=False, kept=problem.padded_depth))


_q_len, _block_k, _width, _bm, _bn = sizes("q_len block_k width BM BN")
_depth, _v_depth = sizes("padded_depth padded_v_depth")

SPIKE_ATTENTION = Template(
    name="spike_attention",
    op="spike_attention",
    sources=(spike_attention_kernel, add_blocks, kept_pairs, load_words, load_rows, store_rows, dot),
    space=_space,
    cost=cost_by_tiles(
        programs=sympy.ceiling(_q_len / _bm), steps=_width * _block_k / _bn, products=_depth + _v_depth, walked=_bn,
        kept=_bm, kept_depth=_depth, sums=_v_depth, scores=sympy.Integer(1),
    ),
    prepare=_prepare,
)
