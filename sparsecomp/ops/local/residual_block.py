"""A residual block of two layers of fixed fan-in as one operator: x + scale · second(activation(first(norm(x)))).

Its second result is what the activation is given, from which the gradients follow by those of `gather_dot`; being a
result, it is differentiated itself in a double backward.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.ops.library import TAGS, differentiable, implement, library
from sparsecomp.ops.local.gather_dot import gradient_by_input, gradient_by_weight
from sparsecomp.ops.sparse.linear import autocast
from sparsecomp.reference.local.residual_block import (
    ACTIVATIONS,
    NORMS,
    activated,
    by_activated,
    by_normalised,
    normalised,
)
from sparsecomp.reference.precision import KERNEL_DTYPES, accumulator

library.define(
    "residual_block(Tensor x, Tensor[] norm, Tensor[] first, Tensor[] sine, Tensor[] second, Tensor scale, "
    "Tensor[] first_index, Tensor[] second_index, str kind, float eps, str activation, str spread, bool keep) "
    "-> (Tensor, Tensor)",
    tags=TAGS,
)

Layer = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor], str], Tensor]


def residual_block(
    x: Tensor, first: Sequence[Tensor], second: Sequence[Tensor], scale: Tensor, first_index: Sequence[Tensor],
    second_index: Sequence[Tensor], *, norm: Sequence[Tensor] = (), kind: str = "none", eps: float = 0.0,
    sine: Sequence[Tensor] = (), activation: str = "relu", spread: str = "far",
) -> Tensor:  # fmt: skip
    """x + scale · second(activation(first(norm(x)))), the layers as of `gather_dot`.

    Sums are float32 (float64 for float64). What lies between the layers has the dtype of their weights, under autocast
    that of torch's own products.

    Args:
        x: (..., n), any strides.
        first, second: weight (n, k) and perhaps bias (n,) of each layer, all of one dtype.
        scale: one number, or one for each place of x's first axis, (x.shape[0], 1, ..., 1); of the dtype of x.
        first_index, second_index: (n, k), int32, and perhaps its transposed lists; see `gather_dot`.
        norm: weight (n,) and perhaps bias (n,).
        kind: "rms", "layer" or "none", over the last axis.
        eps: is added to the mean square.
        sine: of a sine A, f and d, and perhaps phi, (n,) each; see `sparsecomp.reference.local.residual_block`.
        activation: "relu", "tanh", "gelu", or "sine_abs", "sine_relu" or "sine_none".
        spread: as of `gather_dot`.

    Returns:
        As x, contiguous. Gradients flow to x, norm, first, sine, second and scale.

    Raises:
        FormatError: operands that do not belong together, or an unknown word.
    """
    tensors = x, *norm, *first, *sine, *second, scale
    keep = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    first, second = ([autocast(x, one)[1] for one in layer] for layer in (first, second))
    return torch.ops.sparsecomp.residual_block.default(
        x, norm, first, sine, second, scale, first_index, second_index, kind, eps, activation, spread, keep
    )[0]


def composed(
    x: Tensor, norm: Sequence[Tensor], first: Sequence[Tensor], sine: Sequence[Tensor], second: Sequence[Tensor],
    scale: Tensor, first_index: Sequence[Tensor], second_index: Sequence[Tensor], kind: str, eps: float,
    activation: str, spread: str, *, dtypes: tuple[torch.dtype, torch.dtype], layer: Layer,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The block step by step, and what the activation is given.

    Args:
        dtypes: of x and of the layers.
        layer: what computes one, of x, weight and bias, index and its lists, and spread.
    """
    own, inner = dtypes
    wide = accumulator(*dtypes)
    before = layer(normalised(x.to(wide), kind, eps, *norm).to(inner), first, first_index, spread)
    hidden = activated(before.to(wide), activation, sine).to(inner)
    out = x.to(wide) + scale.to(wide) * layer(hidden, second, second_index, spread).to(wide)
    return out.to(own), before


def by_operator(x: Tensor, layer: Sequence[Tensor], index: Sequence[Tensor], spread: str) -> Tensor:
    """A layer as the operator `gather_dot`."""
    weight, bias = layer if len(layer) == 2 else (layer[0], None)
    return torch.ops.sparsecomp.gather_dot.default(x, weight, index[0], bias, None, index[1:], "none", spread)


def _check(x, norm, first, sine, second, scale, first_index, second_index, kind, eps, activation, spread, keep):
    """All that looks at no contents."""
    if x.dim() == 0 or not x.is_floating_point() or kind not in NORMS or activation not in ACTIVATIONS:
        raise FormatError(
            f"x is {tuple(x.shape)} {x.dtype}, the norm {kind!r}, the activation {activation!r}: needs (..., n), one "
            f"of {', '.join(NORMS)}, and one of {', '.join(ACTIVATIONS)}"
        )
    features = x.shape[-1:]
    layers = [(layer[0], index[0]) for layer, index in ((first, first_index), (second, second_index))]
    if any(
        index.dim() != 2 or index.dtype is not torch.int32 or weight.shape != index.shape
        or index.shape[0] != features[0] or weight.dtype != layers[0][0].dtype
        for weight, index in layers
    ):  # fmt: skip
        given = ", ".join(f"{tuple(one.shape)} {one.dtype}" for pair in layers for one in pair)
        raise FormatError(
            f"weights and indices are {given}: need ({features[0]}, k), weights one dtype, indices int32"
        )
    if any(one.shape != features for one in (*norm, *first[1:], *sine, *second[1:])):
        raise FormatError(f"norm, biases and sine need ({features[0]},) each")
    if len(sine) not in ((3, 4) if activation.startswith("sine") else (0,)):
        raise FormatError(f"sine has {len(sine)} tensors: a sine needs A, f and d, and may have phi, others nothing")
    by_sample = x.dim() > 1 and scale.shape == (x.shape[0], *[1] * (x.dim() - 1))
    if scale.dtype != x.dtype or not (scale.numel() == 1 or by_sample):
        raise FormatError(
            f"scale is {tuple(scale.shape)} {scale.dtype}: needs one number, or one for each of x's first axis, of "
            f"{x.dtype}"
        )


