"""Pointers and indices, over rows or over columns, of elements or of blocks: the body of CSR, CSC, BSR and BCSC.

One axis is the major one: pointer i says where the entries of its row (or column, or row of blocks) i begin. An
entry is a value, or a block of them. What is true of rows here is true of columns in the column formats, so that a
matrix and its transpose are the same arrays.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.base import Matrix, SparseMatrix
from sparsecomp.formats.checks import (
    Invariant,
    check_indices,
    check_length,
    check_shape,
    check_slice,
    check_tensor,
    check_values,
    in_range,
    require,
)
from sparsecomp.formats.foreign import tensor_of
from sparsecomp.formats.indices import (
    groups_of,
    has_repeats,
    pointers_of,
    rows_of,
    sorted_keys,
    sorted_pairs,
    sum_groups,
    take,
)
from sparsecomp.formats.operand import Block, ByRows, Shape


class Compressed(SparseMatrix):
    """A matrix compressed along one axis.

    Attributes:
        pointers: (majors + 1,): entries of major i are those from pointers[i] to pointers[i + 1]. They need not begin
            at 0 nor end at the last entry: what lies outside is spare capacity, of any content.
        indices: (entries,): where each entry lies on the other axis, ascending within a major.
        values: (entries,), or (entries, height, width) of blocks; with a batch in front.
        shape: rows and columns.
    """

    MAJOR: ClassVar[int]
    TWIN: ClassVar[type["Compressed"]]

    def __init__(self, pointers: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]) -> None:
        self.pointers, self.indices, self.values, self.shape = pointers, indices, values, shape

    @classmethod
    def _checked(
        cls, pointers: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int], coalesce: bool, check: bool
    ) -> Self:
        """`from_arrays` of every compressed format."""
        matrix = cls(pointers, indices, values, check_shape(shape))
        if check:
            matrix._check_arrays()
        if coalesce:
            return matrix.compact()._coalesced()
        if check:
            matrix._check_order()
        return matrix

    # -- geometry

    @property
    def index_dtype(self) -> torch.dtype:
        """dtype of pointers and indices."""
        return self.indices.dtype

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns counted in entries: the shape, or that in blocks."""
        return self.shape

    @property
    def _entry_dim(self) -> int:
        return self.values.dim() - self.VALUE_DIMS

    @property
    def _grid_of_majors(self) -> tuple[int, int]:
        """`grid` as (majors, minors)."""
        return self.grid[self.MAJOR], self.grid[1 - self.MAJOR]

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        """Where the entries begin and end; reads from the device once."""
        first, last = torch.stack([self.pointers[0], self.pointers[-1]]).tolist()
        return first, last

    def known_compact(self) -> Self:
        """Itself, which is not looked at for spare capacity."""
        self._bounds = 0, self.indices.shape[0]
        return self

    def compact(self) -> Self:
        """The matrix without spare capacity: a view of its entries, pointers that begin at 0."""
        first, last = self._bounds
        if (first, last) == (0, self.indices.numel()):
            return self
        values = self.values.narrow(self._entry_dim, first, last - first)
        return type(self)(self.pointers - first, self.indices[first:last], values, shape=self.shape)

    def _majors(self) -> Tensor:
        """Major of each entry of a compact matrix, of the index dtype."""
        return rows_of(self.pointers, self.indices.numel(), self.index_dtype)

    # -- invariants

    def _check_arrays(self) -> None:
        check_shape(self.shape)
        check_values("values", self.values, self.VALUE_DIMS)
        pointers, index = self.ARRAYS[:2]
        self._check_blocks()
        for name, array in ((pointers, self.pointers), (index, self.indices)):
            check_tensor(name, array)
        check_indices({pointers: self.pointers, index: self.indices}, self.values, *self.shape, self._stored)
        majors, minors = self._grid_of_majors
        check_length(pointers, self.pointers.numel(), majors + 1, "one more than it points at")
        check_length(index, self.indices.numel(), self.values.shape[self._entry_dim], "one for each of values")
        self._check_pointers(pointers)
        require([in_range(index, self.compact().indices, minors)])

    def _check_pointers(self, name: str) -> None:
        pointers, entries = self.pointers, self.indices.numel()
        require(
            [
                Invariant(f"{name} must not be negative", pointers[:1] < 0, lambda _: f"begins at {int(pointers[0])}"),
                Invariant(
                    f"{name} must not decrease",
                    pointers[1:] < pointers[:-1],
                    lambda at: f"{name}[{at}] is {int(pointers[at])}, {name}[{at + 1}] is {int(pointers[at + 1])}",
                ),
                Invariant(
                    f"{name} must not point beyond the {entries} entries",
                    pointers[-1:] > entries,
                    lambda _: f"its last is {int(pointers[-1])}",
                ),
            ]
        )

    def _check_blocks(self) -> None:
        """Raise FormatError if the blocks have no area; formats without blocks have nothing to check."""

    def _check_order(self) -> None:
        this = self.compact()
        name, indices, majors = self.ARRAYS[1], this.indices, this._majors()
        require(
            [
                Invariant(
                    f"{name} must ascend within each {('row', 'column')[self.MAJOR]}, each once "
                    "(coalesce=True sorts and sums)",
                    (indices[1:] <= indices[:-1]) & (majors[1:] == majors[:-1]),
                    lambda at: (
                        f"in {('row', 'column')[self.MAJOR]} {int(majors[at])} (of entries), "
                        f"{int(indices[at + 1])} follows {int(indices[at])}"
                    ),
                ),
                *this._beyond_shape(),
            ]
        )

    def _beyond_shape(self) -> list[Invariant]:
        """That values beyond the shape are zero."""
        if self.padded_shape == self.shape:
            return []
        row, col = self._positions()
        beyond = (row >= self.shape[0]) | (col >= self.shape[1])
        return [
            Invariant(
                f"values beyond the shape {self.shape} must be 0",
                beyond & (self.values != 0),
                lambda at: f"values.flatten()[{at}] is {float(self.values.flatten()[at])}",
            )
        ]

    def _coalesced(self) -> Self:
        """A compact matrix with its entries sorted, those of one place summed."""
        majors, minors, dim = self._majors(), self.indices, self._entry_dim
        majors, minors, order = sorted_pairs(majors, minors, self._grid_of_majors)
        if order is None:
            return self
        values = take(self.values, dim, order)
        if has_repeats(majors, minors):
            first, group = groups_of(majors, minors)
            majors, minors = take(majors, 0, first), take(minors, 0, first)
            values = sum_groups(values, dim, group, minors.numel())
        return self._of_sorted(majors, minors, values, self.shape, self.index_dtype)

    # -- conversions

    @classmethod
    def _of_sorted(
        cls, majors: Tensor, minors: Tensor, values: Tensor, shape: tuple[int, int], index_dtype: torch.dtype
    ) -> Self:
        """The matrix of entries sorted by (major, minor)."""
        n_majors = cls(majors, minors, values, shape)._grid_of_majors[0]
        return cls(pointers_of(majors, n_majors, index_dtype), minors.to(index_dtype), values, shape)

    @property
    def mT(self) -> "Compressed":
        """The transposed matrix in the twin format (CSR and CSC, BSR and BCSC), sharing all arrays."""
        rows, cols = self.shape
        values = self.values.mT if self.VALUE_DIMS > 1 else self.values
        return self.TWIN(self.pointers, self.indices, values, (cols, rows))

    def by_rows(self) -> ByRows:
        """The arrays as they are: those of a matrix by columns are its transpose's by rows."""
        this = self.mT if self.MAJOR else self
        return ByRows(this.values, (this.pointers, this.indices), (1, 1), this.shape)

    @classmethod
    def of_rows(cls, values: Tensor, arrays: Sequence[Tensor], block: Block, shape: Shape) -> Self:
        """The matrix of these arrays, which it shares."""
        pointers, indices = arrays
        if not cls.MAJOR:
            return cls(pointers, indices, values, shape)
        return cast(Self, cls.TWIN(pointers, indices, values, shape).mT)

    def _direct(self, target: type[Matrix], layout: Mapping[str, Any]) -> Matrix | None:
        if not issubclass(self.TWIN, target) or layout != self.layout:
            return None
        this = self.compact()
        minors, order = sorted_keys(this.indices, this._grid_of_majors[1])
        majors, values = take(this._majors(), 0, order), take(this.values, this._entry_dim, order)
        return self.TWIN._of_sorted(minors, majors, values, self.shape, self.index_dtype)

    def _slice(self, start: int, stop: int) -> Self:
        """Majors of the rows (or columns) `start` to `stop` - 1, sharing indices and values."""
        step = (self.padded_shape[self.MAJOR] // self.grid[self.MAJOR]) if self.grid[self.MAJOR] else 1
        check_slice(start, stop, self.shape[self.MAJOR], step)
        pointers = self.pointers[start // step : -(-stop // step) + 1]
        shape = (stop - start, self.shape[1]) if self.MAJOR == 0 else (self.shape[0], stop - start)
        return type(self)(pointers, self.indices, self.values, shape=shape)

    def to_torch(self) -> Tensor:
        """A torch tensor of the same layout; batches repeat the indices.

        Torch's blocks must divide the shape: otherwise BSR becomes CSR, and BCSC becomes CSC.
        """
        this = self.compact()
        batch = () if self.batch is None else (self.batch,)
        pointers, indices = (array.expand(*batch, -1).contiguous() for array in (this.pointers, this.indices))
        assert self.TORCH_LAYOUT is not None
        return torch.sparse_compressed_tensor(
            pointers,
            indices,
            this.values.contiguous(),
            (*batch, *self.shape),
            layout=self.TORCH_LAYOUT,
            device=self.device,
            check_invariants=False,
        )

    @classmethod
    def _from_native_torch(cls, tensor: Tensor) -> Self:
        if tensor.dense_dim() or tensor.dim() not in (2, 3):
            raise FormatError(f"tensor has shape {tuple(tensor.shape)}, needs 2 sparse dimensions, 3 with a batch")
        if cls.MAJOR == 0:
            pointers, indices = tensor.crow_indices(), tensor.col_indices()
        else:
            pointers, indices = tensor.ccol_indices(), tensor.row_indices()
        if tensor.dim() == 3:
            pointers, indices = _shared(pointers), _shared(indices)
        return cls(pointers, indices, tensor.values(), (tensor.shape[-2], tensor.shape[-1]))

    @classmethod
    def _from_native_scipy(cls, matrix: Any) -> Self:
        pointers, indices, values = (tensor_of(array) for array in (matrix.indptr, matrix.indices, matrix.data))
        return cls._checked(pointers, indices, values, matrix.shape, coalesce=True, check=True)


def _shared(index: Tensor) -> Tensor:
    """The one row of a batch of indices; zeros for a batch of none, where all entries are spare capacity then.

    Raises:
        FormatError: the rows differ.
    """
    if not index.shape[0]:
        return index.new_zeros(index.shape[1])
    if bool((index != index[:1]).any()):
        raise FormatError("the matrices of the batch have different patterns: convert them one by one, then stack")
    return index[0]
