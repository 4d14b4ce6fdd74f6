"""Layers of few rows by bitmaps that read one x, as operations of one launch; see `lowering.sparse.siblings`."""

from collections.abc import Sequence

from torch import Tensor

from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import output_of
from sparsecomp.lowering.launch.launch import aligned
from sparsecomp.lowering.launch.strided import dtype_name
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.lowering.sparse.bitmap_linear import BITMAP_LINEAR, BitmapLinear, checked_copy
from sparsecomp.lowering.sparse.siblings import of_several, sibling_operands

SIBLINGS = {
    count: of_several(name, count, BITMAP_LINEAR, 3, 3) for count, name in ((2, "bitmap_two"), (3, "bitmap_three"))
}  # fmt: skip
"""By how many."""
BITMAP_TWO, BITMAP_THREE = SIBLINGS.values()


def launch_bitmap_siblings(
    x: Tensor, copies: Sequence[Sequence[Tensor]], parts: Sequence[int], values: Sequence[int], grain: int,
    longest: int, biases: Sequence[Tensor | None], activation: str,
) -> list[Tensor]:  # fmt: skip
    """activation(x @ weight.mT + bias) of two or three weights, for an x that `takes_bitmap` accepts.

    Args:
        x: (n, k), contiguous, of the values' dtype; so is what follows.
        copies, grain, longest: as of `launch_bitmap_linear`, for weights of so many rows and values; `longest` is that
            of all, and their starts are of one dtype.
        biases: one a weight, of one dtype that kernels take; all or none.

    Raises:
        FormatError: operands that do not belong together.
    """
    n, k = x.shape
    x, m = aligned(x), sum(parts)
    weights = [
        checked_copy(copy, rows, k, stored, grain) for copy, rows, stored in zip(copies, parts, values, strict=True)
    ]
    outs = [allocate((n, rows), (rows, 1), x.dtype, x.device) for rows in parts]
    described = output_of(outs[0].mT, biases[0], "row", None, activation, 1.0)
    index = dtype_name(weights[0][0])
    problem = BitmapLinear(m, k, n, sum(values), grain, longest, dtype_name(x), index, described, parts=tuple(parts))
    dispatch.launch(SIBLINGS[len(parts)], problem, *sibling_operands(weights, x, biases, outs))
    return outs
