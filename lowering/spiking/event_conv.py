"""Event-driven convolution as three operations: find the events, pack the weight, accumulate."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature, size_bucket
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name
from sparsecomp.lowering.spiking.window import (
    TOLERANCE,
    Selection,
    Window,
    dense_strides,
    pixel_strides,
    poisoned_output,
)
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.geometry import output_size

SPARSEST_OVERFLOW = 16
"""The event list holds one in this many inputs; beyond, the binary convolution is faster anyhow."""
CHANNELS_A_BLOCK = 256
"""Most output channels that one program accumulates."""

_MAX_WORDS = 1024
_MAX_STRETCHES = 11
TRIAL_DENSITY = 0.01
"""Density of the inputs that configurations are measured on: where events can win over dense, see the gate."""


class FindEvents(NamedTuple):
    """Rows of an image ``w`` pixels wide with ``c`` channels, whose events go to a list of ``capacity``."""

    rows: int
    w: int
    c: int
    capacity: int
    dtype: str


class PackEvents(NamedTuple):
    """A weight (k, c, r, s) with its strides, stored by blocks of ``block`` output channels, and beside a factor."""

    k: int
    c: int
    stride_k: int
    stride_c: int
    stride_r: int
    stride_s: int
    r: int
    s: int
    block: int
    dtype: str
    has_factor: bool


class Accumulate(NamedTuple):
    """An event-driven convolution but for its addresses: fields of ``BinaryConv``, ``block`` of ``PackEvents``.

    ``multiplier``, ``has_factor``: as ``scale`` and ``has_factor`` there.
    """

    capacity: int
    n: int
    h: int
    w: int
    oh: int
    ow: int
    c: int
    k: int
    stride_h: int
    stride_w: int
    pad_h: int
    pad_w: int
    dil_h: int
    dil_w: int
    out_pixel: int
    out_channel: int
    out_image: int
    r: int
    s: int
    block: int
    processors: int
    has_bias: bool
    dtype: str
    multiplier: float = 1.0
    has_factor: bool = False

    @property
    def numbers(self) -> tuple[float, ...]:
        """The kernel's run-time numbers, in its order."""
        return (self.capacity, self.n * self.oh * self.ow, *self[2:17], self.multiplier)


