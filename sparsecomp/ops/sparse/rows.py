"""Rows of a sparse matrix by index, dense: what an embedding looks up."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.ops.library import differentiable, implement, library
from sparsecomp.reference.patterns import Layout
from sparsecomp.reference.precision import accumulator

library.define("sparse_rows(Tensor sparse, Tensor index) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.define(
    "sparse_rows_gradient(Tensor sparse, Tensor index, Tensor grad) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_ARRAYS = "Tensor index, Tensor pointers, Tensor columns, int cols) -> Tensor"
library.define(f"stored_rows(Tensor values, {_ARRAYS}", tags=(torch.Tag.pt2_compliant_tag,))
library.define(f"stored_rows_gradient(Tensor grad, {_ARRAYS}", tags=(torch.Tag.pt2_compliant_tag,))


def sparse_rows(sparse: Tensor, index: Tensor) -> Tensor:
    """Rows of `sparse` (rows, columns), dense.

    Args:
        sparse: a `SparseTensor` of format CSR, COO, NM, NARROW or BITMAP, or a dense tensor.
        index: of any shape, int32 or int64, in the rows; it is not checked on a device.

    Returns:
        `(*index.shape, columns)`. The gradient of a `SparseTensor` is one of the same pattern.
    """
    return torch.ops.sparsecomp.sparse_rows.default(sparse, index)


def stored_rows(index: Tensor, values: Tensor, pattern: Sequence[Tensor], layout: Layout) -> Tensor:
    """Rows of a matrix whose entries are elements, dense; its gradient by `values` is summed in float32 at least.

    Args:
        index: of any shape, int32 or int64, in the rows; a GPU does not check it: a row that is none is NaN there.
        values, pattern: as `layout` says; see `sparsecomp.reference.patterns`.

    Returns:
        (*index.shape, columns).
    """
    if not isinstance(index, Tensor):
        raise FormatError(f"index is a {type(index).__name__}, needs a tensor of int32 or int64")
    pointers, columns, order = layout.kind.ordered_entries(pattern, layout.block, layout.shape)
    flat = values.flatten() if order is None else values.index_select(0, order)
    return torch.ops.sparsecomp.stored_rows.default(flat, index, pointers, columns, layout.shape[1])


def _dense(sparse, index):
    return sparse.index_select(0, index.flatten()).view(*index.shape, sparse.shape[1])


def _dense_gradient(sparse, index, grad):
    return torch.zeros_like(sparse).index_add(0, index.flatten(), grad.reshape(-1, grad.shape[-1]))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    sparse, index = ctx.saved_tensors
    return torch.ops.sparsecomp.sparse_rows_gradient.default(sparse, index, grad), None


implement("sparse_rows", _dense)
implement("sparse_rows_gradient", _dense_gradient)
torch.library.register_autograd("sparsecomp::sparse_rows", _backward, setup_context=_save, lib=library)


def _stored(values, index, pointers, columns, cols):
    place, missing = _places(pointers, columns, index, cols)
    stored = values.index_select(0, place.flatten()).view(place.shape).masked_fill(missing, 0)
    target = columns.index_select(0, place.flatten()).view(place.shape).long().masked_fill(missing, cols)
    out = values.new_zeros((index.numel(), cols + 1)).scatter(1, target, stored)
    return out[:, :cols].contiguous().view(*index.shape, cols)


def _stored_gradient(grad, index, pointers, columns, cols):
    place, missing = _places(pointers, columns, index, cols)
    target = columns.index_select(0, place.flatten()).view(place.shape).long().masked_fill(missing, 0)
    wide = grad.reshape(index.numel(), cols).to(accumulator(grad.dtype))
    found = wide.gather(1, target).masked_fill(missing, 0)
    out = wide.new_zeros(columns.numel()).index_add(0, place.flatten(), found.flatten())
    return out.to(grad.dtype)


def _places(pointers: Tensor, columns: Tensor, index: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """Entries (indices, those of the longest row) of each row, in which `missing` ones stand for nothing."""
    rows = index.flatten()
    start, stop = pointers.index_select(0, rows).long(), pointers.index_select(0, rows + 1).long()
    longest = min(int((stop - start).max()), columns.numel()) if rows.numel() else 0
    place = start[:, None] + torch.arange(longest, device=rows.device)
    missing = place >= stop[:, None]
    place = place.masked_fill(missing, 0)
    beyond = columns.index_select(0, place.flatten()).view(place.shape) >= cols
    return place, missing | beyond


def _stored_cuda(values, index, pointers, columns, cols):
    from sparsecomp.lowering.sparse import looked_up  # loads Triton

    out = values.new_empty((*index.shape, cols))
    looked_up.write_rows(index, pointers.contiguous(), columns.contiguous(), values.contiguous(), out)
    return out


def _stored_gradient_cuda(grad, index, pointers, columns, cols):
    from sparsecomp.lowering.sparse import looked_up  # loads Triton

    out = grad.new_zeros(columns.shape, dtype=accumulator(grad.dtype))
    looked_up.add_rows(index, pointers.contiguous(), columns.contiguous(), grad.contiguous(), out)
    return out.to(grad.dtype)


def _fake_stored(values, index, pointers, columns, cols):
    return values.new_empty((*index.shape, cols))


def _fake_stored_gradient(grad, index, pointers, columns, cols):
    return grad.new_empty(columns.shape)


def _save_stored(ctx, inputs, output):
    _, index, *ctx.how = inputs
    ctx.save_for_backward(index)  # and not the pattern: see sparse_linear


def _backward_stored(ctx, grad):
    found = torch.ops.sparsecomp.stored_rows_gradient.default(grad, *ctx.saved_tensors, *ctx.how)
    return found, None, None, None, None


def _backward_stored_gradient(ctx, grad):
    found = torch.ops.sparsecomp.stored_rows.default(grad, *ctx.saved_tensors, *ctx.how)
    return found, None, None, None, None


implement("stored_rows", _stored, _stored_cuda, _fake_stored)
implement("stored_rows_gradient", _stored_gradient, _stored_gradient_cuda, _fake_stored_gradient)
differentiable("stored_rows", _backward_stored, _save_stored)
differentiable("stored_rows_gradient", _backward_stored_gradient, _save_stored)
