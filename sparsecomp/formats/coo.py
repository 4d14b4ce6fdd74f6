"""COO: a list of positions and values, sorted by row, then column."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from sparsecomp.formats.base import SparseMatrix
from sparsecomp.formats.checks import (
    Invariant,
    check_indices,
    check_length,
    check_shape,
    check_slice,
    check_values,
    in_range,
    require,
)
from sparsecomp.formats.foreign import scipy_sparse, tensor_of, to_numpy
from sparsecomp.formats.indices import choose_index_dtype, pointers_of, rows_of
from sparsecomp.formats.operand import Block, ByRows, Shape
from sparsecomp.formats.triplets import Triplets, coalesced, of_batched_coo


class COO(SparseMatrix):
    """Coordinates of each stored element, sorted by row, then column, each position once.

    Attributes:
        row: (nnz,) int32 or int64.
        col: (nnz,) of the same dtype.
        values: (nnz,) or (batch, nnz).
        shape: rows and columns.
    """

    ARRAYS = ("row", "col", "values")
    TORCH_LAYOUT = torch.sparse_coo
    SCIPY_FORMAT = "coo"

    def __init__(self, row: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> None:
        self.row, self.col, self.values, self.shape = row, col, values, shape

    @classmethod
    def from_arrays(
        cls,
        row: Tensor,
        col: Tensor,
        values: Tensor,
        shape: tuple[int, int],
        *,
        coalesce: bool = False,
        check: bool = True,
    ) -> Self:
        """The matrix in these arrays, which are kept and not copied unless `coalesce` reorders them.

        Args:
            row: (nnz,) int32 or int64, ascending.
            col: (nnz,) of the same dtype, ascending in each row.
            values: (nnz,) or (batch, nnz).
            shape: rows and columns.
            coalesce: sort, and sum values of repeated positions, instead of raising.
            check: False skips validation; wrong arrays then give wrong results.

        Raises:
            FormatError: the first invariant that is broken.
        """
        matrix = cls(row, col, values, check_shape(shape))
        if check:
            matrix._check_arrays()
        if coalesce:
            return cls(*coalesced(row, col, values, matrix.shape))
        if check:
            matrix._check_order()
        return matrix

    @classmethod
    def from_triplets(cls, row: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> Self:
        """The sum of elements in any order: sorted, repeated positions summed.

        Args:
            row: (entries,) int32 or int64.
            col: (entries,) of the same dtype.
            values: (entries,) or (batch, entries); half precision sums in float32.
            shape: rows and columns.

        Raises:
            FormatError: as `from_arrays`.
        """
        return cls.from_arrays(row, col, values, shape, coalesce=True)

    def _check_arrays(self) -> None:
        check_shape(self.shape)
        check_values("values", self.values, 1)
        nnz = self.values.shape[-1]
        check_indices({"row": self.row, "col": self.col}, self.values, *self.shape, nnz)
        for name, index in (("row", self.row), ("col", self.col)):
            check_length(name, index.numel(), nnz, "one for each value")
        require([in_range("row", self.row, self.shape[0]), in_range("col", self.col, self.shape[1])])

    def _check_order(self) -> None:
        row, col = self.row, self.col
        repeated_or_less = (row[1:] < row[:-1]) | ((row[1:] == row[:-1]) & (col[1:] <= col[:-1]))
        require(
            [
                Invariant(
                    "positions must ascend by row, then column, each once (coalesce=True sorts and sums)",
                    repeated_or_less,
                    lambda at: (
                        f"entry {at + 1} at ({int(row[at + 1])}, {int(col[at + 1])}) "
                        f"follows ({int(row[at])}, {int(col[at])})"
                    ),
                )
            ]
        )

    @property
    def index_dtype(self) -> torch.dtype:
        """dtype of `row` and `col`."""
        return self.row.dtype

    @property
    def mT(self) -> "COO":
        """The transposed matrix, sorted anew."""
        rows, cols = self.shape
        return COO(*coalesced(self.col, self.row, self.values, (cols, rows)))

    def slice_rows(self, start: int, stop: int) -> "COO":
        """Rows `start` to `stop` - 1, sharing `col` and `values`; reads two offsets from the device.

        Raises:
            FormatError: not 0 <= start <= stop <= rows.
        """
        check_slice(start, stop, self.shape[0])
        edges = torch.tensor([start, stop], dtype=self.row.dtype, device=self.device)
        first, last = torch.searchsorted(self.row, edges).tolist()
        row, col = self.row[first:last] - start, self.col[first:last]
        return COO(row, col, self.values[..., first:last], (stop - start, self.shape[1]))

    def to_torch(self) -> Tensor:
        """A coalesced sparse COO tensor (rows, columns), or (batch, rows, columns) with three sparse dimensions."""
        indices, values, shape = torch.stack([self.row, self.col]).long(), self.values, self.shape
        if self.batch is not None:
            item = torch.arange(self.batch, device=self.device).repeat_interleave(self.row.numel())
            indices = torch.cat([item[None], indices.repeat(1, self.batch)])
            values, shape = values.flatten(), (self.batch, *shape)
        return torch.sparse_coo_tensor(
            indices, values, shape, device=values.device, is_coalesced=True, check_invariants=False
        )

    def to_scipy(self) -> Any:
        """A `scipy.sparse.coo_array`; as `SparseMatrix.to_scipy`."""
        values, row, col = to_numpy(self.values, self.row, self.col)
        return scipy_sparse().coo_array((values, (row, col)), shape=self.shape)

    def by_rows(self) -> ByRows:
        """As CSR: rows become pointers."""
        return ByRows(self.values, (pointers_of(self.row, self.shape[0], self.row.dtype), self.col), (1, 1), self.shape)

    @classmethod
    def of_rows(cls, values: Tensor, arrays: Sequence[Tensor], block: Block, shape: Shape) -> Self:
        """Pointers become rows."""
        pointers, col = arrays
        return cls(rows_of(pointers, col.numel(), col.dtype), col, values, shape)

    @classmethod
    def _from_triplets(
        cls, elements: Triplets, index_dtype: torch.dtype | None, at_least: torch.dtype, **layout: Any
    ) -> Self:
        dtype = choose_index_dtype(index_dtype, at_least, *elements.shape, elements.row.numel())
        return cls(elements.row.to(dtype), elements.col.to(dtype), elements.values, elements.shape)

    def _triplets(self) -> Triplets:
        return Triplets(self.row, self.col, self.values, self.shape)

    def _positions(self) -> tuple[Tensor, Tensor]:
        return self.row.long(), self.col.long()

    @classmethod
    def _from_native_torch(cls, tensor: Tensor) -> Self:
        return cls(*of_batched_coo(tensor.coalesce()))

    @classmethod
    def _from_native_scipy(cls, matrix: Any) -> Self:
        return cls.from_triplets(
            tensor_of(matrix.row), tensor_of(matrix.col), tensor_of(matrix.data), check_shape(matrix.shape)
        )
