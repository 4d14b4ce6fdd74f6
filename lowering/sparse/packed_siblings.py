"""Layers of few rows by 2:4 weights with packed positions that read one x, as operations of one launch; see
`lowering.sparse.siblings`."""

from collections.abc import Sequence

from torch import Tensor

from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import output_of
from sparsecomp.lowering.launch.launch import aligned
from sparsecomp.lowering.launch.strided import dtype_name
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.lowering.sparse.packed_linear import PACKED_LINEAR, PackedLinear, check_packed, order_of_positions
from sparsecomp.lowering.sparse.siblings import of_several, sibling_operands

SIBLINGS = {
    count: of_several(name, count, PACKED_LINEAR, 2, 4) for count, name in ((2, "packed_two"), (3, "packed_three"))
}  # fmt: skip
"""By how many."""
PACKED_TWO, PACKED_THREE = SIBLINGS.values()


def launch_packed_siblings(
    x: Tensor, weights: Sequence[tuple[Tensor, Tensor]], biases: Sequence[Tensor | None], activation: str
) -> list[Tensor]:  # fmt: skip
    """activation(x @ weight.mT + bias) of two or three weights, for an x that `takes_packed` accepts.

    Args:
        x: (n, k), contiguous, of the values' dtype; so is what follows.
        weights: values and positions of each, as of `launch_packed_linear`.
        biases: one a weight, of one dtype that kernels take; all or none.

    Raises:
        FormatError: operands that do not belong together.
    """
    (n, k), order = x.shape, order_of_positions(weights[0][1])
    parts = tuple(values.shape[0] for values, _ in weights)
    for (values, positions), rows in zip(weights, parts, strict=True):
        check_packed(values, positions, rows, k, order)
    x, given = aligned(x), [(aligned(values), positions) for values, positions in weights]
    outs = [allocate((n, rows), (rows, 1), x.dtype, x.device) for rows in parts]
    described = output_of(outs[0].mT, biases[0], "row", None, activation, 1.0)
    problem = PackedLinear(sum(parts), k, n, order, False, dtype_name(x), described, parts)
    dispatch.launch(SIBLINGS[len(parts)], problem, *sibling_operands(given, x, biases, outs))
    return outs
