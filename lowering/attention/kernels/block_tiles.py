"""What the kernels of attention over listed blocks share: which pairs a tile keeps, how it is read, and what fits.

A kernel's tile is a block or divides it. Each kernel walks its list once, and masks the blocks that are kept in part by
one bit a pair; or twice, the second time over those that are kept whole, in a loop that knows no masks.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparsecomp.lowering.attention.problem import BlockAttention
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.tuning.limits import fits_shared
from sparsecomp.lowering.tuning.template import Config
from sparsecomp.reference.attention.blocks import SURELY_ZERO

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(SURELY_ZERO)


@triton.jit
def load_words(bits_ptr, tile, rows, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """The words with the bits of `rows` of a tile (ROWS, COLUMNS) and WIDE columns, at most 128, from `first_column`.

    They are loaded before the product whose scores they mask, and nothing waits for them then. Of a block that is kept
    whole, whose tile is negative, nothing is read.
    """
    PARTS: tl.constexpr = COLUMNS // 32
    word_ptrs = bits_ptr + tile.to(tl.int64) * (ROWS * PARTS) + rows * PARTS + first_column // 32
    listed = tile >= 0
    first = tl.load(word_ptrs, mask=listed, other=0)
    second, third, fourth = first, first, first
    if WIDE > 32:
        second = tl.load(word_ptrs + 1, mask=listed, other=0)
    if WIDE > 64:
        third = tl.load(word_ptrs + 2, mask=listed, other=0)
        fourth = tl.load(word_ptrs + 3, mask=listed, other=0)
    return first, second, third, fourth


@triton.jit
def kept_pairs(first, second, third, fourth, WIDE: tl.constexpr):
    """(rows, WIDE) bool from the words of `load_words`."""
    column = tl.arange(0, WIDE)[None, :]
    word = first[:, None]
    if WIDE > 32:
        word = tl.where(column < 32, word, second[:, None])
    if WIDE > 64:
        word = tl.where(column < 64, word, tl.where(column < 96, third[:, None], fourth[:, None]))
    return ((word >> (column % 32)) & 1) != 0


@triton.jit
def shaped(score, scale, cap, slope, queries, keys, CAPPED: tl.constexpr, BIASED: tl.constexpr):
    """cap · tanh(scale · score / cap) + slope · (keys - queries), times log2 e, and the derivative of the cap.

    `scale` and `slope` have log2 e in them; `queries` and `keys` are positions that broadcast.
    """
    slope_of_cap = score
    if CAPPED:
        # tanh by 1 - 2 / (1 + exp(2 x)), which is right at both infinities
        capped = 1.0 - 2.0 / (1.0 + tl.math.exp2(score * (2.0 * scale / cap)))
        slope_of_cap = 1.0 - capped * capped
        score = capped * (cap * LOG2_E)
    else:
        score = score * scale
    if BIASED:
        score += slope * (keys - queries).to(tl.float32)
    return score, slope_of_cap


@triton.jit
def drawn_words(seed, stream, queries, first_key, kept, WIDE: tl.constexpr):
    """Words like those of `load_words`, of WIDE keys from `first_key`, whose bits are set with a chance of
    kept / 65536: 16 bits a pair of Philox (Salmon et al., 2011), eight keys a call.

    A pair's bit depends on the seed, the stream, which is the head's of a batch entry, and the pair alone.
    """
    place = tl.arange(0, WIDE // 8)
    query = queries.to(tl.uint32)[:, None] + (place * 0).to(tl.uint32)[None, :]
    group = (first_key // 8 + place).to(tl.uint32)[None, :] + query * 0
    one, two, three, four = tl.philox(seed, query, group, query * 0 + stream.to(tl.uint32), query * 0)
    bits = ((one & 0xFFFF) < kept).to(tl.int32) | (((one >> 16) < kept).to(tl.int32) << 1)
    bits |= (((two & 0xFFFF) < kept).to(tl.int32) << 2) | (((two >> 16) < kept).to(tl.int32) << 3)
    bits |= (((three & 0xFFFF) < kept).to(tl.int32) << 4) | (((three >> 16) < kept).to(tl.int32) << 5)
    bits |= (((four & 0xFFFF) < kept).to(tl.int32) << 6) | (((four >> 16) < kept).to(tl.int32) << 7)
    bits = bits << (place % 4 * 8)[None, :]
    word = (place // 4)[None, :]
    first = tl.sum(tl.where(word == 0, bits, 0), 1)
    second, third, fourth = first, first, first
    if WIDE > 32:
        second = tl.sum(tl.where(word == 1, bits, 0), 1)
    if WIDE > 64:
        third = tl.sum(tl.where(word == 2, bits, 0), 1)
        fourth = tl.sum(tl.where(word == 3, bits, 0), 1)
    return first, second, third, fourth


@triton.jit
def kept_of_keys(first, second, third, fourth, WIDE: tl.constexpr):
    """`kept_pairs` with keys as rows: (WIDE, queries) bool from words of the queries."""
    row = tl.arange(0, WIDE)[:, None]
    word = first[None, :]
    if WIDE > 32:
        word = tl.where(row < 32, word, second[None, :])
    if WIDE > 64:
        word = tl.where(row < 64, word, tl.where(row < 96, third[None, :], fourth[None, :]))
    return ((word >> (row % 32)) & 1) != 0


@triton.jit
def load_added(ptrs, inside):
    """Numbers that are added to scores, -inf where not `inside`."""
    return tl.load(ptrs, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def with_added(score, added):
    """Scores times log2 e with numbers added. One that is finite and LOWEST at most takes the score's place by 0: kept
    pairs have such only where all of a query's do, and their scores are all equal then."""
    lowest = (added <= LOWEST) & (added > float("-inf"))
    return tl.where(lowest, 0.0, score + added * LOG2_E)


