"""The gradient of attention over listed blocks by numbers that are added to its scores, a tile of them a program.

A program looks for its block in the list of its queries. If it is there, it adds up the gradients of scores over all
batch entries and heads that the numbers are added to, or over a part of them; else it writes zeros. Parts, and tiles of
numbers that are added to all queries or keys alike, are added up by a second kernel.
"""

from dataclasses import replace

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.attention.added_gradient import AddedGradient
from sparsecomp.lowering.attention.kernels.block_tiles import (
    LOG2_E,
    drawn_words,
    kept_pairs,
    launch_options,
    load_added,
    load_rows,
    load_words,
    shaped,
    with_added,
)
from sparsecomp.lowering.attention.kernels.tile_cost import cost_by_tiles
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.sparse.kernels.epilogue import dot, precision
from sparsecomp.lowering.tuning.cost import sizes
from sparsecomp.lowering.tuning.limits import fits_shared
from sparsecomp.lowering.tuning.template import Config, Template

_MERGED = 256


@triton.jit
def attention_by_added_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, logsumexp_ptr, delta_ptr, count_ptr, index_ptr, tile_ptr, bits_ptr, alibi_ptr,
    added_ptr, seed_ptr, out_ptr, HEADS, Q_LEN, K_LEN, scale, cap, kept_share, added_batch, added_head, added_row,
    added_column, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, grad_batch, grad_head,
    grad_row, list_batch, list_head, WIDTH, Q_TILES, K_TILES, LEADING, ADDED_HEADS, ITEMS, ITEM_HEADS, EACH, OUT_ROWS,
    OUT_COLUMNS, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
    CAPPED: tl.constexpr, BIASED: tl.constexpr, DROPPED: tl.constexpr, ROWS_ALIKE: tl.constexpr,
    KEYS_ALIKE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BM queries and BN keys of one head of what is added, and a part of the batch entries and heads it is added to."""
    key_tile = tl.program_id(0) % K_TILES
    query_tile = tl.program_id(0) // K_TILES % Q_TILES
    whole = tl.program_id(0) // (K_TILES * Q_TILES)
    leading, part = (whole % LEADING).to(tl.int64), whole // LEADING
    own_batch, own_head = leading // ADDED_HEADS, leading % ADDED_HEADS
    first_query, first_key = query_tile * BM, key_tile * BN
    queries, keys = first_query + tl.arange(0, BM), first_key + tl.arange(0, BN)
    rows = first_query % BLOCK_Q + tl.arange(0, BM)
    depth, v_depth = tl.arange(0, BD), tl.arange(0, BDV)

    block = own_batch * list_batch + own_head * list_head + first_query // BLOCK_Q
    count, entry = tl.load(count_ptr + block), tl.arange(0, WIDE)
    listed = tl.load(index_ptr + block * WIDTH + entry, mask=entry < count, other=-1)
    place = tl.max(tl.where(listed == first_key // BLOCK_K, entry, -1))
    acc = tl.zeros((BM, BN), tl.float32)
    if place >= 0:
        tile = tl.load(tile_ptr + block * WIDTH + place)
        words = load_words(bits_ptr, tile, rows, first_key % BLOCK_K, BLOCK_Q, BLOCK_K, BN)
        kept = kept_pairs(words[0], words[1], words[2], words[3], BN) | (tile < 0)
        added_ptr += own_batch * added_batch + own_head * added_head
        added_ptrs = added_ptr + queries.to(tl.int64)[:, None] * added_row + keys.to(tl.int64)[None, :] * added_column
        # of a block that is kept whole nothing is added
        added = load_added(added_ptrs, (queries < Q_LEN)[:, None] & (keys < K_LEN)[None, :] & (tile >= 0))
        seed = 0
        if DROPPED:
            seed = tl.load(seed_ptr)
        for item in range(part * EACH, tl.minimum(part * EACH + EACH, ITEMS)):
            batch, head = own_batch + item // ITEM_HEADS, own_head + item % ITEM_HEADS
            q_ptrs = q_ptr + batch * q_batch + head * q_head + queries.to(tl.int64)[:, None] * q_row + depth[None, :]
            k_ptrs = k_ptr + batch * k_batch + head // GROUP * k_head
            k_ptrs += keys.to(tl.int64)[:, None] * k_row + depth[None, :]
            v_ptrs = v_ptr + batch * v_batch + head // GROUP * v_head
            v_ptrs += keys.to(tl.int64)[:, None] * v_row + v_depth[None, :]
            grad_ptrs = grad_ptr + batch * grad_batch + head * grad_head
            grad_ptrs += queries.to(tl.int64)[:, None] * grad_row + v_depth[None, :]
            q = load_rows(q_ptrs, queries, depth, Q_LEN, True, D, BD)
            k = load_rows(k_ptrs, keys, depth, K_LEN, True, D, BD)
            grad = load_rows(grad_ptrs, queries, v_depth, Q_LEN, True, DV, BDV)
            v = load_rows(v_ptrs, keys, v_depth, K_LEN, True, DV, BDV)
            of_head = (batch * HEADS + head) * Q_LEN
            logsumexp = tl.load(logsumexp_ptr + of_head + queries, mask=queries < Q_LEN, other=0.0)
            delta = tl.load(delta_ptr + of_head + queries, mask=queries < Q_LEN, other=0.0)
            # of a query that keeps nothing: any finite number
            logsumexp = tl.where(logsumexp == float("-inf"), 0.0, logsumexp) * LOG2_E
            slope = 0.0
            if BIASED:
                slope = tl.load(alibi_ptr + head) * LOG2_E
            score = dot(q, tl.trans(k), tl.zeros((BM, BN), tl.float32), PRECISION)
            score, _ = shaped(score, scale * LOG2_E, cap, slope, queries[:, None], keys[None, :], CAPPED, BIASED)
            score = tl.where(tile >= 0, with_added(score, added), score)
            weight = tl.where(kept, tl.math.exp2(score - logsumexp[:, None]), 0.0)
            by_weight = dot(grad, tl.trans(v), tl.zeros((BM, BN), tl.float32), PRECISION)
            if DROPPED:
                drawn = drawn_words(seed, batch * HEADS + head, queries, first_key, kept_share, BN)
                drawn_pairs = kept_pairs(drawn[0], drawn[1], drawn[2], drawn[3], BN)
                by_weight = tl.where(drawn_pairs, by_weight * (65536.0 / kept_share), 0.0)
            acc += weight * (by_weight - delta[:, None])

    out_ptr += (part * LEADING + leading) * OUT_ROWS * OUT_COLUMNS
    if ROWS_ALIKE and KEYS_ALIKE:
        tl.store(out_ptr + query_tile.to(tl.int64) * OUT_COLUMNS + key_tile, tl.sum(tl.sum(acc, 1), 0))
    elif ROWS_ALIKE:
        tl.store(out_ptr + query_tile.to(tl.int64) * OUT_COLUMNS + keys, tl.sum(acc, 0), mask=keys < K_LEN)
    elif KEYS_ALIKE:
        tl.store(out_ptr + queries.to(tl.int64) * OUT_COLUMNS + key_tile, tl.sum(acc, 1), mask=queries < Q_LEN)
    else:
        places = out_ptr + queries.to(tl.int64)[:, None] * OUT_COLUMNS + keys[None, :]
        inside = (queries < Q_LEN)[:, None] & (keys < K_LEN)[None, :]
        tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def merge_added_kernel(
    part_ptr, out_ptr, PARTS, LEADING, ROWS, COLUMNS, SIZE, ROWS_ALIKE: tl.constexpr, KEYS_ALIKE: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """SIDE numbers of the SIZE that are wanted: over all parts, and over ROWS or COLUMNS where these are alike."""
    place = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    inside = place < SIZE
    leading, row, column = place, place * 0, place * 0
    if not KEYS_ALIKE:
        column, leading = leading % COLUMNS, leading // COLUMNS
    if not ROWS_ALIKE:
        row, leading = leading % ROWS, leading // ROWS
    part_ptrs = part_ptr + (leading * ROWS + row) * COLUMNS + column
    rows, columns = ROWS if ROWS_ALIKE else 1, COLUMNS if KEYS_ALIKE else 1
    acc = tl.zeros((SIDE,), tl.float32)
    for part in range(PARTS):
        for at_row in range(rows):
            for at_column in range(columns):
                at = (part * LEADING * ROWS + at_row) * COLUMNS + at_column
                acc += tl.load(part_ptrs + at, mask=inside, other=0.0)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


def _prepare(problem: AddedGradient, config: Config) -> Launches | Launch:
    """Tensors are q, k, v, the gradient, logsumexp, delta, four of the lists, slopes, what is added, the seed and the
    result."""
    p, (added_batch, added_heads, added_rows, added_keys) = problem, problem.added_sizes
    rows_alike, keys_alike = added_rows == 1 < p.q_len, added_keys == 1 < p.k_len
    rows, columns = (tiles if alike else length for tiles, alike, length in
                     zip(p.tiles, (rows_alike, keys_alike), (p.q_len, p.k_len), strict=True))  # fmt: skip
    leading = added_batch * added_heads
    numbers = (
        *p.numbers, *p.lists[0], p.width, *p.tiles, leading, added_heads, p.items, p.shared[1],
        -(-p.items // p.sums), rows, columns,
    )  # fmt: skip
    fixed = {
        "GROUP": p.group, "D": p.depth, "DV": p.v_depth, "BD": p.padded_depth, "BDV": p.padded_v_depth,
        "BLOCK_Q": p.block_q, "BLOCK_K": p.block_k, "BM": p.sides[0], "BN": p.sides[1],
        "WIDE": triton.next_power_of_2(p.width), "CAPPED": p.softcap > 0, "BIASED": p.biased,
        "DROPPED": bool(p.dropped), "ROWS_ALIKE": rows_alike, "KEYS_ALIKE": keys_alike,
        "PRECISION": precision(p.dtype),
    }  # fmt: skip
    adding = Launch(
        attention_by_added_kernel, (p.programs * p.sums,), numbers, fixed, **launch_options(config)
    )  # fmt: skip
    if p.sums == 1 and not rows_alike and not keys_alike:
        return adding
    size = leading * (1 if rows_alike else rows) * (1 if keys_alike else columns)
    alike = {"ROWS_ALIKE": rows_alike, "KEYS_ALIKE": keys_alike, "SIDE": _MERGED}
    merging = Launch(
        merge_added_kernel, (triton.cdiv(size, _MERGED),), (p.sums, leading, rows, columns, size), alike
    )  # fmt: skip
    parts = ((p.sums * leading * rows * columns,), torch.float32)
    return Launches([parts], [Step(adding, (*range(13), 14)), Step(merging, (14, 13))])


def _space(problem: AddedGradient, device: Device) -> list[Config]:
    height, width = problem.sides
    found = [Config(BM=height, BN=width, registers=0, warps=warps, stages=stages)
             for warps in (4, 8) for stages in (1, 2, 3)]  # fmt: skip
    return [one for one in found if fits_shared(shared_of_added(problem, one), device)]


def shared_of_added(problem: AddedGradient, config: Config) -> int:
    """Shared memory of a configuration, or somewhat more."""
    p, half = problem, problem.dtype != "float32"
    tiles = sum(p.sides) * (p.padded_depth + p.padded_v_depth) * (2 if half else 4)
    # operands of float32 are multiplied from registers, which halves of them go through memory to
    return tiles * config["stages"] - (0 if half else tiles // 2) + 4096


_batch, _heads, _listed, _items, _sums, _written = sizes("batch heads listed items sums numbers_written")
_depth, _v_depth, _bm, _bn = sizes("padded_depth padded_v_depth BM BN")

ATTENTION_BY_ADDED = Template(
    name="attention_by_added",
    op="attention_by_added",
    sources=(attention_by_added_kernel, merge_added_kernel, kept_pairs, load_words, load_rows, shaped, dot, drawn_words,
             load_added, with_added),
    space=_space,
    cost=replace(
        cost_by_tiles(
            programs=_listed * _sums / (_batch * _heads), steps=_items / _sums, products=_depth + _v_depth,
            walked=_bm + _bn, kept=sympy.Integer(0), kept_depth=sympy.Integer(0), sums=sympy.Integer(0),
            scores=sympy.Integer(3), beside=sympy.Integer(0),
        ),
        bytes=4 * _written,
    ),
    prepare=_prepare,
)
