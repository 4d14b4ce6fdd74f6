"""CUDA implementation of the selective step on theta, and the operation behind it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name
from sparsecomp.lowering.masked import select_largest
from sparsecomp.lowering.tuning.template import Operation


class SelectiveStep(NamedTuple):
    """The sizes, numbers and types of a step; see `sparsecomp.ops.selective_step`.

    The learning rate and the number of the step are read on the device, so that a schedule makes no new problems.

    Attributes:
        phase: "all" selects by tau; "average" leaves the weight alone and gives the consistencies, "move" then moves
            what was selected by them.
        pruned: elements of theta; of the weight where a mask says which are pruned.
        numel: elements of the weight.
        whole: 1 if mean and square have the weight's shape, 0 if theta's.
    """

    phase: str
    pruned: int
    numel: int
    whole: int
    warm_up: int
    beta: float
    beta2: float
    tau: float
    delta: float
    eps: float
    weight_decay: float
    dtype: str
    grad_dtype: str
    index_dtype: str
    rate_dtype: str

    @property
    def by_mask(self) -> bool:
        """Whether a mask of bytes, not a list of positions, says which elements are pruned."""
        return self.index_dtype == "uint8"


def selective_step(
    weight: Tensor, grad: Tensor, pruned: Tensor, slots: tuple[Tensor, Tensor, Tensor], steps: Tensor, lr: Tensor, *,
    betas: tuple[float, float], tau: float, delta: float, eps: float, weight_decay: float, warm_up: int,
    count: Tensor | None = None, whole: bool = False,
) -> None:  # fmt: skip
    """See `sparsecomp.ops.selective_step`; all tensors are contiguous."""
    if not pruned.numel():
        return
    if pruned.dtype is torch.bool:
        pruned, whole = pruned.view(torch.uint8), True
    problem = SelectiveStep(
        "all", pruned.numel(), weight.numel(), int(whole), warm_up, *betas, tau, delta, eps, weight_decay,
        dtype_name(weight), dtype_name(grad), dtype_name(pruned), dtype_name(lr),
    )  # fmt: skip
    operands = (weight, grad, pruned, *slots, steps, lr)
    if count is None:
        dispatch.launch(SELECTIVE_STEP, problem, *operands, None, None)
        return
    consistency = torch.empty_like(slots[1]).view(-1)
    dispatch.launch(SELECTIVE_STEP, problem._replace(phase="average"), *operands, consistency, None)
    selected = select_largest.select(consistency, count).view(torch.uint8)
    dispatch.launch(SELECTIVE_STEP, problem._replace(phase="move"), *operands, None, selected)


def _signature(problem: SelectiveStep, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "selective_step", device, dtypes=(p.dtype, p.grad_dtype, p.rate_dtype), accumulator="float32",
        index=p.index_dtype, sizes=(("pruned", p.pruned),), density=p.pruned / p.numel,
        parameters=(("phase", p.phase), ("whole", p.whole)),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> SelectiveStep:
    pruned = int(dict(signature.sizes)["pruned"])
    numel = max(int(pruned / (signature.density or 1)), pruned)
    dtype, grad, rate = signature.dtypes
    given = dict(signature.parameters)
    return SelectiveStep(
        str(given["phase"]), pruned, numel, int(given["whole"]), 10, 0.9, 0.999, 0.5, 1e-12, 1e-8, 0.0, dtype, grad,
        signature.index, rate,
    )  # fmt: skip


def _operands(problem: SelectiveStep, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)

    def normal(size: int, dtype: str = "float32") -> Tensor:
        return torch.randn(size, generator=random, device=device).to(getattr(torch, dtype))

    if p.by_mask:
        pruned = (torch.rand(p.numel, generator=random, device=device) > 0.3).view(torch.uint8)
    else:
        order = torch.rand(p.numel, generator=random, device=device).argsort()
        pruned = order[: p.pruned].sort().values.to(getattr(torch, p.index_dtype))
    lr = torch.full((), 0.01, dtype=getattr(torch, p.rate_dtype), device=device)
    moments = p.numel if p.whole else p.pruned
    return (
        normal(p.numel, p.dtype), normal(p.numel, p.grad_dtype), pruned, normal(moments), normal(p.pruned).abs() + 1,
        normal(moments).square(), torch.full((), 20, device=device), lr,
        torch.empty(p.pruned, device=device) if p.phase == "average" else None,
        (torch.rand(p.pruned, generator=random, device=device) > 0.5).view(torch.uint8) if p.phase == "move" else None,
    )  # fmt: skip


def _reference(problem: SelectiveStep, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    p = problem
    weight, grad, pruned, mean, size, square, steps, lr, *last = (one.clone() for one in operands if one is not None)
    where = pruned.nonzero()[:, 0] if p.by_mask else pruned.long()
    at = where if p.by_mask else torch.arange(p.pruned, device=where.device)
    g, own = grad[where].double(), where if p.whole else at
    mean, size, square = mean.double(), size.double(), square.double()
    if p.phase != "move":
        mean[own] = mean[own].lerp(g, 1 - p.beta)
        size[at] = size[at].lerp(g.abs(), 1 - p.beta)
        square[own] = square[own].lerp(g.square(), 1 - p.beta2)
    chosen = last[0].bool()[at] if p.phase == "move" else mean[own].abs() / (size[at] + p.delta) > p.tau
    moves = p.phase != "average" and int(steps) > p.warm_up
    one, two = (1 - base ** int(steps) for base in (p.beta, p.beta2))
    theta, rate = weight[where].double(), float(lr)
    update = (mean[own] / one) / ((square[own] / two).sqrt() + p.eps)
    moved = theta * (1 - rate * p.weight_decay) - rate * update
    out = weight.double()
    out[where] = torch.where(chosen, moved, theta) if moves else theta
    return out, mean, size, square


# an element whose consistency rounds to the other side of tau moves by a step more or less
_TOLERANCE = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 8e-3}

SELECTIVE_STEP = Operation(
    "selective_step", _signature, _representative, _operands, (0, 3, 4, 5), _reference,
    lambda problem: _TOLERANCE[problem.dtype],
)  # fmt: skip


def log_of(beta: float) -> float:
    """The logarithm of a decay, which is so small for 0 that its first power is nothing."""
    return math.log(beta) if beta else -1e4
