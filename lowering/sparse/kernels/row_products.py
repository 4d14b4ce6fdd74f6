"""Products of two sparse matrices at given places, by rows: every element of one is searched for in a row of another.

Two schedules. `dots_kernel` takes places, and looks up one matrix's row in the other's: nothing is added by two
programs, so that results are the same in every run. `products_kernel` takes elements of the left matrix, multiplies
them with a row of the right one, and adds each product where there is a place for it.
"""

import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels.sddmm import rows_of_entries

TOGETHER = 512
"""Elements that a program looks up at a time."""


@triton.jit
def found_in(indices_ptr, low, high, wanted, there, halvings):
    """Where each wanted index stands between `low` and `high`, ascending, or -1; tiles of one shape."""
    end = high
    for _ in range(halvings):
        middle = (low + high) // 2
        searching = there & (low < high)
        before = searching & (tl.load(indices_ptr + middle, mask=searching, other=0) < wanted)
        high = tl.where(searching & ~before, middle, high)
        low = tl.where(before, middle + 1, low)
    inside = there & (low < end)
    return tl.where(inside & (tl.load(indices_ptr + low, mask=inside, other=-1) == wanted), low, -1)


@triton.jit
def bounds_of(pointers_ptr, line, ok):
    """Where the entries of each line begin and end."""
    return tl.load(pointers_ptr + line, mask=ok, other=0), tl.load(pointers_ptr + line + 1, mask=ok, other=0)


@triton.jit
def dots_kernel(
    x_pointers_ptr, x_indices_ptr, x_ptr, y_pointers_ptr, y_indices_ptr, y_ptr, at_pointers_ptr, at_indices_ptr,
    out_ptr, rows, entries, x_batch, y_batch, row_halvings, halvings,
    TURN: tl.constexpr, DOUBLE: tl.constexpr, E: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """out[entry of `at`] = x[row] · y[column], or x[column] · y[row] if TURN; rows of x are looked up, W at a time."""
    batch = tl.program_id(1).to(tl.int64)
    x_ptr += batch * x_batch
    y_ptr += batch * y_batch
    out_ptr += batch * entries
    entry = tl.program_id(0) * E + tl.arange(0, E)
    ok = (entry >= tl.load(at_pointers_ptr)) & (entry < tl.load(at_pointers_ptr + rows))
    row = tl.where(ok, rows_of_entries(at_pointers_ptr, entry, rows, row_halvings), 0)
    col = tl.load(at_indices_ptr + entry, mask=ok, other=0)
    mine, its = (col, row) if TURN else (row, col)
    begin, end = bounds_of(x_pointers_ptr, mine, ok)
    low, high = bounds_of(y_pointers_ptr, its, ok)
    wide = tl.float64 if DOUBLE else tl.float32
    acc = tl.zeros((E, W), wide)
    for start in range(0, tl.max(end - begin), W):
        place = begin[:, None] + (start + tl.arange(0, W))[None, :]
        there = place < end[:, None]
        wanted = tl.load(x_indices_ptr + place, mask=there, other=0)
        lows, highs = tl.broadcast_to(low[:, None], (E, W)), tl.broadcast_to(high[:, None], (E, W))
        found = found_in(y_indices_ptr, lows, highs, wanted, there, halvings)
        # what does not meet may be infinite, and is not read
        one = tl.load(x_ptr + place, mask=found >= 0, other=0.0)
        other = tl.load(y_ptr + found, mask=found >= 0, other=0.0)
        acc += one.to(wide) * other.to(wide)
    tl.store(out_ptr + entry, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), mask=entry < entries)


@triton.jit
def products_kernel(
    a_pointers_ptr, a_indices_ptr, a_ptr, b_pointers_ptr, b_indices_ptr, b_ptr, at_pointers_ptr, at_indices_ptr,
    out_ptr, rows, entries, a_batch, b_batch, row_halvings, halvings, E: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """out[row, column] += a[row, k] · b[k, column] for the places that `at` has; a program takes E elements of a."""
    batch = tl.program_id(1).to(tl.int64)
    a_ptr += batch * a_batch
    b_ptr += batch * b_batch
    out_ptr += batch * entries
    wide = out_ptr.dtype.element_ty
    entry = tl.program_id(0) * E + tl.arange(0, E)
    ok = (entry >= tl.load(a_pointers_ptr)) & (entry < tl.load(a_pointers_ptr + rows))
    row = tl.where(ok, rows_of_entries(a_pointers_ptr, entry, rows, row_halvings), 0)
    inner = tl.load(a_indices_ptr + entry, mask=ok, other=0)
    factor = tl.load(a_ptr + entry, mask=ok, other=0.0).to(wide)
    begin, end = bounds_of(b_pointers_ptr, inner, ok)
    low, high = bounds_of(at_pointers_ptr, row, ok)
    for start in range(0, tl.max(end - begin), W):
        place = begin[:, None] + (start + tl.arange(0, W))[None, :]
        there = place < end[:, None]
        wanted = tl.load(b_indices_ptr + place, mask=there, other=0)
        lows, highs = tl.broadcast_to(low[:, None], (E, W)), tl.broadcast_to(high[:, None], (E, W))
        found = found_in(at_indices_ptr, lows, highs, wanted, there, halvings)
        product = factor[:, None] * tl.load(b_ptr + place, mask=found >= 0, other=0.0).to(wide)
        tl.atomic_add(out_ptr + found, product, mask=found >= 0, sem="relaxed")


def dots_launch(
    lines: tuple[int, int], sizes: tuple[int, int, int], columns: int, batch: tuple[int, int, int], turn: bool,
    double: bool,
) -> Launch:  # fmt: skip
    """The launch of `dots_kernel`.

    Args:
        lines: rows of x and of `at`.
        sizes: entries of x, y and `at`.
        columns: of x and y.
        batch: products, and the strides of x's and y's values between them.
    """
    per_program, width = _tile(sizes[0], lines[0])
    numbers = (lines[1], sizes[2], *batch[1:], lines[1].bit_length(), min(columns, sizes[1]).bit_length())
    constants = {"TURN": turn, "DOUBLE": double, "E": per_program, "W": width}
    return Launch(dots_kernel, (triton.cdiv(sizes[2], per_program), batch[0]), numbers, constants, num_warps=4)


def products_launch(
    lines: tuple[int, int], sizes: tuple[int, int, int], columns: int, batch: tuple[int, int, int]
) -> Launch:
    """The launch of `products_kernel`; arguments as of `dots_launch`, of a and b, and `lines` the rows of a and b."""
    per_program, width = _tile(sizes[1], lines[1])
    numbers = (lines[0], sizes[2], *batch[1:], lines[0].bit_length(), min(columns, sizes[2]).bit_length())
    constants = {"E": per_program, "W": width}
    return Launch(products_kernel, (triton.cdiv(sizes[0], per_program), batch[0]), numbers, constants, num_warps=4)


def _tile(entries: int, lines: int) -> tuple[int, int]:
    """Lines a program takes, and elements of each that it looks up together: as many as a line has in the mean."""
    width = min(max(triton.next_power_of_2(triton.cdiv(entries, max(lines, 1))), 4), 64)
    return TOGETHER // width, width
