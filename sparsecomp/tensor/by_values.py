"""What is computed of a SparseTensor's values above autograd: arithmetic of matrices, and all under transforms.

A transform of torch.func wraps the tensors that it follows, as forward-mode AD does, and a wrapped SparseTensor would
be a SparseTensor no more. So the SparseTensor stays outermost and its values are what is followed: products become
operators on plain tensors. Arithmetic is that of `sparsecomp.formats`: it needs the way to the values, and back.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.formats.base import SparseMatrix
from sparsecomp.formats.bounded_product import bounded_matmul
from sparsecomp.formats.csr import CSC, CSR
from sparsecomp.formats.dots import untraced
from sparsecomp.formats.masked_product import masked_matmul
from sparsecomp.formats.reductions import axis_of
from sparsecomp.ops.sparse.linear import autocast, sparse_linear
from sparsecomp.ops.sparse.sparse_matmul import by_column
from sparsecomp.reference.patterns import Layout
from sparsecomp.tensor.dispatch import by_row_elements, written_out
from sparsecomp.tensor.index_arrays import IndexArrays, is_traced

_DEPENDS = "what the result stores depends on what the operands store"


@torch.compiler.allow_in_graph
def product_by_values(
    sparse: Any, dense: Tensor, bias: Tensor | None, residual: Tensor | None, linear: bool, axis: str, scale: float
) -> Tensor:
    """`sparsecomp.ops.sparse_matmul`, under autocast as torch's own products."""
    if not linear:
        beside, other = None if residual is None else residual.mT, "row" if axis == "column" else "column"
        return product_by_values(sparse, dense.mT, bias, beside, True, other, scale).mT
    pattern = sparse.pattern
    dense, values = autocast(dense, _values_of(sparse))
    bias, residual = by_column(bias, residual, axis, (*dense.shape[:-1], sparse.shape[0]))
    return sparse_linear(
        dense if scale == 1 else dense * scale, values, pattern.operands(), pattern.layout.written(),
        transpose=pattern.stored_by_columns(sparse._transpose), bias=bias, residual=residual,
    )  # fmt: skip


@torch.compiler.allow_in_graph
def rows_by_values(sparse: Any, index: Tensor) -> Tensor:
    """`sparsecomp.ops.sparse_rows`."""
    rows = torch.ops.sparsecomp.sparse_rows.default
    values, arrays, _ = by_row_elements(type(sparse), rows, sparse, _values_of(sparse))
    return torch.ops.sparsecomp.stored_rows.default(values, index, *arrays, sparse.shape[1])


@torch.compiler.allow_in_graph
def dense_by_values(sparse: Any) -> Tensor:
    """`SparseTensor.to_dense`."""
    return written_out(sparse, _values_of(sparse))


@torch.compiler.allow_in_graph
def flipped(sparse: Any) -> Any:
    """The transpose."""
    if _compat.carries_levels(sparse._values):
        return type(sparse)._make(sparse._values, sparse.pattern, not sparse._transpose)
    with _compat.outside_transforms(), _compat.without_torch_function():
        return sparse.t()


@torch.compiler.allow_in_graph
def reduced(sparse: Any, name: str, dim: int | None) -> Tensor:
    """A method of the matrix that gives a dense tensor along a dimension, or of all elements."""
    return getattr(_matrix_of(sparse), name)(None if dim is None else _turned(sparse, dim))


@torch.compiler.allow_in_graph
def softmax_of_stored(sparse: Any, dim: int) -> Any:
    """`SparseMatrix.softmax`."""
    found = _matrix_of(sparse).softmax(_turned(sparse, dim))
    return view(type(sparse), found.values, sparse.pattern, sparse._transpose)


def times(sparse: Any, other: Any) -> Any:
    """The product with another SparseTensor of the same elements: the values', whatever pattern a gradient brings."""
    return view(type(sparse), _values_of(sparse) * _values_of(other), sparse.pattern, sparse._transpose)


