"""The selective AdamW step on theta where it lies in its weight: gather, averages, selection, step, one pass."""

import math

import torch
from torch import Tensor

from sparsecomp.ops.library import KERNEL_DTYPES, library

library.define(
    "selective_step_(Tensor(a!) weight, Tensor grad, Tensor pruned, Tensor(b!) mean, Tensor(c!) size, "
    "Tensor(d!) square, Tensor steps, float lr, float beta, float beta2, float eps, float weight_decay, float tau, "
    "float delta, int warm_up) -> ()",
)


def selective_step(
    weight: Tensor, grad: Tensor, pruned: Tensor, mean: Tensor, size: Tensor, square: Tensor, steps: Tensor, *,
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, tau: float, delta: float, warm_up: int,
) -> None:  # fmt: skip
    """Move theta within ``weight``, in place, and its averages.

    With g the gradient at the pruned places: m = lerp(m, g, 1-b1), v = lerp(v, |g|, 1-b1), s = lerp(s, g^2, 1-b2).
    Where |m| / (v + delta) > tau and more than ``warm_up`` steps are done, theta becomes
    theta * (1 - lr * weight_decay) - lr * (m / (1-b1^steps)) / (sqrt(s / (1-b2^steps)) + eps); elsewhere it stays bit
    for bit.

    Args:
        weight: contiguous, float32, float16, bfloat16 or float64.
        grad: of its shape, contiguous.
        pruned: (p,) flat positions, int32 or int64, each once.
        mean, size, square: (p,) float32: m, v and s.
        steps: int64, 0-d on the device of ``weight``: steps done, this one included.
    """
    numbers = (lr, *betas, eps, weight_decay, tau, delta, warm_up)
    torch.ops.sparsecomp.selective_step_.default(weight, grad, pruned, mean, size, square, steps, *numbers)


def reference(
    weight, grad, pruned, mean, size, square, steps, lr, beta, beta2, eps, weight_decay, tau, delta, warm_up
):
    g = grad.reshape(-1).index_select(0, pruned).float()
    mean.lerp_(g, 1 - beta)
    size.lerp_(g.abs(), 1 - beta)
    square.lerp_(g.square(), 1 - beta2)
    theta = weight.view(-1).index_select(0, pruned)
    selected = (mean.abs() / (size + delta) > tau) & (steps > warm_up)
    moved = adamw_moved(theta, mean, square, steps, lr, beta, beta2, eps, weight_decay)
    weight.view(-1).index_copy_(0, pruned.long(), torch.where(selected, moved, theta))


def adamw_moved(
    theta: Tensor, mean: Tensor, square: Tensor, steps: Tensor, lr: float, beta: float, beta2: float, eps: float,
    weight_decay: float,
) -> Tensor:  # fmt: skip
    """AdamW's step of all elements (p,), from their averages, in theta's dtype."""
    one, two = (-torch.expm1(steps.double() * math.log(b)) if b else torch.ones_like(steps) for b in (beta, beta2))
    step = (mean / one.float()) / ((square / two.float()).sqrt() + eps)
    return (theta.float() * (1 - lr * weight_decay) - lr * step).to(theta.dtype)


def _cuda(weight, grad, pruned, *rest):
    if weight.dtype not in KERNEL_DTYPES or grad.dtype not in KERNEL_DTYPES:
        return reference(weight, grad, pruned, *rest)
    from sparsecomp.lowering import selective_step  # loads Triton

    return selective_step.run(weight, grad.contiguous(), pruned, *rest)


library.impl("selective_step_", reference, "CPU")
library.impl("selective_step_", _cuda, "CUDA")
torch.library.register_fake("sparsecomp::selective_step_", lambda *arguments: None, lib=library)
