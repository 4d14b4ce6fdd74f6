"""Products whose sparse operand is one tensor, such as `sparsecomp.SparseTensor`, not arrays.

This is the form in which products stand in a graph: one node, whatever the spelling, that a rule can read and extend.
A tensor subclass implements these operators on its arrays; given a plain tensor they compute the dense result, which
is also what they mean.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.ops.sparse.linear import by_rows
from sparsecomp.ops.sparse.spmm import before_activation, epilogue, epilogue_gradients
from sparsecomp.reference.patterns import Layout
from sparsecomp.reference.precision import without_autocast

library.define(
    "sparse_matmul(Tensor sparse, Tensor dense, Tensor? bias, Tensor? residual, bool linear, str bias_axis, "
    "str activation, float scale, ScalarType? dtype) -> Tensor",
    tags=TAGS,
)
library.define(
    "sparse_sampled(Tensor sparse, Tensor grad, Tensor dense, bool linear, float scale) -> Tensor",
    tags=TAGS,
)
library.define("sparse_to_dense(Tensor sparse) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.define("sparse_gather(Tensor sparse, Tensor dense) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def sparse_matmul(
    sparse: Tensor, dense: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *, linear: bool = False,
    bias_axis: str = "column", activation: str = "none", scale: float = 1.0, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """activation(scale · product + bias + residual), summed in float32 (float64 for float64), rounded once.

    Args:
        sparse: (m, k), a `SparseTensor`, or a dense tensor, which then is multiplied densely.
        dense: (..., k) if `linear`, the product being dense @ sparse.mT, (..., m); else (..., k, n), the product being
            sparse @ dense, (..., m, n). Of the dtype of `sparse`.
        bias: one number a "column" (last axis of the result) or a "row" (the one before), by `bias_axis`.
        residual: of the result's shape.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid" or "tanh".
        dtype: of the result; by default that of `dense`.

    Returns:
        The result, rows contiguous. The gradient of a `SparseTensor` is one of the same pattern.

    Raises:
        FormatError: operands that do not belong together, or an unknown word.
    """
    return torch.ops.sparsecomp.sparse_matmul.default(
        sparse, dense, bias, residual, linear, bias_axis, activation, scale, dtype
    )


def sparse_to_dense(sparse: Tensor) -> Tensor:
    """The dense tensor of a `SparseTensor`, whose gradient has the sparse one's pattern."""
    return torch.ops.sparsecomp.sparse_to_dense.default(sparse)