@dataclass(frozen=True)
class Events:
    """The non-zero inputs of a convolution; see ``events_kernel`` for the tensors."""

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
    _, c, _, w = x.shape
    stretches = window.kernel[0] * (window.kernel[1] if window.dilation[1] > 1 else 1)
    return (
        groups == 1
        and x.numel() < 2**31
        and w * -(-c // 32) <= _MAX_WORDS
        and stretches <= _MAX_STRETCHES
    )


def conv2d(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, factor: Tensor | None, window: Window,
    scale: float, out: Tensor,
) -> Selection:  # fmt: skip
    """Write the convolution of ``x`` to ``out``, unless ``x`` has too many events, or zeros matter.

    Args:
        x: (N, C, H, W) in dense channels-last memory, integers in [-128, 127] of any dtype.
        weight: (K, C, R, S), or (K, C) for a 1×1 window.
        scales: of ``split_weight``: NaN tells of a weight that is not finite, of which a zero makes NaN.
        factor, scale: what the integers stand for, see ``sparsecomp.ops.spike_conv2d``.

    Returns:
        The selection under which another kernel must write ``out``: everything or nothing.
    """
    events = find_events(x)
    packed = event_weight(weight, scales, factor, events.total)
    if out.numel():
        _accumulate(events, packed, bias, factor, x, window, scale, out)
    return Selection(events.total, events.capacity)


def find_events(x: Tensor) -> Events:
    """The prescan of ``x`` (N, C, H, W), channels-last: one pass over it, no host synchronisation."""
    n, c, h, w = x.shape
    codes = torch.empty((x.numel() // SPARSEST_OVERFLOW,), dtype=torch.int32, device=x.device)
    starts = torch.empty((n * h, w + 1), dtype=torch.int32, device=x.device)
    total = torch.zeros((1,), dtype=torch.int32, device=x.device)
    if x.numel():
        problem = FindEvents(n * h, w, c, codes.shape[0], dtype_name(x))
        dispatch.run(FIND_EVENTS, problem, x, codes, starts, total)
    return Events(codes, starts, total)


def event_weight(weight: Tensor, scales: Tensor, factor: Tensor | None, total: Tensor) -> Tensor:
    """``weight`` as ``event_conv_kernel`` reads it, by blocks of :func:`block_of` output channels.

    ``total`` becomes more than any capacity where events alone would be wrong; see :func:`conv2d`.
    """
    w = weight if weight.dim() == 4 else weight[:, :, None, None]
    k, c, r, s = w.shape
    block = block_of(k)
    out = torch.empty((-(-k // block), r * s * c, block), dtype=w.dtype, device=w.device)
    if out.numel():
        problem = PackEvents._make((k, c, *w.stride(), r, s, block, dtype_name(w), factor is not None))
        dispatch.run(PACK_EVENTS, problem, w, scales, factor, out, total)
    return out


def block_of(out_channels: int) -> int:
    """Output channels a program accumulates: all, up to ``CHANNELS_A_BLOCK``, as a power of two from 16 on."""
    return min(max(size_bucket(out_channels), 16), CHANNELS_A_BLOCK)


def _accumulate(
    events: Events, packed: Tensor, bias: Tensor | None, factor: Tensor | None, x: Tensor, window: Window,
    scale: float, out: Tensor,
) -> None:  # fmt: skip
    n, c, h, w = x.shape
    _, k, oh, ow = out.shape
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    problem = Accumulate._make((
        events.capacity, n, h, w, oh, ow, c, k, *window.stride, *window.padding, *window.dilation,
        *pixel_strides(out), *window.kernel, packed.shape[2], processors, bias is not None, dtype_name(out),
        scale, factor is not None,
    ))  # fmt: skip
    dispatch.run(ACCUMULATE, problem, events.codes, events.starts, events.total, packed, bias, factor, out)


def _find_signature(problem: FindEvents, device: Device) -> KernelSignature:
    sizes = (("rows", problem.rows), ("w", problem.w), ("c", problem.c))
    return KernelSignature("find_events", device, dtypes=(problem.dtype, "int32"), sizes=sizes)


def _pack_signature(problem: PackEvents, device: Device) -> KernelSignature:
    sizes = (("k", problem.k), ("c", problem.c))
    return KernelSignature("pack_events", device, dtypes=(problem.dtype,), sizes=sizes)


def _accumulate_signature(problem: Accumulate, device: Device) -> KernelSignature:
    names = ("c", "k", "r", "s", "stride_h", "stride_w", "dil_w", "block", "processors")
    return KernelSignature(
        "event_conv", device, dtypes=(problem.dtype,), accumulator="float32", index="int32",
        layouts=("nhwc", "nhwc" if problem.out_channel == 1 else "nchw"),
        epilogue="bias" if problem.has_bias else "",
        sizes=(("n", problem.n), ("h", problem.h), ("w", problem.w)),
        parameters=tuple((name, getattr(problem, name)) for name in names), density=TRIAL_DENSITY,
    )  # fmt: skip


def _representative(signature: KernelSignature) -> Accumulate:
    sizes, given = dict(signature.sizes), dict(signature.parameters)
    n, h, w = (int(sizes[name]) for name in ("n", "h", "w"))
    names = "c k r s stride_h stride_w dil_w block processors"
    c, k, r, s, stride_h, stride_w, dil_w, block, processors = (int(given[name]) for name in names.split())
    padding = (r // 2, dil_w * (s // 2))
    oh, ow = output_size((h, w), (r, s), (stride_h, stride_w), padding, (1, dil_w))
    strides = dense_strides(signature.layouts[1], k, oh, ow)
    return Accumulate(
        n * c * h * w // SPARSEST_OVERFLOW, n, h, w, oh, ow, c, k, stride_h, stride_w, *padding, 1, dil_w, *strides,
        r, s, block, processors, signature.epilogue == "bias", signature.dtypes[0],
    )  # fmt: skip


def _operands(problem: Accumulate, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    x = torch.rand(p.n, p.h, p.w, p.c, generator=random, device=device) < TRIAL_DENSITY
    events = find_events(x.float().permute(0, 3, 1, 2))
    weight = torch.randn(p.k, p.c, p.r, p.s, generator=random, device=device).to(getattr(torch, p.dtype))
    bias = torch.randn(p.k, generator=random, device=device).to(weight.dtype) if p.has_bias else None
    strides = (p.out_pixel, p.out_channel, p.out_image)
    out = poisoned_output((p.n, p.k, p.oh, p.ow), strides, weight.dtype, device)
    packed = event_weight(weight, torch.ones(p.k, device=device), None, events.total)
    factor = torch.full((1,), -0.7, device=device).to(weight.dtype) if p.has_factor else None
    return events.codes, events.starts, events.total, packed, bias, factor, out


def _reference(problem: Accumulate, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """The dense convolution of what the lists say, in float64."""
    codes, starts, _, packed, bias, factor, _ = operands
    assert codes is not None and starts is not None and packed is not None
    p = problem
    x = _listed(codes, starts, p) * p.multiplier * (1.0 if factor is None else factor.double())
    weight = packed.transpose(1, 2).reshape(-1, p.r, p.s, p.c)[: p.k].permute(0, 3, 1, 2).double()
    geometry = ((p.stride_h, p.stride_w), (p.pad_h, p.pad_w), (p.dil_h, p.dil_w))
    return (F.conv2d(x, weight, None if bias is None else bias.double(), *geometry),)


def _listed(codes: Tensor, starts: Tensor, p: Accumulate) -> Tensor:
    """The input (n, c, h, w) in float64 that an event list stands for."""
    first = starts[:, 0].long()
    counts = starts[:, -1] - first
    rows = torch.arange(len(first), device=codes.device).repeat_interleave(counts)
    before = (counts.cumsum(0) - counts).repeat_interleave(counts)
    code = codes[first.repeat_interleave(counts) + torch.arange(len(rows), device=codes.device) - before]
    x = torch.zeros(p.n * p.h, p.w * p.c, dtype=torch.float64, device=codes.device)
    x[rows, (code & 0xFFFF).long()] = (code & -0x10000).view(torch.float32).double()
    return x.view(p.n, p.h, p.w, p.c).permute(0, 3, 1, 2)


FIND_EVENTS = Operation("find_events", _find_signature)
PACK_EVENTS = Operation("pack_events", _pack_signature)
ACCUMULATE = Operation(
    "event_conv", _accumulate_signature, _representative, _operands, (6,), _reference,
    lambda problem: TOLERANCE[problem.dtype],
)  # fmt: skip
