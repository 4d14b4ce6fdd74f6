"""CUDA implementations of the effective weight and its gradients, and the operations behind them."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering import dispatch
from sparsecomp.lowering.signature import Device, KernelSignature
from sparsecomp.lowering.strided import dtype_name
from sparsecomp.lowering.template import Operation


class Effective(NamedTuple):
    """A weight, theta and mask, flat and contiguous, but for addresses.

    Attributes:
        count: elements of the weight.
        dtype: of weight, theta and results.
    """

    count: int
    dtype: str


def forward(weight: Tensor, theta: Tensor, mask: Tensor, before: Tensor) -> Tensor:
    """See ``sparsecomp.ops.effective_weight``."""
    out = torch.empty_like(weight)
    if weight.numel():
        problem = Effective(weight.numel(), dtype_name(weight))
        dispatch.run(EFFECTIVE_WEIGHT, problem, weight, theta, mask, before, out)
    return out


def gradients(grad: Tensor, mask: Tensor, before: Tensor, pruned: int) -> tuple[Tensor, Tensor]:
    """See ``sparsecomp.ops.effective_weight``."""
    of_weight, of_theta = torch.empty_like(grad), grad.new_empty(pruned)
    if grad.numel():
        problem = Effective(grad.numel(), dtype_name(grad))
        dispatch.run(EFFECTIVE_GRADIENTS, problem, grad, mask, before, of_weight, of_theta)
    return of_weight, of_theta


def _signature(name: str):
    def signature(problem: Effective, device: Device) -> KernelSignature:
        return KernelSignature(name, device, dtypes=(problem.dtype,), sizes=(("count", problem.count),))

    return signature


def _representative(signature: KernelSignature) -> Effective:
    return Effective(int(dict(signature.sizes)["count"]), signature.dtypes[0])


def _masked(problem: Effective, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor, int, torch.dtype]:
    from sparsecomp.ops.effective_weight import pruned_before  # the operators load this module

    random = torch.Generator(device).manual_seed(seed)
    mask = torch.rand(problem.count, generator=random, device=device) < 0.3
    kind = getattr(torch, problem.dtype)
    values = torch.randn(problem.count, generator=random, device=device).to(kind)
    return values, mask, pruned_before(mask), int((~mask).sum()), kind


def _operands(problem: Effective, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    weight, mask, before, pruned, kind = _masked(problem, device, seed)
    theta = torch.arange(pruned, device=device).to(kind)
    return weight, theta, mask, before, torch.full_like(weight, torch.nan)


def _reference(problem: Effective, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    weight, theta, mask, *_ = operands
    assert weight is not None and theta is not None and mask is not None
    return (weight.double().masked_scatter(~mask, theta.double()),)


def _gradient_operands(problem: Effective, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    grad, mask, before, pruned, kind = _masked(problem, device, seed)
    return grad, mask, before, torch.full_like(grad, torch.nan), grad.new_full((pruned,), torch.nan)


def _gradient_reference(problem: Effective, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    grad, mask, *_ = operands
    assert grad is not None and mask is not None
    return grad.double().masked_fill(~mask, 0), grad.double()[~mask]


EFFECTIVE_WEIGHT = Operation(
    "effective_weight", _signature("effective_weight"), _representative, _operands, (4,), _reference, lambda _: 0.0
)
EFFECTIVE_GRADIENTS = Operation(
    "effective_gradients", _signature("effective_gradients"), _representative, _gradient_operands, (3, 4),
    _gradient_reference, lambda _: 0.0,
)  # fmt: skip
