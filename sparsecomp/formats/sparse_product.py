"""The product of two sparse matrices, a sparse one (SpGEMM).

Torch multiplies compressed matrices on both devices (by MKL and by cuSPARSE), and no faster than that is known here. It
gives no gradients at the operands' patterns: these are the same products, of which what the operand stores is taken.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.indices import index_dtype_for, pair_keys, rows_of, sorted_pairs, take
from sparsecomp.formats.triplets import Triplets

if TYPE_CHECKING:
    from sparsecomp.formats.base import Matrix, SparseMatrix


class Rows(NamedTuple):
    """Where a matrix by rows stores: pointers (rows + 1,) and indices (entries,), ascending in a row; and its shape."""

    pointers: Tensor
    indices: Tensor
    shape: tuple[int, int]

    @property
    def row(self) -> Tensor:
        """Row of each entry, int64."""
        return rows_of(self.pointers, self.indices.numel(), torch.int64)


def sparse_product(one: Matrix, other: SparseMatrix) -> Matrix:
    """one @ other in the format of the first: stored is every place that a product of two stored elements reaches.

    Sums are float32 for half precision, rounded once. Gradients flow to the values of both.

    Raises:
        FormatError: shapes, dtypes or devices do not belong together, one is a batch, or the product does not fit the
            format of the first.
    """
    fits = one.shape[1] == other.shape[0] and one.dtype is other.dtype and one.device == other.device
    if not fits or one.batch is not None or other.batch is not None:
        raise FormatError(
            f"{one!r} and {other!r} have no product: they need inner dimensions that are equal, one dtype and device, "
            "and no batch"
        )
    (a, a_values), (b, b_values) = (_by_rows(matrix._terms()) for matrix in (one, other))
    found, values = _multiplied(a, a_values, b, b_values)
    return type(one)._from_triplets(
        Triplets(found.row, found.indices.long(), values, found.shape), None, one.index_dtype, **one.layout
    )


def _by_rows(elements: Triplets) -> tuple[Rows, Tensor]:
    dtype = index_dtype_for(*elements.shape, elements.row.numel())
    pointers = torch.ops.aten._convert_indices_from_coo_to_csr.default(
        elements.row.contiguous(), elements.shape[0], out_int32=dtype is torch.int32
    )
    return Rows(pointers, elements.col.to(dtype), elements.shape), elements.values


def _multiplied(a: Rows, a_values: Tensor, b: Rows, b_values: Tensor) -> tuple[Rows, Tensor]:
    """The product's places and values."""
    values, pointers, indices = _Product.apply(a_values, b_values, a, b)  # pyright: ignore[reportGeneralTypeIssues]
    return Rows(pointers, indices, (a.shape[0], b.shape[1])), values


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a_values: Tensor, b_values: Tensor, a: Rows, b: Rows) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(a_values.dtype, torch.float32)
        product = _torchs(a, a_values.to(wide)) @ _torchs(b, b_values.to(wide))
        pointers, indices, values = product.crow_indices(), product.col_indices(), product.values()
        shape = (a.shape[0], b.shape[1])
        row = rows_of(pointers, indices.numel(), indices.dtype)
        _, indices, order = sorted_pairs(row, indices, shape)  # torch promises no order within a row
        ctx.save_for_backward(a_values, b_values)
        ctx.places = a, b, Rows(pointers, indices, shape)
        ctx.mark_non_differentiable(pointers, indices)
        return take(values, 0, order).to(a_values.dtype), pointers, indices

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (a_values, b_values), (a, b, found) = ctx.saved_tensors, ctx.places
        grad, by_a, by_b = grads[0], None, None
        if ctx.needs_input_grad[0]:
            by_a = _at(a, *_multiplied(found, grad, *_transposed(b, b_values)))
        if ctx.needs_input_grad[1]:
            by_b = _at(b, *_multiplied(*_transposed(a, a_values), found, grad))
        return by_a, by_b, None, None


def _torchs(rows: Rows, values: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that its sparse layouts are beta
        return torch.sparse_csr_tensor(rows.pointers, rows.indices, values, rows.shape, check_invariants=False)


def _transposed(rows: Rows, values: Tensor) -> tuple[Rows, Tensor]:
    shape = (rows.shape[1], rows.shape[0])
    row, col, order = sorted_pairs(rows.indices.long(), rows.row, shape)
    return _by_rows(Triplets(row, col, take(values, 0, order), shape))


def _at(wanted: Rows, found: Rows, values: Tensor) -> Tensor:
    """The elements of a matrix at other places; 0 where it stores none."""
    keys, others = (pair_keys(one.row, one.indices.long(), one.shape) for one in (found, wanted))
    if keys is None or others is None:
        raise FormatError(f"a matrix of shape {wanted.shape} has more than 2**63 - 1 places, which are not compared")
    if not keys.numel():
        return values.new_zeros(others.shape)
    places = torch.searchsorted(keys, others).clamp_(max=keys.numel() - 1)
    return values.index_select(0, places).masked_fill(keys[places] != others, 0)
