"""What stands around the layers of a residual block, in plain torch: a norm, an activation, and their gradients.

The gradients are written out and are torch's operators, so that they can be differentiated again.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

NORMS = ("rms", "layer", "none")
ACTIVATIONS = ("relu", "tanh", "gelu", "sine_abs", "sine_relu", "sine_none")
"""A sine's second word says what it decays with: see `damped_sine`."""
FAR = 1e30
"""Inputs of a sine beyond this count as this, so that no product of theirs is infinite."""

_DECAYS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "abs": (torch.abs, torch.sign), "relu": (F.relu, lambda z: torch.gt(z, 0).to(z.dtype)),
    "none": (torch.zeros_like, torch.zeros_like),
}  # fmt: skip
"""g of z, and its derivative."""


def normalised(x: Tensor, norm: str, eps: float, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """x over the root of its mean square along the last axis, for "layer" after its mean was taken away."""
    if norm != "none":
        x = x - x.mean(-1, keepdim=True) if norm == "layer" else x
        x = x * _rate(x, eps)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _rate(centred: Tensor, eps: float) -> Tensor:
    return (centred.square().mean(-1, keepdim=True) + eps).rsqrt()


def by_normalised(
    grad: Tensor, x: Tensor, norm: str, eps: float, operands: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of `normalised` by x, and by weight and bias as far as they are given."""
    if norm == "none":
        return grad, []
    centred = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    rate = _rate(centred, eps)
    unit = centred * rate
    inner = grad * operands[0] if operands else grad
    by_x = rate * (inner - unit * (inner * unit).mean(-1, keepdim=True))
    by_x = by_x - by_x.mean(-1, keepdim=True) if norm == "layer" else by_x
    return by_x, [term.sum_to_size(one.shape) for term, one in zip((grad * unit, grad), operands, strict=False)]


def damped_sine(z: Tensor, decays: str, shape: Sequence[Tensor]) -> Tensor:
    """A · exp(-d · g(z)) · sin(f · z + phi), where g(z) is the magnitude ("abs"), the ReLU ("relu") or 0 ("none").

    Args:
        shape: A, f and d, and phi if there is one, by feature.
    """
    z = z.clamp(-FAR, FAR)
    amplitude, frequency, decay, *phase = shape
    angle = frequency * z + phase[0] if phase else frequency * z
    return amplitude * torch.exp(-decay * _DECAYS[decays][0](z)) * torch.sin(angle)


def _by_damped_sine(grad: Tensor, z: Tensor, decays: str, shape: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    inside, z = z.abs() <= FAR, z.clamp(-FAR, FAR)
    amplitude, frequency, decay, *phase = shape
    angle = frequency * z + phase[0] if phase else frequency * z
    damped, slope = (function(z) for function in _DECAYS[decays])
    fallen = grad * torch.exp(-decay * damped)
    sine, cosine = amplitude * fallen * torch.sin(angle), amplitude * fallen * torch.cos(angle)
    by_z = torch.where(inside, frequency * cosine - decay * slope * sine, 0.0)
    terms = (fallen * torch.sin(angle), cosine * z, -damped * sine, cosine)
    return by_z, [term.sum_to_size(one.shape) for term, one in zip(terms, shape, strict=False)]


def activated(z: Tensor, activation: str, shape: Sequence[Tensor]) -> Tensor:
    """One of `ACTIVATIONS`; `shape` as of `damped_sine`, else empty."""
    name, _, decays = activation.partition("_")
    if name == "sine":
        return damped_sine(z, decays, shape)
    return {"relu": F.relu, "tanh": torch.tanh, "gelu": F.gelu}[name](z)


def by_activated(grad: Tensor, z: Tensor, activation: str, shape: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Gradients of `activated` by z and by the tensors of `shape`."""
    name, _, decays = activation.partition("_")
    if name == "sine":
        return _by_damped_sine(grad, z, decays, shape)
    if name == "tanh":
        return grad * (1 - torch.tanh(z).square()), []
    if name == "relu":
        return torch.where(z > 0, grad, 0.0), []
    bell = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return grad * (0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * bell), []
