"""Event-driven convolution as three operations: find the events, pack the weight, accumulate."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature, size_bucket
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name
from sparsecomp.lowering.spiking.convolution import CONV_TOLERANCE, Convolution, Maps, Selection, planar
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.geometry import IMAGE_DIMS, Window

SPARSEST_OVERFLOW = 16
"""The event list holds one in this many inputs; beyond, int8 tensor cores are faster."""
CHANNELS_A_BLOCK = 256
"""Most output channels that one program accumulates."""

_MAX_WORDS = 1024
_MAX_STRETCHES = 11
TRIAL_DENSITY = 0.01
"""Density of the inputs that configurations are measured on: where events can win over dense, see the gate."""


class FindEvents(NamedTuple):
    """Rows of an image `w` pixels wide with `c` channels, whose events go to a list of `capacity`."""

    rows: int
    w: int
    c: int
    capacity: int
    dtype: str


class PackEvents(NamedTuple):
    """A weight, stored by blocks of output channels, and beside a factor."""

    weight: Maps
    has_factor: bool

    @property
    def block(self) -> int:
        """Output channels of a block."""
        return block_of(self.weight.outer)

    @property
    def depth(self) -> int:
        """Weights of an output channel."""
        return self.weight.pixels * self.weight.c


class Accumulate(NamedTuple):
    """An event-driven convolution, with a list of `capacity` events."""

    conv: Convolution
    capacity: int
    processors: int

    @property
    def block(self) -> int:
        """Output channels that a program accumulates."""
        return block_of(self.conv.k)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The kernel's run-time numbers, in its order."""
        c = self.conv
        return (self.capacity, *c.maps, c.c, c.k, *c.geometry, c.scale)


@dataclass(frozen=True)
class Events:
    """The non-zero inputs of a convolution; see `events_kernel` for the tensors."""

    codes: Tensor
    starts: Tensor
    total: Tensor

    @property
    def capacity(self) -> int:
        return self.codes.shape[0]


