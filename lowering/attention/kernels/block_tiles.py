"""What the kernels of attention over listed blocks share: which pairs a tile keeps, how it is read, and what fits.

A kernel's tile is a block or divides it. Each kernel walks its list once, and masks the blocks that are kept in part by
one bit a pair; or twice, the second time over those that are kept whole, in a loop that knows no masks.
"""

from typing import Any

import triton
import triton.language as tl

from sparsecomp.lowering.attention.problem import BlockAttention
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.tuning.limits import fits_registers, fits_shared
from sparsecomp.lowering.tuning.template import Config

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


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


def tile_space(problem: BlockAttention, device: Device, by_key: bool, kept: int, scores: int) -> list[Config]:
    """Configurations: BM queries and BN keys of a tile, whether there is one loop, warps and stages.

    Args:
        by_key: the kernel keeps a tile of keys and walks over queries, not the other way round.
        kept: numbers of a row that are summed in registers.
        scores: matrices (BM, BN) that are alive at once.
    """
    p, itemsize = problem, 4 if problem.dtype == "float32" else 2
    depth = p.padded_depth + p.padded_v_depth
    outer_block, inner_block = (p.block_k, p.block_q) if by_key else (p.block_q, p.block_k)
    outer = _sides(outer_block, 64 if depth <= 256 and itemsize == 2 else 32)
    found = []
    inner = _sides(inner_block, 64 if scores == 1 and depth <= 256 and itemsize == 2 else 32)
    for side, walked, warps in ((a, b, w) for a in outer for b in inner for w in (4, 8)):
        bm, bn = (walked, side) if by_key else (side, walked)
        # a warp works on 16 rows
        if warps == 8 and side < 128 and kept < 256 or not fits_registers(side * kept + scores * bm * bn, warps):
            continue
        found += [Config(BM=bm, BN=bn, joint=joint, warps=warps, stages=stages)
                  for joint in (1, 0) for stages in (1, 2, 3, 4)
                  if (stages > 1 or itemsize == 4 or depth > 256)
                  and fits_shared(itemsize * depth * (side + stages * walked), device)]  # fmt: skip
    return found


def _sides(block: int, least: int) -> list[int]:
    return [side for side in (32, 64, 128) if side <= block and (side >= least or side == block)]


def constants(problem: BlockAttention, config: Config, rows_walked: int, block: int) -> dict[str, Any]:
    """What all these kernels are specialised on.

    Args:
        rows_walked, block: how many rows the kernel walks over in all, and in a block.
    """
    return {
        "GROUP": problem.group, "D": problem.depth, "DV": problem.v_depth, "BD": problem.padded_depth,
        "BDV": problem.padded_v_depth, "BLOCK_Q": problem.block_q, "BLOCK_K": problem.block_k, "BM": config["BM"],
        "BN": config["BN"], "CHECK_ROWS": rows_walked % block != 0, "JOINT": bool(config["joint"]),
        "CAPPED": problem.softcap > 0, "BIASED": problem.biased,
    }  # fmt: skip
