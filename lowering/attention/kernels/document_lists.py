"""Block lists of packed documents by their offsets: a program a row of blocks walks over what its documents reach.

What a row keeps is one interval of columns, which is found once. Each direction is counted
first, and then filled in: where a row's tiles begin follows from the counts of the rows before it.
"""

from collections.abc import Iterator

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.attention.document_lists import DocumentLists
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template
from sparsecomp.reference.attention.blocks import FULL

_FULL = tl.constexpr(FULL)


@triton.jit
def document_of(offset_ptr, position, DOCUMENTS, STEPS: tl.constexpr):
    """The document of each position, by halving: -1 before the first, DOCUMENTS behind the last."""
    low = position * 0
    high = low + DOCUMENTS + 1
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        before = tl.load(offset_ptr + middle, mask=open_, other=0) <= position
        low = tl.where(open_ & before, middle + 1, low)
        high = tl.where(open_ & (before == 0), middle, high)
    return low - 1


@triton.jit
def intervals(
    own_ptr, other_ptr, row, LENGTH, COLUMNS, DOCUMENTS, BACK, AHEAD, STEPS: tl.constexpr
):  # fmt: skip
    """Of each row the first column that it keeps, and the one behind the last; 0 and 0 if there is none."""
    document = document_of(own_ptr, row, DOCUMENTS, STEPS)
    inside = (document >= 0) & (document < DOCUMENTS) & (row < LENGTH)
    start = tl.load(other_ptr + document, mask=inside, other=0)
    end = tl.load(other_ptr + document + 1, mask=inside, other=0)
    # both sides of a document end together
    beside = row - tl.load(own_ptr + document + 1, mask=inside, other=0) + end
    low = tl.maximum(tl.maximum(start, beside - BACK), 0)
    high = tl.minimum(tl.minimum(end, beside + AHEAD + 1), COLUMNS)
    some = inside & (low < high)
    return tl.where(some, low, 0), tl.where(some, high, 0)


@triton.jit
def reached(low, high, COLUMNS, BLOCK_COLUMN: tl.constexpr):
    """The first block that rows may reach, and the one behind the last."""
    first = tl.min(tl.where(low < high, low, COLUMNS))
    return first // BLOCK_COLUMN, (tl.max(high) + BLOCK_COLUMN - 1) // BLOCK_COLUMN


@triton.jit
def kept_in_block(low, high, block, BLOCK_COLUMN: tl.constexpr):
    """How many pairs of a block are kept."""
    first = tl.maximum(low, block * BLOCK_COLUMN)
    return tl.sum(tl.maximum(tl.minimum(high, (block + 1) * BLOCK_COLUMN) - first, 0))


