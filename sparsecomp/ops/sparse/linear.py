"""A linear layer by a sparse weight, on plain tensors: the one node that stands for it in a graph.

It is `sparsecomp.ops.spmm` of the transposed input, with the input's leading axes and a result whose rows lie
contiguous, so that a layer is one operator and not five with its views.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, is_autocast_enabled

from sparsecomp.errors import FormatError
from sparsecomp.ops.library import TAGS, differentiable, implement, library
from sparsecomp.ops.sparse.sddmm import run_sddmm
from sparsecomp.ops.sparse.spmm import before_activation, epilogue, epilogue_gradients, run_spmm
from sparsecomp.reference.patterns import Layout, check_pattern, compressed, stored_shape
from sparsecomp.reference.precision import accumulator, without_autocast
from sparsecomp.reference.sparse import compact_product, compact_sampled, without_spare

library.define(
    "sparse_linear(Tensor x, Tensor values, Tensor[] pattern, Tensor? bias, Tensor? residual, str layout, "
    "bool transpose, str activation, str kernel) -> Tensor",
    tags=TAGS,
)
library.define(
    "sparse_linear_values(Tensor x, Tensor grad, Tensor[] pattern, str layout, bool transpose) -> Tensor",
    tags=TAGS,
)

LINEAR = torch.ops.sparsecomp.sparse_linear.default


def sparse_linear(
    x: Tensor, values: Tensor, pattern: Sequence[Tensor], layout: str, *, transpose: bool = False,
    bias: Tensor | None = None, residual: Tensor | None = None, activation: str = "none", kernel: str = "",
) -> Tensor:  # fmt: skip
    """activation(x @ op(S).mT + bias + residual), summed in float32 (float64 for float64), rounded once.

    Under autocast x and values are taken as torch's own products take theirs.

    Args:
        x: (..., k), of the dtype of `values`.
        values: of S, without a batch.
        pattern: index arrays of S, and perhaps of its transpose; see `sparsecomp.reference.patterns`. They begin at 0;
            a gradient holds anything in spare capacity behind the last entry.
        layout: of S, from `Layout.written`.
        transpose: op(S) is the transpose of S.
        bias: (m,), one number a row of op(S).
        residual: of the result's shape.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid" or "tanh".
        kernel: name of the kernel that is to do it on CUDA, which a compiler may know to be the best for the host;
            empty for the one that is expected to take the device the least time.

    Returns:
        (..., m), contiguous. Gradients flow to x, values, bias and residual.

    Raises:
        FormatError: operands that do not belong together, or an unknown word.
    """
    if not isinstance(x, Tensor):
        raise no_tensor(x, values)
    x, values = autocast(x, values)
    return LINEAR(x, values, pattern, bias, residual, layout, transpose, activation, kernel)


def no_tensor(x: object, values: Tensor) -> FormatError:
    """What is raised of an input that is none."""
    return FormatError(f"x is a {type(x).__name__}, needs a tensor of the dtype of values, {values.dtype}")


def autocast(dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
    """Two operands as torch's own products take them where autocast is on, which leaves float64 alone."""
    device = dense.device.type
    if device == "meta" or not is_autocast_enabled(device):
        return dense, sparse
    dtype = torch.get_autocast_dtype(device)
    return _lowered(dense, dtype), _lowered(sparse, dtype)


def _lowered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


