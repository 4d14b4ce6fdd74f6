"""The geometry of convolutions in any number of dimensions, for rules, operators and launchers alike."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IMAGE_DIMS = 2
"""Spatial dimensions that every kernel of a convolution indexes; a signal is an image of height one."""
KERNEL_DIMS = 3
"""Those that the one that takes most does, the portable one for int8 tensor cores."""


class Window(NamedTuple):
    """How a convolution walks over a map: a number a dimension, outermost first.

    Attributes:
        kernel: extent of the weight.
        stride, padding, dilation: as in `torch.nn.functional.conv2d`.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(
        cls, weight: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
    ) -> "Window":
        """The window of a weight of this shape; a matrix has a kernel of one pixel."""
        kernel = weight[2:] or (1,) * len(stride)
        return cls(tuple(kernel), tuple(stride), tuple(padding), tuple(dilation))

    @classmethod
    def centred(cls, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...] = ()) -> "Window":
        """A window padded by half its kernel; dilation is 1 by default."""
        dilation = dilation or (1,) * len(kernel)
        padding = tuple(d * (extent // 2) for d, extent in zip(dilation, kernel, strict=True))
        return cls(kernel, stride, padding, dilation)

    def output_size(self, size: Sequence[int]) -> tuple[int, ...]:
        """Of the result for a map of this size."""
        return tuple(output_size(size, *self))


class TransposedWindow(NamedTuple):
    """How a transposed convolution walks: each input pixel is spread over the outputs that a window sees of it.

    Attributes:
        kernel: extent of the weight.
        stride, padding, output_padding, dilation: as in `torch.nn.functional.conv_transpose2d`.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(
        cls, weight: Sequence[int], stride: Sequence[int], padding: Sequence[int], output_padding: Sequence[int],
        dilation: Sequence[int],
    ) -> "TransposedWindow":  # fmt: skip
        """The window of a weight of this shape."""
        return cls(tuple(weight[2:]), tuple(stride), tuple(padding), tuple(output_padding), tuple(dilation))

    def output_size(self, size: Sequence[int]) -> tuple[int, ...]:
        """Of the result for a map of this size."""
        window = zip(size, *self, strict=True)
        return tuple((n - 1) * s - 2 * p + d * (r - 1) + more + 1 for n, r, s, p, more, d in window)


AnyWindow = Window | TransposedWindow


def output_size(
    size: Sequence[Any], kernel: Sequence[int], stride: Sequence[Any], padding: Sequence[Any], dilation: Sequence[Any]
) -> list[Any]:
    """Spatial size of a convolution's result; all arguments by dimension, maybe symbolic."""
    window = zip(size, kernel, stride, padding, dilation, strict=True)
    return [(n + 2 * p - d * (r - 1) - 1) // s + 1 for n, r, s, p, d in window]


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, window: AnyWindow, groups: int = 1) -> Tensor:
    """The dense convolution of x (N, C, …) with weight (K, C / groups, …); a transposed one's is (C, K / groups, …)."""
    if isinstance(window, TransposedWindow):
        how = window.stride, window.padding, window.output_padding, groups, window.dilation
        return transposed_of(weight)(x, weight, bias, *how)
    return convolution_of(weight)(x, weight, bias, window.stride, window.padding, window.dilation, groups)


def convolution_of(weight: Tensor) -> Callable[..., Tensor]:
    """torch's function for a weight (K, C / groups, …); of a shape that none takes the one whose error says so."""
    return {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}.get(weight.dim(), F.conv2d)


def transposed_of(weight: Tensor) -> Callable[..., Tensor]:
    """torch's function for a weight (C, K / groups, …) of a transposed convolution."""
    known = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}
    return known.get(weight.dim(), F.conv_transpose2d)


def by_output(weight: Tensor, groups: int) -> Tensor:
    """The weight (C, K / groups, …) of a transposed convolution as a convolution's (K, C / groups, …), and back.

    A view where there is one group.
    """
    if groups == 1:
        return weight.transpose(0, 1)
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def lies_channels_last(x: Tensor) -> bool:
    """Whether x (N, C, …) fills its memory with channels innermost."""
    if x.dim() == 4:  # kernels ask in each call, and a view takes the host longer
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


def is_channels_last(x: Tensor) -> bool:
    """Whether x lies channels-last and not, as small shapes can, in the contiguous format as well."""
    return lies_channels_last(x) and not x.is_contiguous()


def laid_out(x: Tensor, channels_last: bool) -> Tensor:
    """x (N, C, …) channels-last, or contiguous."""
    if not channels_last or x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    return x.movedim(1, -1).contiguous().movedim(-1, 1)
