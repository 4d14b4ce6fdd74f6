"""The gradients of attention over listed blocks by its keys and values, a tile of keys a program.

A program adds up over all heads of queries that read its head of keys, one after another.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.attention.kernels.block_tiles import (
    LOG2_E,
    Walk,
    constants,
    kept_pairs,
    launch_options,
    load_rows,
    load_words,
    shaped,
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


@triton.jit
def sum_by_key(
    by_k, by_v, k, v, q_ptrs, grad_ptrs, q_row, grad_row, logsumexp_ptr, delta_ptr, index_ptr, tile_ptr, bits_ptr,
    first, last, rows, keys, Q_LEN, scale, cap, slope, MASKED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD:
    tl.constexpr, BDV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BM: tl.constexpr, CHECK_ROWS:
    tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients by scaled keys and by values after the entries `first` to `last` of a list."""
    column, depth, v_depth = tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BDV)
    PARTS: tl.constexpr = BLOCK_Q // BM
    # the next place is loaded a step ahead: loads of tiles are in flight while none waits for its place
    block = tl.load(index_ptr + first, mask=first < last, other=0)
    if MASKED:
        tile = tl.load(tile_ptr + first, mask=first < last, other=0)
    for at in range(first * PARTS, last * PARTS):
        within = at % PARTS * BM
        start = block * BLOCK_Q + within
        if MASKED:
            now = tile
            words = load_words(bits_ptr, now, rows, within, BLOCK_K, BLOCK_Q, BM)
            tile = tl.load(tile_ptr + (at + 1) // PARTS, mask=at + 1 < last * PARTS, other=0)
        block = tl.load(index_ptr + (at + 1) // PARTS, mask=at + 1 < last * PARTS, other=0)
        start = tl.multiple_of(start, BM)
        queries = start + column
        check: tl.constexpr = MASKED and CHECK_ROWS
        q = load_rows(q_ptrs + start.to(tl.int64) * q_row, queries, depth, Q_LEN, check, D, BD)
        grad = load_rows(grad_ptrs + start.to(tl.int64) * grad_row, queries, v_depth, Q_LEN, check, DV, BDV)
        if check:
            logsumexp = tl.load(logsumexp_ptr + queries, mask=queries < Q_LEN, other=0.0)
            delta = tl.load(delta_ptr + queries, mask=queries < Q_LEN, other=0.0)
        else:
            logsumexp = tl.load(logsumexp_ptr + queries)
            delta = tl.load(delta_ptr + queries)
        # of a query that keeps nothing: any finite number
        logsumexp = tl.where(logsumexp == float("-inf"), 0.0, logsumexp) * LOG2_E
        score = dot(k, tl.trans(q), tl.zeros((k.shape[0], BM), tl.float32), PRECISION)
        score, slope_of_cap = shaped(score, scale, cap, slope, queries[None, :], keys[:, None], CAPPED, BIASED)
        weight = tl.math.exp2(score - logsumexp[None, :])
        if MASKED:
            if now >= 0:
                kept = kept_pairs(words[0], words[1], words[2], words[3], BM)
                weight = tl.where(kept, weight, 0.0)
        by_v = dot(weight.to(grad.dtype), grad, by_v, PRECISION)
        by_weight = dot(v, tl.trans(grad), tl.zeros((k.shape[0], BM), tl.float32), PRECISION)
        by_score = weight * (by_weight - delta[None, :])
        if CAPPED:
            by_score *= slope_of_cap
        by_k = dot(by_score.to(q.dtype), q, by_k, PRECISION)
    return by_k, by_v


@triton.jit
def attention_by_key_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, logsumexp_ptr, delta_ptr, count_ptr, partial_ptr, index_ptr, tile_ptr, bits_ptr,
    alibi_ptr, by_k_ptr, by_v_ptr, HEADS, Q_LEN, K_LEN, scale, cap, q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, grad_batch, grad_head, grad_row, by_k_batch, by_k_head, by_k_row, by_v_batch, by_v_head,
    by_v_row, list_batch, list_head, WIDTH, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHECK_ROWS:
    tl.constexpr, JOINT: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of BN keys of one head of keys. All heads begin together: lists that are long in each end early."""
    first_key = tl.program_id(1) * BN
    kv_heads = HEADS // GROUP
    kv_head, batch = (tl.program_id(0) % kv_heads).to(tl.int64), (tl.program_id(0) // kv_heads).to(tl.int64)
    keys = first_key + tl.arange(0, BN)
    wide = keys.to(tl.int64)[:, None]
    rows = first_key % BLOCK_K + tl.arange(0, BN)
    column, depth, v_depth = tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BDV)
    k_ptrs = k_ptr + batch * k_batch + kv_head * k_head + wide * k_row + depth[None, :]
    v_ptrs = v_ptr + batch * v_batch + kv_head * v_head + wide * v_row + v_depth[None, :]
    k = load_rows(k_ptrs, keys, depth, K_LEN, True, D, BD)
    v = load_rows(v_ptrs, keys, v_depth, K_LEN, True, DV, BDV)

    by_k = tl.zeros((BN, BD), tl.float32)
    by_v = tl.zeros((BN, BDV), tl.float32)
    for beside in range(GROUP):
        head = kv_head * GROUP + beside
        q_ptrs = q_ptr + batch * q_batch + head * q_head + column[:, None] * q_row + depth[None, :]
        grad_ptrs = grad_ptr + batch * grad_batch + head * grad_head + column[:, None] * grad_row + v_depth[None, :]
        of_head = (batch * HEADS + head) * Q_LEN
        block = batch * list_batch + head * list_head + first_key // BLOCK_K
        slope = 0.0
        if BIASED:
            slope = tl.load(alibi_ptr + head) * LOG2_E
        count, partial = tl.load(count_ptr + block), tl.load(partial_ptr + block)
        index_row, tile_row = index_ptr + block * WIDTH, tile_ptr + block * WIDTH
        # blocks that are kept in part come first
        checked = count if JOINT else partial
        by_k, by_v = sum_by_key(
            by_k, by_v, k, v, q_ptrs, grad_ptrs, q_row, grad_row, logsumexp_ptr + of_head, delta_ptr + of_head,
            index_row, tile_row, bits_ptr, 0, checked, rows, keys, Q_LEN, scale * LOG2_E, cap, slope, True, D, DV, BD,
            BDV, BLOCK_Q, BLOCK_K, BM, CHECK_ROWS, CAPPED, BIASED, PRECISION,
        )  # fmt: skip
        if not JOINT:
            by_k, by_v = sum_by_key(
                by_k, by_v, k, v, q_ptrs, grad_ptrs, q_row, grad_row, logsumexp_ptr + of_head, delta_ptr + of_head,
                index_row, tile_row, bits_ptr, partial, count, rows, keys, Q_LEN, scale * LOG2_E, cap, slope, False, D,
                DV, BD, BDV, BLOCK_Q, BLOCK_K, BM, CHECK_ROWS, CAPPED, BIASED, PRECISION,
            )  # fmt: skip
    by_k_ptrs = by_k_ptr + batch * by_k_batch + kv_head * by_k_head + wide * by_k_row + depth[None, :]
    by_v_ptrs = by_v_ptr + batch * by_v_batch + kv_head * by_v_head + wide * by_v_row + v_depth[None, :]
    store_rows(by_k_ptrs, by_k * scale, keys, depth, K_LEN, D)
    store_rows(by_v_ptrs, by_v, keys, v_depth, K_LEN, DV)


def _prepare(problem: BlockAttention, config: Config) -> Launch:
    p = problem
    fixed = constants(p, config, p.q_len, p.block_q) | {"PRECISION": precision(p.dtype)}
    grid = (p.heads // p.group * p.batch, triton.cdiv(p.k_len, config["BN"]))
    numbers = (*p.numbers, *p.lists[1], p.k_width)
    return Launch(attention_by_key_kernel, grid, numbers, fixed, **launch_options(config))


def _space(problem: BlockAttention, device: Device) -> list[Config]:
    return tile_space(problem, device, Walk(by_key=True, kept=problem.padded_depth + problem.padded_v_depth))


_k_len, _block_q, _k_width, _group, _bm, _bn = sizes("k_len block_q k_width group BM BN")
_depth, _v_depth = sizes("padded_depth padded_v_depth")

ATTENTION_BY_KEY = Template(
    name="attention_by_key",
    op="attention_by_key",
    sources=(attention_by_key_kernel, sum_by_key, kept_pairs, load_words, load_rows, shaped, store_rows, dot),
    space=_space,
    cost=cost_by_tiles(
        programs=sympy.ceiling(_k_len / _bn) / _group, steps=_k_width * _block_q / _bm * _group,
        products=2 * (_depth + _v_depth), walked=_bm, kept=_bn, kept_depth=_depth + _v_depth, sums=_depth + _v_depth,
        scores=sympy.Rational(3, 2),
    ),
    prepare=_prepare,
)
