"""Sparse times dense with what usually follows it: activation(scale · (op(S) @ dense) + bias + residual).

One operator for all layouts of `sparsecomp.reference.patterns`. It is closed under differentiation: the gradient by the
dense operand is the same operator of the transpose, the one by the values is `sparsecomp.ops.sddmm` at the stored
places, so that no dense gradient of S ever exists.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.lowering.launch.epilogue import ACTIVATIONS
from sparsecomp.lowering.sparse.launcher import launcher_of
from sparsecomp.ops.library import TAGS, differentiable, implement, library
from sparsecomp.reference import sparse as sparse_reference
from sparsecomp.reference.patterns import Layout, check_pattern, layout_of
from sparsecomp.reference.precision import KERNEL_DTYPES

library.define(
    "spmm(Tensor values, Tensor[] pattern, Tensor dense, Tensor? bias, Tensor? residual, str format, SymInt[] block, "
    "SymInt[] shape, str[] skews, bool transpose, str bias_axis, str activation, float scale, ScalarType? dtype, "
    "bool by_column) -> Tensor",
    tags=TAGS,
)


def spmm(
    values: Tensor, pattern: Sequence[Tensor], dense: Tensor, layout: Layout, *, transpose: bool = False,
    bias: Tensor | None = None, bias_axis: str = "column", residual: Tensor | None = None, activation: str = "none",
    scale: float = 1.0, dtype: torch.dtype | None = None, by_column: bool = False,
) -> Tensor:  # fmt: skip
    """activation(scale · (op(S) @ dense) + bias + residual), summed in float32 (float64 for float64), rounded once.

    Args:
        values: of S, as `layout` says; a batch of them shares the pattern. float16, bfloat16, float32 or float64.
        pattern: index arrays of S, and perhaps of its transpose; see `sparsecomp.reference.patterns`.
        dense: (k, n) or (batch, k, n), of the dtype of `values` and any strides; k is S's columns, or its rows if
            `transpose`.
        transpose: multiply by the transpose of S.
        bias: (m,) with `bias_axis` "row", (n,) with "column"; None is not read, nor is a `residual` of None.
        residual: of the result's shape, any strides.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid" or "tanh".
        dtype: of the result; by default that of `dense`.
        by_column: the result's columns lie contiguous instead of its rows.

    Returns:
        (m, n), or (batch, m, n). Gradients flow to values, dense, bias and residual.

    Raises:
        FormatError: operands that do not belong together, or an unknown word.

    On CUDA, 2:4 in float16 or bfloat16 runs on sparse tensor cores where cuSPARSELt is installed, takes the product and
    is expected to be the fastest. A copy of the matrix, 9/16 of its dense size, is kept as long as `values`; a write to
    `values` or the index array is noticed (see `frozen_weights`). All activations but relu are then computed of the
    rounded sum, and a group with fewer than two values that are not zero is filled with a zero at a place of the
    library's choice, which only shows where `dense` is infinite or NaN.
    """
    return torch.ops.sparsecomp.spmm.default(
        values, pattern, dense, bias, residual, *layout, transpose, bias_axis, activation, scale, dtype, by_column
    )


def run_spmm(device: str, *arguments: Any) -> Tensor:
    """The operator's implementation for "cpu" or "cuda", for a caller that is below autograd and in a hurry.

    Args:
        arguments: all of the operator's, in order.
    """
    return _IMPLEMENTATIONS[device](*arguments)


def epilogue(
    product: Tensor, bias: Tensor | None, residual: Tensor | None, bias_axis: str, activation: str, scale: float
) -> Tensor:
    """A product in the dtype it was summed in, finished in that dtype; the product's memory is used."""
    if scale != 1.0:
        product.mul_(scale)
    if bias is not None:
        product.add_((bias[:, None] if bias_axis == "row" else bias).to(product.dtype))
    if residual is not None:
        product.add_(residual.to(product.dtype))
    return ACTIVATIONS[activation](product)


