"""Softmax over the stored elements of rows: a program reads some rows twice, first for their sums, then to write.

What is summed stays apart for each of the places that a program reads at a time until the end of a row, so that nothing
crosses threads before, and the order of sums is always the same.
"""

import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch

_TOGETHER = 512
"""Elements that a program reads at a time."""
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_bounds(pointers_ptr, rows, ROWS: tl.constexpr):
    """Where the rows of this program begin and end."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.load(pointers_ptr + row, mask=row < rows, other=0)
    return begin, tl.load(pointers_ptr + row + 1, mask=row < rows, other=0)


@triton.jit
def row_softmax_kernel(values_ptr, pointers_ptr, out_ptr, rows, entries, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """out = exp(value - greatest) / sum, for each row; zeros for a row of -inf."""
    begin, end = row_bounds(pointers_ptr, rows, ROWS)
    values_ptr += tl.program_id(1).to(tl.int64) * entries
    out_ptr += tl.program_id(1).to(tl.int64) * entries
    place = tl.arange(0, WIDE)[None, :]
    top = tl.full((ROWS, WIDE), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(0, tl.max(end - begin), WIDE):
        entry = begin[:, None] + start + place
        there = entry < end[:, None]
        value = tl.load(values_ptr + entry, mask=there, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, value)
        # nothing yet but -inf: any finite number in its place gives zeros
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        # the difference is multiplied: a value near the end of what float32 holds would become infinite
        total = total * tl.math.exp2((top - shift) * _LOG2_E) + tl.math.exp2((value - shift) * _LOG2_E)
        top = higher
    greatest = tl.max(top, 1)
    shift = tl.where(greatest == float("-inf"), 0.0, greatest)[:, None]
    total = tl.sum(total * tl.math.exp2((top - shift) * _LOG2_E), 1)
    some = tl.where(total == 0.0, 1.0, total)[:, None]
    for start in range(0, tl.max(end - begin), WIDE):
        entry = begin[:, None] + start + place
        there = entry < end[:, None]
        value = tl.load(values_ptr + entry, mask=there, other=float("-inf")).to(tl.float32)
        share = tl.math.exp2((value - shift) * _LOG2_E) / some
        tl.store(out_ptr + entry, share.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def row_softmax_gradient_kernel(
    grad_ptr, weights_ptr, pointers_ptr, out_ptr, rows, entries, ROWS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """out = weight · (grad - the row's sum of weight · grad)."""
    begin, end = row_bounds(pointers_ptr, rows, ROWS)
    batch = tl.program_id(1).to(tl.int64) * entries
    place = tl.arange(0, WIDE)[None, :]
    sums = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(0, tl.max(end - begin), WIDE):
        entry = begin[:, None] + start + place
        there = entry < end[:, None]
        grad = tl.load(grad_ptr + batch + entry, mask=there, other=0.0).to(tl.float32)
        sums += grad * tl.load(weights_ptr + batch + entry, mask=there, other=0.0).to(tl.float32)
    total = tl.sum(sums, 1)[:, None]
    for start in range(0, tl.max(end - begin), WIDE):
        entry = begin[:, None] + start + place
        there = entry < end[:, None]
        grad = tl.load(grad_ptr + batch + entry, mask=there, other=0.0).to(tl.float32)
        weight = tl.load(weights_ptr + batch + entry, mask=there, other=0.0).to(tl.float32)
        tl.store(out_ptr + batch + entry, (weight * (grad - total)).to(out_ptr.dtype.element_ty), mask=there)


_KERNELS = {"softmax": row_softmax_kernel, "gradient": row_softmax_gradient_kernel}


def softmax_launch(which: str, rows: int, entries: int, batch: int) -> Launch:
    """The launch of the "softmax" or of its "gradient".

    Args:
        entries: of a batch entry, which lie side by side.
    """
    wide = min(max(triton.next_power_of_2(triton.cdiv(entries, max(rows, 1))), 8), 256)
    tile = {"ROWS": _TOGETHER // wide, "WIDE": wide}
    return Launch(_KERNELS[which], (triton.cdiv(rows, tile["ROWS"]), batch), (rows, entries), tile, num_warps=4)
