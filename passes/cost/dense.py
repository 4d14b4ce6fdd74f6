"""Seconds of a dense product on a card: a roofline by the share of the ceiling that the libraries' kernels reach."""

import math
from typing import NamedTuple

import torch

from sparsecomp import _compat
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import ByPrecision, Card
from sparsecomp.lowering.tuning.host import Time

_NARROW = 64
"""Output channels up to which a convolution counts as narrow."""


class DenseWork(NamedTuple):
    """A matrix product or a convolution.

    Attributes:
        operations: a multiply-accumulate is two.
        elements: of all operands and the result, each once.
        dtype: of all of them.
        channels: of a convolution's output; None for a matrix product.
        channels_last: a convolution's input lies so.
    """

    operations: float
    elements: float
    dtype: torch.dtype
    channels: int | None = None
    channels_last: bool = False


def matmul_work(left: list[int], right: list[int], out: list[int], dtype: torch.dtype) -> DenseWork:
    """A product of matrices, or of batches of them, from the shapes of its operands."""
    elements = sum(map(math.prod, (left, right, out)))
    return DenseWork(2.0 * math.prod(out) * left[-1], elements, dtype)


def conv_work(
    x: list[int], weight: list[int], out: list[int], dtype: torch.dtype, channels_last: bool
) -> DenseWork:  # fmt: skip
    """A convolution, from the shapes of its operands; the weight is (K, C / groups, …)."""
    elements = sum(map(math.prod, (x, weight, out)))
    operations = 2.0 * math.prod(out) * math.prod(weight[1:])
    return DenseWork(operations, elements, dtype, weight[0], channels_last)


def time_of(work: DenseWork, card: Card) -> Time | None:
    """What the device and the host take; None for a dtype whose rate is not known."""
    is_conv = work.channels is not None
    precision = _precision(work.dtype, is_conv)
    if precision is None:
        return None
    rate = getattr(card, precision) * getattr(_reached(work, card), precision)
    if work.channels is not None and work.channels <= _NARROW:
        rate *= getattr(card.narrow, precision)
    traffic = work.elements * work.dtype.itemsize / card.bandwidth
    return Time(max(traffic, work.operations / rate) + card.launch, host.CONV if is_conv else host.MATMUL)


def _reached(work: DenseWork, card: Card) -> ByPrecision:
    if work.channels is None:
        return card.matmul
    return card.conv_channels_last if work.channels_last else card.conv


def _precision(dtype: torch.dtype, is_conv: bool) -> str | None:
    if dtype in (torch.float16, torch.bfloat16):
        return "half"
    if dtype is not torch.float32:
        return None
    return "tf32" if (_compat.conv_tf32() if is_conv else _compat.matmul_tf32()) else "fp32"
