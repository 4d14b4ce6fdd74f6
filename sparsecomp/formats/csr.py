"""CSR and CSC: elements compressed by rows and by columns."""

from typing import Any, Self

import torch
from torch import Tensor

from sparsecomp.formats.axes import ByColumn, ByRow
from sparsecomp.formats.compressed import Compressed
from sparsecomp.formats.foreign import scipy_sparse, to_numpy
from sparsecomp.formats.indices import choose_index_dtype, sorted_keys, sorted_pairs, take
from sparsecomp.formats.triplets import Triplets


class _Elements(Compressed):
    """Entries are single values."""

    @classmethod
    def _from_triplets(
        cls, elements: Triplets, index_dtype: torch.dtype | None, at_least: torch.dtype, **layout: Any
    ) -> Self:
        row, col, values, shape = elements
        dtype = choose_index_dtype(index_dtype, at_least, *shape, row.numel())
        if cls.MAJOR == 0:
            return cls._of_sorted(row, col, values, shape, dtype)
        col, order = sorted_keys(col, shape[1])
        return cls._of_sorted(col, take(row, 0, order), take(values, -1, order), shape, dtype)

    def _triplets(self) -> Triplets:
        this = self.compact()
        majors, minors = this._majors(), this.indices
        if self.MAJOR == 0:
            return Triplets(majors, minors, this.values, self.shape)
        row, col, order = sorted_pairs(minors, majors, self.shape)
        return Triplets(row, col, take(this.values, -1, order), self.shape)

    def _positions(self) -> tuple[Tensor, Tensor]:
        majors, minors = self._majors().long(), self.indices.long()
        return (majors, minors) if self.MAJOR == 0 else (minors, majors)

    def to_scipy(self) -> Any:
        """As `SparseMatrix.to_scipy`."""
        this = self.compact()
        kind = getattr(scipy_sparse(), f"{self.SCIPY_FORMAT}_array")
        return kind(to_numpy(this.values, this.indices, this.pointers), shape=self.shape)


class CSR(_Elements, ByRow):
    """Elements row by row.

    Attributes:
        crow: (rows + 1,) int32 or int64: row i holds entries crow[i] to crow[i + 1] - 1. 0 <= crow[0] and
            crow[-1] <= len(col); entries outside are spare capacity of any content.
        col: (entries,) of the same dtype, ascending in each row, each once.
        values: (entries,) or (batch, entries).
        shape: rows and columns.
    """

    ARRAYS = ("crow", "col", "values")
    TORCH_LAYOUT = torch.sparse_csr
    SCIPY_FORMAT = "csr"

    def _row_counts(self) -> Tensor:
        return self.crow.diff().long()


class CSC(_Elements, ByColumn):
    """Elements column by column.

    Attributes:
        ccol: (columns + 1,) int32 or int64: column i holds entries ccol[i] to ccol[i + 1] - 1. 0 <= ccol[0] and
            ccol[-1] <= len(row); entries outside are spare capacity of any content.
        row: (entries,) of the same dtype, ascending in each column, each once.
        values: (entries,) or (batch, entries).
        shape: rows and columns.
    """

    ARRAYS = ("ccol", "row", "values")
    TORCH_LAYOUT = torch.sparse_csc
    SCIPY_FORMAT = "csc"


CSR.TWIN, CSC.TWIN = CSC, CSR
