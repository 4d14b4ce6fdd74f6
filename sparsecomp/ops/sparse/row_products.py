"""Products of two sparse matrices at given places, and nowhere else (masked SpGEMM): values of known sizes.

A matrix is its values and, by rows, pointers and indices ascending in a row; entries outside of the pointers are spare.
Gradients are such products again, at the places that the operands store. On a GPU nothing is waited for, and the
operators stand in CUDA graphs; a CPU looks elements up for as many at a time as its cache holds.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.formats import dots
from sparsecomp.formats.dots import StoredRows, looked_up, transposed
from sparsecomp.formats.indices import index_dtype_for
from sparsecomp.ops.library import TAGS, call_at_once, differentiable, implement, library
from sparsecomp.reference.patterns import Layout, kept_transpose
from sparsecomp.reference.precision import KERNEL_DTYPES, accumulator

_MATRIX = "Tensor {0}_values, Tensor {0}_pointers, Tensor {0}_indices, "
_AT = "Tensor at_pointers, Tensor at_indices, SymInt columns) -> Tensor"
library.define(f"row_dots({_MATRIX.format('x')}{_MATRIX.format('y')}{_AT}", tags=TAGS)
library.define(f"row_products({_MATRIX.format('a')}{_MATRIX.format('b')}{_AT}", tags=TAGS)
library.define("turned_pattern(Tensor pointers, Tensor indices, SymInt columns) -> (Tensor, Tensor, Tensor)", tags=TAGS)

_WHOLE = (*KERNEL_DTYPES, torch.float64)


def row_dots(
    x_values: Tensor, x_pointers: Tensor, x_indices: Tensor, y_values: Tensor, y_pointers: Tensor, y_indices: Tensor,
    at_pointers: Tensor, at_indices: Tensor, columns: int,
) -> Tensor:  # fmt: skip
    """Dot products of a row of x and a row of y, for each entry of `at` (rows of x, rows of y).

    Args:
        x_values: (entries,) or (batch, entries); so are y's, of the same dtype.
        columns: of x and y.

    Returns:
        (entries,) or (batch, entries) of `at`, 0 in spare ones. Sums are float32 for half precision, rounded once.
    """
    return call_at_once(
        torch.ops.sparsecomp.row_dots.default, x_values, x_pointers, x_indices, y_values, y_pointers, y_indices,
        at_pointers, at_indices, columns,
    )  # fmt: skip


def row_products(
    a_values: Tensor, a_pointers: Tensor, a_indices: Tensor, b_values: Tensor, b_pointers: Tensor, b_indices: Tensor,
    at_pointers: Tensor, at_indices: Tensor, columns: int,
) -> Tensor:  # fmt: skip
    """Elements of a @ b for each entry of `at`, all by rows; otherwise as `row_dots`.

    On a GPU the order of sums is another in each run, but for `torch.use_deterministic_algorithms`.

    Args:
        columns: of b and `at`.
    """
    return call_at_once(
        torch.ops.sparsecomp.row_products.default, a_values, a_pointers, a_indices, b_values, b_pointers, b_indices,
        at_pointers, at_indices, columns,
    )  # fmt: skip


def turned_pattern(pointers: Tensor, indices: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pointers and indices of the transposed matrix, and which entry each is of this one; spare ones are last."""
    return torch.ops.sparsecomp.turned_pattern.default(pointers, indices, columns)


def _turned_pattern(pointers, indices, columns):
    first, last = pointers[[0, -1]].tolist()
    rows = StoredRows(pointers - first, indices[first:last], (pointers.numel() - 1, columns))
    found, order = transposed(rows, torch.arange(first, last, device=indices.device))
    spare = (0, indices.numel() - order.numel())
    dtypes = indices.dtype, index_dtype_for(indices.numel())
    return found.pointers.to(dtypes[0]), F.pad(found.indices.to(dtypes[0]), spare), F.pad(order.to(dtypes[1]), spare)


def _cuda_turned_pattern(pointers, indices, columns):
    return kept_transpose((pointers, indices), Layout("csr", (1, 1), (pointers.numel() - 1, columns)))[:3]


def _fake_turned_pattern(pointers, indices, columns):
    order = torch.int32 if indices.dtype == torch.int32 else index_dtype_for(indices.shape[0])
    return indices.new_empty(columns + 1), torch.empty_like(indices), torch.empty_like(indices, dtype=order)


def _dots(x_values, x_pointers, x_indices, y_values, y_pointers, y_indices, at_pointers, at_indices, columns):
    x, x_kept = compacted(x_values, x_pointers, x_indices, columns)
    y, y_kept = compacted(y_values, y_pointers, y_indices, columns)
    first, last = at_pointers[[0, -1]].tolist()
    at = StoredRows(at_pointers - first, at_indices[first:last], (x.shape[0], y.shape[0]))
    found = looked_up(x, x_kept, y, y_kept, at)
    return F.pad(found, (first, at_indices.numel() - last))


def compacted(values: Tensor, pointers: Tensor, indices: Tensor, columns: int) -> tuple[StoredRows, Tensor]:
    """The matrix without spare entries, on a CPU."""
    first, last = pointers[[0, -1]].tolist()
    return StoredRows(pointers - first, indices[first:last], (pointers.numel() - 1, columns)), values[..., first:last]


def _products(a_values, a_pointers, a_indices, b_values, b_pointers, b_indices, at_pointers, at_indices, columns):
    other = turned(b_values, b_pointers, b_indices, columns)
    return _dots(a_values, a_pointers, a_indices, *other, at_pointers, at_indices, b_pointers.numel() - 1)


