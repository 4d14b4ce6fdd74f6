"""CUDA implementation of the selective step on theta, and the operation behind it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering import dispatch
from sparsecomp.lowering.signature import Device, KernelSignature
from sparsecomp.lowering.strided import dtype_name
from sparsecomp.lowering.template import Operation


class SelectiveStep(NamedTuple):
    """A step but for addresses; see ``sparsecomp.ops.selective_step``.

    Attributes:
        pruned: elements of theta.
        keep, gain: 1 - lr · weight_decay, and lr.
        log2_beta, log2_beta2: logarithms of the betas; the kernel raises them to the number of steps.
    """

    pruned: int
    warm_up: int
    beta: float
    beta2: float
    log2_beta: float
    log2_beta2: float
    keep: float
    gain: float
    eps: float
    tau: float
    delta: float
    dtype: str
    grad_dtype: str
    index_dtype: str


def run(
    weight, grad, pruned, mean, size, square, steps, lr, beta, beta2, eps, weight_decay, tau, delta, warm_up
) -> None:
    """See ``sparsecomp.ops.selective_step``."""
    if not pruned.numel():
        return
    problem = SelectiveStep(
        pruned.numel(), warm_up, beta, beta2, _log2(beta), _log2(beta2), 1 - lr * weight_decay, lr, eps, tau, delta,
        dtype_name(weight), dtype_name(grad), dtype_name(pruned),
    )  # fmt: skip
    dispatch.run(SELECTIVE_STEP, problem, weight, grad, pruned, mean, size, square, steps)


def _log2(beta: float) -> float:
    # so small that its first power is nothing already
    return math.log2(beta) if beta else -1e4


def _signature(problem: SelectiveStep, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "selective_step", device, dtypes=(p.dtype, p.grad_dtype), accumulator="float32", index=p.index_dtype,
        sizes=(("pruned", p.pruned),),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> SelectiveStep:
    dtype, grad = signature.dtypes
    return SelectiveStep(
        int(dict(signature.sizes)["pruned"]), 10, 0.9, 0.999, _log2(0.9), _log2(0.999), 1.0, 1e-3, 1e-8, 0.5, 1e-12,
        dtype, grad, signature.index,
    )  # fmt: skip


def _operands(problem: SelectiveStep, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    count = -(-p.pruned * 10 // 7)

    def normal(size: int, dtype: str = "float32") -> Tensor:
        return torch.randn(size, generator=random, device=device).to(getattr(torch, dtype))

    where = torch.rand(count, generator=random, device=device).argsort()[: p.pruned].sort().values
    pruned = where.to(getattr(torch, p.index_dtype))
    steps = torch.full((), 20, device=device)
    return (
        normal(count, p.dtype), normal(count, p.grad_dtype), pruned, normal(p.pruned), normal(p.pruned).abs() + 1,
        normal(p.pruned).square(), steps,
    )  # fmt: skip


def _reference(problem: SelectiveStep, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    p = problem
    weight, grad, pruned, mean, size, square, steps = (one.clone() for one in operands if one is not None)
    kind = weight.dtype
    g = grad.view(-1)[pruned.long()].double()
    mean, size, square = (
        old.double().lerp(new, 1 - beta)
        for old, new, beta in ((mean, g, p.beta), (size, g.abs(), p.beta), (square, g.square(), p.beta2))
    )
    one, two = (-math.expm1(int(steps) * math.log(beta)) if beta else 1.0 for beta in (p.beta, p.beta2))
    theta = weight.view(-1)[pruned.long()].double()
    moved = theta * p.keep - p.gain * (mean / one) / ((square / two).sqrt() + p.eps)
    chosen = (mean.float().abs() / (size.float() + p.delta) > p.tau) & (steps > p.warm_up)
    out = weight.double()
    out.view(-1)[pruned.long()] = torch.where(chosen, moved.to(kind).double(), theta)
    return out, mean, size, square


SELECTIVE_STEP = Operation(
    "selective_step", _signature, _representative, _operands, (0, 3, 4, 5), _reference,
    lambda problem: 1e-5 if problem.dtype == "float32" else 4e-3,
)  # fmt: skip