def _reference(*arguments: Any) -> tuple[Tensor, Tensor]:
    _check(*arguments)
    *rest, keep = arguments
    out, before = composed(*rest, dtypes=(rest[0].dtype, rest[2][0].dtype), layer=by_operator)
    return out.contiguous(), before if keep else before.new_empty(0)


def _cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, norm, first, sine, second, scale, first_index, second_index, kind, eps, activation, _, keep = arguments
    if not x.numel() or not {x.dtype, first[0].dtype} <= {*KERNEL_DTYPES}:
        return _reference(*arguments)
    out, before = _fake(*arguments)
    from sparsecomp.lowering.local import residual_block as lowered  # loads Triton

    rows = x.shape[:-1].numel(), x.shape[-1]
    norm, first, sine, second = ([one.contiguous() for one in some] for some in (norm, first, sine, second))
    indices = first_index[0].contiguous(), second_index[0].contiguous()
    lowered.residual_block(
        x.reshape(rows), norm, first, sine, second, scale.reshape(-1).contiguous(), indices, out.view(rows),
        before.view(rows) if keep else None, kind, eps, activation,
    )  # fmt: skip
    return out, before


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    _check(*arguments)
    x, _, first, *_, keep = arguments
    return x.new_empty(x.shape), first[0].new_empty(x.shape if keep else 0)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, norm, first, sine, second, scale, *indices, ctx.kind, ctx.eps, ctx.activation, ctx.spread, ctx.kept = inputs
    before = [output[1]] if ctx.kept else []
    ctx.save_for_backward(x, scale, *before, *norm, *first, *sine, *second)
    # the indices are not saved for autograd: DistributedDataParallel writes the same again in each forward
    ctx.indices, ctx.counts = indices, [len(some) for some in (before, norm, first, sine, second)]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_before: Tensor | None) -> tuple[Any, ...]:
    x, scale, *saved = ctx.saved_tensors
    before, norm, first, sine, second = _split(saved, ctx.counts)
    (first_index, second_index), wants = ctx.indices, ctx.needs_input_grad
    inner, wide = first[0].dtype, accumulator(x.dtype, first[0].dtype)
    normed = normalised(x.to(wide), ctx.kind, ctx.eps, *norm).to(inner)
    z = (before[0] if before else by_operator(normed, first, first_index, ctx.spread)).to(wide)
    hidden = activated(z, ctx.activation, sine).to(inner)
    grad = (torch.zeros_like(x) if grad is None else grad).to(wide)
    # before it is scaled: from it follows the gradient of the scale, without the sums that the scale multiplies
    by_hidden = _input_gradient(grad, second, second_index)
    by_scale = (by_hidden * hidden).sum(-1, keepdim=True)
    by_scale = by_scale + (grad * second[1]).sum(-1, keepdim=True) if second[1:] else by_scale
    by_second = _layer_gradients(hidden, grad * scale, second, second_index, wants[4])
    by_z, by_sine = by_activated(by_hidden * scale, z, ctx.activation, sine)
    by_z = by_z + grad_before if ctx.kept and grad_before is not None else by_z
    by_first = _layer_gradients(normed, by_z, first, first_index, wants[2])
    by_x, by_norm = by_normalised(_input_gradient(by_z, first, first_index), x.to(wide), ctx.kind, ctx.eps, norm)
    found = (grad + by_x, by_norm, by_first, by_sine, by_second, by_scale.sum_to_size(scale.shape))
    rounded = [_as(given, one) for given, one in zip(found, (x, norm, first, sine, second, scale), strict=True)]
    return *rounded, *([None] * len(some) for some in ctx.indices), None, None, None, None, None


def _split(tensors: Iterable[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    rest = iter(tensors)
    return [list(islice(rest, count)) for count in counts]


def _input_gradient(grad: Tensor, layer: Sequence[Tensor], index: Sequence[Tensor]) -> Tensor:
    """In the dtype of `grad`; a layer has as many inputs as outputs."""
    return gradient_by_input(grad.to(layer[0].dtype), layer[0], index[0], index[1:], grad.shape[-1]).to(grad.dtype)


def _layer_gradients(
    x: Tensor, grad: Tensor, layer: Sequence[Tensor], index: Sequence[Tensor], wants: Sequence[bool]
) -> list[Tensor | None]:
    by_weight = gradient_by_weight(x, grad.to(x.dtype), index[0], index[1:]) if wants[0] else None
    return [by_weight, *(grad.sum_to_size(bias.shape) for bias in layer[1:])]


def _as(gradients: Any, operands: Any) -> Any:
    """Gradients in the dtypes of the tensors they belong to."""
    if isinstance(operands, Tensor):
        return None if gradients is None else gradients.to(operands.dtype)
    return [_as(gradient, one) for gradient, one in zip(gradients, operands, strict=True)] or None


implement("residual_block", _reference, _cuda, _fake)
differentiable("residual_block", _backward, _save)
