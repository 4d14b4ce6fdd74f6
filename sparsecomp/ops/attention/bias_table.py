"""Rows of a small table read at many places, such as a bias by relative position, with a gradient that adds without
atomics.

Torch's own scatters every number of the gradient, of which thousands meet in one row; this one adds them up in a
fixed order, so that two calls give the same bits.
"""

from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.ops.library import TAGS, decompose, differentiable, implement, library
from sparsecomp.reference.precision import KERNEL_DTYPES

NO_PADDING = -1

library.define("table_rows(Tensor table, Tensor index, SymInt padding) -> Tensor", tags=TAGS)
library.define("table_rows_gradient(Tensor grad, Tensor index, SymInt rows, SymInt padding) -> Tensor", tags=TAGS)


def table_rows(table: Tensor, index: Tensor, padding: int = NO_PADDING) -> Tensor:
    """table[index], whose gradient by the table is summed in float32 (float64 for float64, and on a CPU) and rounded
    once.

    Made for tables of few rows that are read at many places: each part of the places is multiplied by the rows that it
    may hold. Gradients of gradients are torch's.

    Args:
        table: (rows, features) or (rows,), floating.
        index: any shape, int32 or int64; negative numbers count from the end.
        padding: a row that gets no gradient, as `padding_idx` of `torch.nn.functional.embedding`, from 0 on; -1 for
            none.

    Returns:
        (\\*index.shape, features) or index.shape, contiguous, of the table's dtype.

    Raises:
        FormatError: a table or an index of other dimensions or dtype, or another negative padding.
        IndexError: a row that the table does not have, on the CPU; on a GPU as torch's own indexing.
    """
    return torch.ops.sparsecomp.table_rows.default(table, index, padding)


def _check(table: Tensor, index: Tensor, padding: int) -> None:
    if table.dim() not in (1, 2) or not table.is_floating_point():
        raise FormatError(
            f"the table is {tuple(table.shape)} {table.dtype}, needs (rows, features) or (rows,) of a floating dtype"
        )
    if index.dtype not in (torch.int32, torch.int64):
        raise FormatError(f"the index is {index.dtype}, needs int32 or int64")
    if padding < NO_PADDING:
        raise FormatError(f"padding is {padding}, needs a row, counted from 0, or {NO_PADDING} for none")


def _rows(table, index, padding):
    _check(table, index, padding)
    return table[index].contiguous()


def _fake_rows(table, index, padding):
    _check(table, index, padding)
    return table.new_empty((*index.shape, *table.shape[1:]))


def _features(grad: Tensor, index: Tensor) -> tuple[int, ...]:
    """Of a row: none of a table (rows,)."""
    return tuple(grad.shape[index.dim() :])


def _gradient(grad, index, rows, padding):
    places, features = index.reshape(-1).long(), _features(grad, index)
    places = torch.where(places < 0, places + rows, places)
    # one by one: in float32 a million of them would be 1% off
    numbers = grad.reshape(len(places), *features).double()
    numbers = numbers.masked_fill((places == padding).view(-1, *[1] * len(features)), 0)
    return numbers.new_zeros((rows, *features)).index_add_(0, places, numbers).to(grad.dtype)


def _gradient_cuda(grad, index, rows, padding):
    if grad.dtype not in KERNEL_DTYPES or not grad.numel() or not rows:
        return _gradient(grad, index, rows, padding)
    from sparsecomp.lowering.attention import bias_table as lowered  # loads Triton

    features = _features(grad, index)
    out = grad.new_empty((rows, *features))
    width = features[0] if features else 1
    lowered.table_gradient(grad.reshape(-1, width), index.reshape(-1), padding, out.view(rows, width))
    return out


def _fake_gradient(grad, index, rows, padding):
    return grad.new_empty((rows, *_features(grad, index)))


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    table, index, ctx.padding = inputs
    ctx.rows = table.shape[0]
    ctx.save_for_backward(index)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (index,) = ctx.saved_tensors
    return torch.ops.sparsecomp.table_rows_gradient.default(grad, index, ctx.rows, ctx.padding), None, None


def _save_gradient(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, index, ctx.rows, ctx.padding = inputs
    ctx.save_for_backward(index)


def _backward_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (index,) = ctx.saved_tensors
    found = table_rows(grad, index, ctx.padding)
    if ctx.padding != NO_PADDING:
        padded = (index == ctx.padding) | (index == ctx.padding - ctx.rows)
        found = found.masked_fill(padded.view(*index.shape, *[1] * (grad.dim() - 1)), 0)
    return found, None, None, None


implement("table_rows", _rows, fake=_fake_rows)
implement("table_rows_gradient", _gradient, _gradient_cuda, _fake_gradient)
decompose("table_rows", _rows)
differentiable("table_rows", _backward, _save)
differentiable("table_rows_gradient", _backward_gradient, _save_gradient)
