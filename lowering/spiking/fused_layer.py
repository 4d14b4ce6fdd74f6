"""A convolution on spikes with the neurons that read it, whichever these are: the problem, its launches, its checks."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sparsecomp.errors import InputError
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import contiguous_strides, random_tensor
from sparsecomp.lowering.spiking.binary_conv import BinaryConv
from sparsecomp.lowering.spiking.convolution import Convolution, planar
from sparsecomp.lowering.spiking.packing import PACK_WEIGHT, PackWeight
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.digits import split_weight, used_weight
from sparsecomp.reference.geometry import laid_out
from sparsecomp.reference.layer_current import check_membranes


class StepNeurons(Protocol):
    """Neurons as a layer's kernels step through them.

    Attributes:
        name: of the operation.
        operations: float operations' worth of a step in an estimate, for a block of eight warps.
        waits: 1 if half as many warps take twice as long for it: instructions wait for each other.
        step_numbers: run-time numbers of a step, in the kernels' order.
        step_constants: what the kernels are specialised on.
    """

    @property
    def name(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def operations(self) -> float: ...
    @property
    def waits(self) -> int: ...
    @property
    def step_numbers(self) -> tuple[float, ...]: ...
    @property
    def step_constants(self) -> dict[str, Any]: ...


class FusedLayer(NamedTuple):
    """A convolution of all time steps, and the neurons that take it step by step.

    Attributes:
        product: the convolution of `neurons.steps` times as many images as a step has; its output lies as the spikes.
        neurons: the neurons.
        keep: the last states are written.
        connect: how the spikes are joined with a residual that lies as they do; empty without one.
        added: dtype of what is added to the neurons' input, and lies as the spikes; empty without it.
        currents: what the neurons are given is written, in the layer's dtype.
    """

    product: BinaryConv
    neurons: StepNeurons
    keep: bool
    connect: str = ""
    added: str = ""
    currents: bool = False

    @property
    def name(self) -> str:
        """Of the operation."""
        return self.neurons.name

    @property
    def conv(self) -> Convolution:
        """The convolution."""
        return self.product.conv

    @property
    def digits(self) -> int:
        """Bytes a weight."""
        return self.product.digits

    @property
    def residuals(self) -> int:
        """Bytes a spike of what is joined with the spikes, and with the neurons' input."""
        return int(bool(self.connect)) + (getattr(torch, self.added).itemsize if self.added else 0)

    @property
    def current_bytes(self) -> int:
        """Bytes a spike of what neurons are given, if it is written."""
        return getattr(torch, self.conv.dtype).itemsize if self.currents else 0

    @property
    def slots(self) -> int:
        """Rows of a block that the steps of one output pixel take: a power of two."""
        return 1 << (self.neurons.steps - 1).bit_length()

    @property
    def pixels(self) -> int:
        """Output pixels of a step."""
        return self.conv.m // self.neurons.steps

    @property
    def in_volumes(self) -> "FusedLayer":
        """The same with maps and window of three dimensions."""
        return self._replace(product=self.product.in_volumes)

    def grid(self, rows: int, channels: int) -> tuple[int]:
        """Programs for blocks of so many rows by output channels."""
        conv = self.conv
        return (-(-self.pixels * self.slots // rows) * -(-conv.kg // channels) * conv.groups,)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The run-time numbers of the kernels, in their order."""
        _, *product, _ = self.product.numbers
        return (self.pixels, self.conv.n // self.neurons.steps, *product, *self.neurons.step_numbers)

    @property
    def constants(self) -> dict[str, Any]:
        """What every kernel is specialised on, whatever the configuration."""
        rows = {"SLOTS": self.slots, "SCALED": self.conv.scale != 1.0, "CONNECT": self.connect}
        return {**self.product.constants, **self.neurons.step_constants, **rows}


class FusedCall:
    """The two launches of a call, which split the weight and do all the rest, and what it allocates.

    Args:
        states: how many the neurons have.
        room: how many the kernel has room for.
        kept: their dtype.
    """

    def __init__(
        self, operation: Operation[Any], problem: FusedLayer, split: PackWeight, device: torch.device, states: int = 1,
        room: int = 1, kept: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        conv, steps = problem.conv, problem.neurons.steps
        self._shape = (steps, conv.n // steps, conv.k, *conv.out_size)
        pixels = (conv.out.pixel * stride for stride in contiguous_strides(conv.out_size))
        images = (self._shape[1] * conv.out.image, conv.out.image)
        self._strides = (*images, conv.out.channel, *pixels)
        self._planes, self._device, self._keep, self._kept = split.planes, device, problem.keep, kept
        self._states, self._unused = states, (None,) * (room - states if problem.keep else room)
        self._currents = getattr(torch, conv.dtype), problem.currents
        some = conv.m * conv.k > 0
        self._pack = dispatch.prepared(PACK_WEIGHT, split, device) if some else None
        self._run = dispatch.prepared(operation, problem, device) if some else None

    def __call__(self, x: Tensor, weight: Tensor, *operands: Tensor | None) -> tuple[Tensor, ...]:
        """Spikes, last states and what neurons are given; `operands` are the kernel's from the bias on."""
        device = self._device
        spikes = torch.empty_strided(self._shape, self._strides, dtype=torch.int8, device=device)
        shape, strides = (self._shape[1:], self._strides[1:]) if self._keep else ((0,), (1,))
        lasts = [torch.empty_strided(shape, strides, dtype=self._kept, device=device) for _ in range(self._states)]
        dtype, given = self._currents
        shape, strides = (self._shape, self._strides) if given else ((0,), (1,))
        currents = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if self._pack is not None and self._run is not None:
            planes = torch.empty(self._planes, dtype=torch.int8, device=device)
            scales = torch.empty(self._planes[1:2], dtype=torch.float32, device=device)
            self._pack(planar(weight), planes, scales)
            written = (*(lasts if self._keep else ()), *self._unused, currents if given else None)
            self._run(x, planes, scales, weight, *operands, spikes, *written)
        return spikes, *lasts, currents


def lying_as_spikes(x: Tensor | None, step: tuple[int, ...], channels_last: bool) -> Tensor | None:
    """(T, N, K, …), or (T, N, K) for maps of one pixel, as (T · N, K, …) that lies as spikes of a `step`'s shape."""
    return None if x is None else laid_out(x.reshape(-1, *step[1:]), channels_last)


def joins_of(problem: FusedLayer) -> tuple[tuple[str, str], ...]:
    """What a signature says of a problem's residuals, and of what it writes besides."""
    joins = ("connect", problem.connect), ("added", problem.added), ("currents", "written" if problem.currents else "")
    return tuple((name, how) for name, how in joins if how)


def check_fused(
    conv: Convolution, weight: torch.Size, steps: int, states: tuple[torch.Size | None, ...],
    by_channel: tuple[torch.Size | None, ...],
) -> None:  # fmt: skip
    """InputError for operands that do not fit each other, of which a kernel would read past the end.

    Args:
        states: shapes of states before the first step.
        by_channel: of the bias, and of mean, variance, factor and bias of a batch-norm.
    """
    if steps < 1 or conv.n % steps:
        raise InputError(f"{conv.n} images are no whole number for each of {steps} time steps")
    if conv.c != weight[1] * conv.groups or conv.k % conv.groups:
        raise InputError(f"a weight {tuple(weight)} in {conv.groups} groups does not fit {conv.c} channels")
    for v in states:
        if v is not None:
            check_membranes(v, (conv.n // steps, conv.k, *conv.out_size))
    wrong = [tuple(shape) for shape in by_channel if shape is not None and shape.numel() != conv.k]
    if wrong or (by_channel[1] is None) != (by_channel[2] is None):
        raise InputError(f"bias or batch-norm of shapes {wrong}: give one number for each of {conv.k} channels")


def random_layer(
    problem: FusedLayer, norm: tuple[bool, bool, bool], device: torch.device, random: torch.Generator
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Random operands of a problem but for its neurons': input, planes, scales, weight, bias, then mean, variance,
    factor and bias of a batch-norm, of which the flags say whether there is one and which of the last two, then what
    is added and what is joined."""
    c = problem.conv

    def normal(given: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.randn(c.k, generator=random, device=device).to(dtype) if given else None

    dtype, (has_norm, has_weight, has_bias) = getattr(torch, c.dtype), norm
    x = torch.randint(0, 7, (c.n, *c.size, c.c), generator=random, device=device) == 0
    weight = random_tensor((c.k, c.cg, *c.window.kernel), problem.product.weight, c.dtype, random)
    planes, scales = split_weight(weight, problem.digits)
    like = c.poisoned_output(device)
    var = torch.rand(c.k, generator=random, device=device) + 0.5 if has_norm else None
    by_step = like.unflatten(0, (problem.neurons.steps, -1))
    residual = torch.full_like(by_step, 3, dtype=torch.int8) if problem.connect else None
    added = torch.full_like(by_step, 0.25).to(getattr(torch, problem.added)) if problem.added else None
    return (
        x.to(torch.int8).movedim(-1, 1), planes, scales, weight, normal(c.has_bias, dtype), normal(has_norm), var,
        normal(has_weight), normal(has_bias), added, residual,
    )  # fmt: skip


def empty_results(
    problem: FusedLayer, device: torch.device, states: int, kept: torch.dtype = torch.float32
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Spikes, last states and what neurons are given, full of values that no result has."""
    current = problem.conv.poisoned_output(device).unflatten(0, (problem.neurons.steps, -1))
    lasts = [current[0].to(kept, copy=True) if problem.keep else None for _ in range(states)]
    return torch.full_like(current, 77, dtype=torch.int8), *lasts, current.clone() if problem.currents else None


def reference_current(problem: FusedLayer, operands: tuple[Tensor | None, ...]) -> Tensor:
    """What the layer gives its neurons (T, N, K, …) before a batch-norm, in float64, of `random_layer`'s operands."""
    x, planes, scales, weight, bias, *_ = operands
    assert x is not None and planes is not None and scales is not None and weight is not None
    current = problem.conv.reference(x, used_weight(weight, planes, scales), bias, None)
    return current.unflatten(0, (problem.neurons.steps, -1))
