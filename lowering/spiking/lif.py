"""CUDA implementation of the fused neuron operator, and the operation behind it."""

from math import frexp
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import InputError
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import random_tensor, side_by_side, strided
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.lif import lif_reference


def is_power_of_two(tau: float) -> bool:
    """Whether a number, and its inverse, is one in float32: to divide by it is then to multiply with that."""
    return frexp(tau)[0] == 0.5 and 2.0**-100 <= tau <= 2.0**100


class Lif(NamedTuple):
    """The sizes and numbers of a layer of neurons; see `sparsecomp.ops.lif`.

    Attributes:
        numel: elements of one time step, dense in memory.
        x_step, spikes_step: elements from one time step to the next.
        channels, channel_stride: channels, and elements between two.
        steps: time steps.
        has_v, has_norm, has_weight, has_bias: which operands are given.
        soft_reset: the threshold is subtracted; `reset` is not read.
    """

    numel: int
    x_step: int
    spikes_step: int
    channels: int
    channel_stride: int
    v0: float
    eps: float
    tau: float
    threshold: float
    reset: float
    steps: int
    charge: str
    decay_input: bool
    soft_reset: bool
    has_v: bool
    has_norm: bool
    has_weight: bool
    has_bias: bool

    @property
    def numbers(self) -> tuple[float, ...]:
        """The run-time numbers of the kernel, in its order."""
        p = self
        sizes = (p.numel, p.x_step, p.spikes_step, p.channels, p.channel_stride)
        return (*sizes, *p.step_numbers)

    @property
    def step_numbers(self) -> tuple[float, ...]:
        """The numbers of a step, in every kernel's order."""
        return self.v0, self.eps, 1.0 / self.tau if self.halves else self.tau, self.threshold, self.reset

    @property
    def name(self) -> str:
        """Of the operation on a layer with such neurons."""
        return "conv_lif"

    @property
    def operations(self) -> float:
        """As of `StepNeurons`. Of eight configurations of each of 12 layers on an H200
        (`bench/results/conv_neuron.json`) it puts the fastest first in eight, one within 3 % of it in two, and one
        within 8 % in one of 7 µs; what it puts first in the last was not timed."""
        return 120.0

    @property
    def waits(self) -> int:
        """As of `StepNeurons`."""
        return 0

    @property
    def halves(self) -> bool:
        """Whether a product with the inverse of tau is the quotient, to the last bit."""
        return self.charge == "lif" and is_power_of_two(self.tau)

    @property
    def constants(self) -> dict[str, int | str | bool]:
        """What the kernel is specialised on."""
        return {
            **self.step_constants, "HAS_V": self.has_v, "HAS_NORM": self.has_norm,
            "HAS_WEIGHT": self.has_weight, "HAS_BIAS": self.has_bias,
        }  # fmt: skip

    @property
    def step_constants(self) -> dict[str, int | str | bool]:
        """What every kernel is specialised on."""
        return {
            "STEPS": self.steps, "CHARGE": self.charge, "HALVES": self.halves, "DECAY_INPUT": self.decay_input,
            "SOFT_RESET": self.soft_reset,
        }  # fmt: skip


def launch_lif(
    x, v, v0, mean, var, weight, bias, eps, charge, tau, rate, decay_input, threshold, reset
) -> tuple[Tensor, Tensor]:
    """See `sparsecomp.ops.lif`.

    Raises:
        InputError: operands that do not fit each other, of which a kernel would read past the end.
    """
    _check(x, (mean, var, weight, bias), charge, rate)
    spikes = torch.empty_like(x, dtype=torch.int8)
    last = torch.empty_like(x[0])
    if x.numel() == 0:
        return spikes, last
    strides = x.stride()[1:]
    if strides != spikes.stride()[1:] or strides != last.stride():
        # a step is not one dense block of memory: run on a copy, answer in the layout asked for
        copy = x.contiguous()
        dense = launch_lif(copy, v, v0, mean, var, weight, bias, eps, charge, tau, rate, decay_input, threshold, reset)
        return spikes.copy_(dense[0]), last.copy_(dense[1])
    if v is not None and (v.shape, v.stride()) != (last.shape, last.stride()):
        v = torch.empty_like(last).copy_(v)
    problem = Lif(
        last.numel(), x.stride(0), spikes.stride(0), x.shape[2], strides[1], float(v0), eps, tau, threshold,
        reset or 0.0, x.shape[0], charge, decay_input, reset is None, v is not None, mean is not None,
        weight is not None, bias is not None,
    )  # fmt: skip
    by_channel = map(side_by_side, (mean, var, weight, bias))
    dispatch.launch(LIF, problem, x, v, *by_channel, rate, spikes, last)
    return spikes, last


