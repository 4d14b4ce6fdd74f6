"""An embedding whose table is a SparseTensor."""

from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn

from sparsecomp.errors import FormatError
from sparsecomp.formats import CSR, SparseMatrix
from sparsecomp.nn.parameter import ExactPattern, SparseParameter
from sparsecomp.nn.pruning import pruned
from sparsecomp.sparse_tensor import PatternMode, SparseTensor

_BY_ROWS = ("CSR", "COO", "NM")


class SparseEmbedding(nn.Module):
    """Rows of a sparse table, looked up as dense vectors.

    Args:
        weight: (rows, columns), a matrix or SparseTensor of format CSR, COO or NM.
        mode: whether the table's pattern may change, as of `SparseParameter`.

    Raises:
        FormatError: another format, from which a row cannot be read.
    """

    def __init__(self, weight: SparseMatrix | SparseTensor, mode: PatternMode = ExactPattern) -> None:
        super().__init__()
        self.weight = SparseParameter(weight, mode)
        if self.weight.format not in _BY_ROWS:
            raise FormatError(f"the table's format is {self.weight.format}, needs one of {', '.join(_BY_ROWS)}")

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, format: type[SparseMatrix] = CSR, *, mask: Tensor | None = None,
        sparsity: float | None = None, mode: PatternMode = ExactPattern, **layout: Any,
    ) -> Self:  # fmt: skip
        """The embedding with part of the table, copied; `mask`, `sparsity` and layout as of `SparseLinear.from_linear`.

        Raises:
            FormatError: arguments that do not fit, or an embedding with padding, max_norm, frequency scaling or torch's
                sparse gradients.
        """
        if embedding.padding_idx is not None or embedding.max_norm is not None:
            raise FormatError("the embedding has padding_idx or max_norm: SparseEmbedding has neither")
        if embedding.scale_grad_by_freq or embedding.sparse:
            raise FormatError("the embedding has scale_grad_by_freq or sparse: SparseEmbedding has neither")
        layer = cls(pruned(embedding.weight, format, mask, sparsity, layout), mode).train(embedding.training)
        layer.weight.requires_grad_(embedding.weight.requires_grad)
        return layer

    def forward(self, index: Tensor) -> Tensor:
        """Integers of any shape to (…, columns)."""
        return F.embedding(index, self.weight)

    def extra_repr(self) -> str:
        """Sizes and format, for print."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}, format={self.weight.format}"
