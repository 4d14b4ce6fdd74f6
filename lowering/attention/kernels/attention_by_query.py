"""The gradient of attention over listed blocks by its queries, and delta, a tile of queries a program."""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.attention.kernels.block_tiles import (
    LOG2_E,
    Walk,
    constants,
    drawn_words,
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
from sparsecomp.reference.attention.block_attention import OF_QUERIES


@triton.jit
def sum_by_query(
    acc, q, grad, logsumexp, delta, k_ptrs, v_ptrs, added_ptrs, k_row, v_row, added_column, index_ptr, tile_ptr,
    bits_ptr, first, last, rows, queries, Q_LEN, K_LEN, scale, cap, slope, seed, stream, kept_share, MASKED:
    tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BN: tl.constexpr, CHECK_ROWS: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr,
    ADDED: tl.constexpr, DROPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient by scaled queries after the entries `first` to `last` of a list."""
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
        if MASKED and ADDED:
            listed = (queries < Q_LEN)[:, None] & (keys < K_LEN)[None, :] & (now >= 0)
            added = load_added(added_ptrs + keys.to(tl.int64)[None, :] * added_column, listed)
        k = load_rows(k_ptrs + start.to(tl.int64) * k_row, keys, depth, K_LEN, MASKED and CHECK_ROWS, D, BD)
        v = load_rows(v_ptrs + start.to(tl.int64) * v_row, keys, v_depth, K_LEN, MASKED and CHECK_ROWS, DV, BDV)
        score = dot(q, tl.trans(k), tl.zeros((q.shape[0], BN), tl.float32), PRECISION)
        score, slope_of_cap = shaped(score, scale, cap, slope, queries[:, None], keys[None, :], CAPPED, BIASED)
        if MASKED and ADDED:
            if now >= 0:
                score = with_added(score, added)
        weight = tl.math.exp2(score - logsumexp[:, None])
        if MASKED:
            if now >= 0:
                kept = kept_pairs(words[0], words[1], words[2], words[3], BN)
                weight = tl.where(kept, weight, 0.0)
        by_weight = dot(grad, tl.trans(v), tl.zeros((q.shape[0], BN), tl.float32), PRECISION)
        if DROPPED:
            drawn = drawn_words(seed, stream, queries, start, kept_share, BN)
            drawn_pairs = kept_pairs(drawn[0], drawn[1], drawn[2], drawn[3], BN)
            by_weight = tl.where(drawn_pairs, by_weight * (65536.0 / kept_share), 0.0)
        by_score = weight * (by_weight - delta[:, None])
        if CAPPED:
            by_score *= slope_of_cap
        acc = dot(by_score.to(k.dtype), k, acc, PRECISION)
    return acc


@triton.jit
def attention_by_query_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, out_ptr, logsumexp_ptr, grad_logsumexp_ptr, count_ptr, partial_ptr, index_ptr,
    tile_ptr, bits_ptr, alibi_ptr, added_ptr, seed_ptr, by_q_ptr, delta_ptr, plan_ptr, limit_ptr, part_ptr,
    other_part_ptr, HEADS, Q_LEN, K_LEN, scale, cap, kept_share, added_batch, added_head, added_row, added_column,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, grad_batch, grad_head, grad_row,
    out_batch, out_head, out_row, by_batch, by_head, by_row, list_batch, list_head, WIDTH, GROUP: tl.constexpr, D:
    tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K:
    tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHECK_ROWS: tl.constexpr, JOINT: tl.constexpr, CAPPED:
    tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, DROPPED: tl.constexpr, PRECISION: tl.constexpr, SPLIT:
    tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """A tile of BM queries of one head. All heads begin together: lists that are long in each end early."""
    head, batch = (tl.program_id(0) % HEADS).to(tl.int64), (tl.program_id(0) // HEADS).to(tl.int64)
    lists, listed = batch * list_batch + head * list_head, (Q_LEN + BLOCK_Q - 1) // BLOCK_Q
    first_query, first, last = part_of(plan_ptr, limit_ptr, lists, listed, BLOCK_Q, BM, SPLIT, ROOM)
    if SPLIT == 2:
        if first_query < 0:
            return
    block = lists + first_query // BLOCK_Q
    count, partial = tl.load(count_ptr + block), tl.load(partial_ptr + block)
    if SPLIT == 1:
        if count > tl.load(limit_ptr + lists // listed):
            return
    if SPLIT == 2:
        count = tl.minimum(count, last)
        partial = tl.minimum(tl.maximum(partial, first), count)
    queries = first_query + tl.arange(0, BM)
    wide = queries.to(tl.int64)[:, None]
    rows = first_query % BLOCK_Q + tl.arange(0, BM)
    column, depth, v_depth = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)

    q_ptrs = q_ptr + batch * q_batch + head * q_head + wide * q_row + depth[None, :]
    grad_ptrs = grad_ptr + batch * grad_batch + head * grad_head + wide * grad_row + v_depth[None, :]
    out_ptrs = out_ptr + batch * out_batch + head * out_head + wide * out_row + v_depth[None, :]
    q = load_rows(q_ptrs, queries, depth, Q_LEN, True, D, BD)
    grad = load_rows(grad_ptrs, queries, v_depth, Q_LEN, True, DV, BDV)
    out = load_rows(out_ptrs, queries, v_depth, Q_LEN, True, DV, BDV)
    of_head = (batch * HEADS + head) * Q_LEN
    inside = queries < Q_LEN
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    if grad_logsumexp_ptr is not None:
        delta -= tl.load(grad_logsumexp_ptr + of_head + queries, mask=inside, other=0.0)
    tl.store(delta_ptr + of_head + queries, delta, mask=inside)
    logsumexp = tl.load(logsumexp_ptr + of_head + queries, mask=inside, other=0.0)
    # of a query that keeps nothing: any finite number
    logsumexp = tl.where(logsumexp == float("-inf"), 0.0, logsumexp) * LOG2_E

    k_ptrs = k_ptr + batch * k_batch + head // GROUP * k_head + column[:, None] * k_row + depth[None, :]
    v_ptrs = v_ptr + batch * v_batch + head // GROUP * v_head + column[:, None] * v_row + v_depth[None, :]
    slope = 0.0
    if BIASED:
        slope = tl.load(alibi_ptr + head) * LOG2_E
    added_ptrs, seed, stream = added_ptr, 0, batch * HEADS + head
    if ADDED:
        added_ptrs += batch * added_batch + head * added_head + wide * added_row
    if DROPPED:
        seed = tl.load(seed_ptr)
    index_ptr += block * WIDTH
    tile_ptr += block * WIDTH
    acc = tl.zeros((BM, BD), tl.float32)
    # blocks that are kept in part come first
    checked = count if JOINT else partial
    acc = sum_by_query(
        acc, q, grad, logsumexp, delta, k_ptrs, v_ptrs, added_ptrs, k_row, v_row, added_column, index_ptr, tile_ptr,
        bits_ptr, first, checked, rows, queries, Q_LEN, K_LEN, scale * LOG2_E, cap, slope, seed, stream, kept_share,
        True, D, DV, BD, BDV, BLOCK_Q, BLOCK_K, BN, CHECK_ROWS, CAPPED, BIASED, ADDED, DROPPED, PRECISION,
    )  # fmt: skip
    if not JOINT:
        acc = sum_by_query(
            acc, q, grad, logsumexp, delta, k_ptrs, v_ptrs, added_ptrs, k_row, v_row, added_column, index_ptr, tile_ptr,
            bits_ptr, partial, count, rows, queries, Q_LEN, K_LEN, scale * LOG2_E, cap, slope, seed, stream, kept_share,
            False, D, DV, BD, BDV, BLOCK_Q, BLOCK_K, BN, CHECK_ROWS, CAPPED, BIASED, ADDED, DROPPED, PRECISION,
        )  # fmt: skip
    if SPLIT == 2:
        slot = (tl.program_id(0).to(tl.int64) * ROOM + tl.program_id(1) // (BLOCK_Q // BM)) * BLOCK_Q + rows
        by_q_ptrs = part_ptr + slot[:, None] * D + depth[None, :]
    else:
        by_q_ptrs = by_q_ptr + batch * by_batch + head * by_head + wide * by_row + depth[None, :]
    store_rows(by_q_ptrs, acc * scale, queries, depth, Q_LEN, D)


def _prepare(problem: BlockAttention, config: Config) -> Launches:
    p = problem
    fixed = constants(p, config, p.k_len, p.block_k) | {"PRECISION": precision(p.dtype)}
    numbers = (*p.numbers, *p.lists[0], p.width)
    walked = Walked(
        (-(-p.q_len // p.block_q), p.width), p.leading, (p.heads * p.batch, p.heads), p.q_len, p.block_q, p.lists[0], 7,
        bool(p.parts & OF_QUERIES),
    )  # fmt: skip
    result = Result(15, p.depth, p.padded_depth, p.lying(5))
    return launches_of(
        attention_by_query_kernel, 17, config["BM"], numbers, fixed, launch_options(config), walked, [result]
    )  # fmt: skip


def _space(problem: BlockAttention, device: Device) -> list[Config]:
    return tile_space(problem, device, Walk(by_key=False, kept=problem.padded_depth + problem.padded_v_depth))


_q_len, _block_k, _width, _bm, _bn, _depth, _v_depth = sizes(
    "q_len block_k width BM BN padded_depth padded_v_depth"
)  # fmt: skip

ATTENTION_BY_QUERY = Template(
    name="attention_by_query",
    op="attention_by_query",
    sources=(attention_by_query_kernel, sum_by_query, kept_pairs, load_words, load_rows, shaped, store_rows, dot,
             drawn_words, load_added, with_added, part_of, plan_list_parts_kernel, merge_list_parts_kernel),
    space=_space,
    cost=cost_by_tiles(
        programs=sympy.ceiling(_q_len / _bm), steps=_width * _block_k / _bn, products=2 * _depth + _v_depth,
        walked=_bn, kept=_bm, kept_depth=_depth + _v_depth, sums=_depth, scores=sympy.Rational(3, 2),
    ),
    prepare=_prepare,
)
