"""Triplets (row, column, value), the form through which every format converts to every other."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.checks import check_threshold, check_values
from sparsecomp.formats.indices import groups_of, has_repeats, sorted_pairs, sum_groups, take


class Triplets(NamedTuple):
    """Elements sorted by row, then column, each position once.

    Attributes:
        row: (nnz,) int32 or int64.
        col: (nnz,) of the same dtype.
        values: (nnz,) or, with a batch, (batch, nnz).
        shape: rows and columns.
    """

    row: Tensor
    col: Tensor
    values: Tensor
    shape: tuple[int, int]


def of_dense(dense: Tensor, threshold: float) -> Triplets:
    """Elements whose magnitude exceeds `threshold`, and NaN; with a batch, where any of its matrices has one.

    Args:
        dense: (rows, columns) or (batch, rows, columns).
        threshold: at 0, both 0.0 and -0.0 are left out.

    Raises:
        FormatError: wrong dtype or dimensions, a negative threshold, the meta device.
    """
    mask = kept(dense, threshold)
    row, col = mask.nonzero(as_tuple=True)
    return Triplets(row, col, dense[..., row, col], (dense.shape[-2], dense.shape[-1]))


def kept(dense: Tensor, threshold: float) -> Tensor:
    """Where `of_dense` keeps an element: bool (rows, columns)."""
    check_values("dense", dense, 2)
    check_threshold(threshold)
    if dense.is_meta:
        raise FormatError("dense is on the meta device, which has no numbers to look at: give a tensor of another one")
    mask = ~(dense.abs() <= threshold)
    return mask.any(0) if mask.dim() == 3 else mask


def coalesced(row: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> Triplets:
    """Sorted, with the values of equal positions summed; the arrays themselves if nothing is to do."""
    row, col, order = sorted_pairs(row, col, shape)
    if order is None:
        return Triplets(row, col, values, shape)
    values = take(values, -1, order)
    if has_repeats(row, col):
        first, group = groups_of(row, col)
        row, col = take(row, 0, first), take(col, 0, first)
        values = sum_groups(values, values.dim() - 1, group, row.numel())
    return Triplets(row, col, values, shape)


def of_batched_coo(tensor: Tensor) -> Triplets:
    """Triplets of a coalesced sparse COO tensor of two sparse dimensions, or three of which the first is a batch.

    Raises:
        FormatError: other dimensions.
    """
    if tensor.dense_dim() or tensor.sparse_dim() not in (2, 3):
        raise FormatError(
            f"tensor has {tensor.sparse_dim()} sparse and {tensor.dense_dim()} dense dimensions, "
            "needs 2 sparse ones, or 3 with a batch"
        )
    *batch, row, col = tensor.indices().unbind()
    shape = (tensor.shape[-2], tensor.shape[-1])
    if not batch:
        return Triplets(row, col, tensor.values(), shape)
    row, col, order = sorted_pairs(row, col, shape)
    item, values = take(batch[0], 0, order), take(tensor.values(), 0, order)
    first, group = groups_of(row, col)
    row, col = take(row, 0, first), take(col, 0, first)
    shared = values.new_zeros((tensor.shape[0], row.numel()))
    return Triplets(row, col, shared.index_put((item, group), values), shape)


def without_filler(triplets: Triplets, inside: Tensor | None = None) -> Triplets:
    """The elements that are not zero in every matrix of the batch, and `inside` (nnz,) if that is given."""
    values = triplets.values
    keep = ((values != 0) if values.dim() == 1 else (values != 0).any(0)) & (True if inside is None else inside)
    return Triplets(triplets.row[keep], triplets.col[keep], values[..., keep], triplets.shape)


def to_dense(row: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Dense (rows, columns), or (batch, rows, columns): `values` at positions that broadcast, zero elsewhere."""
    batch = values.shape[: values.dim() - torch.broadcast_tensors(row, col)[0].dim()]
    dense = values.new_zeros((*batch, *shape))
    dense[..., row, col] = values
    return dense
