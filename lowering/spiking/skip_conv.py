"""Convolution on non-idle pixels only, as two operations: scan the pixels, list the rows they reach."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.spiking.convolution import Convolution, Maps, Selection, planar
from sparsecomp.lowering.tuning.template import Operation


class ListRows(NamedTuple):
    """A convolution whose output pixels are listed."""

    conv: Convolution


def list_rows(
    x: Tensor, scale: Tensor, bias: Tensor | None, conv: Convolution, out: Tensor
) -> tuple[Tensor, Selection]:
    """Write the outputs that see no spike, and choose the others.

    Args:
        x: (N, C, …) of any strides, integers in [-128, 127] of any dtype.
        scale: (K,) float32 from `split_weight`, NaN for a channel with a weight that is not finite.

    Returns:
        `x` as int8 in channels-last memory, and the rows of `out` that remain to be computed.
    """
    x8, active, count = scan_pixels(x)
    rows = torch.empty((conv.m,), dtype=torch.int32, device=x.device)
    if out.numel():
        dispatch.launch(LIST_ROWS, ListRows(conv), active, rows, count, scale, bias, out)
    return x8, Selection(count, 0, rows)


def scan_pixels(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The prescan: `x` as channels-last int8, the flags (N, …) of its active pixels, and a cleared counter."""
    n, c, *size = x.shape
    x8 = torch.empty((n, *size, c), dtype=torch.int8, device=x.device)
    active = torch.empty((n, *size), dtype=torch.int8, device=x.device)
    count = torch.empty((1,), dtype=torch.int32, device=x.device)
    x = planar(x)
    dispatch.launch(SCAN_PIXELS, Maps.of(x), x, x8, active, count)
    return x8.movedim(-1, 1), active, count


def _scan_signature(problem: Maps, device: Device) -> KernelSignature:
    sizes = (("n", problem.outer), ("c", problem.c), ("pixels", problem.pixels))
    return KernelSignature("scan_pixels", device, dtypes=(problem.dtype, "int8"), sizes=sizes)


def _list_signature(problem: ListRows, device: Device) -> KernelSignature:
    sizes = (("m", problem.conv.m), ("k", problem.conv.k))
    return KernelSignature("list_rows", device, dtypes=(problem.conv.dtype,), sizes=sizes)


SCAN_PIXELS = Operation("scan_pixels", _scan_signature)
LIST_ROWS = Operation("list_rows", _list_signature)
