"""Convolution on non-idle pixels only: launches of ``templates.skip_conv``."""

import torch
import triton
from torch import Tensor

from sparsecomp.lowering.launch import Launcher
from sparsecomp.lowering.templates.skip_conv import list_rows_kernel, scan_pixels_kernel
from sparsecomp.lowering.window import Selection, Window, pixel_strides

_list_rows = Launcher(list_rows_kernel)
_scan_pixels = Launcher(scan_pixels_kernel)


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
        r, s = window.kernel
        block = 128
        arguments = (
            active, rows, count, scale, bias, out, m, *x.shape[2:], oh, ow, k,
            *window.stride, *window.padding, *window.dilation, *pixel_strides(out),
        )  # fmt: skip
        constants = {"R": r, "S": s, "HAS_BIAS": bias is not None, "BM": block, "BN": 32}
        _list_rows((triton.cdiv(m, block),), arguments, constants)
    return x8, Selection(count, 0, rows)


def scan_pixels(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The prescan: ``x`` as channels-last int8, the flags (N, H, W) of its active pixels, and a cleared counter."""
    n, c, h, w = x.shape
    x8 = torch.empty((n, h, w, c), dtype=torch.int8, device=x.device)
    active = torch.empty((n, h, w), dtype=torch.int8, device=x.device)
    count = torch.empty((1,), dtype=torch.int32, device=x.device)
    channels = min(triton.next_power_of_2(max(c, 1)), 128)
    pixels = max(4096 // channels, 16)
    # at least one program, which clears the counter
    grid = (max(triton.cdiv(n * h * w, pixels), 1),)
    _scan_pixels(grid, (x, x8, active, count, n, c, w, max(h * w, 1), *x.stride()), {"BP": pixels, "BC": channels})
    return x8.permute(0, 3, 1, 2), active, count