def before_activation(grad: Tensor, activation: str, saved: Tensor | None) -> Tensor:
    """The gradient in front of an activation; `saved` is relu's result, or what the others were given."""
    aten = torch.ops.aten
    if activation == "none" or saved is None:
        return grad
    if activation == "relu":
        return aten.threshold_backward.default(grad, saved, 0)
    if activation == "silu":
        return aten.silu_backward.default(grad, saved)
    if activation == "sigmoid":
        return aten.sigmoid_backward.default(grad, saved.sigmoid())
    if activation == "tanh":
        return aten.tanh_backward.default(grad, saved.tanh())
    return aten.gelu_backward.default(grad, saved, approximate="tanh" if activation == "gelu_tanh" else "none")


def _result_shape(values: Tensor, pattern, dense, bias, residual, layout: Layout, transpose, bias_axis, activation):
    """Shape of the result, after all checks that look at no contents."""
    check_pattern(values, pattern, layout)
    m, k = layout.shape[::-1] if transpose else layout.shape
    batched = values.dim() > layout.kind.VALUE_DIMS
    if dense.dim() not in (2, 3) or dense.shape[-2] != k:
        raise FormatError(f"dense has shape {tuple(dense.shape)}, needs ({k}, n) or (batch, {k}, n)")
    if batched and dense.dim() == 3 and dense.shape[0] != values.shape[0]:
        raise FormatError(f"values have a batch of {values.shape[0]}, dense one of {dense.shape[0]}: they must agree")
    if values.dtype != dense.dtype:
        raise FormatError(f"values are {values.dtype}, dense is {dense.dtype}: convert one of them")
    batch = (values.shape[0],) if batched else dense.shape[:-2]
    shape = (*batch, m, dense.shape[-1])
    if activation not in ACTIVATIONS or bias_axis not in ("row", "column"):
        raise FormatError(
            f"activation {activation!r}, bias_axis {bias_axis!r}: need one of {', '.join(ACTIVATIONS)}, and 'row' or "
            "'column'"
        )
    length = m if bias_axis == "row" else dense.shape[-1]
    if bias is not None and tuple(bias.shape) != (length,):
        raise FormatError(f"bias has shape {tuple(bias.shape)}, needs ({length},): one a {bias_axis}")
    if residual is not None and tuple(residual.shape) != shape:
        raise FormatError(f"residual has shape {tuple(residual.shape)}, needs the result's {shape}")
    for operand in (*pattern, dense, bias, residual):
        if operand is not None and operand.device != values.device:
            raise FormatError(f"operands are on {operand.device} and {values.device}: move them to one device")
    return shape


def _empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype, by_column: bool) -> Tensor:
    if not by_column:
        return like.new_empty(shape, dtype=dtype)
    return like.new_empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).mT


def _reference(
    values, pattern, dense, bias, residual, format, block, shape, skews, transpose, bias_axis, activation, scale,
    dtype, by_column,
):  # fmt: skip
    layout = layout_of(format, block, shape, skews)
    size = _result_shape(values, pattern, dense, bias, residual, layout, transpose, bias_axis, activation)
    dtype = dense.dtype if dtype is None else dtype
    product = sparse_reference.reference_product(values, pattern, dense, layout, transpose, dtype)
    out = epilogue(product, bias, residual, bias_axis, activation, scale)
    return _empty(values, size, dtype, by_column).copy_(out)


def _cuda(
    values, pattern, dense, bias, residual, format, block, shape, skews, transpose, bias_axis, activation, scale,
    dtype, by_column,
):  # fmt: skip
    layout = layout_of(format, block, shape, skews)
    size = _result_shape(values, pattern, dense, bias, residual, layout, transpose, bias_axis, activation)
    dtype = dense.dtype if dtype is None else dtype
    given = [operand.dtype for operand in (values, bias, residual) if operand is not None]
    if not all(each in KERNEL_DTYPES for each in (*given, dtype)):
        if transpose:
            from sparsecomp.lowering.sparse.transposed import transposed_matrix  # loads Triton

            transposed_matrix(values, pattern, layout)  # makes a kept transpose anew that is another matrix's
        return _reference(
            values, pattern, dense, bias, residual, format, block, shape, skews, transpose, bias_axis, activation,
            scale, dtype, by_column,
        )  # fmt: skip
    out = _empty(values, size, dtype, by_column)
    bias = None if bias is None else bias.contiguous()
    finish = {
        "bias": bias, "bias_axis": bias_axis, "residual": residual, "activation": activation, "scale": scale
    }  # fmt: skip
    launcher_of(layout, transpose).multiply(values, pattern, layout, transpose, dense, out, **finish)
    return out


