"""Attention of few queries over a cache, split over its keys (flash-decoding, Dao et al., 2023).

The queries of all heads of a group are one tile, which reads a key once for all of them. A program walks over a part of
the tiles of keys that some query sees; a second launch merges the parts, in their order. How many tiles there are is
found on the device, where the lengths are: parts of a short sequence are short.

By a mask (`sparsecomp.ops.masked_decode_attention`) a sequence is walked from the first key that some query keeps to
the last, and the mask says which of these each query sees.
"""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.attention.decode_attention import DecodeAttention
from sparsecomp.lowering.attention.kernels.block_tiles import LN_2, LOG2_E, load_rows, shaped
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.sparse.kernels.epilogue import dot, precision
from sparsecomp.lowering.tuning.cost import Cost, sizes, waves
from sparsecomp.lowering.tuning.limits import fits_shared
from sparsecomp.lowering.tuning.template import Config, Template

_ALL = 2**30
"""A window that no cache is as long as."""
_MOST_QUERIES = 64
"""Of a tile."""


@triton.jit
def keys_read(keys, length, low, sinks):
    """Whether some query sees each key."""
    return (keys < length) & ((keys >= low) | (keys < sinks))


@triton.jit
def pages_of(table_ptr, start, some, length, low, sinks, PAGE: tl.constexpr, BN: tl.constexpr):
    """The page of a tile of keys, or of each of its keys where a page does not hold whole tiles."""
    if PAGE % BN == 0:
        page = tl.load(table_ptr + start // PAGE, mask=some, other=0)
    else:
        keys = start + tl.arange(0, BN)
        page = tl.load(table_ptr + keys // PAGE, mask=some & keys_read(keys, length, low, sinks), other=0)
    return page


@triton.jit
def load_mask(ptrs, inside, ADDED: tl.constexpr):
    """A mask's numbers, or its bytes; what drops a pair where not `inside`."""
    if ADDED:
        return tl.load(ptrs, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.load(ptrs, mask=inside, other=0)


@triton.jit
def decode_parts_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, table_ptr, alibi_ptr, kept_ptr, out_ptr, logsumexp_ptr, KV_HEADS, CAPACITY, PAGES,
    TABLE, scale, cap, window, sinks, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, m_batch,
    m_head, m_row, m_key, parts,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr,
    MASKED: tl.constexpr, ADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of BM queries of a group over one part of the keys: its result, and its logsumexp.

    MASKED: the lengths are pairs, of the first key that is kept and the one behind the last; 1 where the mask has one
    row for all queries of a sequence, 2 where it may have others, 0 without one. ADDED: it is of numbers that are added
    to scores, -inf where a query does not see a key.
    """
    # all in the first size of a grid: the others have no room for the heads of a large batch
    part, of_group = tl.program_id(0) % parts, (tl.program_id(0) // parts).to(tl.int64)
    kv_head, batch = of_group % KV_HEADS, of_group // KV_HEADS
    QUERIES: tl.constexpr = GROUP * ROWS
    query = tl.program_id(1) * BM + tl.arange(0, BM)
    head = kv_head * GROUP + query // ROWS
    column, depth, v_depth = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)
    q_ptrs = q_ptr + batch * q_batch + head * q_head + (query % ROWS).to(tl.int64) * q_row
    q = load_rows(q_ptrs[:, None] + depth[None, :], query, depth, QUERIES, True, D, BD)
    slope = tl.zeros((BM,), tl.float32)
    if BIASED:
        slope = tl.load(alibi_ptr + head, mask=query < QUERIES, other=0.0) * LOG2_E

    if MASKED > 0:
        low, length = tl.load(lengths_ptr + 2 * batch), tl.load(lengths_ptr + 2 * batch + 1)
        wrong = (low < 0) | (length < low) | (length > CAPACITY)
        low = tl.where(wrong, 0, low)
        length = tl.where(wrong, 0, length)
        kept_ptr += batch * m_batch
        kept_ptrs = kept_ptr + head * m_head + (query % ROWS).to(tl.int64) * m_row
    else:
        length = tl.load(lengths_ptr + batch)
        wrong = (length < 0) | (length > CAPACITY)
        length = tl.where(wrong, 0, length)
        low = tl.maximum(length - ROWS - window, 0)
    position = length - ROWS + query % ROWS
    # tiles of keys: those of the sinks, then those of the window
    first_tile = low // BN
    sink_tiles = tl.minimum(tl.cdiv(sinks, BN), first_tile)
    skipped = first_tile - sink_tiles
    tiles = tl.cdiv(length, BN) - skipped
    each = tl.cdiv(tiles, parts)
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    if PAGE == 0:
        k_ptr += batch * k_batch
        v_ptr += batch * v_batch
    else:
        table_ptr += batch * TABLE

    acc = tl.zeros((BM, BDV), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    first, last = part * each, tl.minimum(part * each + each, tiles)
    start = tl.where(first < sink_tiles, first, first + skipped) * BN
    if PAGE != 0:
        # the next page is looked up a step ahead: loads of tiles are in flight while none waits for its place
        page = pages_of(table_ptr, start, first < last, length, low, sinks, PAGE, BN)
    for entry in range(first, last):
        keys = start + column
        inside = keys_read(keys, length, low, sinks)
        start = tl.where(entry + 1 < sink_tiles, entry + 1, entry + 1 + skipped) * BN
        if PAGE == 0:
            k_at, v_at = keys.to(tl.int64) * k_row, keys.to(tl.int64) * v_row
        else:
            known = (page >= 0) & (page < PAGES)
            place = tl.where(known, page, 0).to(tl.int64)
            within = (keys % PAGE).to(tl.int64)
            k_at, v_at = place * k_batch + within * k_row, place * v_batch + within * v_row
            page = pages_of(table_ptr, start, entry + 1 < last, length, low, sinks, PAGE, BN)
        readable = inside[:, None]
        # a mask is read before the product, which then need not wait for it
        if MASKED == 1:
            mask = load_mask(kept_ptr + keys.to(tl.int64) * m_key, inside, ADDED)[None, :]
        elif MASKED == 2:
            there = (query < QUERIES)[:, None] & inside[None, :]
            mask = load_mask(kept_ptrs[:, None] + (keys.to(tl.int64) * m_key)[None, :], there, ADDED)
        else:
            seen = (keys[None, :] <= position[:, None]) & (
                (keys[None, :] >= position[:, None] - window) | (keys[None, :] < sinks)
            )
        if BD != D:
            k = tl.load(k_ptr + k_at[:, None] + depth[None, :], mask=readable & (depth < D)[None, :], other=0.0)
        else:
            k = tl.load(k_ptr + k_at[:, None] + depth[None, :], mask=readable, other=0.0)
        score = dot(q, tl.trans(k), tl.zeros((BM, BN), tl.float32), PRECISION)
        score, _ = shaped(
            score, scale * LOG2_E, cap, slope[:, None], position[:, None], keys[None, :], CAPPED, BIASED
        )  # fmt: skip
        if PAGE != 0:
            if PAGE % BN == 0:
                score = tl.where(known, score, float("nan"))
            else:
                score = tl.where(known[None, :], score, float("nan"))
        if ADDED:
            score = tl.where(mask == float("-inf"), float("-inf"), score + mask * LOG2_E)
        elif MASKED > 0:
            score = tl.where(mask != 0, score, float("-inf"))
        else:
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        # no score yet but -inf: any finite number in its place gives weights of zero
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.math.exp2(score - shift[:, None])
        shrink = tl.math.exp2(top - shift)
        total = total * shrink + tl.sum(weight, 1)
        if BDV != DV:
            v = tl.load(v_ptr + v_at[:, None] + v_depth[None, :], mask=readable & (v_depth < DV)[None, :], other=0.0)
        else:
            v = tl.load(v_ptr + v_at[:, None] + v_depth[None, :], mask=readable, other=0.0)
        acc = dot(weight.to(v.dtype), v, acc * shrink[:, None], PRECISION)
        top = higher

    total = tl.where(wrong, float("nan"), total)
    some = tl.where(total == 0.0, 1.0, total)
    acc = acc / some[:, None]
    sums = tl.where(total == 0.0, float("-inf"), (top + tl.math.log2(some)) * LN_2)
    place = (of_group * parts + part) * QUERIES + query
    tl.store(logsumexp_ptr + place, sums, mask=query < QUERIES)
    out_ptrs = out_ptr + place[:, None] * DV + v_depth[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(query < QUERIES)[:, None] & (v_depth < DV)[None, :])


@triton.jit
def merge_parts_kernel(
    parts_ptr, sums_ptr, out_ptr, logsumexp_ptr, parts, QUERIES: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The result of one query from those of its parts; PARTS is `parts` or more, a power of two."""
    query = tl.program_id(0).to(tl.int64)
    part, depth = tl.arange(0, PARTS), tl.arange(0, BDV)
    place = (query // QUERIES * parts + part) * QUERIES + query % QUERIES
    sums = tl.load(sums_ptr + place, mask=part < parts, other=float("-inf")) * LOG2_E
    top = tl.max(sums, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.math.exp2(sums - shift)
    total = tl.sum(weight, 0)
    inside = (part < parts)[:, None] & (depth < DV)[None, :]
    found = tl.load(parts_ptr + place[:, None] * DV + depth[None, :], mask=inside, other=0.0)
    some = tl.where(total == 0.0, 1.0, total)
    out = tl.sum(found * weight[:, None], 0) / some
    tl.store(out_ptr + query * DV + depth, out.to(out_ptr.dtype.element_ty), mask=depth < DV)
    tl.store(logsumexp_ptr + query, tl.where(total == 0.0, float("-inf"), (shift + tl.math.log2(some)) * LN_2))


def _space(problem: DecodeAttention, device: Device) -> list[Config]:
    """Tiles of BN keys, in so many parts of a sequence."""
    found = [
        Config(BN=bn, parts=parts, warps=warps, stages=stages)
        for bn in (32, 64, 128) for parts in (1, 2, 4, 8, 16, 32, 64) for warps in (4, 8)
        for stages in (1, 2, 3, 4, 5)
        if parts == 1 or parts * bn <= problem.seen
    ]  # fmt: skip
    return [one for one in found if fits_shared(shared_of_parts(problem, one), device)]


def shared_of_parts(problem: DecodeAttention, config: Config) -> int:
    """Shared memory of a configuration, or somewhat more."""
    p, itemsize, side = problem, 4 if problem.dtype == "float32" else 2, _queries_of(problem)
    walked = itemsize * config["BN"] * (p.padded_depth + p.padded_v_depth)
    kept = itemsize * side * (p.padded_depth + config["BN"])
    walked += side * config["BN"] * getattr(torch, p.added).itemsize if any(p.kept[1:3]) and p.added else 0
    return config["stages"] * walked + kept + 2048


def _queries_of(problem: DecodeAttention) -> int:
    """Of a tile."""
    return min(max(1 << (problem.queries - 1).bit_length(), 16), _MOST_QUERIES)


def _prepare(problem: DecodeAttention, config: Config) -> Launches | Launch:
    p, parts, side = problem, config["parts"], _queries_of(problem)
    strides = tuple(stride for one in p.strides for stride in one)
    window = _ALL if p.window < 0 else p.window
    strides += p.kept or (0, 0, 0, 0)
    numbers = (p.kv_heads, p.capacity, p.pages, p.table, p.scale, p.softcap, window, p.sinks, *strides, parts)
    fixed = {
        "GROUP": p.group, "ROWS": p.rows, "PAGE": p.page, "D": p.depth, "DV": p.v_depth, "BD": p.padded_depth,
        "BDV": p.padded_v_depth, "BM": side, "BN": config["BN"], "CAPPED": p.softcap > 0, "BIASED": p.biased,
        "MASKED": (1 + any(p.kept[1:3])) if p.kept else 0, "ADDED": bool(p.added), "PRECISION": precision(p.dtype),
    }  # fmt: skip
    heads = p.batch * p.kv_heads
    attend = Launch(
        decode_parts_kernel, (parts * heads, triton.cdiv(p.queries, side)), numbers, fixed, num_warps=config["warps"],
        num_stages=config["stages"],
    )  # fmt: skip
    if parts == 1:
        return attend
    merge = Launch(
        merge_parts_kernel, (heads * p.queries,), (parts,),
        {"QUERIES": p.queries, "DV": p.v_depth, "BDV": p.padded_v_depth, "PARTS": triton.next_power_of_2(parts)},
        num_warps=4,
    )  # fmt: skip
    found = (heads, parts, p.queries)
    return Launches(
        [((*found, p.v_depth), torch.float32), (found, torch.float32)],
        [Step(attend, (0, 1, 2, 3, 4, 5, 6, 9, 10)), Step(merge, (9, 10, 7, 8))],
    )


_batch, _kv_heads, _queries, _seen, _itemsize = sizes("batch kv_heads queries seen itemsize")
_depth, _v_depth, _bn, _parts, _warps, _stages = sizes("padded_depth padded_v_depth BN parts warps stages")
_bandwidth, _processors, _shared = sizes("bandwidth processors shared")
_LATENCY = 8e-7
"""Seconds from a load to its first byte."""
_groups = _batch * _kv_heads * sympy.ceiling(_queries / _MOST_QUERIES)
_tile = _bn * (_depth + _v_depth) * _itemsize
_resident = sympy.Max(1, sympy.Min(sympy.floor(_shared / (_stages * _tile + 8192)), sympy.floor(16 / _warps)))
_walk = waves(_groups * _parts, _processors * _resident) * sympy.ceiling(_seen / (_parts * _bn)) * _LATENCY
"""Steps one after another, each a load; a processor's programs hide one another's."""
_reading = sympy.Min(1, _groups * _parts / _processors)
"""Of the bandwidth, where too few programs run for each processor to have one: it reads no faster than its share."""
_traffic = _batch * _kv_heads * _seen * (_depth + _v_depth) * _itemsize / (_bandwidth * _reading)
_merged = sympy.Piecewise((0, sympy.Eq(_parts, 1)), (1, True))

DECODE_ATTENTION = Template(
    name="decode_attention",
    op="decode_attention",
    sources=(decode_parts_kernel, merge_parts_kernel, keys_read, pages_of, load_mask, load_rows, shaped, dot),
    space=_space,
    cost=Cost(
        bytes=8 * _groups * _parts * _queries * _v_depth * _merged, launches=1 + _merged,
        seconds=sympy.sqrt(_traffic**2 + (_walk / sympy.Min(_stages, 3)) ** 2) + 2e-6,
    ),
    prepare=_prepare,
)  # fmt: skip