@triton.jit
def count_listed_kernel(
    own_ptr, other_ptr, count_ptr, partial_ptr, ROWS, COLUMNS, DOCUMENTS, BACK, AHEAD, BLOCK_ROW: tl.constexpr,
    BLOCK_COLUMN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """How many blocks a row of blocks lists, and how many of them are kept in part."""
    row = tl.program_id(0) * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    low, high = intervals(own_ptr, other_ptr, row, ROWS, COLUMNS, DOCUMENTS, BACK, AHEAD, STEPS)
    first, last = reached(low, high, COLUMNS, BLOCK_COLUMN)
    count, partial = first * 0, first * 0
    for block in range(first, last):
        kept = kept_in_block(low, high, block, BLOCK_COLUMN)
        count += (kept > 0).to(tl.int32)
        partial += ((kept > 0) & (kept < BLOCK_ROW * BLOCK_COLUMN)).to(tl.int32)
    tl.store(count_ptr + tl.program_id(0), count)
    tl.store(partial_ptr + tl.program_id(0), partial)


@triton.jit
def fill_lists_kernel(
    own_ptr, other_ptr, partial_ptr, index_ptr, tile_ptr, bits_ptr, ROWS, COLUMNS, DOCUMENTS, BACK, AHEAD, WIDTH,
    TILES, BLOCK_ROW: tl.constexpr, BLOCK_COLUMN: tl.constexpr, STEPS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The list of a row of blocks, and the bits of those that are kept in part."""
    row = tl.program_id(0) * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    low, high = intervals(own_ptr, other_ptr, row, ROWS, COLUMNS, DOCUMENTS, BACK, AHEAD, STEPS)
    first, last = reached(low, high, COLUMNS, BLOCK_COLUMN)
    before = tl.arange(0, ALL)
    tile = tl.sum(tl.load(partial_ptr + before, mask=before < tl.program_id(0), other=0))
    partial_place = first * 0
    full_place = tl.load(partial_ptr + tl.program_id(0))
    index_ptr += tl.program_id(0).to(tl.int64) * WIDTH
    tile_ptr += tl.program_id(0).to(tl.int64) * WIDTH
    WORDS: tl.constexpr = BLOCK_COLUMN // 32
    at = tl.arange(0, BLOCK_ROW)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    bit = tl.arange(0, 32)[None, None, :]
    for block in range(first, last):
        kept = kept_in_block(low, high, block, BLOCK_COLUMN)
        if kept == BLOCK_ROW * BLOCK_COLUMN:
            tl.store(index_ptr + full_place, block)
            tl.store(tile_ptr + full_place, _FULL)
            full_place += 1
        elif kept > 0:
            tl.store(index_ptr + partial_place, block)
            # offsets that do not ascend may have more tiles than there is room for
            number = tl.minimum(tile, TILES - 1)
            tl.store(tile_ptr + partial_place, number)
            column = block * BLOCK_COLUMN + tl.arange(0, BLOCK_COLUMN)
            pairs = ((column[None, :] >= low[:, None]) & (column[None, :] < high[:, None])).to(tl.int32)
            words = tl.sum(tl.reshape(pairs, (BLOCK_ROW, WORDS, 32)) << bit, 2)
            tl.store(bits_ptr + number.to(tl.int64) * (BLOCK_ROW * WORDS) + at, words)
            partial_place += 1
            tile += 1


def _prepare(problem: DocumentLists, config: Config) -> Launches:
    """Tensors are both sides' offsets and the ten of the lists."""
    p = problem
    rows, columns = p.grid
    by_query, by_key = (p.q_len, p.k_len, rows, columns), (p.k_len, p.q_len, columns, rows)
    return Launches([], [
        *_direction(p, by_query, (p.block_q, p.block_k), (p.before, p.after), (0, 1, 2, 3, 4, 5, 6)),
        *_direction(p, by_key, (p.block_k, p.block_q), (p.after, p.before), (1, 0, 7, 8, 9, 10, 11)),
    ])  # fmt: skip


def _direction(
    p: DocumentLists, sizes: tuple[int, int, int, int], sides: tuple[int, int], far: tuple[int, int],
    places: tuple[int, ...],
) -> Iterator[Step]:  # fmt: skip
    """What counts and what fills in the lists of one side.

    Args:
        sizes: of this side and the other, in tokens, and in blocks.
        sides: of a block.
        far: how far before and behind itself a row keeps columns.
        places: among the tensors, of both offsets and the five of the lists.
    """
    own, other, rows, columns = sizes
    fixed = {"BLOCK_ROW": sides[0], "BLOCK_COLUMN": sides[1], "STEPS": p.documents.bit_length() + 1}
    numbers = (own, other, p.documents, *far)
    yield Step(Launch(count_listed_kernel, (rows,), numbers, fixed), places[:4])
    fill = Launch(
        fill_lists_kernel, (rows,), (*numbers, columns, p.tiles), fixed | {"ALL": triton.next_power_of_2(rows)}
    )  # fmt: skip
    yield Step(fill, (*places[:2], *places[3:]))


_q_len, _k_len, _block_q, _block_k = sizes("q_len k_len block_q block_k")

DOCUMENT_LISTS = Template(
    name="document_lists",
    op="document_lists",
    sources=(count_listed_kernel, fill_lists_kernel, kept_in_block, reached, intervals, document_of),
    # if a row of blocks lists eight: their entries and bits
    cost=Cost(
        bytes=8 * (_q_len / _block_q + _k_len / _block_k) * (8 + _block_q * _block_k / 8),
        launches=sympy.Integer(4),
    ),
    prepare=_prepare,
)