@untraced
def by_matrices(function: Callable[..., SparseMatrix | Tensor], *operands: Any) -> Any:
    """What a function makes of these SparseTensors' matrices, a SparseTensor too if it is sparse; gradients go back to
    all of them."""
    if any(is_traced(operand._values, *operand.pattern.arrays) for operand in operands):
        raise _compat.BreaksGraph(_DEPENDS)
    found = function(*(_matrix_of(operand, operand._transpose) for operand in operands))
    return found if isinstance(found, Tensor) else view(type(operands[0]), *IndexArrays.of(found), False)


def _matrix_of(sparse: Any, transpose: bool = False) -> SparseMatrix:
    """The matrix, or that of which it is the transpose, since some formats are sorted to be transposed."""
    found = sparse.pattern.matrix(_values_of(sparse), transpose)
    return found if sparse.pattern.spare else found.known_compact()


def _turned(sparse: Any, dim: int) -> int:
    return axis_of(dim) ^ sparse._transpose


@torch.compiler.allow_in_graph
def bounded(one: Any, other: Any, capacity: int) -> Any:
    """`bounded_matmul` of two SparseTensors."""
    found = bounded_matmul(_matrix_of(one, one._transpose), _matrix_of(other, other._transpose), capacity)
    pattern = IndexArrays("CSR", Layout("csr", (1, 1), found.shape), (found.crow, found.col), spare=True)
    # of what a backward needs nothing is read from the device, and a graph that returns the product has it
    row, col = pattern.places(found.values)
    spare = row == found.shape[0]
    by_column, order = col.where(~spare, found.shape[1]).sort(stable=True)
    pointers = torch.searchsorted(by_column, torch.arange(found.shape[1] + 1, device=col.device))
    dtype = found.index_dtype
    pattern.transposed = pointers.to(dtype), row.where(~spare, 0)[order].to(dtype), order.to(dtype)
    return view(type(one), found.values, pattern, False)


@torch.compiler.allow_in_graph
def masked(one: Any, other: Any, at: Any) -> Any:
    """`masked_matmul` of two SparseTensors at what a third stores.

    Of tensors in CSR, `other` perhaps in CSC, the product shares that one's pattern.
    """
    if not (_by_rows(one) and _by_rows(at) and type(_matrix_of(other, other._transpose)) in (CSR, CSC)):
        return by_matrices(masked_matmul, one, other, at.detach())
    operands = [_matrix_of(sparse, sparse._transpose) for sparse in (one, other, at.detach())]
    return view(type(one), masked_matmul(*operands).values, at.pattern, False)


def _by_rows(sparse: Any) -> bool:
    return sparse.format == "CSR" and not sparse._transpose


def view(kind: Any, values: Tensor, pattern: IndexArrays, transpose: bool) -> Any:
    """A SparseTensor, of the class `kind`, whose gradient goes back to `values`."""
    if _compat.carries_levels(values):  # what a transform follows must stay within its sight
        return kind._make(values, pattern, transpose)
    with _compat.outside_transforms():
        return _View.apply(values, kind, pattern, transpose)


def _values_of(sparse: Any) -> Tensor:
    """The values, with what autograd knows of the SparseTensor."""
    if not sparse.requires_grad:
        return sparse._values
    with _compat.outside_transforms():
        return cast(Tensor, _Values.apply(sparse))


class _Values(torch.autograd.Function):
    """The values of a SparseTensor, whose gradient is one of its pattern."""

    @staticmethod
    def forward(ctx: Any, sparse: Any) -> Tensor:
        ctx.how = type(sparse), sparse.pattern, sparse._transpose
        return sparse._values.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kind, *how = ctx.how
        return view(kind, grads[0], *how) if torch.is_grad_enabled() else kind._make(grads[0], *how)


class _View(torch.autograd.Function):
    """A SparseTensor of values, whose gradient goes back to them."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, kind: Any, pattern: IndexArrays, transpose: bool) -> Any:
        return kind._make(values.detach(), pattern, transpose)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return _values_of(grads[0]) if torch.is_grad_enabled() else grads[0]._values, None, None, None
