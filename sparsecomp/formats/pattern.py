"""Which elements of a matrix are stored, as a set: no values and no format.

A pattern is one number an element, row times columns plus column, ascending. Every operation is then a merge or a
search of sorted numbers, on any device.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from sparsecomp.errors import FormatError, PatternError
from sparsecomp.formats.base import Matrix, SparseMatrix
from sparsecomp.formats.checks import check_shape
from sparsecomp.formats.coo import COO
from sparsecomp.formats.csr import CSR
from sparsecomp.formats.indices import (
    index_dtype_for,
    pair_keys,
    places_in,
    select_keys,
    sort_keys,
    sorted_union,
    take_or_zero,
)
from sparsecomp.formats.triplets import Triplets

_ODD = -7046029254386353131
"""The golden ratio in 64 bits, which spreads neighbouring numbers over all bits (Knuth, TAOCP 3, 6.4)."""


class Pattern:
    """A set of elements of a matrix of `shape`; like a frozenset, it does not change.

    `|`, `&`, `-`, `^` combine two patterns of one shape and device, `<=` and `==` compare them. How many elements a
    result has is read from the device, once, unless the caller says so by `nnz=`, which must be right.

    Attributes:
        keys: (nnz,) int32 or int64 by the shape, ascending: row · columns + column of each element.
        shape: rows and columns.
    """

    def __init__(self, keys: Tensor, shape: tuple[int, int]) -> None:
        self.keys, self.shape = keys, shape

    # -- made of

    @classmethod
    def of(cls, stored: "SparseMatrix | Tensor") -> Self:
        """What a matrix stores, or where a tensor (rows, columns), dense or a SparseTensor, is not zero.

        Zeros that a matrix stores count; the filler of blocks and groups does not. NaN is not zero.

        Raises:
            PatternError: something else, a tensor of other dimensions or on the meta device, or a shape of more than
                2**63 - 1 elements.
        """
        matrix = getattr(stored, "matrix", stored)
        if isinstance(matrix, SparseMatrix) and not matrix.values.is_meta:
            row, col, _, shape = matrix._triplets()
            return cls(_keys(row, col, shape), shape)
        if not isinstance(matrix, Tensor) or matrix.layout != torch.strided or matrix.dim() != 2 or matrix.is_meta:
            raise PatternError(
                f"{type(matrix).__name__} has no pattern: needs a matrix of sparsecomp.formats, or a dense tensor "
                "(rows, columns), that has contents"
            )
        shape = check_shape(tuple(matrix.shape))
        return cls(matrix.reshape(-1).nonzero().squeeze(1).to(index_dtype_for(matrix.numel())), shape)

    @classmethod
    def from_positions(cls, row: Tensor, col: Tensor, shape: tuple[int, int]) -> Self:
        """Elements in any order; one that is named twice counts once.

        Args:
            row: (entries,) int32 or int64.
            col: as `row`.
            shape: rows and columns.

        Raises:
            FormatError: positions outside the shape, other dtypes or sizes.
            PatternError: as `of`.
        """
        ones = torch.ones(row.shape, dtype=torch.float16, device=row.device)
        found = COO.from_triplets(row, col, ones, shape)
        return cls(_keys(found.row, found.col, found.shape), found.shape)

    @classmethod
    def where(
        cls, compare: Callable[[Any, Any], Any], one: SparseMatrix, other: SparseMatrix | float
    ) -> Self:
        """Where a comparison, of the module `operator`, holds between the elements of a matrix and those of another, or
        a number. What is not stored is 0.

        Raises:
            PatternError: it holds between two zeros, or 0 and the number, so nearly everywhere; or shapes or devices
                differ.
            FormatError: a matrix is a batch.
        """
        if compare(0.0, 0.0 if isinstance(other, SparseMatrix) else other):
            raise PatternError(
                f"{compare.__name__} holds wherever nothing is stored: ask for the opposite, whose complement it is, "
                "or compare to_dense()"
            )
        if not isinstance(other, SparseMatrix):
            found = _without_batch(one)
            return cls(cls.of(one).keys[compare(found.values, other)], one.shape)
        mine, its = cls.of(one), cls.of(other)
        either = mine | its
        left, right = (
            take_or_zero(_without_batch(matrix).values, pattern.places_of(either))
            for matrix, pattern in ((one, mine), (other, its))
        )
        return cls(either.keys[compare(left, right)], one.shape)

    # -- what it is

    @property
    def nnz(self) -> int:
        """Number of elements."""
        return self.keys.numel()

    @property
    def device(self) -> torch.device:
        """Where `keys` are."""
        return self.keys.device

    @property
    def row(self) -> Tensor:
        """Row of each element (nnz,), of the dtype of `keys`."""
        return torch.div(self.keys, max(self.shape[1], 1), rounding_mode="trunc")

    @property
    def col(self) -> Tensor:
        """Column of each element (nnz,), of the dtype of `keys`."""
        return self.keys.remainder(max(self.shape[1], 1))

    @property
    def density(self) -> float:
        """Share of the elements, 0 to 1; 1 for a shape without any."""
        numel = self.shape[0] * self.shape[1]
        return self.nnz / numel if numel else 1.0

    @property
    def mT(self) -> "Pattern":
        """The transposed pattern."""
        (rows, cols), row = self.shape, self.row
        col = self.keys - row * cols  # a remainder takes longer
        return Pattern(sort_keys(_keys(col, row, (cols, rows))), (cols, rows))

    def to(self, device: torch.device | str) -> "Pattern":
        """The pattern on a device; itself if it is there."""
        keys = self.keys.to(device)
        return self if keys is self.keys else Pattern(keys, self.shape)

    def mask(self) -> Tensor:
        """Bool (rows, columns), True at the elements."""
        dense = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
        dense.view(-1)[self.keys] = True
        return dense

    def values_of(self, dense: Tensor) -> Tensor:
        """The elements of a dense tensor (rows, columns) that the pattern names: (nnz,), in the order of `keys`.

        Raises:
            PatternError: another shape or device.
        """
        if tuple(dense.shape) != self.shape or dense.device != self.device:
            raise PatternError(
                f"the tensor is {tuple(dense.shape)} on {dense.device}, the pattern {self.shape} on {self.device}"
            )
        return dense.reshape(-1).index_select(0, self.keys)

    def matrix(self, values: Tensor, format: type[Matrix] = CSR, **layout: int | tuple[int, int]) -> Matrix:
        """The matrix that stores `values` (nnz,), in the order of `keys`, at these elements.

        Raises:
            FormatError: values that do not fit the pattern or the format.
        """
        found = COO.from_arrays(self.row, self.col, values, self.shape)
        return found.to(format, index_dtype=None, **layout)

    # -- algebra

    def union(self, other: "Pattern", nnz: int | None = None) -> "Pattern":
        """Elements of either."""
        keys = self._with(other)
        kept = torch.ones_like(keys, dtype=torch.bool)
        kept[1:] = _changes(keys)
        return self._kept(keys, kept, nnz)

    def intersection(self, other: "Pattern", nnz: int | None = None) -> "Pattern":
        """Elements of both."""
        keys = self._with(other)
        return self._kept(keys[1:], keys[1:] == keys[:-1], nnz)

    def symmetric_difference(self, other: "Pattern", nnz: int | None = None) -> "Pattern":
        """Elements of one but not of both."""
        keys = self._with(other)
        changes, kept = _changes(keys), torch.ones_like(keys, dtype=torch.bool)
        kept[1:] = changes
        kept[:-1] &= changes
        return self._kept(keys, kept, nnz)

    def difference(self, other: "Pattern", nnz: int | None = None) -> "Pattern":
        """Elements that `other` does not have."""
        self._check(other)
        if self.keys.is_cuda:
            return self._kept(self.keys, ~other.contains(self), nnz)  # ascending keys are sought side by side
        # two merges, of which the second is short: faster than one that has to know whose each element is
        both = self.intersection(other, None if nnz is None else self.nnz - nnz)
        return self.symmetric_difference(both, nnz)

    __or__, __and__, __sub__, __xor__ = union, intersection, difference, symmetric_difference

    def complement(self, budget: int) -> "Pattern":
        """All other elements, of which there may be at most `budget`: they take eight bytes each.

        Raises:
            PatternError: there are more.
        """
        others = self.shape[0] * self.shape[1] - self.nnz
        if others > budget:
            raise PatternError(
                f"the complement of {self!r} has {others} elements, more than the budget of {budget}: raise it, or "
                "take the difference from a pattern that is wanted"
            )
        # the gap before each element, and that behind the last
        edges = torch.cat([self.keys, self.keys.new_tensor([self.nnz + others])])
        gaps = edges.diff(prepend=self.keys.new_tensor([-1])) - 1
        passed = torch.arange(edges.numel(), device=self.device).repeat_interleave(gaps, output_size=others)
        return Pattern(torch.arange(others, device=self.device).add_(passed).to(self.keys.dtype), self.shape)

    def contains(self, other: "Pattern") -> Tensor:
        """Which elements of `other` this has: bool (other.nnz,), on the device.

        Raises:
            PatternError: another shape or device.
        """
        return self.places_of(other) >= 0

    def places_of(self, other: "Pattern") -> Tensor:
        """Where in this pattern each element of `other` is, or -1: int64 (other.nnz,), on the device.

        Raises:
            PatternError: another shape or device.
        """
        self._check(other)
        return places_in(self.keys, other.keys)

    def __le__(self, other: "Pattern") -> bool:
        """Whether `other` has all elements of this; reads one flag from the device."""
        self._check(other)
        return self.nnz <= other.nnz and bool(other.contains(self).all())

    def __ge__(self, other: "Pattern") -> bool:
        return other <= self

    def isdisjoint(self, other: "Pattern") -> bool:
        """Whether no element is in both; reads one flag from the device."""
        return not bool(self.contains(other).any())

    def __eq__(self, other: object) -> bool:
        """Whether both are the same set of the same shape; on two devices they are compared on this one's."""
        return isinstance(other, Pattern) and self.shape == other.shape and (
            self.keys is other.keys or torch.equal(self.keys, other.keys.to(self.device))
        )  # fmt: skip

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The same in every process; reads one number from the device."""
        mixed = self.keys.long() * _ODD
        return hash((self.shape, self.nnz, int((mixed ^ (mixed >> 32)).sum())))

    def __len__(self) -> int:
        return self.nnz

    def __repr__(self) -> str:
        return f"Pattern(shape={self.shape}, nnz={self.nnz}, device='{self.device}')"

    def _with(self, other: "Pattern") -> Tensor:
        """The elements of both, sorted: those of both twice."""
        self._check(other)
        return sorted_union(self.keys, other.keys)

    def _kept(self, keys: Tensor, kept: Tensor, nnz: int | None) -> "Pattern":
        found = select_keys(keys, kept, nnz)
        if nnz is not None and found.numel() != nnz:  # a GPU does as it is told
            raise PatternError(f"nnz is {nnz}, the result has {found.numel()} elements: leave it out where unknown")
        return Pattern(found, self.shape)

    def _check(self, other: "Pattern") -> None:
        if not isinstance(other, Pattern) or self.shape != other.shape or self.device != other.device:
            raise PatternError(f"{self!r} and {other!r} do not belong together: they need one shape and one device")


def _without_batch(matrix: SparseMatrix) -> Triplets:
    if matrix.batch is not None:
        raise FormatError(f"{matrix!r} is a batch, whose matrices are compared one by one: use unbatch()")
    return matrix._triplets()


def _changes(keys: Tensor) -> Tensor:
    """Which of the sorted keys but the first differ from the one before them."""
    return keys[1:] != keys[:-1]


def _keys(row: Tensor, col: Tensor, shape: tuple[int, int]) -> Tensor:
    keys = pair_keys(row, col, shape)
    if keys is None:
        raise PatternError(f"a pattern of shape {shape} has more than 2**63 - 1 elements, the most that are told apart")
    return keys
