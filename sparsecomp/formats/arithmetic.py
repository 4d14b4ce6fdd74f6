"""Sums and elementwise products of sparse matrices."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.checks import check_tensor, check_values
from sparsecomp.formats.indices import pair_keys, places_in
from sparsecomp.formats.triplets import Triplets, coalesced

if TYPE_CHECKING:
    from sparsecomp.formats.base import SparseMatrix

Matrix = TypeVar("Matrix", bound="SparseMatrix")


def union(one: Matrix, other: SparseMatrix) -> Matrix:
    """The sum of two sparse matrices in the format of the first: what either stores is stored.

    Raises:
        FormatError: another shape, batch or device, or a sum that does not fit the format.
    """
    batches = _batches("sum", one, other)
    parts = [matrix._terms() for matrix in (one, other)]
    dtype = torch.promote_types(one.dtype, other.dtype)
    row, col = (torch.cat([getattr(part, name).long() for part in parts]) for name in ("row", "col"))
    values = torch.cat([part.values.to(dtype).expand(*batches, -1) for part in parts], -1)
    found = coalesced(row, col, values, one.shape)
    return type(one)._from_triplets(found, None, torch.int32, **one.layout)


def intersection(one: Matrix, other: SparseMatrix) -> Matrix:
    """The elementwise product of two sparse matrices in the format of the first: what both store is stored.

    Raises:
        FormatError: another shape, batch or device, or a product that does not fit the format.
    """
    batches = _batches("product", one, other)
    a, b = (matrix._terms() for matrix in (one, other))
    dtype = torch.promote_types(one.dtype, other.dtype)
    keys, others = (pair_keys(part.row.long(), part.col.long(), one.shape) for part in (a, b))
    if keys is None or others is None:
        raise FormatError(f"{one!r} has more than 2**63 - 1 places, which are not compared")
    places = places_in(others, keys)
    both = places >= 0
    values = a.values[..., both].to(dtype) * b.values[..., places[both]].to(dtype)
    found = Triplets(a.row[both], a.col[both], values.expand(*batches, -1), one.shape)
    return type(one)._from_triplets(found, None, one.index_dtype, **one.layout)


def _batches(what: str, one: SparseMatrix, other: SparseMatrix) -> set[int]:
    """The batch of the result, if there is one.

    Raises:
        FormatError: the two do not belong together.
    """
    batches = {batch for matrix in (one, other) if (batch := matrix.batch) is not None}
    if one.shape != other.shape or len(batches) > 1 or one.device != other.device:
        raise FormatError(
            f"{one!r} and {other!r} have no {what}: they need one shape, batch and device; `ragged` puts other shapes "
            "along a diagonal"
        )
    return batches


def scaled(
    matrix: Matrix, other: Tensor | float, by: Callable[[Any, Any], Any] = operator.mul
) -> Matrix:
    """The elementwise product, or quotient, with what is stored; see `SparseMatrix.__mul__`."""
    check_partner(matrix, other)
    this = matrix.compact()
    product = by(this.values, _gather(this, other) if isinstance(other, Tensor) and other.dim() else other)
    if this.padded_shape != this.shape:
        row, col = this._positions()
        product = product.masked_fill((row >= this.shape[0]) | (col >= this.shape[1]), 0)
    check_values("product", product, matrix.VALUE_DIMS)
    return this._with(values=product)


def _gather(matrix: SparseMatrix, dense: Tensor) -> Tensor:
    """Elements of `dense` at the stored positions; those beyond the shape read the last row or column."""
    rows, cols = matrix.shape
    batch = dense.shape[:-2]
    fits = dense.dim() <= 3 and all(
        given in (1, needed) for given, needed in zip(dense.shape[::-1], (cols, rows), strict=False)
    )
    if matrix.batch is not None and batch:
        fits = fits and (batch[0] == 1 or matrix.batch in (1, batch[0]))
    if not fits:
        raise FormatError(
            f"other has shape {tuple(dense.shape)}, which does not broadcast to the matrix's {matrix.shape}"
            + (f" with batch {matrix.batch}" if matrix.batch is not None else "")
        )
    row, col = matrix._positions()
    return dense.expand(*batch, rows, cols)[..., row.clamp(max=rows - 1), col.clamp(max=cols - 1)]


def check_partner(matrix: SparseMatrix, other: Tensor | float) -> None:
    """Raise FormatError unless `other` is a number, or a dense tensor on the matrix's device."""
    if isinstance(other, Tensor) and other.dim():
        check_tensor("other", other)
        if other.device != matrix.device:
            raise FormatError(f"other is on {other.device}, the matrix on {matrix.device}: move one of them")
