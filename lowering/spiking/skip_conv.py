"""Convolution on non-idle pixels only, as two operations: scan the pixels, list the rows they reach."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name
from sparsecomp.lowering.spiking.window import Selection, Window, pixel_strides
from sparsecomp.lowering.tuning.template import Operation


class ScanPixels(NamedTuple):
    """An input (n, c, pixels of rows w wide) of any strides."""

    n: int
    c: int
    w: int
    pixels: int
    stride_n: int
    stride_c: int
    stride_h: int
    stride_w: int
    dtype: str


class ListRows(NamedTuple):
    """The output pixels ``m`` of a convolution; other fields as in ``BinaryConv``."""

    m: int
    h: int
    w: int
    oh: int
    ow: int
    k: int
    stride_h: int
    stride_w: int
    pad_h: int
    pad_w: int
    dil_h: int
    dil_w: int
    out_pixel: int
    out_channel: int
    out_image: int
    r: int
    s: int
    has_bias: bool
    dtype: str


def list_rows(x: Tensor, scale: Tensor, bias: Tensor | None, window: Window, out: Tensor) -> tuple[Tensor, Selection]:
    """Write the outputs that see no spike, and choose the others.

    Args:
        x: (N, C, H, W) of any strides, integers in [-128, 127] of any dtype.
        scale: (K,) float32 from ``split_weight``, NaN for a channel with a weight that is not finite.

    Returns:
        ``x`` as int8 in channels-last memory, and the rows of ``out`` that remain to be computed.
    """
    x8, active, count = scan_pixels(x)
    n, k, oh, ow = out.shape
    m = n * oh * ow
    rows = torch.empty((m,), dtype=torch.int32, device=x.device)
    if out.numel():
        problem = ListRows._make((
            m, *x.shape[2:], oh, ow, k, *window.stride, *window.padding, *window.dilation, *pixel_strides(out),
            *window.kernel, bias is not None, dtype_name(out),
        ))  # fmt: skip
        dispatch.run(LIST_ROWS, problem, active, rows, count, scale, bias, out)
    return x8, Selection(count, 0, rows)


def scan_pixels(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The prescan: ``x`` as channels-last int8, the flags (N, H, W) of its active pixels, and a cleared counter."""
    n, c, h, w = x.shape
    x8 = torch.empty((n, h, w, c), dtype=torch.int8, device=x.device)
    active = torch.empty((n, h, w), dtype=torch.int8, device=x.device)
    count = torch.empty((1,), dtype=torch.int32, device=x.device)
    problem = ScanPixels._make((n, c, w, max(h * w, 1), *x.stride(), dtype_name(x)))
    dispatch.run(SCAN_PIXELS, problem, x, x8, active, count)
    return x8.permute(0, 3, 1, 2), active, count


def _scan_signature(problem: ScanPixels, device: Device) -> KernelSignature:
    sizes = (("n", problem.n), ("c", problem.c), ("pixels", problem.pixels))
    return KernelSignature("scan_pixels", device, dtypes=(problem.dtype, "int8"), sizes=sizes)


def _list_signature(problem: ListRows, device: Device) -> KernelSignature:
    sizes = (("m", problem.m), ("k", problem.k))
    return KernelSignature("list_rows", device, dtypes=(problem.dtype,), sizes=sizes)


SCAN_PIXELS = Operation("scan_pixels", _scan_signature)
LIST_ROWS = Operation("list_rows", _list_signature)