def multiplied(
    spmm: Callable[..., Tensor], values: Tensor, pattern: Sequence[Tensor], layout: Layout, transpose: bool,
    dense: Tensor, bias: Tensor | None, residual: Tensor | None, linear: bool, bias_axis: str, activation: str,
    scale: float, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """`sparse_matmul` on a matrix's arrays, by an implementation of the operator `spmm`.

    Args:
        values, pattern, layout, transpose: as of `sparsecomp.ops.spmm`; values may have a batch unless `linear`.
    """
    m, size = layout.shape[1 if transpose else 0], dense.shape
    if linear:
        bias, residual = by_column(bias, residual, bias_axis, (*size[:-1], m))
        return by_rows(spmm, dense, values, pattern, bias, residual, layout, transpose, activation, scale, dtype)
    many = dense.dim() > 3
    flat = dense.flatten(0, -3) if many else dense
    beside = residual.flatten(0, -3) if many and residual is not None else residual
    out = spmm(values, pattern, flat, bias, beside, *layout, transpose, bias_axis, activation, scale, dtype, False)
    return out.view(*size[:-2], m, size[-1]) if many else out


def by_column(
    bias: Tensor | None, residual: Tensor | None, bias_axis: str, shape: tuple[int, ...]
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Bias and residual of a result whose bias can only be one number a column."""
    if bias is None or bias_axis == "column":
        return bias, residual
    beside = bias[:, None].expand(shape)
    return None, beside if residual is None else residual + beside


def _dense(sparse, dense, bias, residual, linear, bias_axis, activation, scale, dtype):
    if sparse.dim() != 2 or dense.dim() < (1 if linear else 2):
        raise FormatError(f"sparse {tuple(sparse.shape)} and dense {tuple(dense.shape)} are no matrices")
    wide = torch.float64 if sparse.dtype is torch.float64 else torch.float32
    left, right = (dense, sparse.mT) if linear else (sparse, dense)
    with without_autocast(dense):
        product = left.to(wide) @ right.to(wide)
    out = epilogue(product, bias, residual, bias_axis, activation, scale)
    return out.to(dense.dtype if dtype is None else dtype).contiguous()


def _dense_sampled(sparse, grad, dense, linear, scale):
    if linear and grad.dim() == 1:
        return (grad[:, None] * dense * scale).to(sparse.dtype).contiguous()
    with without_autocast(dense):
        found = grad.flatten(0, -2).mT @ dense.flatten(0, -2) if linear else grad @ dense.mT
    if not linear and found.dim() > 2:
        found = found.flatten(0, -3).sum(0)
    return (found * scale).to(sparse.dtype).contiguous()


def save_product(ctx, inputs, output):
    """What `backward` needs of a product's operands and result."""
    sparse, dense, bias, residual, linear, bias_axis, activation, scale, _ = inputs
    smooth = activation not in ("none", "relu")
    saved = (bias, residual, None) if smooth else (None, None, output if activation == "relu" else None)
    ctx.save_for_backward(sparse, dense, *saved)
    ctx.kinds = [None if operand is None else (operand.dtype, operand.shape) for operand in (bias, residual)]
    ctx.how = linear, bias_axis, activation, scale, output.dtype


def _by_sparse(sparse: Tensor, grad: Tensor, dense: Tensor, linear: bool, scale: float) -> Tensor:
    return torch.ops.sparsecomp.sparse_sampled.default(sparse, grad, dense, linear, scale)


def _by_dense(sparse: Tensor, grad: Tensor, linear: bool, scale: float) -> Tensor:
    return sparse_matmul(sparse.t(), grad, linear=linear, scale=scale)


def product_gradients(ctx, grad, by_sparse=_by_sparse, by_dense=_by_dense):
    """Gradients by all arguments of `sparse_matmul`, from that by its result.

    Args:
        by_sparse: the sampled product that is the gradient by the sparse operand.
        by_dense: the product with the transpose.
    """
    sparse, dense, bias, residual, saved = ctx.saved_tensors
    linear, bias_axis, activation, scale, dtype = ctx.how
    if activation not in ("none", "relu"):
        # computed again from what is smaller to keep
        saved = sparse_matmul(
            sparse, dense, bias, residual, linear=linear, bias_axis=bias_axis, scale=scale, dtype=dtype
        )  # fmt: skip
    grad = before_activation(grad, activation, saved)
    wants = ctx.needs_input_grad
    grad_bias, grad_residual = epilogue_gradients(grad, ctx.kinds, bias_axis, wants[2:4])
    narrow = grad.to(dense.dtype)
    grad_sparse = grad_dense = None
    if wants[0]:
        grad_sparse = by_sparse(sparse, narrow, dense, linear, scale)
    if wants[1]:
        grad_dense = by_dense(sparse, narrow, linear, scale)
    return grad_sparse, grad_dense, grad_bias, grad_residual, None, None, None, None, None


def _backward_sampled(ctx, grad):
    raise NotImplementedError(
        "a product with a SparseTensor cannot be differentiated twice by the SparseTensor: use sparsecomp.ops.spmm on "
        "its values"
    )


def _backward_to_dense(ctx, grad):
    (sparse,) = ctx.saved_tensors
    return torch.ops.sparsecomp.sparse_gather.default(sparse, grad)


def _backward_gather(ctx, grad):
    # the gather's own gradient is the dense tensor of what is stored
    return None, sparse_to_dense(grad)


def _save_sparse(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


for _name, _function, _setup, _gradient in (
    ("sparse_matmul", _dense, save_product, product_gradients),
    ("sparse_sampled", _dense_sampled, None, _backward_sampled),
    ("sparse_to_dense", lambda sparse: sparse.clone(), _save_sparse, _backward_to_dense),
    ("sparse_gather", lambda sparse, dense: dense.clone(), None, _backward_gather),
):
    implement(_name, _function)
    torch.library.register_autograd(f"sparsecomp::{_name}", _gradient, setup_context=_setup, lib=library)
