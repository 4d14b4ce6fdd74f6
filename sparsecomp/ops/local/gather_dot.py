"""A layer of fixed fan-in as one operator: each output is the dot product of k weights and k gathered inputs.

The tensor (..., n_out, k) of gathered inputs never exists. It is closed under differentiation: its gradients are two
more operators, and the gradients of those are the three again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.lowering.launch.epilogue import ACTIVATIONS
from sparsecomp.ops.library import TAGS, differentiable, implement, library
from sparsecomp.ops.sparse.linear import autocast
from sparsecomp.ops.sparse.spmm import before_activation, epilogue, epilogue_gradients
from sparsecomp.reference.local import gather_dot as reference
from sparsecomp.reference.local.spread import SPREADS
from sparsecomp.reference.local.transposed import current_lists
from sparsecomp.reference.precision import KERNEL_DTYPES, accumulator, without_autocast

library.define(
    "gather_dot(Tensor x, Tensor weight, Tensor index, Tensor? bias, Tensor? residual, Tensor[] transposed, "
    "str activation, str spread) -> Tensor",
    tags=TAGS,
)
library.define(
    "gather_dot_input(Tensor grad, Tensor weight, Tensor index, Tensor[] transposed, SymInt inputs) -> Tensor",
    tags=TAGS,
)
library.define("gather_dot_weight(Tensor x, Tensor grad, Tensor index, Tensor[] transposed) -> Tensor", tags=TAGS)


def gather_dot(
    x: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None,
    transposed: Sequence[Tensor] = (), activation: str = "none", spread: str = "far",
) -> Tensor:  # fmt: skip
    """activation(y + bias + residual), where y[..., o] is the sum of weight[o, j] · x[..., index[o, j]] over j.

    Sums are float32 (float64 for float64), rounded once. Under autocast x and weight are taken as torch's own products
    take theirs.

    Args:
        x: (..., n_in), of the dtype of `weight` and any strides.
        weight: (n_out, k).
        index: (n_out, k), int32, in 0 to n_in - 1, which is not looked at; inputs may repeat.
        bias: (n_out,).
        residual: of the result's shape.
        transposed: pointers (n_in + 1,) and order (n_out · k,) of an index that stays, which the gradient by x goes
            through; or all of `kept_lists`, which follow every write to the index in place: see
            `sparsecomp.reference.local.transposed`. Made in each backward where they are left out.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid" or "tanh".
        spread: how far apart neighbouring outputs read, a word of `sparsecomp.reference.local.spread`, by which a GPU
            chooses how it gathers; any gives the right result.

    Returns:
        (..., n_out), contiguous. Gradients flow to x, weight, bias and residual.

    Raises:
        FormatError: operands that do not belong together, or an unknown word.
    """
    x, weight = autocast(x, weight)
    return torch.ops.sparsecomp.gather_dot.default(
        x, weight, index, bias, residual, transposed, activation, spread
    )


def _result_shape(
    x: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None, residual: Tensor | None,
    transposed: Sequence[Tensor], activation: str, spread: str,
) -> tuple[int, ...]:  # fmt: skip
    """Shape of the result, after all checks that look at no contents."""
    if index.dim() != 2 or index.dtype is not torch.int32 or weight.shape != index.shape:
        raise FormatError(
            f"weight is {tuple(weight.shape)}, index {tuple(index.shape)} {index.dtype}: both need (n_out, k), the "
            "index int32"
        )
    if x.dim() == 0 or x.dtype != weight.dtype or not x.is_floating_point():
        raise FormatError(
            f"x is {tuple(x.shape)} {x.dtype}, weight {weight.dtype}: needs (..., n_in) and one floating dtype"
        )
    shape = (*x.shape[:-1], index.shape[0])
    if (bias is not None and bias.shape != shape[-1:]) or (residual is not None and residual.shape != shape):
        given = [None if operand is None else tuple(operand.shape) for operand in (bias, residual)]
        raise FormatError(f"bias and residual have shapes {given[0]} and {given[1]}, need {shape[-1:]} and {shape}")
    if len(transposed) not in (0, 2, 3):
        raise FormatError(
            f"transposed has {len(transposed)} tensors, needs pointers and order, all of kept_lists, or nothing"
        )
    if activation not in ACTIVATIONS:
        raise FormatError(f"activation is {activation!r}, needs one of {', '.join(ACTIVATIONS)}")
    if spread not in SPREADS:
        raise FormatError(f"spread is {spread!r}, needs one of {', '.join(SPREADS)}")
    return shape


def _rows(x: Tensor) -> Tensor:
    """As a matrix, in the dtype that sums are kept in."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]).to(accumulator(x.dtype))


