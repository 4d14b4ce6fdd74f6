"""Attention over listed blocks with an online softmax (FlashAttention-2, algorithm 1), a tile of queries a program."""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.attention.kernels.block_tiles import (
    LN_2,
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
def attend(
    acc, total, top, q, k_ptrs, v_ptrs, added_ptrs, k_row, v_row, added_column, index_ptr, tile_ptr, bits_ptr,
    first, last, rows, queries, Q_LEN, K_LEN, scale, cap, slope, seed, stream, kept_share, MASKED: tl.constexpr, D:
    tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K:
    tl.constexpr, BN: tl.constexpr, CHECK_ROWS: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr, ADDED:
    tl.constexpr, DROPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums and greatest scores (times log2 e) after the entries `first` to `last` of a list."""
    column, depth, v_depth = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)
    unit = 1.0 if CAPPED or BIASED or ADDED else scale
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
        score = dot(q, tl.trans(k), tl.zeros((q.shape[0], BN), tl.float32), PRECISION)
        if CAPPED or BIASED or ADDED:
            score, _ = shaped(score, scale, cap, slope, queries[:, None], keys[None, :], CAPPED, BIASED)
        if MASKED:
            if now >= 0:
                if ADDED:
                    score = with_added(score, added)
                kept = kept_pairs(words[0], words[1], words[2], words[3], BN)
                score = tl.where(kept, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * unit)
        # no score yet but -inf: any finite number in its place gives weights of zero
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.math.exp2(score * unit - shift[:, None])
        shrink = tl.math.exp2(top - shift)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        if DROPPED:
            drawn = drawn_words(seed, stream, queries, start, kept_share, BN)
            weight = tl.where(kept_pairs(drawn[0], drawn[1], drawn[2], drawn[3], BN), weight, 0.0)
        v = load_rows(v_ptrs + start.to(tl.int64) * v_row, keys, v_depth, K_LEN, MASKED and CHECK_ROWS, DV, BDV)
        acc = dot(weight.to(v.dtype), v, acc, PRECISION)
        top = higher
    return acc, total, top


@triton.jit
def block_attention_kernel(
    q_ptr, k_ptr, v_ptr, count_ptr, partial_ptr, index_ptr, tile_ptr, bits_ptr, alibi_ptr, added_ptr, seed_ptr,
    out_ptr, logsumexp_ptr, plan_ptr, limit_ptr, part_ptr, part_sums_ptr, HEADS, Q_LEN, K_LEN, scale, cap,
    kept_share, added_batch, added_head, added_row, added_column, q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, out_batch, out_head, out_row, list_batch, list_head, WIDTH, GROUP: tl.constexpr, D:
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
    queries = first_query + tl.arange(0, BM)
    rows = first_query % BLOCK_Q + tl.arange(0, BM)
    column, depth, v_depth = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)

    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + head // GROUP * k_head
    v_ptr += batch * v_batch + head // GROUP * v_head
    q_ptrs = q_ptr + queries.to(tl.int64)[:, None] * q_row + depth[None, :]
    q = load_rows(q_ptrs, queries, depth, Q_LEN, True, D, BD)
    k_ptrs = k_ptr + column[:, None] * k_row + depth[None, :]
    v_ptrs = v_ptr + column[:, None] * v_row + v_depth[None, :]

    block = lists + first_query // BLOCK_Q
    slope = 0.0
    if BIASED:
        slope = tl.load(alibi_ptr + head) * LOG2_E
    added_ptrs, seed, stream = added_ptr, 0, batch * HEADS + head
    if ADDED:
        added_ptrs += batch * added_batch + head * added_head + queries.to(tl.int64)[:, None] * added_row
    if DROPPED:
        seed = tl.load(seed_ptr)
    count, partial = tl.load(count_ptr + block), tl.load(partial_ptr + block)
    if SPLIT == 1:
        if count > tl.load(limit_ptr + lists // listed):
            return
    if SPLIT == 2:
        count = tl.minimum(count, last)
        partial = tl.minimum(tl.maximum(partial, first), count)
    index_ptr += block * WIDTH
    tile_ptr += block * WIDTH
    acc = tl.zeros((BM, BDV), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    scale = scale * LOG2_E
    # blocks that are kept in part come first
    checked = count if JOINT else partial
    acc, total, top = attend(
        acc, total, top, q, k_ptrs, v_ptrs, added_ptrs, k_row, v_row, added_column, index_ptr, tile_ptr, bits_ptr,
        first, checked, rows, queries, Q_LEN, K_LEN, scale, cap, slope, seed, stream, kept_share, True, D, DV, BD, BDV,
        BLOCK_Q, BLOCK_K, BN, CHECK_ROWS, CAPPED, BIASED, ADDED, DROPPED, PRECISION,
    )  # fmt: skip
    if not JOINT:
        acc, total, top = attend(
            acc, total, top, q, k_ptrs, v_ptrs, added_ptrs, k_row, v_row, added_column, index_ptr, tile_ptr, bits_ptr,
            partial, count, rows, queries, Q_LEN, K_LEN, scale, cap, slope, seed, stream, kept_share, False, D, DV, BD,
            BDV, BLOCK_Q, BLOCK_K, BN, CHECK_ROWS, CAPPED, BIASED, ADDED, DROPPED, PRECISION,
        )  # fmt: skip

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if DROPPED:
        acc *= 65536.0 / kept_share
    filled = tl.where(total == 0.0, 1.0, total)
    if SPLIT == 2:
        slot = (tl.program_id(0).to(tl.int64) * ROOM + tl.program_id(1) // (BLOCK_Q // BM)) * BLOCK_Q + rows
        store_rows(part_ptr + slot[:, None] * DV + v_depth[None, :], acc, queries, v_depth, Q_LEN, DV)
        tl.store(part_sums_ptr + slot, tl.where(total == 0.0, float("-inf"), top + tl.math.log2(filled)))
    else:
        out_ptr += batch * out_batch + head * out_head
        out_ptrs = out_ptr + queries.to(tl.int64)[:, None] * out_row + v_depth[None, :]
        store_rows(out_ptrs, acc, queries, v_depth, Q_LEN, DV)
        sums = tl.where(total == 0.0, float("-inf"), (top + tl.math.log2(filled)) * LN_2)
        logsumexp_ptr += (batch * HEADS + head) * Q_LEN
        tl.store(logsumexp_ptr + queries, sums, mask=queries < Q_LEN)


def _prepare(problem: BlockAttention, config: Config) -> Launches:
    p = problem
    fixed = constants(p, config, p.k_len, p.block_k) | {"PRECISION": precision(p.dtype)}
    numbers = (*p.numbers, *p.lists[0], p.width)
    walked = Walked(
        (-(-p.q_len // p.block_q), p.width), p.leading, (p.heads * p.batch, p.heads), p.q_len, p.block_q, p.lists[0], 3,
        bool(p.parts & OF_QUERIES),
    )  # fmt: skip
    result = Result(11, p.v_depth, p.padded_v_depth, p.lying(3), 12)
    return launches_of(
        block_attention_kernel, 13, config["BM"], numbers, fixed, launch_options(config), walked, [result]
    )  # fmt: skip


def _space(problem: BlockAttention, device: Device) -> list[Config]:
    return tile_space(problem, device, Walk(by_key=False, kept=problem.padded_depth))


_q_len, _block_q, _block_k, _width, _bm, _bn = sizes("q_len block_q block_k width BM BN")
_depth, _v_depth = sizes("padded_depth padded_v_depth")

BLOCK_ATTENTION = Template(
    name="block_attention",
    op="block_attention",
    sources=(block_attention_kernel, attend, kept_pairs, load_words, load_rows, shaped, store_rows, dot, drawn_words,
             load_added, with_added, part_of, plan_list_parts_kernel, merge_list_parts_kernel),
    space=_space,
    cost=cost_by_tiles(
        programs=sympy.ceiling(_q_len / _bm), steps=_width * _block_k / _bn, products=_depth + _v_depth, walked=_bn,
        kept=_bm, kept_depth=_depth, sums=_v_depth, scores=sympy.Integer(1),
    ),
    prepare=_prepare,
)