@triton.jit
def load_rows(ptrs, rows, depth, ROWS, CHECK_ROWS: tl.constexpr, DEPTH: tl.constexpr, PADDED: tl.constexpr):
    """A tile by pointers; zeros past the depth and, where rows are to be checked, past ROWS."""
    if CHECK_ROWS and DEPTH != PADDED:
        return tl.load(ptrs, mask=(rows < ROWS)[:, None] & (depth < DEPTH)[None, :], other=0.0)
    if CHECK_ROWS:
        return tl.load(ptrs, mask=(rows < ROWS)[:, None], other=0.0)
    if DEPTH != PADDED:
        return tl.load(ptrs, mask=(depth < DEPTH)[None, :], other=0.0)
    return tl.load(ptrs)


@triton.jit
def store_rows(ptrs, value, rows, depth, ROWS, DEPTH: tl.constexpr):
    """A tile by pointers, but what lies past ROWS and the depth."""
    tl.store(ptrs, value.to(ptrs.dtype.element_ty), mask=(rows < ROWS)[:, None] & (depth < DEPTH)[None, :])


class Walk(NamedTuple):
    """What a kernel keeps and what it walks over.

    Attributes:
        by_key: it keeps a tile of keys and walks over queries, not the other way round.
        kept: numbers of a row of the operands that stay, in shared memory.
    """

    by_key: bool
    kept: int

    def sides(self, config: Mapping[str, int]) -> tuple[int, int]:
        """Rows of a tile that stays, and of one that is walked over."""
        return (config["BN"], config["BM"]) if self.by_key else (config["BM"], config["BN"])


