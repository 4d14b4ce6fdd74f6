"""CUDA implementations of the spike convolution ops: which operations make up each of them.

The host has microseconds for a layer. What a call on int8 tensor cores needs beside addresses follows from the shapes
alone, so it is worked out once and kept as a record.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name, side_by_side
from sparsecomp.lowering.spiking.binary_conv import BINARY_CONV, BinaryConv, binary_conv
from sparsecomp.lowering.spiking.convolution import Convolution, beyond_images, empty_output, planar
from sparsecomp.lowering.spiking.direct_conv import direct_conv
from sparsecomp.lowering.spiking.event_conv import event_conv, serves
from sparsecomp.lowering.spiking.packing import PACK_WEIGHT, PackWeight, pack_weight, to_bytes
from sparsecomp.lowering.spiking.skip_conv import list_rows
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.digits import SPREAD
from sparsecomp.reference.geometry import Window, lies_channels_last


def launch_conv(
    x, weight, bias, stride, padding, dilation, groups, digits, implementation,
    scale=1.0, factor=None, binary=False, spread=SPREAD,
) -> Tensor:  # fmt: skip
    """CUDA implementation of `sparsecomp::spike_conv`."""
    how = (stride, padding, dilation, groups, digits, implementation, scale, factor, spread)
    counts = _counts(x, implementation, scale, binary)
    return launch_counts(counts, weight, bias, *how, returns_channels_last(x, weight))


def launch_linear(
    x, weight, bias, digits, implementation, scale=1.0, factor=None, binary=False, spread=SPREAD
) -> Tensor:
    """CUDA implementation of `sparsecomp::spike_linear`: a 1×1 convolution of rows."""
    rows = _counts(x.reshape(-1, x.shape[-1], 1, 1), implementation, scale, binary)
    how = ((1, 1), (0, 0), (1, 1), 1, digits, implementation, scale, factor, spread)
    return launch_counts(rows, weight, bias, *how, True).reshape(*x.shape[:-1], weight.shape[0])


def _counts(x: Tensor, implementation: str, scale: float, binary: bool) -> Tensor:
    """`x` as bytes, or as it is where the implementation's own first pass reads it."""
    plain = implementation in ("event", "skip") and scale == 1.0 and not binary
    return x if plain else to_bytes(x, scale=scale, binary=binary)


def launch_counts(
    x, weight, bias, stride, padding, dilation, groups, digits, implementation, scale, factor, spread, channels_last
) -> Tensor:
    """CUDA implementation of `sparsecomp::spike_conv_counts`."""
    bias = side_by_side(bias)
    factor = factor if factor is None or factor.dtype is weight.dtype else factor.to(weight.dtype)
    if implementation == "binary" and x.dtype is torch.int8 and lies_channels_last(x):
        record = _record(
            x.device, x.shape, weight.shape, weight.stride(), weight.dtype, bias is not None, factor is not None,
            tuple(stride), tuple(padding), tuple(dilation), groups, digits, scale, spread, channels_last,
        )  # fmt: skip
        return record(x, weight, bias, factor)
    window = Window.of(weight.shape, stride, padding, dilation)
    out = empty_output(x, window, weight.shape[0], weight.dtype, channels_last)
    conv = Convolution.of(
        x.shape, weight.shape, window, groups, dtype_name(out), not out.is_contiguous(), bias is not None, scale,
        factor is not None,
    )  # fmt: skip
    if implementation == "direct":
        direct_conv(to_bytes(x), weight, bias, factor, conv, out)
        return out
    planes, scales = pack_weight(weight, digits, spread)
    select = None
    if implementation == "event" and serves(x, window, groups):
        x = x if lies_channels_last(x) else to_bytes(x)
        select = event_conv(x, weight, scales, bias, factor, conv, out)
    elif implementation == "skip" and beyond_images(conv) is None:
        x, select = list_rows(x, scales, bias, conv, out)
    binary_conv(to_bytes(x, select), planes, scales, weight, bias, factor, conv, out, select)
    return out


class SplitProduct:
    """The two launches of a call on int8 tensor cores, which split the weight and multiply, and their workspaces.

    Args:
        operation, problem: the product.
        split: the split.
        out: like the output.
        unused: how many tensors the product takes that such a call does not have.
    """

    def __init__(
        self, operation: Operation[Any], problem: Any, split: PackWeight, out: Tensor, device: torch.device,
        unused: int = 0,
    ) -> None:  # fmt: skip
        self._planes, self._scales, self._unused = split.planes, split.planes[1:2], (None,) * unused
        self._size, self._stride, self._dtype, self._device = out.size(), out.stride(), out.dtype, device
        self._pack = dispatch.prepared(PACK_WEIGHT, split, device) if out.numel() else None
        self._multiply = dispatch.prepared(operation, problem, device) if out.numel() else None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None) -> Tensor:
        """The output; `weight` is (K, C / groups, …)."""
        out = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)
        if self._pack is not None and self._multiply is not None:
            planes = torch.empty(self._planes, dtype=torch.int8, device=self._device)
            scales = torch.empty(self._scales, dtype=torch.float32, device=self._device)
            self._pack(planar(weight), planes, scales)
            self._multiply(x, planes, scales, weight, bias, factor, out, *self._unused)
        return out


@dispatch.recorded
def _record(
    device: torch.device, shape: torch.Size, weight_shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype,
    has_bias: bool, has_factor: bool, stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...],
    groups: int, digits: int, scale: float, spread: float, channels_last: bool,
) -> SplitProduct:  # fmt: skip
    x = torch.empty(shape, dtype=torch.int8, device="meta")
    weight = torch.empty_strided(weight_shape, strides, dtype=dtype, device="meta")
    window = Window.of(weight_shape, stride, padding, dilation)
    out = empty_output(x, window, weight_shape[0], dtype, channels_last)
    conv = Convolution.of(
        shape, weight_shape, window, groups, dtype_name(out), not out.is_contiguous(), has_bias, scale, has_factor
    )
    problem = BinaryConv(conv, digits, strides)
    return SplitProduct(BINARY_CONV, problem, PackWeight.of(weight, digits, spread), out, device, unused=2)


def returns_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution on CUDA answers in channels-last memory: it does when either operand suggests it."""
    if x.dim() == 3:  # torch's goes the way of an image too
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    return _suggests_channels_last(x.shape, x.stride()) or _suggests_channels_last(weight.shape, weight.stride())


@lru_cache(maxsize=4096)
def _suggests_channels_last(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """c10's `suggest_memory_format` rule: strides grow along C, the map's dimensions from the last, and N."""
    if stride[1] == 0:
        return False
    least = 0
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        if stride[d] < least or (d == 0 and least == stride[1]):
            return False
        least = stride[d] * max(shape[d], 1)
    return True
