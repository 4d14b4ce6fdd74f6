"""What is computed of a SparseTensor's values above autograd, for transforms of torch.func and forward-mode AD.

A transform wraps the tensors that it follows, and a wrapped SparseTensor would be a SparseTensor no more. So the
SparseTensor stays outermost and its values are what is followed: products become operators on plain tensors.
"""

from typing import Any, cast

import torch
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.ops.sparse.linear import autocast, sparse_linear
from sparsecomp.ops.sparse.sparse_matmul import by_column
from sparsecomp.tensor.dispatch import by_row_elements, written_out


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
    arrays = by_row_elements(type(sparse), torch.ops.sparsecomp.sparse_rows.default, sparse)
    return torch.ops.sparsecomp.stored_rows.default(_values_of(sparse).flatten(), index, *arrays, sparse.shape[1])


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
        ctx.kind, ctx.how = type(sparse), (sparse.pattern, sparse._transpose)
        return sparse._values.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.kind._make(grads[0], *ctx.how)
