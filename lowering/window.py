"""What every convolution kernel takes besides tensors: the geometry, and a choice of rows made on the device."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.ops.geometry import output_size


class Window(NamedTuple):
    """The geometry of a convolution: kernel size, stride, padding and dilation, rows before columns."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def empty_output(self, x: Tensor, channels: int, dtype: torch.dtype, channels_last: bool) -> Tensor:
        """The uninitialised output (N, channels, OH, OW) of a convolution of ``x`` (N, C, H, W)."""
        size = (x.shape[0], channels, *_output_size(self, *x.shape[2:]))
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return torch.empty(size, dtype=dtype, device=x.device, memory_format=layout)


@lru_cache(maxsize=4096)
def _output_size(window: Window, height: int, width: int) -> tuple[int, ...]:
    return tuple(output_size((height, width), *window))


@dataclass(frozen=True)
class Selection:
    """Work that the device itself chose, for kernels whose grid cannot depend on it.

    Attributes:
        count: (1,) int32. A kernel does nothing unless ``count > limit``.
        limit: see ``count``.
        rows: int32 list whose first ``count`` entries are the output pixels to compute; None for all of them.
    """

    count: Tensor
    limit: int = 0
    rows: Tensor | None = None


def pixel_strides(out: Tensor) -> tuple[int, int, int]:
    """Strides of a dense (N, K, OH, OW) output by pixel, channel and image, in either memory format."""
    _, k, oh, ow = out.shape
    if out.is_contiguous():
        return 1, oh * ow, k * oh * ow
    return k, 1, k * oh * ow
