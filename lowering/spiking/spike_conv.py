"""CUDA implementations of the spike convolution ops: which operations make up each strategy.

The host has microseconds for a layer. What a call of the binary product needs beside addresses follows from the shapes
alone, so it is worked out once and kept as a record.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.spiking import binary_conv, event_conv, skip_conv
from sparsecomp.lowering.spiking.binary_conv import BINARY_CONV
from sparsecomp.lowering.spiking.packing import PACK_WEIGHT, lies_dense_nhwc, pack_problem, pack_weight, to_bytes
from sparsecomp.lowering.spiking.window import Window
from sparsecomp.reference.digits import SPREAD


def conv2d(
    x, weight, bias, stride, padding, dilation, groups, digits, strategy,
    scale=1.0, factor=None, binary=False, spread=SPREAD,
) -> Tensor:  # fmt: skip
    """CUDA implementation of ``sparsecomp::spike_conv2d``."""
    window = (stride, padding, dilation, groups, digits, strategy, scale, factor, spread)
    counts = _counts(x, strategy, scale, binary)
    return convolve(counts, weight, bias, *window, _returns_channels_last(x, weight))


def linear(x, weight, bias, digits, strategy, scale=1.0, factor=None, binary=False, spread=SPREAD) -> Tensor:
    """CUDA implementation of ``sparsecomp::spike_linear``: a 1×1 convolution of rows."""
    rows = _counts(x.reshape(-1, x.shape[-1], 1, 1), strategy, scale, binary)
    window = ((1, 1), (0, 0), (1, 1), 1, digits, strategy, scale, factor, spread)
    return convolve(rows, weight, bias, *window, True).reshape(*x.shape[:-1], weight.shape[0])


def _counts(x: Tensor, strategy: str, scale: float, binary: bool) -> Tensor:
    """``x`` as bytes, or as it is where the strategy's own first pass reads it."""
    plain = strategy != "binary" and scale == 1.0 and not binary
    return x if plain else to_bytes(x, scale=scale, binary=binary)


def convolve(
    x, weight, bias, stride, padding, dilation, groups, digits, strategy, scale, factor, spread, channels_last
) -> Tensor:
    """CUDA implementation of ``sparsecomp::spike_conv2d_counts``."""
    factor = factor if factor is None or factor.dtype is weight.dtype else factor.to(weight.dtype)
    if strategy == "binary" and x.dtype is torch.int8 and lies_dense_nhwc(x):
        record = _record(
            x.device, x.shape, weight.shape, weight.stride(), weight.dtype, bias is not None,
            factor is not None, tuple(stride), tuple(padding), tuple(dilation), groups, digits, scale, spread,
            channels_last,
        )  # fmt: skip
        return record(x, weight, bias, factor)
    window = _window(weight.shape, stride, padding, dilation)
    planes, scales = pack_weight(weight, digits, spread)
    out = window.empty_output(x, weight.shape[0], weight.dtype, channels_last)
    select = None
    if strategy == "event" and event_conv.serves(x, window, groups):
        x = x if lies_dense_nhwc(x) else to_bytes(x)
        select = event_conv.conv2d(x, weight, scales, bias, factor, window, scale, out)
    elif strategy == "skip":
        x, select = skip_conv.list_rows(x, scales, bias, window, out)
    counts = to_bytes(x, select)
    binary_conv.run(counts, planes, scales, weight, bias, factor, window, groups, scale, out, select)
    return out


class _Binary:
    """All of a binary product but its addresses: the weight's split and the product, both of them launches."""

    def __init__(
        self, device: torch.device, shape: torch.Size, weight: Tensor, given: tuple[bool, bool], window: Window,
        groups: int, digits: int, scale: float, spread: float, channels_last: bool,
    ) -> None:  # fmt: skip
        x = torch.empty(shape, dtype=torch.int8, device="meta")
        out = window.empty_output(x, weight.shape[0], weight.dtype, channels_last)
        split = pack_problem(weight, digits, spread)
        problem = binary_conv.problem_of(x, weight, window, groups, digits, scale, out, *given)
        self._planes, self._scales = (digits, split.k, split.depth), (split.k,)
        self._size, self._stride, self._dtype, self._device = out.size(), out.stride(), out.dtype, device
        self._pack = dispatch.prepared(PACK_WEIGHT, split, device) if out.numel() else None
        self._multiply = dispatch.prepared(BINARY_CONV, problem, device) if out.numel() else None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None) -> Tensor:
        out = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)
        if self._pack is not None and self._multiply is not None:
            planes = torch.empty(self._planes, dtype=torch.int8, device=self._device)
            scales = torch.empty(self._scales, dtype=torch.float32, device=self._device)
            self._pack(weight, planes, scales)
            self._multiply(x, planes, scales, weight, bias, factor, out, None, None)
        return out


@dispatch.recorded
def _record(
    device: torch.device, shape: torch.Size, size: torch.Size, strides: tuple[int, ...], dtype: torch.dtype,
    has_bias: bool, has_factor: bool, stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int],
    groups: int, digits: int, scale: float, spread: float, channels_last: bool,
) -> _Binary:  # fmt: skip
    weight = torch.empty_strided(size, strides, dtype=dtype, device="meta")
    window = _window(size, stride, padding, dilation)
    given = (has_bias, has_factor)
    return _Binary(device, shape, weight, given, window, groups, digits, scale, spread, channels_last)


def _window(size: torch.Size, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Window:
    """The geometry of a convolution with a weight of this size; a matrix is a window of one pixel."""
    r, s = size[2:] if len(size) == 4 else (1, 1)
    return Window((r, s), (stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1]))


def _returns_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Whether ``conv2d`` on CUDA answers in channels-last memory: it does when either operand suggests it."""
    return _suggests_channels_last(x.shape, x.stride()) or _suggests_channels_last(weight.shape, weight.stride())


@lru_cache(maxsize=4096)
def _suggests_channels_last(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """c10's ``suggest_memory_format`` rule for four dimensions: strides grow along C, W, H, N."""
    if stride[1] == 0:
        return False
    least = 0
    for d in (1, 3, 2, 0):
        if stride[d] < least or (d == 0 and least == stride[1]):
            return False
        least = stride[d] * max(shape[d], 1)
    return True
