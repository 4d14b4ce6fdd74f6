"""A SparseTensor as a parameter, and whether its pattern may change."""

from typing import cast

from torch import nn

from sparsecomp.errors import FormatError
from sparsecomp.formats import SparseMatrix
from sparsecomp.sparse_tensor import PatternMode, SparseTensor

ExactPattern = PatternMode.EXACT
"""Gradients and updates must store what the parameter stores; anything else is a PatternError."""
AllowGrowth = PatternMode.GROWTH
"""They may store more: the parameter grows by zeros there, and the optimizer's states with it."""
AllowShrinkage = PatternMode.SHRINKAGE
"""They may store less: the parameter forgets the rest, and the optimizer's states with it."""


class SparseParameter:
    """Makes a SparseTensor that modules and optimizers know as a parameter.

    Args:
        data: a matrix of `sparsecomp.formats`, or a SparseTensor; its arrays are shared.
        mode: `ExactPattern`, `AllowGrowth` or `AllowShrinkage`; N:M patterns always store as much, and only take the
            first.
        requires_grad: whether it takes a gradient.

    Raises:
        FormatError: `data` is neither, or a batch.
    """

    def __new__(
        cls, data: SparseMatrix | SparseTensor, mode: PatternMode = ExactPattern, requires_grad: bool = True
    ) -> SparseTensor:
        """The parameter: a SparseTensor for which `isinstance(…, torch.nn.Parameter)` holds."""
        if not isinstance(mode, PatternMode):
            raise FormatError(f"mode is {mode!r}, needs ExactPattern, AllowGrowth or AllowShrinkage")
        tensor = data if isinstance(data, SparseTensor) else SparseTensor(data)
        return cast(SparseTensor, nn.Parameter(tensor.with_mode(mode), requires_grad))