def turned(values: Tensor, pointers: Tensor, indices: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The transposed matrix; with spare entries its values there are any."""
    pointers, indices, order = turned_pattern(pointers, indices, columns)
    return values.index_select(-1, order), pointers, indices


def _cuda_dots(x_values, x_pointers, x_indices, y_values, y_pointers, y_indices, at_pointers, at_indices, columns):
    if x_values.dtype not in _WHOLE:
        return _dots(
            x_values, x_pointers, x_indices, y_values, y_pointers, y_indices, at_pointers, at_indices, columns
        )
    from sparsecomp.lowering.sparse import row_products as lowered  # loads Triton

    x, y, at = as_rows(x_pointers, x_indices), as_rows(y_pointers, y_indices), as_rows(at_pointers, at_indices)
    out = x_values.new_empty(together(x_values, y_values) + at_indices.shape)
    operands = (x, neighbours(x_values), y, neighbours(y_values))
    # the shorter rows are walked, as far as their mean tells
    turn = y_indices.numel() * (x_pointers.numel() - 1) < x_indices.numel() * (y_pointers.numel() - 1)
    lowered.write_dots(*(operands[2:] + operands[:2] if turn else operands), at, out, columns, turn)
    return out


def _cuda_products(a_values, a_pointers, a_indices, b_values, b_pointers, b_indices, at_pointers, at_indices, columns):
    inner = b_pointers.numel() - 1
    if a_values.dtype not in _WHOLE or torch.are_deterministic_algorithms_enabled():
        other = turned(b_values, b_pointers, b_indices, columns)
        return _cuda_dots(a_values, a_pointers, a_indices, *other, at_pointers, at_indices, inner)
    from sparsecomp.lowering.sparse import row_products as lowered  # loads Triton

    a, b, at = as_rows(a_pointers, a_indices), as_rows(b_pointers, b_indices), as_rows(at_pointers, at_indices)
    shape = together(a_values, b_values) + at_indices.shape
    out = a_values.new_zeros(shape, dtype=accumulator(a_values.dtype))
    lowered.add_products(a, neighbours(a_values), b, neighbours(b_values), at, out, columns)
    return out.to(a_values.dtype)


def as_rows(pointers: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """As kernels take them."""
    return pointers.contiguous(), indices.contiguous()


def neighbours(values: Tensor) -> Tensor:
    """As kernels take them: neighbours are those of the same matrix."""
    return values if values.is_contiguous() or values.stride(-1) == 1 else values.contiguous()


def flat(values: Tensor) -> Tensor:
    """(batch, entries), as kernels take them."""
    values = neighbours(values)
    return values if values.dim() == 2 else values[None]


def together(one: Tensor, other: Tensor) -> torch.Size:
    """The batch of two matrices' values, if either has one."""
    if one.dim() == other.dim() == 1:  # the usual case, and torch's function takes the host a while
        return torch.Size()
    return torch.broadcast_shapes(one.shape[:-1], other.shape[:-1])


def _fake(one, one_pointers, one_indices, other, other_pointers, other_indices, at_pointers, at_indices, columns):
    return one.new_empty((*together(one, other), at_indices.shape[0]))


def _save(ctx, inputs, output):
    *tensors, ctx.columns = inputs
    ctx.save_for_backward(*tensors)


def _dots_backward(ctx, grad):
    x_values, x_pointers, x_indices, y_values, y_pointers, y_indices, at_pointers, at_indices = ctx.saved_tensors
    x, y, at, by_x, by_y = (x_pointers, x_indices), (y_pointers, y_indices), (at_pointers, at_indices), None, None
    if ctx.needs_input_grad[0]:
        by_x = as_values(x_values, row_products(grad, *at, y_values, *y, *x, ctx.columns))
    if ctx.needs_input_grad[3]:
        across = turned(grad, *at, y_pointers.shape[0] - 1)
        by_y = as_values(y_values, row_products(*across, x_values, *x, *y, ctx.columns))
    return by_x, None, None, by_y, None, None, None, None, None


def _products_backward(ctx, grad):
    by_a, by_b = gradients_of_product(ctx, grad)
    return by_a, None, None, by_b, None, None, None, None, None


def gradients_of_product(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients by the values of both matrices of a product.

    Args:
        ctx: with values, pointers and indices of both and the pattern of the product saved, and `columns`; the values
            are arguments 0 and 3.
        grad: by the product's values.
    """
    a_values, a_pointers, a_indices, b_values, b_pointers, b_indices, at_pointers, at_indices = ctx.saved_tensors
    a, b, at, by_a, by_b = (a_pointers, a_indices), (b_pointers, b_indices), (at_pointers, at_indices), None, None
    if ctx.needs_input_grad[0]:
        by_a = as_values(a_values, row_dots(grad, *at, b_values, *b, *a, ctx.columns))
    if ctx.needs_input_grad[3]:
        across = turned(a_values, *a, b_pointers.shape[0] - 1)
        by_b = as_values(b_values, row_products(*across, grad, *at, *b, ctx.columns))
    return by_a, by_b


def as_values(values: Tensor, grad: Tensor) -> Tensor:
    """A gradient, summed over the batch where the values have none."""
    return grad.sum(0) if grad.dim() > values.dim() else grad


implement("turned_pattern", _turned_pattern, _cuda_turned_pattern, _fake_turned_pattern)
implement("row_dots", _dots, _cuda_dots, _fake)
implement("row_products", _products, _cuda_products, _fake)
differentiable("row_dots", _dots_backward, _save)
differentiable("row_products", _products_backward, _save)
dots.enter_products(dots=row_dots, products=row_products)
