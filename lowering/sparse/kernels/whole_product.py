"""The product of two sparse matrices at every place that it reaches: rows of both are walked, twice.

`count_columns_kernel` marks a row's columns in a bitmap and counts them. `fill_columns_kernel` knows from the bitmap
where in the row a column stands, and adds each product there. One program has a row, and within it the entries of the
left row one after the other: no atomic sum, so that results are the same in every run.
"""

import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels.row_products import bounds_of

WORD = 32
"""Columns that a word of a bitmap has."""


@triton.jit
def bits_in(word):
    """How many bits of an int32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return (word + (word >> 16)) & 0x3F


@triton.jit
def mark_row(a_indices_ptr, b_pointers_ptr, b_indices_ptr, bits, begin, end, K: tl.constexpr, W: tl.constexpr):
    """Set the bits of the columns that a row of a, entries begin to end - 1, reaches; return the pairs that meet."""
    met = tl.zeros((K,), tl.int64)
    for first in range(begin, end, K):
        entry = first + tl.arange(0, K)
        ok = entry < end
        inner = tl.load(a_indices_ptr + entry, mask=ok, other=0)
        low, high = bounds_of(b_pointers_ptr, inner, ok)
        met += high - low
        for start in range(0, tl.max(high - low), W):
            place = low[:, None] + (start + tl.arange(0, W))[None, :]
            there = place < high[:, None]
            col = tl.load(b_indices_ptr + place, mask=there, other=0).to(tl.int32)
            tl.atomic_or(bits + (col >> 5), tl.full((K, W), 1, tl.int32) << (col & 31), mask=there, sem="relaxed")
    return tl.sum(met, 0)


@triton.jit
def rank_row(bits, ranks, words, CLEAR: tl.constexpr, S: tl.constexpr):
    """ranks = for each word of the bitmap how many bits are set before it, and in the lower half the word itself.

    Returns how many are set in all. CLEAR leaves the bitmap empty.
    """
    seen = tl.full((), 0, tl.int32)
    for start in range(0, words, S):
        word = start + tl.arange(0, S)
        # past the first cache, where a program's own atomics are not seen
        found = tl.load(bits + word, mask=word < words, other=0, cache_modifier=".cg")
        count = bits_in(found)
        before = seen + tl.cumsum(count, 0) - count
        both = (before.to(tl.int64) << 32) | (found.to(tl.int64) & 0xFFFFFFFF)
        tl.store(ranks + word, both, mask=word < words)
        if CLEAR:
            tl.store(bits + word, tl.zeros((S,), tl.int32), mask=word < words)
        seen += tl.sum(count, 0)
    return seen


@triton.jit
def count_columns_kernel(
    a_pointers_ptr, a_indices_ptr, b_pointers_ptr, b_indices_ptr, bits_ptr, ranks_ptr, counts_ptr, pairs_ptr, rows,
    words, KEPT: tl.constexpr, K: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """counts[row + 1] = columns that the row of a @ b reaches; pairs += the pairs of elements that meet.

    KEPT: each row has a bitmap and ranks of its own, which stay; else each program has them.
    """
    met = tl.full((), 0, tl.int64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        mine = tl.cast(row if KEPT else tl.program_id(0), tl.int64) * words
        begin, end = tl.load(a_pointers_ptr + row), tl.load(a_pointers_ptr + row + 1)
        count = tl.full((), 0, tl.int32)
        if begin < end:
            met += mark_row(a_indices_ptr, b_pointers_ptr, b_indices_ptr, bits_ptr + mine, begin, end, K, W)
            tl.debug_barrier()
            count = rank_row(bits_ptr + mine, ranks_ptr + mine, words, not KEPT, S)
            tl.debug_barrier()
        tl.store(counts_ptr + row + 1, count.to(tl.int64))
    tl.atomic_add(pairs_ptr, met, sem="relaxed")


@triton.jit
def fill_columns_kernel(
    a_pointers_ptr, a_indices_ptr, a_ptr, b_pointers_ptr, b_indices_ptr, b_ptr, bits_ptr, ranks_ptr, pointers_ptr,
    indices_ptr, out_ptr, rows, words, KEPT: tl.constexpr, K: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """indices and out (zeros before) = columns and values of a @ b, by rows, as far as the pointers reach.

    An element is the sum over W columns of K entries of a at a time, one entry after the other.
    """
    wide = out_ptr.dtype.element_ty
    lane = tl.arange(0, K)[:, None]
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        mine = tl.cast(row if KEPT else tl.program_id(0), tl.int64) * words
        ranks = ranks_ptr + mine
        begin, end = tl.load(a_pointers_ptr + row), tl.load(a_pointers_ptr + row + 1)
        base, last = tl.load(pointers_ptr + row), tl.load(pointers_ptr + row + 1)
        if base < last:
            if not KEPT:
                mark_row(a_indices_ptr, b_pointers_ptr, b_indices_ptr, bits_ptr + mine, begin, end, K, W)
                tl.debug_barrier()
                rank_row(bits_ptr + mine, ranks, words, True, S)
                tl.debug_barrier()
            for first in range(begin, end, K):
                entry = first + tl.arange(0, K)
                ok = entry < end
                inner = tl.load(a_indices_ptr + entry, mask=ok, other=0)
                factor = tl.load(a_ptr + entry, mask=ok, other=0.0).to(wide)
                low, high = bounds_of(b_pointers_ptr, inner, ok)
                for start in range(0, tl.max(high - low), W):
                    place = low[:, None] + (start + tl.arange(0, W))[None, :]
                    there = place < high[:, None]
                    col = tl.load(b_indices_ptr + place, mask=there, other=0).to(tl.int32)
                    product = factor[:, None] * tl.load(b_ptr + place, mask=there, other=0.0).to(wide)
                    both = tl.load(ranks + (col >> 5), mask=there, other=0)
                    lower = both.to(tl.int32) & ((tl.full((K, W), 1, tl.int32) << (col & 31)) - 1)
                    spot = base + (both >> 32) + bits_in(lower)
                    there &= spot < last
                    tl.store(indices_ptr + spot, col.to(indices_ptr.dtype.element_ty), mask=there)
                    # columns of one entry differ: no two lanes add to the same element
                    for turn in tl.static_range(K):
                        now = there & (lane == turn)
                        tl.store(out_ptr + spot, tl.load(out_ptr + spot, mask=now, other=0.0) + product, mask=now)
                        tl.debug_barrier()


def count_launch(rows: int, words: int, programs: int, kept: bool, means: tuple[int, int]) -> Launch:
    """The launch of `count_columns_kernel`, which has no sums that must follow each other: many entries at a time.

    Args:
        programs: how many there are; a bitmap and ranks for each, of so many words, or one a row if `kept`.
        means: entries of a row of a and of b, in the mean, powers of two.
    """
    entries, width = _tile(means, 512, 64)
    constants = {"KEPT": kept, "K": entries, "W": width, "S": _scanned(words)}
    return Launch(count_columns_kernel, (programs,), (rows, words), constants, num_warps=_warps(entries * width))


def fill_launch(rows: int, words: int, programs: int, kept: bool, means: tuple[int, int]) -> Launch:
    """The launch of `fill_columns_kernel`; as of `count_columns_kernel`."""
    entries, width = _tile(means, 512, 8)
    constants = {"KEPT": kept, "K": entries, "W": width, "S": _scanned(words)}
    return Launch(fill_columns_kernel, (programs,), (rows, words), constants, num_warps=_warps(entries * width))


def _tile(means: tuple[int, int], elements: int, most: int) -> tuple[int, int]:
    """Entries of a that are walked together, and columns of each: as many as rows have in the mean."""
    width = min(max(means[1], 8), 256)
    return min(max(elements // width, 1), max(means[0], 2), most), width


def _scanned(words: int) -> int:
    return min(triton.next_power_of_2(words), 512)


def _warps(elements: int) -> int:
    return min(max(elements // 64, 1), 4)
