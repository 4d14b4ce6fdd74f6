"""Lists that are long beside the rest, walked over in parts by several programs, so that none of them bounds the time.

Global tokens have such lists: a few rows of blocks that list everything. How long lists are is only known on the
device. There a program looks for the shortest part by which there are no more parts than there is room for; programs
of whole rows leave those to others whose list is longer. Each part has a place of its own for what it gives, and these
are merged in their order: two runs give the same bits.

Whether that pays follows from how long the lists are (`sparsecomp.lowering.attention.list_parts`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step, Workspace

LEAST = 16
"""Blocks of a part."""
_MOST_PARTS = tl.constexpr(16)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def plan_list_parts_kernel(
    count_ptr, plan_ptr, limit_ptr, ROWS, WIDTH, LEAST_PART: tl.constexpr, ROOM: tl.constexpr, PADDED: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """Of the lists of one head: blocks of a part, and for each part its row of blocks and its number; -1 for none."""
    lists = tl.program_id(0)
    row = tl.arange(0, ALL)
    count = tl.load(count_ptr + lists * ROWS + row, mask=row < ROWS, other=0)
    limit = WIDTH
    for halvings in tl.static_range(1, 5):
        shorter = tl.maximum((WIDTH + (1 << halvings) - 1) >> halvings, LEAST_PART)
        parts = tl.sum(tl.where(count > shorter, (count + shorter - 1) // shorter, 0))
        limit = tl.where(parts <= ROOM, shorter, limit)
    parts = tl.where(count > limit, (count + limit - 1) // limit, 0)
    first = tl.cumsum(parts, 0) - parts
    plan_ptr += lists * ROOM * 2
    for number in tl.static_range(_MOST_PARTS):
        tl.store(plan_ptr + (first + number) * 2, row, mask=number < parts)
        tl.store(plan_ptr + (first + number) * 2 + 1, row * 0 + number, mask=number < parts)
    spare = tl.arange(0, PADDED)
    unused = (spare >= tl.sum(parts)) & (spare < ROOM)
    tl.store(plan_ptr + spare * 2, spare * 0 - 1, mask=unused)
    tl.store(plan_ptr + spare * 2 + 1, spare * 0, mask=unused)
    tl.store(limit_ptr + lists, limit)


@triton.jit
def part_of(
    plan_ptr, limit_ptr, lists, listed, BLOCK: tl.constexpr, SIDE: tl.constexpr, SPLIT: tl.constexpr, ROOM: tl.constexpr
):
    """The first row of a program's tile, negative if there is none, and its first and last entry of the list.

    Args:
        lists: place of the first list of the program's head; there are `listed` of a head.
        SIDE: rows of a tile, of which a BLOCK has several.
        SPLIT: 0 if no list is split, 1 for programs of whole lists, 2 for those of parts.
    """
    first_row, first, last = tl.program_id(1) * SIDE, 0, 0
    if SPLIT == 2:
        place = (lists // listed * ROOM + tl.program_id(1) // (BLOCK // SIDE)) * 2
        limit = tl.load(limit_ptr + lists // listed)
        first = tl.load(plan_ptr + place + 1) * limit
        last = first + limit
        first_row = tl.load(plan_ptr + place) * BLOCK + tl.program_id(1) % (BLOCK // SIDE) * SIDE
    return first_row, first, last


@triton.jit
def merge_list_parts_kernel(
    plan_ptr, limit_ptr, count_ptr, part_ptr, sums_ptr, out_ptr, logsumexp_ptr, HEADS, LENGTH, LISTED, list_batch,
    list_head, batch_stride, head_stride, row_stride, D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, ROWS:
    tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a list that has parts: their sum, or with `sums_ptr` the mean by their sums' exponentials.

    HEADS are those of the result, of which each may stand for several heads of lists: `list_head` goes from one to
    the next.
    """
    place = tl.program_id(1) // (BLOCK // ROWS)
    head, batch = (tl.program_id(0) % HEADS).to(tl.int64), (tl.program_id(0) // HEADS).to(tl.int64)
    first_list = batch * list_batch + head * list_head
    lists = first_list // LISTED
    block = tl.load(plan_ptr + (lists * ROOM + place) * 2)
    number = tl.load(plan_ptr + (lists * ROOM + place) * 2 + 1)
    if (block >= 0) & (number == 0):
        limit, count = tl.load(limit_ptr + lists), tl.load(count_ptr + first_list + block)
        parts = (count + limit - 1) // limit
        within = tl.program_id(1) % (BLOCK // ROWS) * ROWS + tl.arange(0, ROWS)
        depth = tl.arange(0, BD)
        slot = (tl.program_id(0).to(tl.int64) * ROOM + place) * BLOCK + within
        rows = block * BLOCK + within
        inside = (rows < LENGTH)[:, None] & (depth < D)[None, :]
        acc = tl.zeros((ROWS, BD), tl.float32)
        if sums_ptr is not None:
            top = tl.full((ROWS,), float("-inf"), tl.float32)
            for part in range(parts):
                top = tl.maximum(top, tl.load(sums_ptr + slot + part * BLOCK))
            # no score but -inf: any finite number in its place
            shift = tl.where(top == float("-inf"), 0.0, top)
            total = tl.zeros((ROWS,), tl.float32)
            for part in range(parts):
                weight = tl.math.exp2(tl.load(sums_ptr + slot + part * BLOCK) - shift)
                total += weight
                given = tl.load(part_ptr + (slot + part * BLOCK)[:, None] * D + depth[None, :], mask=inside, other=0.0)
                acc += weight[:, None] * given
            filled = tl.where(total == 0.0, 1.0, total)
            acc = acc / filled[:, None]
            sums = tl.where(total == 0.0, float("-inf"), (top + tl.math.log2(filled)) * _LN_2)
            tl.store(logsumexp_ptr + tl.program_id(0).to(tl.int64) * LENGTH + rows, sums, mask=rows < LENGTH)
        else:
            for part in range(parts):
                acc += tl.load(part_ptr + (slot + part * BLOCK)[:, None] * D + depth[None, :], mask=inside, other=0.0)
        out_ptrs = out_ptr + batch * batch_stride + head * head_stride + rows.to(tl.int64)[:, None] * row_stride
        tl.store(out_ptrs + depth[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


class Walked(NamedTuple):
    """Lists that a kernel walks over.

    Attributes:
        listed: rows of blocks of a head, and blocks of the longest list.
        leading: how many heads of how many batch entries have lists of their own, in all.
        programs: heads of the result in all batch entries, and the heads of one.
        length: rows of the result.
        block: rows of a block.
        strides: in rows of lists, from one batch entry to the next, and from one head of the result to the next.
        count: place of the lists' counts among the tensors.
        split: whether long lists are walked over in parts.
    """

    listed: tuple[int, int]
    leading: int
    programs: tuple[int, int]
    length: int
    block: int
    strides: tuple[int, int]
    count: int
    split: bool

    @property
    def room(self) -> int:
        """For how many parts of one head's lists there is room; 0 if nothing is split."""
        return max(16, self.listed[0] // 8) if self.split else 0


class Result(NamedTuple):
    """What is merged.

    Attributes:
        place: of the result among the tensors.
        depth, padded: numbers of a row.
        strides: of batch, head and row.
        logsumexp: place of the logsumexp, if the parts are weighted; None if they are added.
    """

    place: int
    depth: int
    padded: int
    strides: tuple[int, int, int]
    logsumexp: int | None = None


def launches_of(
    kernel: Any, tensors: int, tile: int, numbers: Sequence[Any], fixed: Mapping[str, Any], options: Mapping[str, int],
    walked: Walked, results: Sequence[Result],
) -> Launches:  # fmt: skip
    """A kernel whose last four tensors are the plan, the limits, and two for what parts give.

    Args:
        tensors: how many there are before those.
        tile: rows of a program.
        numbers, fixed, options: as of `Launch`.
        results: one with sums, or one or two that are added.
    """
    heads, plain = walked.programs[0], tuple(range(tensors))
    whole = triton.cdiv(walked.length, tile)
    room = walked.room
    if not room:
        launch = Launch(kernel, (heads, whole), tuple(numbers), {**fixed, "SPLIT": 0, "ROOM": 0}, **options)
        return Launches([], [Step(launch, (*plain, None, None, None, None))])
    plan, limit, first, second = range(tensors, tensors + 4)
    slots = heads * room * walked.block
    shapes: list[Workspace] = [((walked.leading * room, 2), torch.int32), ((walked.leading,), torch.int32)]
    shapes += [((slots, one.depth), torch.float32) for one in results]
    if results[0].logsumexp is not None:
        shapes.append(((slots,), torch.float32))
    parts = (first, second if len(shapes) == 4 else None)
    rows, width = walked.listed
    planning = {"LEAST_PART": LEAST, "ROOM": room, "PADDED": triton.next_power_of_2(room),
                "ALL": triton.next_power_of_2(rows)}  # fmt: skip
    planned = Launch(plan_list_parts_kernel, (walked.leading,), (rows, width), planning)
    steps = [Step(planned, (walked.count, plan, limit))]
    for split, tiles in ((1, whole), (2, room * (walked.block // tile))):
        launch = Launch(kernel, (heads, tiles), tuple(numbers), {**fixed, "SPLIT": split, "ROOM": room}, **options)
        steps.append(Step(launch, (*plain, plan, limit, *parts)))
    for one, part in zip(results, (first, second), strict=False):
        steps.append(_merging(walked, one, (plan, limit, walked.count, part), second))
    return Launches(shapes, steps)


def _merging(walked: Walked, result: Result, takes: tuple[int | None, ...], sums: int) -> Step:
    height = min(walked.block, 32)
    numbers = (walked.programs[1], walked.length, walked.listed[0], *walked.strides, *result.strides)
    fixed = {"D": result.depth, "BD": result.padded, "BLOCK": walked.block, "ROWS": height, "ROOM": walked.room}
    grid = (walked.programs[0], walked.room * (walked.block // height))
    weighted = result.logsumexp is not None
    takes = (*takes, sums if weighted else None, result.place, result.logsumexp)
    return Step(Launch(merge_list_parts_kernel, grid, numbers, fixed), takes)
