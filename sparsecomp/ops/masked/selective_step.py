"""Selective AdamW on theta in its weight's memory, as one operator: gather, averages, consistency, selection, step.

In plain torch it is some forty passes over vectors of the pruned elements' length; on CUDA it is one. Where elements
compete for a number of places it is two, with a selection between them.
"""

import math

import torch
from torch import Tensor

from sparsecomp.errors import MaskError
from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.ops.masked.elementwise import count_on, select_largest
from sparsecomp.reference.precision import KERNEL_DTYPES

library.define(
    "selective_step(Tensor(a!) weight, Tensor grad, Tensor pruned, Tensor(b!) mean, Tensor(c!) size, "
    "Tensor(d!) square, Tensor steps, Tensor lr, float beta, float beta2, float eps, float weight_decay, float tau, "
    "float delta, int warm_up, Tensor? count, bool whole) -> ()",
    tags=TAGS,
)


@torch.no_grad()
def selective_step(
    weight: Tensor, grad: Tensor, pruned: Tensor, mean: Tensor, size: Tensor, square: Tensor, steps: Tensor, *,
    lr: Tensor | float, betas: tuple[float, float], eps: float, weight_decay: float, tau: float, delta: float,
    warm_up: int, count: Tensor | int | None = None, whole: bool = False,
) -> None:  # fmt: skip
    """Move theta, the elements of `weight` that are `pruned`, where their gradients agree over time.

    In place, with g = grad at P: averages m of g and v of |g| by betas[0], s of g² by betas[1]; C = m.abs() / (v +
    delta). Where C > tau, or among the `count` largest C (ties to the first), and after `warm_up` steps, theta becomes
    theta · (1 - lr · weight_decay) - lr · (m / (1 - betas[0]^steps)) / (sqrt(s / (1 - betas[1]^steps)) + eps). All else
    of the weight keeps its bits. It can be captured in a CUDA graph, whose replays read `steps` and a tensor `lr` anew.

    Args:
        weight: float32, float16, bfloat16 or float64, of any shape.
        grad: dL/dW_eff, of the weight's shape.
        pruned: (n,) flat positions, int32 or int64, none twice; ascending ones are fastest. Or a bool tensor of the
            weight's shape, whose elements need not be counted: the averages then have that shape too, as with `whole`.
        mean, size, square: (n,) float32, contiguous: m, v and s. At the first step they begin at 0, whatever they hold.
        whole: mean and square have the weight's shape instead, and the averages lie at `pruned`, such as in the moments
            that AdamW keeps for the weight; nothing else of them is read or written.
        steps: 0-d integer on the weight's device: steps done, this one included.
        lr: a number, or a 0-d tensor on the weight's device.
        count: None to select by tau; a number, or a 0-d tensor on the weight's device.

    Raises:
        MaskError: tensors that do not belong together.

    The kernel differs from the same formulae in plain torch by a few roundings of float32. An element whose C rounds to
    the other side of tau moves, or stays, instead.
    """
    if not isinstance(lr, Tensor):
        lr = torch.full((), lr, dtype=torch.float64, device=weight.device)
    if isinstance(count, int):
        if not 0 <= count <= pruned.numel():
            raise MaskError(f"{count} of {pruned.numel()} elements cannot be selected: at most all can")
        count = count_on(weight.device, count)
    torch.ops.sparsecomp.selective_step.default(
        weight, grad, pruned, mean, size, square, steps, lr, *betas, eps, weight_decay, tau, delta, warm_up, count,
        whole,
    )  # fmt: skip


def adamw_moved(
    theta: Tensor, mean: Tensor, square: Tensor, steps: Tensor, lr: Tensor | float, beta: float, beta2: float,
    eps: float, weight_decay: float,
) -> Tensor:  # fmt: skip
    """AdamW's step of all elements (n,), from their averages, in theta's dtype."""
    wide = theta.to(torch.promote_types(theta.dtype, torch.float32))
    one, two = (-torch.expm1(steps.double() * math.log(b)) if b else torch.ones_like(steps) for b in (beta, beta2))
    step = (mean / one.float()) / ((square / two.float()).sqrt() + eps)
    if isinstance(lr, Tensor):
        keep, lr = (1 - lr.double() * weight_decay).to(wide.dtype), lr.to(wide.dtype)
    else:
        keep = 1 - lr * weight_decay
    return (wide * keep - lr * step).to(theta.dtype)


def _check(weight, grad, pruned, mean, size, square, steps, lr, count, whole) -> None:
    slots, shape = (mean, size, square), weight.shape if whole else pruned.shape
    by_mask = pruned.dtype is torch.bool
    fits = (mean.shape, size.shape, square.shape) == (shape, pruned.shape, shape)
    if grad.shape != weight.shape or (pruned.shape != weight.shape if by_mask else pruned.dim() != 1) or not fits:
        raise MaskError(
            f"the weight is {tuple(weight.shape)}, its gradient {tuple(grad.shape)}; there are {tuple(pruned.shape)} "
            f"positions and averages of {', '.join(str(tuple(slot.shape)) for slot in slots)}: each must match"
        )
    if any(slot.dtype is not torch.float32 or not slot.is_contiguous() for slot in slots):
        raise MaskError("the averages are contiguous and float32: make them with torch.zeros")
    if not weight.dtype.is_floating_point or pruned.dtype not in (torch.int32, torch.int64, torch.bool):
        raise MaskError(f"the weight is {weight.dtype}, positions are {pruned.dtype}: floating, and int32 or int64")
    if steps.dim() or lr.dim() or steps.dtype.is_floating_point or (count is not None and count.dim()):
        raise MaskError(f"steps is {steps.dtype} {tuple(steps.shape)}, lr {tuple(lr.shape)}: 0-d, steps an integer")
    if any(tensor.device != weight.device for tensor in (grad, pruned, *slots, steps, lr)):
        raise MaskError(f"all tensors of a step must be on the weight's device, {weight.device}")


