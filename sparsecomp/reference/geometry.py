"""The shape and memory format of a convolution's result, for rules, operators and launchers alike."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def output_size(
    size: Sequence[Any], kernel: Sequence[int], stride: Sequence[Any], padding: Sequence[Any], dilation: Sequence[Any]
) -> list[Any]:
    """Height and width of a two-dimensional convolution's result; all arguments by rows and columns, maybe symbolic."""
    window = zip(size, kernel, stride, padding, dilation, strict=True)
    return [(n + 2 * p - d * (r - 1) - 1) // s + 1 for n, r, s, p, d in window]


def is_channels_last(x: Tensor) -> bool:
    """Whether four dimensions lie channels-last and not, as small shapes can, in the contiguous format as well."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
