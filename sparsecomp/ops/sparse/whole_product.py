"""The product of two sparse matrices at every place that it reaches (SpGEMM).

A matrix is its values and, by rows, pointers and indices ascending in a row; entries outside of the pointers are spare.
On a GPU rows are counted and then filled, and nothing but the size is waited for, or nothing where it is given. A CPU
multiplies by torch, and in memory of a given size by sorting. Gradients are products at the operands' places.
"""

import math
import warnings

import torch
from torch import Tensor

from sparsecomp.formats import dots
from sparsecomp.formats.bounded_product import by_slots
from sparsecomp.formats.indices import index_dtype_for, rows_of, sorted_within, take
from sparsecomp.ops.library import TAGS, call_at_once, differentiable, implement, library
from sparsecomp.ops.sparse.row_products import (
    as_rows,
    compacted,
    flat,
    gradients_of_product,
    together,
)
from sparsecomp.reference.precision import KERNEL_DTYPES, accumulator, without_autocast

library.define(
    "whole_product(Tensor a_values, Tensor a_pointers, Tensor a_indices, Tensor b_values, Tensor b_pointers, "
    "Tensor b_indices, SymInt columns, SymInt? capacity) -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)
_WHOLE = (*KERNEL_DTYPES, torch.float64)


def whole_product(
    a_values: Tensor, a_pointers: Tensor, a_indices: Tensor, b_values: Tensor, b_pointers: Tensor, b_indices: Tensor,
    columns: int, capacity: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Values, pointers and indices of a @ b, by rows.

    Args:
        a_values: (entries,) or (batch, entries); so are b's, of the same dtype.
        columns: of b.
        capacity: room for entries, those that are not needed being spare, behind the last row's, and 0; None for
            none, which waits for a GPU, to know how many there are. Where more pairs of elements meet, every value
            is NaN.

    Returns:
        (entries,) or (batch, entries) of sums, float32 for half precision and rounded once, in an order that the
        patterns give and that is the same in every run; pointers (rows + 1,) and indices (entries,), int64 if a's are
        or if int32 cannot hold them.
    """
    return call_at_once(
        torch.ops.sparsecomp.whole_product.default, a_values, a_pointers, a_indices, b_values, b_pointers, b_indices,
        columns, capacity,
    )  # fmt: skip


def _cpu(a_values, a_pointers, a_indices, b_values, b_pointers, b_indices, columns, capacity):
    if capacity is not None:
        dtype = _index_dtype(a_pointers, a_indices, columns, capacity)
        one, other = (a_pointers, a_indices), (b_pointers, b_indices)
        if a_values.dim() == b_values.dim() == 1:
            return by_slots(a_values, one, b_values, other, columns, capacity, dtype)
        batch = together(a_values, b_values)
        items = [
            by_slots(left, one, right, other, columns, capacity, dtype)
            for left, right in zip(a_values.expand(*batch, -1), b_values.expand(*batch, -1), strict=True)
        ]
        return torch.stack([values for values, _, _ in items]), *items[0][1:]
    a, a_values = compacted(a_values, a_pointers, a_indices, b_pointers.numel() - 1)
    b, b_values = compacted(b_values, b_pointers, b_indices, columns)
    wide, batch = torch.promote_types(a_values.dtype, torch.float32), together(a_values, b_values)
    pairs = zip(flat(a_values).expand(*batch or (1,), -1), flat(b_values).expand(*batch or (1,), -1), strict=True)
    with without_autocast(a_values):
        found = [_torchs(a, left.to(wide)) @ _torchs(b, right.to(wide)) for left, right in pairs]
    pointers, indices = found[0].crow_indices(), found[0].col_indices()
    # torch promises no order within a row
    dtype = _index_dtype(a_pointers, a_indices, columns, indices.numel())
    row = rows_of(pointers, indices.numel(), indices.dtype)
    indices, order = sorted_within(row, indices, (a.shape[0], columns))
    values = [take(product.values(), 0, order) for product in found]
    return (torch.stack(values) if batch else values[0]).to(a_values.dtype), pointers.to(dtype), indices.to(dtype)


def _torchs(rows: dots.StoredRows, values: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that its sparse layouts are beta
        # its products take arrays as contiguous, whatever their strides
        arrays = rows.pointers.contiguous(), rows.indices.contiguous(), values.contiguous()
        return torch.sparse_csr_tensor(*arrays, rows.shape, device=values.device, check_invariants=False)


def _index_dtype(pointers: Tensor, indices: Tensor, columns: int, entries: int) -> torch.dtype:
    needed = index_dtype_for(pointers.shape[0] - 1, columns, entries)
    return torch.promote_types(indices.dtype, needed)


def _cuda(a_values, a_pointers, a_indices, b_values, b_pointers, b_indices, columns, capacity):
    from sparsecomp.lowering.sparse import whole_product as lowered

    if a_values.dtype not in _WHOLE or columns > lowered.COLUMNS:
        return _cpu(a_values, a_pointers, a_indices, b_values, b_pointers, b_indices, columns, capacity)
    a, b = as_rows(a_pointers, a_indices), as_rows(b_pointers, b_indices)
    counted = lowered.count(a, b, max(columns, 1))
    size = int(counted.pointers[-1]) if capacity is None else capacity
    dtype = _index_dtype(a_pointers, a_indices, columns, size)
    pointers = (counted.pointers if capacity is None else counted.pointers.clamp(max=capacity)).to(dtype)
    indices = pointers.new_zeros(size)
    out = a_values.new_zeros((*together(a_values, b_values), size), dtype=accumulator(a_values.dtype))
    lowered.fill(a, flat(a_values), b, flat(b_values), counted, pointers, indices, flat(out))
    if capacity is not None:
        out.masked_fill_(counted.pairs > capacity, math.nan)
    return out.to(a_values.dtype), pointers, indices


def _fake(a_values, a_pointers, a_indices, b_values, b_pointers, b_indices, columns, capacity):
    size = torch.library.get_ctx().new_dynamic_size() if capacity is None else capacity
    dtype = torch.promote_types(a_indices.dtype, index_dtype_for(a_pointers.shape[0] - 1, columns))
    if capacity is not None:
        dtype = _index_dtype(a_pointers, a_indices, columns, capacity)
    values = a_values.new_empty((*together(a_values, b_values), size))
    return values, a_pointers.new_empty(a_pointers.shape, dtype=dtype), a_indices.new_empty(size, dtype=dtype)


def _save(ctx, inputs, output):
    *tensors, ctx.columns, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *_):
    by_a, by_b = gradients_of_product(ctx, grad)
    return by_a, None, None, by_b, None, None, None, None


implement("whole_product", _cpu, _cuda, _fake)
differentiable("whole_product", _backward, _save)
dots.enter_products(whole=whole_product)