def step_reference(
    weight, grad, pruned, mean, size, square, steps, lr, beta, beta2, eps, weight_decay, tau, delta, warm_up, count,
    whole=False,
) -> None:  # fmt: skip
    """The operator in plain torch, with its arguments in the schema's order."""
    _check(weight, grad, pruned, mean, size, square, steps, lr, count, whole)
    if pruned.dtype is torch.bool:
        return _by_mask(
            weight, grad, pruned, mean, size, square, steps, lr, beta, beta2, eps, weight_decay, tau, delta, warm_up,
            count,
        )  # fmt: skip
    moments = (mean, square)
    if whole:
        mean, square = (one.view(-1).index_select(0, pruned) for one in moments)
    g = grad.reshape(-1).index_select(0, pruned).float()
    _average(g, steps, beta, beta2, mean, size, square)
    if whole:
        for one, part in zip(moments, (mean, square), strict=True):
            one.view(-1).index_copy_(0, pruned.long(), part)
    consistency = mean.abs() / (size + delta)
    selected = consistency > tau if count is None else select_largest(consistency, count)
    theta = weight.reshape(-1).index_select(0, pruned)
    moved = adamw_moved(theta, mean, square, steps, lr, beta, beta2, eps, weight_decay)
    theta = torch.where(selected & (steps > warm_up), moved, theta)
    if weight.is_contiguous():
        weight.view(-1).index_copy_(0, pruned.long(), theta)
    else:
        weight.copy_(weight.reshape(-1).index_copy(0, pruned.long(), theta).view(weight.shape))


def _by_mask(
    weight, grad, pruned, mean, size, square, steps, lr, beta, beta2, eps, weight_decay, tau, delta, warm_up, count
) -> None:  # fmt: skip
    """All elements take the step, and it is kept of those that are pruned: how many they are need not be known."""
    moved_on = [slot.clone() for slot in (mean, size, square)]
    _average(grad.float(), steps, beta, beta2, *moved_on)
    for slot, new in zip((mean, size, square), moved_on, strict=True):
        slot.copy_(torch.where(pruned, new, slot))
    consistency = mean.abs() / (size + delta)
    if count is None:
        selected = pruned & (consistency > tau)
    else:
        # NaN ranks last of the pruned
        ranked = torch.where(pruned, consistency.nan_to_num(nan=-0.5), -1.0)
        selected = pruned & select_largest(ranked.reshape(-1), count).view(pruned.shape)
    moved = adamw_moved(weight, mean, square, steps, lr, beta, beta2, eps, weight_decay)
    weight.copy_(torch.where(selected & (steps > warm_up), moved, weight))


def _average(g, steps, beta, beta2, mean, size, square) -> None:
    for slot, new, gain in ((mean, g, 1 - beta), (size, g.abs(), 1 - beta), (square, g.square(), 1 - beta2)):
        slot.masked_fill_(steps == 1, 0).lerp_(new, gain)


def step_cuda(
    weight, grad, pruned, mean, size, square, steps, lr, beta, beta2, eps, weight_decay, tau, delta, warm_up, count,
    whole,
) -> None:  # fmt: skip
    """The operator on CUDA."""
    if weight.dtype not in KERNEL_DTYPES or grad.dtype not in KERNEL_DTYPES:
        return step_reference(
            weight, grad, pruned, mean, size, square, steps, lr, beta, beta2, eps, weight_decay, tau, delta, warm_up,
            count, whole,
        )  # fmt: skip
    _check(weight, grad, pruned, mean, size, square, steps, lr, count, whole)
    from sparsecomp.lowering.masked import selective_step as lowered  # loads Triton

    dense = weight.contiguous()
    lowered.selective_step(
        dense, grad.contiguous(), pruned.contiguous(), (mean, size, square), steps, lr, betas=(beta, beta2), tau=tau,
        delta=delta, eps=eps, weight_decay=weight_decay, warm_up=warm_up, count=count, whole=whole,
    )  # fmt: skip
    if dense is not weight:
        weight.copy_(dense)
    torch.autograd.graph.increment_version([one for one in (weight, mean, size, square) if not one.is_inference()])


def _fake(
    weight, grad, pruned, mean, size, square, steps, lr, beta, beta2, eps, weight_decay, tau, delta, warm_up, count,
    whole,
) -> None:  # fmt: skip
    _check(weight, grad, pruned, mean, size, square, steps, lr, count, whole)


implement("selective_step", step_reference, step_cuda, _fake)
