"""A linear layer whose weight is a SparseTensor."""

from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn

from sparsecomp.formats import CSR, SparseMatrix
from sparsecomp.nn.parameter import ExactPattern, SparseParameter
from sparsecomp.nn.pruning import pruned
from sparsecomp.sparse_tensor import PatternMode, SparseTensor


class SparseLinear(nn.Module):
    """y = x @ weight.T + bias.

    Args:
        weight: (out_features, in_features), a matrix of `sparsecomp.formats` or a SparseTensor.
        bias: (out_features,), or None.
        mode: whether the weight's pattern may change, as of `SparseParameter`.

    Raises:
        FormatError: the weight is a batch or no sparse matrix.
    """

    def __init__(
        self, weight: SparseMatrix | SparseTensor, bias: Tensor | None = None, mode: PatternMode = ExactPattern
    ) -> None:
        super().__init__()
        self.weight = SparseParameter(weight, mode)
        self.bias = None if bias is None else nn.Parameter(bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, format: type[SparseMatrix] = CSR, *, mask: Tensor | None = None,
        sparsity: float | None = None, mode: PatternMode = ExactPattern, **layout: Any,
    ) -> Self:  # fmt: skip
        """The layer with part of `linear`'s weight, copied; the bias parameter is shared.

        Args:
            linear: left as it is.
            format: of the weight, with `block=` for BSR and BCSC, `n=` and `m=` for N:M.
            mask: (out_features, in_features): store what is not zero in it. Whole blocks for BSR and BCSC.
            sparsity: share to leave out, the least magnitudes (or block norms) first. Instead of `mask`; for N:M,
                neither means the n largest of each m.

        Raises:
            FormatError: arguments that do not fit.
        """
        matrix = pruned(linear.weight, format, mask, sparsity, layout)
        layer = cls(matrix, None, mode).train(linear.training)
        layer.weight.requires_grad_(linear.weight.requires_grad)
        layer.bias = linear.bias
        return layer

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) to (…, out_features)."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes and format, for print."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, format={self.weight.format}"
