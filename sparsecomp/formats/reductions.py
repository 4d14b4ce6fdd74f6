"""Sums, extremes and softmax of sparse matrices along an axis; gradients flow to the values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError

if TYPE_CHECKING:
    from sparsecomp.formats.base import SparseMatrix


class Elements(NamedTuple):
    """What a matrix holds, filler included.

    Attributes:
        values: (…, entries).
        place: (entries,) int64: along the axis that is left.
        size: of that axis, rounded up to whole blocks or groups.
        inside: (entries,) bool: what lies in the shape.
    """

    values: Tensor
    place: Tensor
    size: int
    inside: Tensor


def axis_of(dim: int) -> int:
    """0 or 1, for a dimension counted from either end.

    Raises:
        FormatError: another one.
    """
    if type(dim) is not int or dim not in (0, 1, -1, -2):
        raise FormatError(f"dim is {dim!r}: a matrix has 0, 1, -1 and -2, and a batch is left as it is")
    return dim % 2


def total(matrix: SparseMatrix, dim: int | None) -> Tensor:
    """The sum over rows, columns or both; half precision sums in float32."""
    wide = torch.promote_types(matrix.dtype, torch.float32)
    if dim is None:
        return _elements(matrix, 0).values.to(wide).sum(-1).to(matrix.dtype)
    axis = axis_of(dim)
    found = _elements(matrix, axis)
    sums = found.values.new_zeros((*found.values.shape[:-1], found.size), dtype=wide)
    return _cut(sums.index_add(-1, found.place, found.values.to(wide)), matrix, axis).to(matrix.dtype)


def extreme(matrix: SparseMatrix, dim: int | None, which: Literal["amax", "amin"]) -> Tensor:
    """The largest or smallest element over rows, columns or both, those that are not stored being 0.

    Raises:
        FormatError: there is no element to choose from.
    """
    if dim is None:
        # over one axis, then over the other, so that a full row is told from one that has zeros
        by_rows = extreme(matrix, 1, which)
        if not by_rows.shape[-1]:
            raise FormatError(f"{which} of {matrix!r}: it has no elements")
        return getattr(by_rows, which)(-1)
    axis = axis_of(dim)
    if not matrix.shape[axis] and matrix.shape[1 - axis]:
        raise FormatError(f"{which} of {matrix!r} along {dim}: it has no elements")
    found = _elements(matrix, axis)
    least = -math.inf if which == "amax" else math.inf
    values = found.values.masked_fill(~found.inside, least)
    start = values.new_full((*values.shape[:-1], found.size), least)
    reached = start.scatter_reduce(-1, found.place.expand_as(values), values, which)
    counts = torch.zeros(found.size, dtype=torch.int64, device=values.device).index_add(
        0, found.place, found.inside.long()
    )
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    with_zeros = torch.maximum(reached, zero) if which == "amax" else torch.minimum(reached, zero)
    return _cut(reached.where(counts == matrix.shape[axis], with_zeros), matrix, axis)


def softmax_values(matrix: SparseMatrix, dim: int) -> Tensor:
    """Values after softmax over what is stored along an axis; computed in float32 at least.

    Raises:
        FormatError: the format holds filler, which cannot be told from what is stored.
    """
    if matrix.VALUE_DIMS != 1 or matrix.FILLED:
        raise FormatError(f"{type(matrix).__name__} stores zeros to fill its blocks or groups: convert to CSR first")
    found = _elements(matrix, axis_of(dim))
    values = found.values.to(torch.promote_types(matrix.dtype, torch.float32))
    place = found.place.expand_as(values)
    largest = values.new_full((*values.shape[:-1], found.size), -math.inf)
    largest = largest.scatter_reduce(-1, place, values.detach(), "amax")
    # a line whose values are all -inf is NaN, as torch's
    powers = (values - largest.gather(-1, place)).exp()
    sums = torch.zeros_like(largest).index_add(-1, found.place, powers)
    return (powers / sums.gather(-1, place)).to(matrix.dtype)


def _elements(matrix: SparseMatrix, axis: int) -> Elements:
    """For a reduction along `axis`."""
    this = matrix.compact()
    row, col = torch.broadcast_tensors(*this._positions())
    inside = (row < this.shape[0]) & (col < this.shape[1])
    values = this.values.flatten(this.values.dim() - this.VALUE_DIMS)
    if this.padded_shape != this.shape:  # beyond it are zeros, which no gradient may reach
        values = values.masked_fill(~inside.flatten(), 0)
    place = (col if axis == 0 else row).flatten()
    return Elements(values, place, this.padded_shape[1 - axis], inside.flatten())


def _cut(found: Tensor, matrix: SparseMatrix, axis: int) -> Tensor:
    return found[..., : matrix.shape[1 - axis]]