def _product(x, weight, index, bias, residual, transposed, activation, spread):
    shape = _result_shape(x, weight, index, bias, residual, transposed, activation, spread)
    with without_autocast(x):
        found = reference.gathered_product(_rows(x), weight.to(accumulator(x.dtype)), index)
        beside = None if residual is None else residual.reshape(found.shape)
        out = epilogue(found, bias, beside, "column", activation, 1.0)
    return out.to(x.dtype).contiguous().view(shape)


def _by_input(grad, weight, index, transposed, inputs):
    with without_autocast(grad):
        lists = current_lists(index, inputs, transposed)
        found = reference.by_input(_rows(grad), weight.to(accumulator(grad.dtype)), index, lists, inputs)
    return found.to(grad.dtype).contiguous().view(*grad.shape[:-1], inputs)


def _by_weight(x, grad, index, transposed):
    with without_autocast(x):
        return reference.by_weight(_rows(x), _rows(grad), index).to(x.dtype)


def _product_cuda(x, weight, index, bias, residual, transposed, activation, spread):
    out = x.new_empty(_result_shape(x, weight, index, bias, residual, transposed, activation, spread))
    if not out.numel():
        return out
    if x.dtype not in KERNEL_DTYPES:
        return _product(x, weight, index, bias, residual, transposed, activation, spread)
    from sparsecomp.lowering.local import gather_dot as lowered  # loads Triton

    rows, bias = x.shape[:-1].numel(), None if bias is None else bias.contiguous()
    lowered.gather_dot(
        x.reshape(rows, x.shape[-1]), weight.contiguous(), index.contiguous(), bias,
        None if residual is None else residual.reshape(rows, index.shape[0]), out.view(rows, index.shape[0]),
        activation, spread,
    )  # fmt: skip
    return out


def _by_input_cuda(grad, weight, index, transposed, inputs):
    if not grad.numel():
        return grad.new_zeros(*grad.shape[:-1], inputs)
    from sparsecomp.lowering.local import gather_dot_input as lowered  # loads Triton
    from sparsecomp.lowering.local import transposed as lists

    pointers, order = lists.compared_lists(index, inputs, transposed)
    if grad.dtype not in KERNEL_DTYPES:
        return _by_input(grad, weight, index, (pointers, order), inputs)
    rows = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])
    out = grad.new_empty(rows.shape[0], inputs)
    lowered.gather_dot_input(rows, weight.contiguous(), pointers, order, out)
    return out.view(*grad.shape[:-1], inputs)


def _by_weight_cuda(x, grad, index, transposed):
    if not x.numel():
        return x.new_zeros(index.shape)
    if x.dtype not in KERNEL_DTYPES:
        return _by_weight(x, grad, index, transposed)
    from sparsecomp.lowering.local import gather_dot_weight as lowered  # loads Triton

    rows, out = x.shape[:-1].numel(), x.new_empty(index.shape)
    x, grad = x.reshape(rows, x.shape[-1]), grad.reshape(rows, grad.shape[-1])
    lowered.gather_dot_weight(x, grad, index.contiguous(), out)
    return out


def _fake_product(x, weight, index, bias, residual, transposed, activation, spread):
    return x.new_empty(_result_shape(x, weight, index, bias, residual, transposed, activation, spread))