def tile_space(problem: BlockAttention, device: Device, walk: Walk) -> list[Config]:
    """Configurations: BM queries and BN keys of a tile, whether there is one loop, the most registers a thread may
    have (0: as many as it likes; fewer let more programs run at once), warps and stages.

    Those that were never among the fastest on an H200 are left out (`python -m bench attention-candidates`).
    """
    p, half = problem, problem.dtype != "float32"
    wide = max(p.padded_depth, p.padded_v_depth)
    kept_block, walked_block = (p.block_k, p.block_q) if walk.by_key else (p.block_q, p.block_k)
    limits = (0, 128) if half and wide <= 128 else (0,)
    stages = [n for n in (1, 2, 3, 4) if n > 1 or wide > 128 or not half]
    found = []
    for kept, walked in product(_sides(kept_block, _kept_sides(wide, half)), _sides(walked_block, (32, 64))):
        warps = 8 if wide > 64 and kept >= 128 or wide > 128 and kept >= 64 else 4
        bm, bn = (walked, kept) if walk.by_key else (kept, walked)
        found += [Config(BM=bm, BN=bn, joint=joint, registers=limit, warps=warps, stages=n)
                  for limit, joint, n in product(limits, (0, 1), stages)]  # fmt: skip
    return [one for one in found if fits_shared(shared_bytes_of(p, one, walk), device)]


def _kept_sides(wide: int, half: bool) -> tuple[int, ...]:
    """Rows of a tile that stays: as many as registers hold the sums of."""
    if wide <= 64:
        return (64, 128) if half else (32, 64)
    if wide <= 128:
        return (128,) if half else (32,)
    return (32, 64)


def _sides(block: int, wanted: tuple[int, ...]) -> list[int]:
    """Those of the wanted sides that divide a block; the block, if it is smaller than all."""
    return [side for side in wanted if side <= block] or [block]


def shared_bytes_of(problem: BlockAttention, config: Mapping[str, int], walk: Walk) -> int:
    """Shared memory of a configuration, or somewhat more: what Triton 3.6 and 3.7 take for sm_80 and sm_90."""
    p, stages, itemsize = problem, config["stages"], 4 if problem.dtype == "float32" else 2
    side, walked = walk.sides(config)
    depth = p.padded_depth + p.padded_v_depth
    tiles = itemsize * (side * walk.kept + stages * walked * depth)
    words = 4 * stages * side * (walked // 32)
    added = stages * side * walked * p.added_bytes
    numbers = 8 * stages * walked if walk.by_key else 0
    # scores whose rows are not a warp's own go through shared memory on their way to a product
    turned = itemsize * side * walked if 16 * config["warps"] > side and (itemsize == 2 or side >= 64) else 0
    # operands of float32 are split in two; without stages results have no freed memory to go through
    split = 4 * side * walk.kept if itemsize == 4 and (side >= 64 or stages == 1) else 0
    split += 4 * walked * depth if itemsize == 4 and side >= 64 else 0
    passed = 2 * side * max(p.padded_depth, p.padded_v_depth) if itemsize == 2 and stages == 1 else 0
    return tiles + words + added + numbers + turned + split + passed


def launch_options(config: Config) -> dict[str, int]:
    """What Triton is told of a configuration beside constants."""
    limit = {"maxnreg": config["registers"]} if config["registers"] else {}
    return {"num_warps": config["warps"], "num_stages": config["stages"], **limit}


def constants(problem: BlockAttention, config: Config, rows_walked: int, block: int) -> dict[str, Any]:
    """What all these kernels are specialised on.

    Args:
        rows_walked, block: how many rows the kernel walks over in all, and in a block.
    """
    return {
        "GROUP": problem.group, "D": problem.depth, "DV": problem.v_depth, "BD": problem.padded_depth,
        "BDV": problem.padded_v_depth, "BLOCK_Q": problem.block_q, "BLOCK_K": problem.block_k, "BM": config["BM"],
        "BN": config["BN"], "CHECK_ROWS": rows_walked % block != 0, "JOINT": bool(config["joint"]),
        "CAPPED": problem.softcap > 0, "BIASED": problem.biased, "ADDED": bool(problem.added),
        "DROPPED": bool(problem.dropped),
    }  # fmt: skip
