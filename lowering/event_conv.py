"""Event-driven convolution: launches of ``templates.event_conv``."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sparsecomp.lowering.launch import Launcher
from sparsecomp.lowering.templates.event_conv import event_conv_kernel, events_kernel, pack_event_weight_kernel
from sparsecomp.lowering.window import Selection, Window, pixel_strides

SPARSEST_OVERFLOW = 16
"""The event list holds one in this many inputs; beyond, the binary convolution is faster anyhow."""

_MAX_WORDS = 1024
_MAX_STRETCHES = 11

_find = Launcher(events_kernel)
_accumulate = Launcher(event_conv_kernel)
_pack_weight = Launcher(pack_event_weight_kernel)


@dataclass(frozen=True)
class EventConfig:
    """Output pixels, events in flight and output channels of a block, warps, and programs a multiprocessor."""

    pixels: int
    events: int
    channels: int
    warps: int
    programs: int


@dataclass(frozen=True)
class Events:
    """The non-zero inputs of a convolution; see ``events_kernel`` for the tensors."""

    codes: Tensor
    starts: Tensor
    total: Tensor

    @property
    def capacity(self) -> int:
        return self.codes.shape[0]


def event_config(out_channels: int, channels_last: bool) -> EventConfig:
    """The configuration to use without measuring: one warp a program, few pixels, all channels it can hold."""
    channels = min(max(triton.next_power_of_2(out_channels), 16), 256)
    # neighbouring pixels of one channel make a whole memory sector where the output is not channels-last
    pixels = max(256 // channels, 1) if channels_last else 8
    return EventConfig(pixels, 2, channels, 1, 128)


def serves(x: Tensor, window: Window, groups: int) -> bool:
    """Whether the kernels can run this convolution: an event's place in its image row has 16 bits."""
    _, c, _, w = x.shape
    stretches = window.kernel[0] * (window.kernel[1] if window.dilation[1] > 1 else 1)
    return (
        groups == 1
        and x.numel() < 2**31
        and w * c <= 2**16
        and w * triton.cdiv(c, 32) <= _MAX_WORDS
        and stretches <= _MAX_STRETCHES
    )


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, out: Tensor) -> Selection:
    """Write the convolution of ``x`` to ``out``, unless ``x`` has too many events.

    Args:
        x: (N, C, H, W) in dense channels-last memory, integers in [-128, 127] of any dtype.
        weight: (K, C, R, S), or (K, C) for a 1×1 window.

    Returns:
        The selection under which another kernel must write ``out``: everything, when there were too many events.
    """
    config = event_config(out.shape[1], not out.is_contiguous())
    packed = event_weight(weight, config.channels)
    events = find_events(x)
    if out.numel():
        accumulate(events, packed, bias, x, window, out, config)
    return Selection(events.total, events.capacity)


def find_events(x: Tensor) -> Events:
    """The prescan of ``x`` (N, C, H, W), channels-last: one pass over it, no host synchronisation."""
    n, c, h, w = x.shape
    codes = torch.empty((x.numel() // SPARSEST_OVERFLOW,), dtype=torch.int32, device=x.device)
    starts = torch.empty((n * h, w + 1), dtype=torch.int32, device=x.device)
    total = torch.zeros((1,), dtype=torch.int32, device=x.device)
    words = triton.cdiv(c, 32)
    block = triton.next_power_of_2(w * words)
    if x.numel():
        arguments = (x, codes, starts, total, w, c, codes.shape[0])
        warps = min(max(block // 32, 1), 16)
        _find((n * h,), arguments, {"WORDS": words, "BLOCK": block}, num_warps=warps)
    return Events(codes, starts, total)


def accumulate(
    events: Events, packed: Tensor, bias: Tensor | None, x: Tensor, window: Window, out: Tensor, config: EventConfig
) -> None:
    """Launch the accumulation with one configuration; ``packed`` is from :func:`event_weight`."""
    _, c, h, w = x.shape
    n, k, oh, ow = out.shape
    m = n * oh * ow
    blocks = triton.cdiv(m, config.pixels) * triton.cdiv(k, config.channels)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    r, s = window.kernel
    arguments = (
        events.codes, events.starts, events.total, packed, bias, out, events.capacity, m, h, w, oh, ow, c, k,
        *window.stride, *window.padding, *window.dilation, *pixel_strides(out),
    )  # fmt: skip
    constants = {
        "R": r, "S": s, "SPAN": s if window.dilation[1] == 1 else 1, "HAS_BIAS": bias is not None,
        "P": config.pixels, "E": config.events, "KS": config.channels,
    }  # fmt: skip
    _accumulate((min(blocks, processors * config.programs),), arguments, constants, num_warps=config.warps)


def event_weight(weight: Tensor, block: int) -> Tensor:
    """``weight`` as ``event_conv_kernel`` reads it, by blocks of ``block`` output channels."""
    w = weight if weight.dim() == 4 else weight[:, :, None, None]
    k, c, r, s = w.shape
    depth = r * s * c
    out = torch.empty((triton.cdiv(k, block), depth + 1, block), dtype=w.dtype, device=w.device)
    largest = torch.linalg.vector_norm(w, float("inf"), dim=(1, 2, 3)) if depth else w.new_zeros(k)
    if k:
        grid = (triton.cdiv(depth + 1, 32), out.shape[0])
        _pack_weight(grid, (w, largest, out, k, c, depth, *w.stride()), {"S": s, "BD": 32, "KS": block})
    return out