def serves(x: Tensor, window: Window, groups: int) -> bool:
    """Whether the kernels can run this convolution.

    An event's place in its image row has 16 bits; so many words of it hold half as many places at most.
    """
    *outer, inner = window.kernel
    stretches = prod(outer) * (inner if window.dilation[-1] > 1 else 1)
    return (
        groups == 1
        and x.dim() <= 2 + IMAGE_DIMS
        and x.numel() < 2**31
        and x.shape[-1] * -(-x.shape[1] // 32) <= _MAX_WORDS
        and stretches <= _MAX_STRETCHES
    )


def event_conv(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, factor: Tensor | None, conv: Convolution,
    out: Tensor,
) -> Selection:  # fmt: skip
    """Write the convolution of `x` to `out`, unless `x` has too many events, or zeros matter.

    Args:
        x: (N, C, …) in dense channels-last memory, integers in [-128, 127] of any dtype.
        weight: (K, C, …), or (K, C) for a window of one pixel.
        scales: of `split_weight`: NaN tells of a weight that is not finite, of which a zero makes NaN.
        factor: what the integers stand for, beside the convolution's scale; see `sparsecomp.ops.spike_conv`.

    Returns:
        The selection under which another kernel must write `out`: everything or nothing.
    """
    events = find_events(x)
    packed = event_weight(weight, scales, factor, events.total)
    if out.numel():
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
        problem = Accumulate(conv, events.capacity, processors)
        dispatch.launch(ACCUMULATE, problem, events.codes, events.starts, events.total, packed, bias, factor, out)
    return Selection(events.total, events.capacity)


def find_events(x: Tensor) -> Events:
    """The prescan of `x` (N, C, …), channels-last: one pass over it, no host synchronisation."""
    n, c, *outer, w = x.shape
    rows = n * prod(outer)
    codes = torch.empty((x.numel() // SPARSEST_OVERFLOW,), dtype=torch.int32, device=x.device)
    starts = torch.empty((rows, w + 1), dtype=torch.int32, device=x.device)
    total = torch.zeros((1,), dtype=torch.int32, device=x.device)
    if x.numel():
        problem = FindEvents(rows, w, c, codes.shape[0], dtype_name(x))
        dispatch.launch(FIND_EVENTS, problem, x, codes, starts, total)
    return Events(codes, starts, total)


def event_weight(weight: Tensor, scales: Tensor, factor: Tensor | None, total: Tensor) -> Tensor:
    """`weight` as `event_conv_kernel` reads it, by blocks of :func:`block_of` output channels.

    `total` becomes more than any capacity where events alone would be wrong; see :func:`event_conv`.
    """
    weight = planar(weight)
    problem = PackEvents(Maps.of(weight), factor is not None)
    shape = (-(-weight.shape[0] // problem.block), problem.depth, problem.block)
    out = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    if out.numel():
        dispatch.launch(PACK_EVENTS, problem, weight, scales, factor, out, total)
    return out


def block_of(out_channels: int) -> int:
    """Output channels a program accumulates: all, up to `CHANNELS_A_BLOCK`, as a power of two from 16 on."""
    return min(max(size_bucket(out_channels), 16), CHANNELS_A_BLOCK)


def _find_signature(problem: FindEvents, device: Device) -> KernelSignature:
    sizes = (("rows", problem.rows), ("w", problem.w), ("c", problem.c))
    return KernelSignature("find_events", device, dtypes=(problem.dtype, "int32"), sizes=sizes)


def _pack_signature(problem: PackEvents, device: Device) -> KernelSignature:
    weight = problem.weight
    sizes = (("k", weight.outer), ("c", weight.c))
    return KernelSignature("pack_events", device, dtypes=(weight.dtype,), sizes=sizes)


def _accumulate_signature(problem: Accumulate, device: Device) -> KernelSignature:
    conv = problem.conv
    dil_w = conv.window.dilation[-1]
    parameters = (("dil_w", dil_w), ("block", problem.block), ("processors", problem.processors))
    return conv.signature(
        "event_conv", device, parameters, dtypes=(conv.dtype,), accumulator="float32", index="int32",
        density=TRIAL_DENSITY,
    )  # fmt: skip


def _representative(signature: KernelSignature) -> Accumulate:
    given = dict(signature.parameters)
    conv = Convolution.of_signature(signature, signature.dtypes[0], dilation=(1, int(given["dil_w"])))
    return Accumulate(conv, conv.in_pixels * conv.c // SPARSEST_OVERFLOW, int(given["processors"]))


def _operands(problem: Accumulate, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    c, random = problem.conv, torch.Generator(device).manual_seed(seed)
    x = torch.rand(c.n, *c.size, c.c, generator=random, device=device) < TRIAL_DENSITY
    events = find_events(x.float().movedim(-1, 1))
    weight = torch.randn(c.k, c.c, *c.window.kernel, generator=random, device=device).to(getattr(torch, c.dtype))
    bias = torch.randn(c.k, generator=random, device=device).to(weight.dtype) if c.has_bias else None
    out = c.poisoned_output(device)
    packed = event_weight(weight, torch.ones(c.k, device=device), None, events.total)
    factor = torch.full((1,), -0.7, device=device).to(weight.dtype) if c.has_factor else None
    return events.codes, events.starts, events.total, packed, bias, factor, out


def _reference(problem: Accumulate, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """The dense convolution of what the lists say."""
    codes, starts, _, packed, bias, factor, _ = operands
    assert codes is not None and starts is not None and packed is not None
    c = problem.conv
    weight = packed.transpose(1, 2).reshape(-1, *c.window.kernel, c.c)[: c.k].movedim(-1, 1)
    return (c.reference(_listed(codes, starts, c), weight, bias, factor),)


def _listed(codes: Tensor, starts: Tensor, conv: Convolution) -> Tensor:
    """The input (n, c, …) in float64 that an event list stands for."""
    first = starts[:, 0].long()
    counts = starts[:, -1] - first
    rows = torch.arange(len(first), device=codes.device).repeat_interleave(counts)
    before = (counts.cumsum(0) - counts).repeat_interleave(counts)
    code = codes[first.repeat_interleave(counts) + torch.arange(len(rows), device=codes.device) - before]
    x = torch.zeros(len(first), conv.size[-1] * conv.c, dtype=torch.float64, device=codes.device)
    x[rows, (code & 0xFFFF).long()] = (code & -0x10000).view(torch.float32).double()
    return x.view(conv.n, *conv.size, conv.c).movedim(-1, 1)


FIND_EVENTS = Operation("find_events", _find_signature)
PACK_EVENTS = Operation("pack_events", _pack_signature)
ACCUMULATE = Operation(
    "event_conv", _accumulate_signature, _representative, _operands, (6,), _reference,
    lambda problem: CONV_TOLERANCE[problem.conv.dtype],
)  # fmt: skip
