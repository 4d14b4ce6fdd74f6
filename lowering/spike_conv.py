"""CUDA implementations of the spike convolution ops: which operations make up each strategy."""

from functools import lru_cache

from torch import Tensor

from sparsecomp.lowering import binary_conv, event_conv, skip_conv
from sparsecomp.lowering.packing import lies_dense_nhwc, pack_weight, to_bytes
from sparsecomp.lowering.window import Window


def conv2d(x, weight, bias, stride, padding, dilation, groups, digits, strategy) -> Tensor:
    """CUDA implementation of ``sparsecomp::spike_conv2d``."""
    window = Window(tuple(weight.shape[2:]), tuple(stride), tuple(padding), tuple(dilation))
    return _convolve(x, weight, bias, window, groups, digits, strategy, _returns_channels_last(x, weight))


def linear(x, weight, bias, digits, strategy) -> Tensor:
    """CUDA implementation of ``sparsecomp::spike_linear``: a 1×1 convolution of rows."""
    rows = x.reshape(-1, x.shape[-1], 1, 1)
    out = _convolve(rows, weight, bias, Window((1, 1), (1, 1), (0, 0), (1, 1)), 1, digits, strategy, True)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def packed(x, planes, scale, bias, kernel, stride, padding, dilation, groups, dtype, channels_last) -> Tensor:
    """CUDA implementation of ``sparsecomp::spike_conv2d_packed``; ``x`` is int8 in channels-last memory."""
    window = Window(tuple(kernel), tuple(stride), tuple(padding), tuple(dilation))
    out = window.empty_output(x, planes.shape[1], dtype, channels_last)
    binary_conv.run(x, planes, scale, bias, window, groups, out)
    return out


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, groups: int, digits: int, strategy: str,
    channels_last: bool,
) -> Tensor:  # fmt: skip
    """One strategy, and after it the binary convolution of what the strategy left (decided on the device)."""
    planes, scale = pack_weight(weight, digits)
    out = window.empty_output(x, weight.shape[0], weight.dtype, channels_last)
    select = None
    if strategy == "event" and event_conv.serves(x, window, groups):
        x = x if lies_dense_nhwc(x) else to_bytes(x)
        select = event_conv.conv2d(x, weight, bias, window, out)
    elif strategy == "skip":
        x, select = skip_conv.list_rows(x, scale, bias, window, out)
    binary_conv.run(to_bytes(x, select), planes, scale, bias, window, groups, out, select)
    return out


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