def _check(x: Tensor, by_channel: tuple[Tensor | None, ...], charge: str, rate: Tensor | None) -> None:
    if x.dim() < 3:
        raise InputError(f"x is {tuple(x.shape)}, needs (T, N, C, …)")
    wrong = [tuple(one.shape) for one in by_channel if one is not None and one.numel() != x.shape[2]]
    if wrong or (by_channel[0] is None) != (by_channel[1] is None):
        raise InputError(f"batch-norm of shapes {wrong}: give one number for each of {x.shape[2]} channels, or none")
    if (0 if rate is None else rate.numel()) != (charge == "plif"):
        raise InputError(f"rate is {None if rate is None else tuple(rate.shape)}: a charge of plif needs one number")


def _signature(problem: Lif, device: Device) -> KernelSignature:
    names = ("steps", "charge", "decay_input", "soft_reset", "has_v", "has_norm", "has_weight", "has_bias")
    parameters = tuple((name, problem.charge if name == "charge" else int(getattr(problem, name))) for name in names)
    layout = "channels last" if problem.channel_stride == 1 else "channels first"
    return KernelSignature(
        "lif", device, dtypes=("float32", "int8"), accumulator="float32", layouts=(layout,),
        sizes=(("numel", problem.numel), ("channels", problem.channels)), parameters=parameters,
    )  # fmt: skip


def _representative(signature: KernelSignature) -> Lif:
    sizes, given = dict(signature.sizes), dict(signature.parameters)
    channels = int(sizes["channels"])
    numel = max(int(sizes["numel"]), channels)
    stride = 1 if signature.layouts[0] == "channels last" else numel // channels
    flags = {name: bool(given[name]) for name in ("decay_input", "soft_reset", "has_v", "has_norm")}
    return Lif(
        numel, numel, numel, channels, stride, 0.0, 1e-5, 2.0, 1.0, 0.0, int(given["steps"]), str(given["charge"]),
        **flags, has_weight=bool(given["has_weight"]), has_bias=bool(given["has_bias"]),
    )  # fmt: skip


def _operands(problem: Lif, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)

    def normal(size: int, given: bool = True) -> Tensor | None:
        return torch.randn(size, generator=random, device=device) if given else None

    x = random_tensor((p.steps, p.numel), (p.x_step, 1), "float32", random)
    var = torch.rand(p.channels, generator=random, device=device) + 0.5 if p.has_norm else None
    poison = torch.tensor(77, dtype=torch.int8, device=device)
    spikes = strided((p.steps, p.numel), (p.spikes_step, 1), poison.repeat)
    rate = torch.full((1,), 0.5, device=device) if p.charge == "plif" else None
    last = torch.full((p.numel,), float("nan"), device=device)
    return (
        x, normal(p.numel, p.has_v), normal(p.channels, p.has_norm), var, normal(p.channels, p.has_weight),
        normal(p.channels, p.has_bias), rate, spikes, last,
    )  # fmt: skip


def _reference(problem: Lif, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    x, v, mean, var, weight, bias, rate, *_ = operands
    p = problem
    assert x is not None
    channel = torch.arange(p.numel, device=x.device) // p.channel_stride % p.channels
    # one element a channel, so that the statistics broadcast as they do over a feature map
    mean, var, weight, bias = (None if t is None else t[channel] for t in (mean, var, weight, bias))
    spikes, last = lif_reference(
        x[:, None], None if v is None else v[None], p.v0, mean, var, weight, bias, p.eps, p.charge, p.tau, rate,
        p.decay_input, p.threshold, None if p.soft_reset else p.reset,
    )  # fmt: skip
    return spikes[:, 0], last[0]


LIF = Operation("lif", _signature, _representative, _operands, (7, 8), _reference, lambda _: 3e-3)
