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
    drawn_words,
    kept_of_keys,
    kept_pairs,
    launch_options,
    load_added,
    load_rows,
    load_words,
    shaped,
    store_rows,
    tile_space,
    with_added,
)
from sparsecomp.lowering.attention.kernels.long_lists import (
    Result,
    Walked,
    launches_of,
    merge_list_parts_kernel,
    part_of,
    plan_list_parts_kernel,
)
from sparsecomp.lowering.attention.kernels.tile_cost import cost_by_tiles
from sparsecomp.lowering.attention.problem import BlockAttention
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.sequence import Launches
from sparsecomp.lowering.sparse.kernels.epilogue import dot, precision
from sparsecomp.lowering.tuning.cost import sizes
from sparsecomp.lowering.tuning.template import Config, Template
from sparsecomp.reference.attention.block_attention import OF_KEYS


@triton.jit
def sum_by_key(
    by_k, by_v, k, v, q_ptrs, grad_ptrs, added_ptrs, q_row, grad_row, added_row, logsumexp_ptr, delta_ptr,
    index_ptr, tile_ptr, bits_ptr, first, last, rows, keys, first_key, Q_LEN, K_LEN, scale, cap, slope, seed,
    stream, kept_share, MASKED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV:
    tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BM: tl.constexpr, CHECK_ROWS: tl.constexpr, CAPPED:
    tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, DROPPED: tl.constexpr, PRECISION: tl.constexpr,
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
        if MASKED and ADDED:
            listed = (keys < K_LEN)[:, None] & (queries < Q_LEN)[None, :] & (now >= 0)
            added = load_added(added_ptrs + queries.to(tl.int64)[None, :] * added_row, listed)
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
        if MASKED and ADDED:
            if now >= 0:
                score = with_added(score, added)
        weight = tl.math.exp2(score - logsumexp[None, :])
        if MASKED:
            if now >= 0:
                kept = kept_pairs(words[0], words[1], words[2], words[3], BM)
                weight = tl.where(kept, weight, 0.0)
        given = weight
        if DROPPED:
            drawn = drawn_words(seed, stream, queries, first_key, kept_share, k.shape[0])
            drawn_pairs = kept_of_keys(drawn[0], drawn[1], drawn[2], drawn[3], k.shape[0])
            given = tl.where(drawn_pairs, weight * (65536.0 / kept_share), 0.0)
        by_v = dot(given.to(grad.dtype), grad, by_v, PRECISION)
        by_weight = dot(v, tl.trans(grad), tl.zeros((k.shape[0], BM), tl.float32), PRECISION)
        if DROPPED:
            by_weight = tl.where(drawn_pairs, by_weight * (65536.0 / kept_share), 0.0)
        by_score = weight * (by_weight - delta[None, :])
        if CAPPED:
            by_score *= slope_of_cap
        by_k = dot(by_score.to(q.dtype), q, by_k, PRECISION)
    return by_k, by_v


@triton.jit
def attention_by_key_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, logsumexp_ptr, delta_ptr, count_ptr, partial_ptr, index_ptr, tile_ptr, bits_ptr,
    alibi_ptr, added_ptr, seed_ptr, by_k_ptr, by_v_ptr, plan_ptr, limit_ptr, part_ptr, other_part_ptr, HEADS, Q_LEN,
    K_LEN, scale, cap, kept_share, added_batch, added_head, added_row, added_column, q_batch, q_head, q_row,
    k_batch, k_head, k_row, v_batch, v_head, v_row, grad_batch, grad_head, grad_row, by_k_batch, by_k_head,
    by_k_row, by_v_batch, by_v_head, by_v_row, list_batch, list_head, WIDTH, GROUP: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BM:
    tl.constexpr, BN: tl.constexpr, CHECK_ROWS: tl.constexpr, JOINT: tl.constexpr, CAPPED: tl.constexpr, BIASED:
    tl.constexpr, ADDED: tl.constexpr, DROPPED: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, ROOM:
    tl.constexpr,
):  # fmt: skip
    """A tile of BN keys of one head of keys. All heads begin together: lists that are long in each end early."""
    kv_heads = HEADS // GROUP
    kv_head, batch = (tl.program_id(0) % kv_heads).to(tl.int64), (tl.program_id(0) // kv_heads).to(tl.int64)
    # heads that share keys share lists, too, if any is split
    lists, listed = batch * list_batch + kv_head * GROUP * list_head, (K_LEN + BLOCK_K - 1) // BLOCK_K
    first_key, first, last = part_of(plan_ptr, limit_ptr, lists, listed, BLOCK_K, BN, SPLIT, ROOM)
    if SPLIT == 2:
        if first_key < 0:
            return
    if SPLIT == 1:
        if tl.load(count_ptr + lists + first_key // BLOCK_K) > tl.load(limit_ptr + lists // listed):
            return
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
    seed = 0
    if DROPPED:
        seed = tl.load(seed_ptr)
    for beside in range(GROUP):
        head = kv_head * GROUP + beside
        q_ptrs = q_ptr + batch * q_batch + head * q_head + column[:, None] * q_row + depth[None, :]
        grad_ptrs = grad_ptr + batch * grad_batch + head * grad_head + column[:, None] * grad_row + v_depth[None, :]
        of_head = (batch * HEADS + head) * Q_LEN
        block = batch * list_batch + head * list_head + first_key // BLOCK_K
        slope = 0.0
        if BIASED:
            slope = tl.load(alibi_ptr + head) * LOG2_E
        added_ptrs, stream = added_ptr, batch * HEADS + head
        if ADDED:
            added_ptrs += batch * added_batch + head * added_head + wide * added_column
        count, partial = tl.load(count_ptr + block), tl.load(partial_ptr + block)
        if SPLIT == 2:
            count = tl.minimum(count, last)
            partial = tl.minimum(tl.maximum(partial, first), count)
        index_row, tile_row = index_ptr + block * WIDTH, tile_ptr + block * WIDTH
        # blocks that are kept in part come first
        checked = count if JOINT else partial
        by_k, by_v = sum_by_key(
            by_k, by_v, k, v, q_ptrs, grad_ptrs, added_ptrs, q_row, grad_row, added_row, logsumexp_ptr + of_head,
            delta_ptr + of_head, index_row, tile_row, bits_ptr, first, checked, rows, keys, first_key, Q_LEN, K_LEN,
            scale * LOG2_E, cap, slope, seed, stream, kept_share, True, D, DV, BD, BDV, BLOCK_Q, BLOCK_K, BM,
            CHECK_ROWS, CAPPED, BIASED, ADDED, DROPPED, PRECISION,
        )  # fmt: skip
        if not JOINT:
            by_k, by_v = sum_by_key(
                by_k, by_v, k, v, q_ptrs, grad_ptrs, added_ptrs, q_row, grad_row, added_row, logsumexp_ptr + of_head,
                delta_ptr + of_head, index_row, tile_row, bits_ptr, partial, count, rows, keys, first_key, Q_LEN, K_LEN,
                scale * LOG2_E, cap, slope, seed, stream, kept_share, False, D, DV, BD, BDV, BLOCK_Q, BLOCK_K, BM,
                CHECK_ROWS, CAPPED, BIASED, ADDED, DROPPED, PRECISION,
            )  # fmt: skip
    if SPLIT == 2:
        slot = (tl.program_id(0).to(tl.int64) * ROOM + tl.program_id(1) // (BLOCK_K // BN)) * BLOCK_K + rows
        by_k_ptrs = part_ptr + slot[:, None] * D + depth[None, :]
        by_v_ptrs = other_part_ptr + slot[:, None] * DV + v_depth[None, :]
    else:
        by_k_ptrs = by_k_ptr + batch * by_k_batch + kv_head * by_k_head + wide * by_k_row + depth[None, :]
        by_v_ptrs = by_v_ptr + batch * by_v_batch + kv_head * by_v_head + wide * by_v_row + v_depth[None, :]
    store_rows(by_k_ptrs, by_k * scale, keys, depth, K_LEN, D)
    store_rows(by_v_ptrs, by_v, keys, v_depth, K_LEN, DV)


def _prepare(problem: BlockAttention, config: Config) -> Launches:
    p, kv_heads = problem, problem.heads // problem.group
    fixed = constants(p, config, p.q_len, p.block_q) | {"PRECISION": precision(p.dtype)}
    numbers, (list_batch, list_head) = (*p.numbers, *p.lists[1], p.k_width), p.lists[1]
    # lists that differ among the heads that share keys are walked over whole
    split = bool(p.parts & OF_KEYS) and not (p.by_head and p.group > 1)
    walked = Walked(
        (-(-p.k_len // p.block_k), p.k_width), p.leading, (kv_heads * p.batch, kv_heads), p.k_len, p.block_k,
        (list_batch, list_head * p.group), 6, split,
    )  # fmt: skip
    results = [Result(14, p.depth, p.padded_depth, p.lying(4)), Result(15, p.v_depth, p.padded_v_depth, p.lying(5))]
    return launches_of(
        attention_by_key_kernel, 16, config["BN"], numbers, fixed, launch_options(config), walked, results
    )  # fmt: skip


def _space(problem: BlockAttention, device: Device) -> list[Config]:
    return tile_space(problem, device, Walk(by_key=True, kept=problem.padded_depth + problem.padded_v_depth))


_k_len, _block_q, _k_width, _group, _bm, _bn = sizes("k_len block_q k_width group BM BN")
_depth, _v_depth = sizes("padded_depth padded_v_depth")

ATTENTION_BY_KEY = Template(
    name="attention_by_key",
    op="attention_by_key",
    sources=(attention_by_key_kernel, sum_by_key, kept_pairs, load_words, load_rows, shaped, store_rows, dot,
             drawn_words, kept_of_keys, load_added, with_added, part_of, plan_list_parts_kernel,
             merge_list_parts_kernel),
    space=_space,
    cost=cost_by_tiles(
        programs=sympy.ceiling(_k_len / _bn) / _group, steps=_k_width * _block_q / _bm * _group,
        products=2 * (_depth + _v_depth), walked=_bm, kept=_bn, kept_depth=_depth + _v_depth, sums=_depth + _v_depth,
        scores=sympy.Rational(3, 2),
    ),
    prepare=_prepare,
)
