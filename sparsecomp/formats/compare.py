"""Equality of two sparse matrices without making either dense."""

import torch

from sparsecomp.errors import FormatError
from sparsecomp.formats.indices import groups_of, sorted_pairs
from sparsecomp.formats.triplets import Triplets


def allclose(one: Triplets, other: Triplets, rtol: float, atol: float, equal_nan: bool) -> bool:
    """Whether all elements are close; where one matrix stores nothing, it is 0.

    Raises:
        FormatError: another shape, batch or device.
    """
    batches = [tuple(elements.values.shape[:-1]) for elements in (one, other)]
    if one.shape != other.shape or batches[0] != batches[1]:
        raise FormatError(
            f"shapes are {batches[0] + one.shape} and {batches[1] + other.shape}: only equal ones can be compared"
        )
    if one.values.device != other.values.device:
        raise FormatError(f"one matrix is on {one.values.device}, the other on {other.values.device}: move one of them")
    row = torch.cat([one.row.long(), other.row.long()])
    col = torch.cat([one.col.long(), other.col.long()])
    row, col, order = sorted_pairs(row, col, one.shape)
    _, group = groups_of(row, col)
    if order is not None:
        group = torch.empty_like(group).index_copy_(0, order, group)
    dtype = torch.promote_types(one.values.dtype, other.values.dtype)
    # at most as many positions as elements, and zeros behind the last are equal
    blank = torch.zeros(*batches[0], row.numel(), dtype=dtype, device=row.device)
    left = blank.index_copy(-1, group[: one.row.numel()], one.values.to(dtype))
    right = blank.index_copy(-1, group[one.row.numel() :], other.values.to(dtype))
    return torch.allclose(left, right, rtol, atol, equal_nan)
