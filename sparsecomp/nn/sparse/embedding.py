"""An embedding with a sparse table."""

from typing import Any, Self, cast

import torch
from torch import Tensor, fx, nn

from sparsecomp.errors import FormatError
from sparsecomp.formats import CSR, SparseMatrix
from sparsecomp.formats.base import FORMATS
from sparsecomp.nn.masked.existing_mask import is_trained
from sparsecomp.nn.sparse.pruning import pruned_layer
from sparsecomp.nn.sparse.stored_weight import StoredWeight
from sparsecomp.ops.sparse.rows import stored_rows
from sparsecomp.tensor.index_arrays import IndexArrays
from sparsecomp.tensor.sparse_tensor import SparseTensor


class SparseEmbedding(StoredWeight):
    """Rows of a sparse table, looked up as dense vectors.

    Args:
        weight: (rows, columns), a matrix or SparseTensor of format CSR, COO, NM, NARROW or BITMAP.
        requires_grad: whether the table's values take a gradient.

    Raises:
        FormatError: another format, from which a row cannot be read.
    """

    def __init__(self, weight: SparseMatrix | SparseTensor, requires_grad: bool = True) -> None:
        super().__init__(weight, requires_grad)
        if self._by_columns or self._layout.entry:
            known = ", ".join(sorted(name for name, kind in FORMATS.items() if not (kind.BY_COLUMNS or kind.BLOCKS)))
            raise FormatError(f"the table's format is {self.format}, needs one of {known}")

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, format: type[SparseMatrix] = CSR, *, mask: Tensor | None = None,
        sparsity: float | None = None, **layout: Any,
    ) -> Self:  # fmt: skip
        """The embedding with part of the table, copied; `mask`, `sparsity` and layout as of `SparseLinear.from_linear`.

        Raises:
            FormatError: arguments that do not fit, or an embedding with padding, max_norm, frequency scaling or torch's
                sparse gradients.
            MaskError: a table to be ranked holds NaN.
        """
        matrix = pruned_layer(embedding, nn.Embedding, format, mask, sparsity, layout)
        if embedding.padding_idx is not None or embedding.max_norm is not None:
            raise FormatError("the embedding has padding_idx or max_norm: SparseEmbedding has neither")
        if embedding.scale_grad_by_freq or embedding.sparse:
            raise FormatError("the embedding has scale_grad_by_freq or sparse: SparseEmbedding has neither")
        return cls(matrix, is_trained(embedding)).train(embedding.training)

    def _derive(self, pattern: IndexArrays, measured: bool = True) -> None:
        """Nothing: no look-up reads a transpose."""

    def _make_room(self, name: str, given: Tensor) -> None:
        super()._make_room(name, given)
        own = getattr(self, name)
        if name != "values" and not own.is_meta and not torch.equal(own, given.to(own)):
            setattr(self, name, own.clone())  # a backward that is still to come reads the old one

    def forward(self, index: Tensor) -> Tensor:
        """Integers of any shape to (…, columns)."""
        if isinstance(index, fx.Proxy):
            return cast(Tensor, self._as_node(index))
        return stored_rows(index, self._live(), self._own(), self._layout)
