"""A gated pair of layers of few rows by bitmaps as an operation of one launch:

    out = activation(weight @ x.mT + bias) · (other_weight @ x.mT + other_bias)

Both weights have one size. A problem is that of either layer alone, as of `lowering.sparse.gated_pair`, with room for
the longest chunk of both.
"""

from collections.abc import Sequence

from torch import Tensor

from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import output_of
from sparsecomp.lowering.launch.launch import aligned
from sparsecomp.lowering.launch.strided import dtype_name
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.lowering.sparse.bitmap_linear import BITMAP_LINEAR, BitmapLinear, checked_copy
from sparsecomp.lowering.sparse.gated_pair import paired

BITMAP_PAIR = paired("bitmap_pair", BITMAP_LINEAR)


def launch_bitmap_pair(
    x: Tensor, copies: tuple[Sequence[Tensor], Sequence[Tensor]], m: int, values: tuple[int, int], grain: int,
    longest: int, biases: tuple[Tensor | None, Tensor | None], activation: str,
) -> Tensor:  # fmt: skip
    """activation(x @ S.mT + a bias) · (x @ T.mT + the other bias), rounded once, for an x that `takes_bitmap` accepts.

    Args:
        x: (n, k), contiguous, of the values' dtype; so is what follows.
        copies, grain, longest: as of `launch_bitmap_linear`, for weights (m, k) with so many values; `longest` is that
            of both, and their starts are of one dtype.
        biases: (m,) each, of one dtype that kernels take; both or none.

    Raises:
        FormatError: operands that do not belong together.
    """
    n, k = x.shape
    weight, other = (checked_copy(copy, m, k, stored, grain) for copy, stored in zip(copies, values, strict=True))
    x = aligned(x)
    out = allocate((n, m), (m, 1), x.dtype, x.device)
    described = output_of(out.mT, biases[0], "row", None, activation, 1.0)
    mean, dtypes = (sum(values) + 1) // 2, (dtype_name(x), dtype_name(weight[0]))
    problem = BitmapLinear(m, k, n, mean, grain, longest, *dtypes, described)
    dispatch.launch(BITMAP_PAIR, problem, *weight, *other, x, *biases, out.mT)
    return out