def _fake(
    values, pattern, dense, bias, residual, format, block, shape, skews, transpose, bias_axis, activation, scale,
    dtype, by_column,
):  # fmt: skip
    layout = layout_of(format, block, shape, skews)
    size = _result_shape(values, pattern, dense, bias, residual, layout, transpose, bias_axis, activation)
    return _empty(values, size, dense.dtype if dtype is None else dtype, by_column)


def _save(ctx, inputs, output):
    values, pattern, dense, bias, residual, *layout, transpose, bias_axis, activation, scale, _, by_column = inputs
    smooth = activation not in ("none", "relu")
    # smooth ones are computed again from their operands, which are smaller to keep than what went into them
    saved = (bias, residual, None) if smooth else (None, None, output if activation == "relu" else None)
    ctx.save_for_backward(values, dense, *pattern, *saved)
    ctx.kinds = [None if operand is None else (operand.dtype, operand.shape) for operand in (bias, residual)]
    ctx.how = layout_of(*layout), transpose, bias_axis, activation, scale, by_column, output.dtype, smooth


def _backward(ctx, grad):
    values, dense, *pattern, bias, residual, saved = ctx.saved_tensors
    layout, transpose, bias_axis, activation, scale, by_column, dtype, smooth = ctx.how
    if smooth:
        saved = spmm(
            values, pattern, dense, layout, transpose=transpose, bias=bias, bias_axis=bias_axis, residual=residual,
            scale=scale, dtype=dtype, by_column=by_column,
        )  # fmt: skip
    grad = before_activation(grad, activation, saved)
    wants = ctx.needs_input_grad
    grad_bias, grad_residual = epilogue_gradients(grad, ctx.kinds, bias_axis, (wants[3], wants[4]))
    grad_values = grad_dense = None
    narrow = grad.to(dense.dtype)
    if wants[0]:
        grad_values = _values_gradient(narrow, dense, pattern, layout, transpose, scale, values)
    if wants[2]:
        grad_dense = spmm(
            values, pattern, narrow, layout, transpose=not transpose, scale=scale, by_column=is_by_column(dense)
        )  # fmt: skip
        grad_dense = grad_dense.sum(0) if grad_dense.dim() > dense.dim() else grad_dense
    return grad_values, [None] * len(pattern), grad_dense, grad_bias, grad_residual, *(None,) * 10


def epilogue_gradients(
    grad: Tensor, kinds: Sequence[Any], bias_axis: str, wants: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of bias and residual, whose (dtype, shape) are `kinds`, from that in front of the activation."""
    bias, residual = kinds
    axes = [axis for axis in range(grad.dim()) if axis != grad.dim() - (2 if bias_axis == "row" else 1)]
    # torch sums over all axes where none is named
    grad_bias = (grad.sum(axes) if axes else grad).to(bias[0]) if bias is not None and wants[0] else None
    grad_residual = grad.to(residual[0]) if residual is not None and wants[1] else None
    return grad_bias, grad_residual


def _values_gradient(grad, dense, pattern, layout, transpose, scale, values):
    from sparsecomp.ops.sparse.sddmm import sddmm  # each is the other's gradient

    if grad.dim() == 3 and values.dim() == layout.kind.VALUE_DIMS:
        # values that a batch shares: its sum is a product over all columns of the batch
        grad = grad.transpose(0, 1).flatten(1)
        dense = dense.transpose(0, 1).flatten(1)
    a, b = (dense, grad) if transpose else (grad, dense)
    return sddmm(a, b, pattern, layout, scale=scale)


def is_by_column(dense: Tensor) -> bool:
    """Whether columns lie contiguous and rows do not."""
    return dense.stride(-2) == 1 and dense.stride(-1) != 1


_IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {"cpu": _reference, "cuda": _cuda}
implement("spmm", _reference, _cuda, _fake)
differentiable("spmm", _backward, _save)
