"""The product of two sparse matrices, a sparse one (SpGEMM).

Torch multiplies compressed matrices on both devices (by MKL and by cuSPARSE), and no faster than that is known here. It
gives no gradients at the operands' patterns: these are the same products, of which what the operand stores is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from sparsecomp.errors import FormatError, SparseOperatorError
from sparsecomp.formats.indices import (
    index_dtype_for,
    pair_keys,
    places_in,
    pointers_of,
    rows_of,
    sorted_pairs,
    sorted_within,
    take,
    take_or_zero,
)
from sparsecomp.formats.triplets import Triplets

if TYPE_CHECKING:
    from sparsecomp.formats.base import SparseMatrix


class StoredRows(NamedTuple):
    """Where a matrix by rows stores: pointers (rows + 1,) and indices (entries,), ascending in a row; and its shape."""

    pointers: Tensor
    indices: Tensor
    shape: tuple[int, int]

    @property
    def row(self) -> Tensor:
        """Row of each entry, int64."""
        return rows_of(self.pointers, self.indices.numel(), torch.int64)


def sparse_product(one: SparseMatrix, other: SparseMatrix) -> tuple[StoredRows, Tensor]:
    """Where one @ other stores, every place that a product of two stored elements reaches, and the values there.

    Sums are float32 for half precision, rounded once. Gradients flow to the values of both.

    Raises:
        FormatError: shapes, dtypes or devices do not belong together, or one is a batch.
        SparseOperatorError: a graph is being traced, in which a size must be known before it is made; without
            `fullgraph` it breaks here.
    """
    if torch.compiler.is_compiling():
        raise SparseOperatorError(
            "a product of two sparse matrices within a compiled graph, which would have to know its size: multiply "
            "outside of it, or leave fullgraph=True out"
        )
    fits = one.shape[1] == other.shape[0] and one.dtype is other.dtype and one.device == other.device
    if not fits or one.batch is not None or other.batch is not None:
        raise FormatError(
            f"{one!r} and {other!r} have no product: they need inner dimensions that are equal, one dtype and device, "
            "and no batch"
        )
    return _untraced()(*_by_rows(one._terms()), *_by_rows(other._terms()))


@cache
def _untraced() -> Callable[..., tuple[StoredRows, Tensor]]:
    """`_multiplied` where Dynamo compiles none of its parts, as it does of what runs behind a break of a graph."""
    return cast(Any, torch.compiler.disable(_multiplied))  # loads Dynamo


def _by_rows(elements: Triplets) -> tuple[StoredRows, Tensor]:
    dtype = index_dtype_for(*elements.shape, elements.row.numel())
    pointers = pointers_of(elements.row, elements.shape[0], dtype)
    return StoredRows(pointers, elements.col.to(dtype), elements.shape), elements.values


def _multiplied(a: StoredRows, a_values: Tensor, b: StoredRows, b_values: Tensor) -> tuple[StoredRows, Tensor]:
    """The product's places and values."""
    values, pointers, indices = _Product.apply(a_values, b_values, a, b)  # pyright: ignore[reportGeneralTypeIssues]
    return StoredRows(pointers, indices, (a.shape[0], b.shape[1])), values


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a_values: Tensor, b_values: Tensor, a: StoredRows, b: StoredRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(a_values.dtype, torch.float32)
        product = _torchs(a, a_values.to(wide)) @ _torchs(b, b_values.to(wide))
        shape, values = (a.shape[0], b.shape[1]), product.values()
        dtype = index_dtype_for(*shape, values.numel())
        pointers, indices = product.crow_indices().to(dtype), product.col_indices().to(dtype)
        row = rows_of(pointers, indices.numel(), indices.dtype)
        indices, order = sorted_within(row, indices, shape)  # torch promises no order within a row
        ctx.save_for_backward(a_values, b_values)
        ctx.places = a, b, StoredRows(pointers, indices, shape)
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


def _torchs(rows: StoredRows, values: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that its sparse layouts are beta
        return torch.sparse_csr_tensor(rows.pointers, rows.indices, values, rows.shape, check_invariants=False)


def _transposed(rows: StoredRows, values: Tensor) -> tuple[StoredRows, Tensor]:
    shape = (rows.shape[1], rows.shape[0])
    row, col, order = sorted_pairs(rows.indices.long(), rows.row, shape)
    return _by_rows(Triplets(row, col, take(values, 0, order), shape))


def _at(wanted: StoredRows, found: StoredRows, values: Tensor) -> Tensor:
    """The elements of a matrix at other places; 0 where it stores none."""
    keys, others = (pair_keys(one.row, one.indices.long(), one.shape) for one in (found, wanted))
    if keys is None or others is None:
        raise FormatError(f"a matrix of shape {wanted.shape} has more than 2**63 - 1 places, which are not compared")
    return take_or_zero(values, places_in(keys, others))
