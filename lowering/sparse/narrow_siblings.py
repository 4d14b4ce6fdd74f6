"""Layers of few rows by narrow CSR that read one x, as operations of one launch; see `lowering.sparse.siblings`."""

from collections.abc import Sequence

from torch import Tensor

from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import output_of
from sparsecomp.lowering.launch.strided import dtype_name, strides_of
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.lowering.sparse.narrow import MOST, SPMM_NARROW, SpmmNarrow
from sparsecomp.lowering.sparse.siblings import of_several, sibling_operands
from sparsecomp.reference.precision import KERNEL_DTYPES

SIBLINGS = {
    count: of_several(name, count, SPMM_NARROW, 5, 5) for count, name in ((2, "narrow_two"), (3, "narrow_three"))
}  # fmt: skip
"""By how many."""
NARROW_TWO, NARROW_THREE = SIBLINGS.values()


def launch_narrow_siblings(
    x: Tensor, weights: Sequence[Sequence[Tensor]], parts: Sequence[int], biases: Sequence[Tensor | None],
    activation: str,
) -> list[Tensor] | None:  # fmt: skip
    """activation(x @ weight.mT + bias) of two or three weights.

    Args:
        x: (n, k), contiguous, of the values' dtype; so is what follows.
        weights: index arrays of each, and its values, which are some.
        parts: rows of each.
        biases: one a weight, of one dtype that kernels take; all or none.

    Returns:
        (n, rows) each; None where arrays differ in their dtypes, or no kernel takes rows or dtype of x.
    """
    (n, k), kinds = x.shape, {tuple(map(dtype_name, weight)) for weight in weights}
    if len(kinds) > 1 or n > MOST or x.dtype not in KERNEL_DTYPES:
        return None
    ((index, *_, distance, dtype),) = kinds
    outs = [allocate((n, rows), (rows, 1), x.dtype, x.device) for rows in parts]
    described = output_of(outs[0].mT, biases[0], "row", None, activation, 1.0)
    stored = sum(values.shape[0] for *_, values in weights)
    problem = SpmmNarrow(
        sum(parts), k, n, 1, stored, strides_of(x.mT), dtype, dtype_name(x), index, distance, described, tuple(parts)
    )  # fmt: skip
    dispatch.launch(SIBLINGS[len(parts)], problem, *sibling_operands(weights, x.mT, biases, outs))
    return outs
