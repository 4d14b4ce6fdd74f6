"""What every convolution kernel takes besides tensors: the geometry, and a choice of rows made on the device."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.reference.geometry import output_size


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


TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Relative Frobenius error of a convolution on spikes by dtype of its result: mostly that result's rounding."""


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
    return dense_strides("nchw" if out.is_contiguous() else "nhwc", *out.shape[1:])


def dense_strides(layout: str, k: int, oh: int, ow: int) -> tuple[int, int, int]:
    """Strides by pixel, channel and image of a dense output that lies in ``"nchw"`` or ``"nhwc"``."""
    return (1, oh * ow, k * oh * ow) if layout == "nchw" else (k, 1, k * oh * ow)


def poisoned_output(
    shape: tuple[int, int, int, int], strides: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An output (N, K, OH, OW) of these :func:`pixel_strides`, full of NaN."""
    pixel, channel, image = strides
    memory = torch.full((shape[0] * image,), float("nan"), dtype=dtype, device=device)
    return memory.as_strided(shape, (image, channel, shape[3] * pixel, pixel))