def by_rows(
    spmm: Callable[..., Tensor], x: Tensor, values: Tensor, pattern: Sequence[Tensor], bias: Tensor | None,
    residual: Tensor | None, layout: Layout, transpose: bool, activation: str, scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The layer by an implementation of the operator `spmm`, which sees neither whose rows they are nor how many axes.

    Raises:
        FormatError: x has no row, or the residual is not of the result's shape.
    """
    m, size = layout.shape[1 if transpose else 0], x.shape
    if not size or (residual is not None and residual.shape != (*size[:-1], m)):
        beside = None if residual is None else tuple(residual.shape)
        raise FormatError(f"x is {tuple(size)} and the residual {beside}: needs (..., k) and (..., {m})")
    rows = x if x.dim() == 2 else x.reshape(size[:-1].numel(), size[-1])
    beside = None if residual is None else residual.reshape(rows.shape[0], m).mT
    out = spmm(values, pattern, rows.mT, bias, beside, *layout, transpose, "row", activation, scale, dtype, True).mT
    return out if x.dim() == 2 else out.view(*size[:-1], m)


def residual_rows(residual: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """The residual of a layer whose result has this shape, (rows, m).

    Raises:
        FormatError: it has another.
    """
    if residual is None:
        return None
    if residual.shape != tuple(shape):
        raise FormatError(f"the residual is {tuple(residual.shape)}, needs the result's shape, {tuple(shape)}")
    return residual.reshape(torch.Size(shape[:-1]).numel(), shape[-1])


def sampled_by_rows(
    sddmm: Callable[..., Tensor], x: Tensor, grad: Tensor, pattern: Sequence[Tensor], layout: Layout, transpose: bool,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """The gradient by the values from that by the result, by an implementation of the operator `sddmm`."""
    a = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1]).mT
    b = x.reshape(x.shape[:-1].numel(), x.shape[-1]).mT
    return sddmm(*((b, a) if transpose else (a, b)), pattern, *layout, scale)


def _reference(x, values, pattern, bias, residual, layout, transpose, activation, kernel):
    layout = Layout.read(layout)
    if not layout.plain:
        return by_rows(partial(run_spmm, "cpu"), x, values, pattern, bias, residual, layout, transpose, activation)
    shape = result_shape(x, values, pattern, bias, residual, layout, transpose)
    wide, matrix = accumulator(x.dtype), without_spare(compressed(values, pattern, layout, transpose))
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    with without_autocast(x):
        product = compact_product(*matrix[:2], matrix.values.to(wide), matrix.shape, rows.to(wide).mT).mT
    beside = None if residual is None else residual.reshape(product.shape)
    out = epilogue(product, bias, beside, "column", activation, 1.0)
    return out.to(x.dtype).contiguous().view(shape)


def _cuda(x, values, pattern, bias, residual, layout, transpose, activation, kernel):
    how = (Layout.read(layout), transpose, activation)
    if _are_contiguous(x, values, bias, residual, *pattern):
        out = _launched(x, values, pattern, bias, residual, *how, kernel)
        if out is not None:
            return out
    result_shape(x, values, pattern, bias, residual, how[0], transpose)
    return by_rows(partial(run_spmm, "cuda"), x, values, pattern, bias, residual, *how)


def _are_contiguous(*operands: Tensor | None) -> bool:
    for operand in operands:  # noqa: SIM110  (a generator takes the host as long again)
        if operand is not None and not operand.is_contiguous():
            return False
    return True


def _launched(x, values, pattern, bias, residual, layout: Layout, transpose, activation, kernel) -> Tensor | None:
    from sparsecomp.lowering.sparse import layer as sparse_layer  # loads Triton

    if not transpose:
        return sparse_layer.layer_product(x, values, pattern, bias, residual, layout, activation, kernel)
    if len(pattern) == layout.own or layout.entry:
        return None
    from sparsecomp.lowering.sparse.transposed import transposed_matrix

    matrix = transposed_matrix(values, pattern, layout)
    of_columns = Layout("csr", (1, 1), matrix.shape, (matrix.skew, layout.skews[0]))
    return sparse_layer.layer_product(
        x, matrix.values, matrix[:2], bias, residual, of_columns, activation, kernel, filled=layout.kind.FILLED
    )


def _reference_gradient(x, grad, pattern, layout, transpose):
    layout = Layout.read(layout)
    sddmm = _compact_sddmm if layout.plain else partial(run_sddmm, "cpu")
    return sampled_by_rows(sddmm, x, grad, pattern, layout, transpose)


def _compact_sddmm(a, b, pattern, *rest):
    wide = accumulator(a.dtype)
    pointers, indices = pattern[:2]
    entries = int(pointers[-1])
    with without_autocast(a):
        found = compact_sampled(a.to(wide), b.to(wide), pointers, indices[:entries]).to(a.dtype)
    return found if entries == indices.numel() else F.pad(found, (0, indices.numel() - entries))


def _cuda_gradient(x, grad, pattern, layout, transpose):
    layout = Layout.read(layout)
    if layout.plain and _are_contiguous(x, grad, *pattern):
        from sparsecomp.lowering.sparse import layer as sparse_layer  # loads Triton

        operands = (x, grad) if transpose else (grad, x)
        found = sparse_layer.layer_sampled(*operands, pattern[0], pattern[1], layout.skews[0])
        if found is not None:
            return found
    return sampled_by_rows(partial(run_sddmm, "cuda"), x, grad, pattern, layout, transpose)


def _fake_gradient(x, grad, pattern, layout, transpose):
    return grad.new_empty(stored_shape(pattern, Layout.read(layout)))


def _fake(x, values, pattern, bias, residual, layout, transpose, activation, kernel):
    return x.new_empty(result_shape(x, values, pattern, bias, residual, Layout.read(layout), transpose))


def result_shape(x, values, pattern, bias, residual, layout: Layout, transpose) -> tuple[int, ...]:
    """Shape of the result, after all checks that look at no contents."""
    check_pattern(values, pattern, layout)
    m, k = layout.shape[::-1] if transpose else layout.shape
    if x.dim() == 0 or x.shape[-1] != k or x.dtype != values.dtype or values.dim() != layout.kind.VALUE_DIMS:
        raise FormatError(
            f"x is {tuple(x.shape)} {x.dtype} and values are {tuple(values.shape)} {values.dtype}: needs (..., {k}) "
            "and one dtype, without a batch of values"
        )
    shape = (*x.shape[:-1], m)
    if (bias is not None and bias.shape != (m,)) or (residual is not None and residual.shape != shape):
        given = [None if operand is None else tuple(operand.shape) for operand in (bias, residual)]
        raise FormatError(f"bias and residual have shapes {given[0]} and {given[1]}, need ({m},) and {shape}")
    return shape


def _save(ctx, inputs, output):
    x, values, pattern, bias, residual, layout, transpose, activation, _ = inputs
    smooth = activation not in ("none", "relu")
    # smooth ones are computed again from their operands, which are smaller to keep than what went into them
    saved = (bias, residual, None) if smooth else (None, None, output if activation == "relu" else None)
    ctx.save_for_backward(x, values, *saved)
    # DistributedDataParallel writes the same indices again in each forward, which must be no reason not to go backward
    ctx.pattern = pattern
    ctx.kinds = [None if operand is None else (operand.dtype, operand.shape) for operand in (bias, residual)]
    ctx.how = layout, transpose, activation


def _backward(ctx, grad):
    x, values, bias, residual, saved = ctx.saved_tensors
    pattern = ctx.pattern
    layout, transpose, activation = ctx.how
    if activation not in ("none", "relu"):
        saved = sparse_linear(x, values, pattern, layout, transpose=transpose, bias=bias, residual=residual)
    grad = before_activation(grad, activation, saved)
    wants = ctx.needs_input_grad
    grad_bias, grad_residual = epilogue_gradients(grad, ctx.kinds, "column", wants[3:5])
    narrow = grad.to(x.dtype)
    grad_x = grad_values = None
    if wants[0]:
        grad_x = sparse_linear(narrow, values, pattern, layout, transpose=not transpose)
    if wants[1]:
        grad_values = torch.ops.sparsecomp.sparse_linear_values.default(x, narrow, pattern, layout, transpose)
    return grad_x, grad_values, [None] * len(pattern), grad_bias, grad_residual, *(None,) * 4


def _save_gradient(ctx, inputs, output):
    x, grad, ctx.pattern, *ctx.how = inputs
    ctx.save_for_backward(x, grad)


def _backward_gradient(ctx, by_values):
    (x, grad), pattern = ctx.saved_tensors, ctx.pattern
    layout, transpose = ctx.how
    by_x = by_grad = None
    if ctx.needs_input_grad[0]:
        by_x = sparse_linear(grad, by_values, pattern, layout, transpose=not transpose)
    if ctx.needs_input_grad[1]:
        by_grad = sparse_linear(x, by_values, pattern, layout, transpose=transpose)
    return by_x, by_grad, [None] * len(pattern), None, None


implement("sparse_linear", _reference, _cuda, _fake)
implement("sparse_linear_values", _reference_gradient, _cuda_gradient, _fake_gradient)
differentiable("sparse_linear", _backward, _save)
differentiable("sparse_linear_values", _backward_gradient, _save_gradient)
