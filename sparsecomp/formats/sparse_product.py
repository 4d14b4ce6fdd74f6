"""The product of two sparse matrices, a sparse one (SpGEMM).

Torch multiplies compressed matrices on both devices (by MKL and by cuSPARSE), and no faster than that is known here. It
gives no gradients at the operands' patterns: these are products at given places.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError, SparseOperatorError
from sparsecomp.formats.dots import StoredRows, dots, products_at, transposed, untraced
from sparsecomp.formats.indices import index_dtype_for, rows_of, sorted_within, take

if TYPE_CHECKING:
    from sparsecomp.formats.base import SparseMatrix


def check_operands(one: SparseMatrix, other: SparseMatrix) -> None:
    """Raise FormatError unless two matrices can be multiplied."""
    fits = one.shape[1] == other.shape[0] and one.dtype is other.dtype and one.device == other.device
    batches = {one.batch, other.batch} - {None}
    if not fits or len(batches) > 1 or 0 in batches:
        raise FormatError(
            f"{one!r} and {other!r} have no product: they need inner dimensions that are equal, one dtype and device, "
            "and one batch that is not empty, or none"
        )


def of_tensors(function: Any, one: Any, other: Any, *rest: Any) -> Any:
    """What a function of two matrices gives for two SparseTensors, whose class says so by `FUNCTIONS`.

    Raises:
        SparseOperatorError: they are not both SparseTensors.
    """
    # no torch function, which Dynamo would not trace
    handler = getattr(type(one), "FUNCTIONS", {}).get(function)
    if handler is None or type(other) is not type(one):
        raise SparseOperatorError(
            f"{function.__name__} takes two SparseTensors or two matrices, not {type(one).__name__} and "
            f"{type(other).__name__}: torch.matmul takes a dense one too"
        )
    return handler(type(one), one, other, *rest)


def sparse_product(one: SparseMatrix, other: SparseMatrix) -> tuple[StoredRows, Tensor]:
    """Where one @ other stores, every place that a product of two stored elements reaches, and the values there.

    Sums are float32 for half precision, rounded once. Gradients flow to the values of both.

    Raises:
        FormatError: shapes, dtypes, devices or batches do not belong together.
        SparseOperatorError: a graph is being traced, in which a size must be known before it is made; without
            `fullgraph` it breaks here.
    """
    if torch.compiler.is_compiling():
        raise SparseOperatorError(
            "a product of two sparse matrices within a compiled graph, which would have to know its size: say it by "
            "bounded_matmul, multiply outside of the graph, or leave fullgraph=True out"
        )
    check_operands(one, other)
    left, right = one._terms(), other._terms()
    where = StoredRows.of(left), StoredRows.of(right)
    items = [
        untraced(_multiplied)(where[0], a_values, where[1], b_values)
        for a_values, b_values in zip(*_of_one_batch(left.values, right.values), strict=True)
    ]
    if one.batch is other.batch is None:
        return items[0]
    return items[0][0], torch.stack([values for _, values in items])


def _of_one_batch(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Values as a batch of equal length."""
    batch = torch.broadcast_shapes(one.shape[:-1], other.shape[:-1]) or (1,)
    return one.expand(*batch, -1), other.expand(*batch, -1)


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
            by_a = dots(found, grad, b, b_values, a)
        if ctx.needs_input_grad[1]:
            by_b = products_at(*transposed(a, a_values), found, grad, b)
        return by_a, by_b, None, None


def _torchs(rows: StoredRows, values: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that its sparse layouts are beta
        return torch.sparse_csr_tensor(rows.pointers, rows.indices, values, rows.shape, check_invariants=False)