def _fake_by_input(grad, weight, index, transposed, inputs):
    return grad.new_empty((*grad.shape[:-1], inputs))


def _fake_by_weight(x, grad, index, transposed):
    return x.new_empty(index.shape)


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, weight, ctx.index, bias, residual, ctx.transposed, ctx.activation, *ctx.hints = inputs
    smooth = ctx.activation not in ("none", "relu")
    # smooth ones are computed again from their operands, which are smaller to keep than what went into them
    saved = (bias, residual, None) if smooth else (None, None, output if ctx.activation == "relu" else None)
    # the index is not saved for autograd: DistributedDataParallel writes the same one again in each forward
    ctx.save_for_backward(x, weight, *saved)
    ctx.kinds = [None if operand is None else (operand.dtype, operand.shape) for operand in (bias, residual)]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias, residual, saved = ctx.saved_tensors
    index, transposed, wants = ctx.index, ctx.transposed, ctx.needs_input_grad
    if ctx.activation not in ("none", "relu"):
        (spread,) = ctx.hints
        saved = gather_dot(x, weight, index, bias, residual=residual, transposed=transposed, spread=spread)
    grad = before_activation(grad, ctx.activation, saved)
    grad_bias, grad_residual = epilogue_gradients(grad, ctx.kinds, "column", wants[3:5])
    narrow = grad.to(x.dtype)
    by_x = gradient_by_input(narrow, weight, index, transposed, x.shape[-1]) if wants[0] else None
    by_weight = gradient_by_weight(x, narrow, index, transposed) if wants[1] else None
    return by_x, by_weight, None, grad_bias, grad_residual, [None] * len(transposed) or None, None, None


def gradient_by_input(grad: Tensor, weight: Tensor, index: Tensor, transposed: Sequence[Tensor], inputs: int) -> Tensor:
    return torch.ops.sparsecomp.gather_dot_input.default(grad, weight, index, transposed, inputs)


def gradient_by_weight(x: Tensor, grad: Tensor, index: Tensor, transposed: Sequence[Tensor]) -> Tensor:
    return torch.ops.sparsecomp.gather_dot_weight.default(x, grad, index, transposed)


def _save_by_input(ctx: Any, inputs: Any, output: Tensor) -> None:
    grad, weight, ctx.index, ctx.transposed, _ = inputs
    ctx.save_for_backward(grad, weight)


def _backward_by_input(ctx: Any, x: Tensor) -> tuple[Any, ...]:
    (grad, weight), index, transposed = ctx.saved_tensors, ctx.index, ctx.transposed
    by_grad = gather_dot(x, weight, index, transposed=transposed) if ctx.needs_input_grad[0] else None
    by_weight = gradient_by_weight(x, grad, index, transposed) if ctx.needs_input_grad[1] else None
    return by_grad, by_weight, None, [None] * len(transposed) or None, None


def _save_by_weight(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, grad, ctx.index, ctx.transposed = inputs
    ctx.save_for_backward(x, grad)


def _backward_by_weight(ctx: Any, weight: Tensor) -> tuple[Any, ...]:
    (x, grad), index, transposed = ctx.saved_tensors, ctx.index, ctx.transposed
    by_x = gradient_by_input(grad, weight, index, transposed, x.shape[-1]) if ctx.needs_input_grad[0] else None
    by_grad = gather_dot(x, weight, index, transposed=transposed) if ctx.needs_input_grad[1] else None
    return by_x, by_grad, None, [None] * len(transposed) or None


for _name, _cpu, _cuda, _shape, _setup, _formula in (
    ("gather_dot", _product, _product_cuda, _fake_product, _save, _backward),
    ("gather_dot_input", _by_input, _by_input_cuda, _fake_by_input, _save_by_input, _backward_by_input),
    ("gather_dot_weight", _by_weight, _by_weight_cuda, _fake_by_weight, _save_by_weight, _backward_by_weight),
):
    implement(_name, _cpu, _cuda, _shape)
    differentiable(_name, _formula, _setup)
