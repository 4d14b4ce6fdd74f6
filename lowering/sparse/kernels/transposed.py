"""Values in the order of a kept transpose, which is made anew where the matrix is another than it was made of.

A write to index arrays may be one that nothing tells the host of. So the launch that reorders values also compares the
index arrays with what the transpose was made of. Programs count themselves off, and where one saw a difference the last
of them sorts the entries anew, by itself: that takes milliseconds, but only once a write.
"""

import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch

NUMBERS = 1024
"""Numbers that a program moves in a step, and the entries it looks at where these are single numbers."""
_AT_ONCE = 64
"""Entries of rows of one length that are sorted in a step, each beside each."""


@triton.jit
def reorder_kernel(
    own_indices_ptr, own_pointers_ptr, pointers_ptr, indices_ptr, order_ptr, source_ptr, values_ptr, out_ptr,
    batch, rows, cols, lines, entries,
    KEEP: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, E: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out[b, t] = values[b, order[t]], WIDTH numbers each, in the order of the matrix as it is now.

    own_pointers: None where rows are of one length and may hold a column more than once. Then indices, values and out
    are None as well: an entry's row follows from its number, and values stay where they are.
    lines: how many own pointers there are; none in N:M, KEEP of GROUP, where an index counts within its group.
    source: own pointers and indices that the transpose was made of, how many programs have arrived, and whether one saw
    a difference; both are 0 between launches.
    """
    at = tl.program_id(0) * E + tl.arange(0, E)
    line, entry = at < lines, at < entries
    seen = tl.load(source_ptr + lines + at, mask=entry, other=0)
    differ = seen != tl.load(own_indices_ptr + at, mask=entry, other=0).to(seen.dtype)
    if own_pointers_ptr is not None:
        differ |= tl.load(source_ptr + at, mask=line, other=0) != tl.load(own_pointers_ptr + at, mask=line, other=0)
        for item in range(batch):
            _move(values_ptr, order_ptr, out_ptr, tl.program_id(0), item, entries, WIDTH, E, B)
    arrived_ptr = source_ptr + lines + entries
    if tl.sum(differ.to(tl.int32)) > 0:
        tl.atomic_xchg(arrived_ptr + 1, 1)
    tl.debug_barrier()  # what all threads wrote lies before the arrival
    if tl.atomic_add(arrived_ptr, 1) == tl.num_programs(0) - 1:
        tl.atomic_add(arrived_ptr, -tl.num_programs(0))
        if tl.atomic_xchg(arrived_ptr + 1, 0) != 0:
            _sort(
                own_pointers_ptr, own_indices_ptr, pointers_ptr, indices_ptr, order_ptr, rows, cols, entries,
                KEEP, GROUP, B,
            )  # fmt: skip
            for part in range(tl.num_programs(0)):
                at = part * E + tl.arange(0, E)
                own = tl.load(own_indices_ptr + at, mask=at < entries, other=0)
                tl.store(source_ptr + lines + at, own.to(seen.dtype), mask=at < entries)
                if own_pointers_ptr is not None:
                    own = tl.load(own_pointers_ptr + at, mask=at < lines, other=0)
                    tl.store(source_ptr + at, own, mask=at < lines)
                    for item in range(batch):
                        _move(values_ptr, order_ptr, out_ptr, part, item, entries, WIDTH, E, B)


@triton.jit
def _move(
    values_ptr, order_ptr, out_ptr, part, item, entries, WIDTH: tl.constexpr, E: tl.constexpr, B: tl.constexpr
):
    """out[item, t] = values[item, order[t]] for the E entries of a part."""
    first = part * E
    base = tl.cast(item, tl.int64) * entries * WIDTH
    for start in range(0, E * WIDTH, B):
        at = start + tl.arange(0, B)
        entry = first + at // WIDTH
        ok = (at < E * WIDTH) & (entry < entries)
        read = tl.load(order_ptr + entry, mask=ok, other=0).to(tl.int64) * WIDTH + at % WIDTH
        tl.store(
            out_ptr + base + tl.cast(first, tl.int64) * WIDTH + at, tl.load(values_ptr + base + read, mask=ok), mask=ok
        )


@triton.jit
def _sort(
    own_pointers_ptr, own_indices_ptr, pointers_ptr, indices_ptr, order_ptr, rows, cols, entries,
    KEEP: tl.constexpr, GROUP: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The transpose, by one program: entries are counted by columns, the counts summed up, and entries put in place."""
    turn = tl.arange(0, B)
    for start in range(0, cols + 1, B):
        tl.store(pointers_ptr + start + turn, tl.zeros((B,), pointers_ptr.dtype.element_ty), mask=start + turn <= cols)
    tl.debug_barrier()
    _visit(
        own_pointers_ptr, own_indices_ptr, pointers_ptr, indices_ptr, order_ptr, rows, cols, entries, False,
        KEEP, GROUP, B,
    )  # fmt: skip
    before = tl.load(pointers_ptr) * 0
    for start in range(0, cols, B):
        col = start + turn
        count = tl.load(pointers_ptr + 1 + col, mask=col < cols, other=0)
        tl.store(pointers_ptr + 1 + col, before + tl.cumsum(count) - count, mask=col < cols)
        before += tl.sum(count)
    tl.debug_barrier()
    # where a column begins is raised with each of its entries to where the next one does
    _visit(
        own_pointers_ptr, own_indices_ptr, pointers_ptr, indices_ptr, order_ptr, rows, cols, entries, True,
        KEEP, GROUP, B,
    )  # fmt: skip


@triton.jit
def _visit(
    own_pointers_ptr, own_indices_ptr, pointers_ptr, indices_ptr, order_ptr, rows, cols, entries, PLACE: tl.constexpr,
    KEEP: tl.constexpr, GROUP: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Count the entries of each column, or put them in place, row by row, so that rows ascend in a column.

    No entry is visited twice or lies outside of the arrays, whatever the pointers; columns that are none are left out.
    """
    done = tl.load(pointers_ptr) * 0
    if own_pointers_ptr is None:
        for start in range(0, entries, B):
            _visit_many(own_indices_ptr, pointers_ptr, order_ptr, start, cols, entries, PLACE, B)
    else:
        for row in range(rows):
            if GROUP:
                begin, end = row * (entries // rows) + done * 0, (row + 1) * (entries // rows) + done * 0
            else:
                begin = tl.minimum(tl.maximum(tl.load(own_pointers_ptr + row).to(done.dtype), done), entries)
                end = tl.minimum(tl.load(own_pointers_ptr + row + 1).to(done.dtype), entries)
                end = tl.maximum(end, begin)  # on a GPU a loop that ends before it begins is not left out
            for start in range(begin, end, B):
                at = start + tl.arange(0, B)
                ok = at < end
                col = tl.load(own_indices_ptr + at, mask=ok, other=0).to(done.dtype)
                if GROUP:
                    col += (at - begin) // KEEP * GROUP
                ok &= (col >= 0) & (col < cols)
                place = tl.atomic_add(pointers_ptr + 1 + tl.where(ok, col, 0), 1, mask=ok, sem="relaxed")
                if PLACE:
                    tl.store(order_ptr + place, at.to(order_ptr.dtype.element_ty), mask=ok)
                    tl.store(
                        indices_ptr + place, tl.full((B,), 0, indices_ptr.dtype.element_ty) + row, mask=ok
                    )
                tl.debug_barrier()
            done = tl.maximum(done, end)


@triton.jit
def _visit_many(own_indices_ptr, pointers_ptr, order_ptr, start, cols, entries, PLACE: tl.constexpr, B: tl.constexpr):
    """`_visit` for B entries of rows of one length, in which columns may repeat."""
    turn = tl.arange(0, B)
    at = start + turn
    col = tl.load(own_indices_ptr + at, mask=at < entries, other=-1)
    ok = (col >= 0) & (col < cols)
    end_ptr = pointers_ptr + 1 + tl.where(ok, col, 0)
    if PLACE:
        # by number, not by who comes first, so that sums have the same order in each run
        earlier = (col[:, None] == col[None, :]) & (turn[:, None] > turn[None, :])
        place = tl.load(end_ptr, mask=ok, other=0) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(order_ptr + place, at.to(order_ptr.dtype.element_ty), mask=ok)
        tl.debug_barrier()
    tl.atomic_add(end_ptr, 1, mask=ok, sem="relaxed")
    tl.debug_barrier()


def reorder_launch(
    batch: int, rows: int, cols: int, lines: int, entries: int, width: int, group: tuple[int, int]
) -> Launch:
    """The launch of `reorder_kernel`.

    Args:
        group: n and m of N:M, zeros otherwise.
    """
    each = max(NUMBERS // triton.next_power_of_2(width), 16)
    numbers, constants = (batch, rows, cols, lines, entries), {"KEEP": group[0], "GROUP": group[1], "WIDTH": width}
    programs = triton.cdiv(max(lines, entries), each)
    return Launch(reorder_kernel, (programs,), numbers, {**constants, "E": each, "B": NUMBERS}, num_warps=4)


def compare_launch(cols: int, entries: int) -> Launch:
    """The launch of `reorder_kernel` for rows of one length, without values and without the row of an entry."""
    constants = {"KEEP": 0, "GROUP": 0, "WIDTH": 1, "E": NUMBERS, "B": _AT_ONCE}
    return Launch(reorder_kernel, (triton.cdiv(entries, NUMBERS),), (0, 0, cols, 0, entries), constants, num_warps=4)
