"""CUDA implementations of the spike convolution ops: prescan, packed weights, kernel choice and launch."""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from sparsecomp.lowering import event_conv, skip_conv
from sparsecomp.lowering.config import hopper_config, portable_config
from sparsecomp.lowering.launch import Launcher
from sparsecomp.lowering.templates.binary_conv import binary_conv_kernel
from sparsecomp.lowering.templates.binary_conv_hopper import binary_conv_hopper_kernel
from sparsecomp.lowering.templates.pack_weight import pack_weight_kernel
from sparsecomp.lowering.templates.prescan import cast_flat_kernel, cast_strided_kernel
from sparsecomp.lowering.window import Selection, Window, pixel_strides
from sparsecomp.ops.weights import digit_bits, largest_mantissa, padded_channels

_pack_weight = Launcher(pack_weight_kernel)
_cast_flat = Launcher(cast_flat_kernel)
_cast_strided = Launcher(cast_strided_kernel)
_binary_conv = Launcher(binary_conv_kernel)
_binary_conv_hopper = Launcher(binary_conv_hopper_kernel)


def conv2d(x, weight, bias, stride, padding, dilation, groups, digits, strategy) -> Tensor:
    """CUDA implementation of ``sparsecomp::spike_conv2d``."""
    window = Window(tuple(weight.shape[2:]), tuple(stride), tuple(padding), tuple(dilation))
    return _convolve(x, weight, bias, window, groups, digits, strategy, _returns_channels_last(x, weight))


def linear(x, weight, bias, digits, strategy) -> Tensor:
    """CUDA implementation of ``sparsecomp::spike_linear``: a 1×1 convolution of rows."""
    rows = x.reshape(-1, x.shape[-1], 1, 1)
    out = _convolve(rows, weight, bias, Window((1, 1), (1, 1), (0, 0), (1, 1)), 1, digits, strategy, True)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, groups: int, digits: int, strategy: str,
    channels_last: bool,
) -> Tensor:  # fmt: skip
    """One strategy, and after it the binary convolution of what the strategy left (decided on the device)."""
    planes, scale = pack_weight(weight, digits)
    out = window.empty_output(x, weight.shape[0], weight.dtype, channels_last)
    select = None
    if strategy == "event" and event_conv.serves(x, window, groups):
        x = x if _lies_dense_nhwc(x) else to_bytes(x)
        select = event_conv.conv2d(x, weight, bias, window, out)
    elif strategy == "skip":
        x, select = skip_conv.list_rows(x, scale, bias, window, out)
    binary_conv2d(to_bytes(x, select), planes, scale, bias, window, groups, out, select)
    return out


def pack_weight(weight: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    """CUDA implementation of ``sparsecomp::pack_weight``; see ``split_weight``.

    Every call packs anew: nothing shows that a weight was written to through ``.data``, so nothing can be kept.
    """
    w = weight if weight.dim() == 4 else weight[:, :, None, None]
    k, c, r, s = w.shape
    cp = padded_channels(c)
    planes = torch.empty((digits, k, r * s * cp), dtype=torch.int8, device=w.device)
    scale = torch.empty((k,), dtype=torch.float32, device=w.device)
    if k:
        constants = {"R": r, "S": s, "DIGITS": digits, "BITS": digit_bits(digits), "TOP": largest_mantissa(digits)}
        _pack_weight((k,), (w, planes, scale, k, c, cp, *w.stride()), {**constants, "BLOCK": 1024})
    return planes, scale


def to_bytes(x: Tensor, select: Selection | None = None) -> Tensor:
    """The prescan: ``x`` (N, C, H, W) of small integers as int8, channels last.

    ``select``: the result is only needed, and in dense memory only made, where it says so.
    """
    if x.dtype is torch.int8:
        return x.contiguous(memory_format=torch.channels_last)
    n, c, h, w = x.shape
    out = torch.empty((n, h, w, c), dtype=torch.int8, device=x.device)
    view = out.permute(0, 3, 1, 2)
    if x.numel() == 0:
        return view
    if _lies_dense_nhwc(x):
        count, limit = (None, 0) if select is None else (select.count, select.limit)
        _cast_flat((triton.cdiv(x.numel(), 4096),), (x, out, x.numel(), count, limit), {"BLOCK": 4096})
    else:
        grid = (n * triton.cdiv(h * w, 64), triton.cdiv(c, 64))
        _cast_strided(grid, (x, out, c, w, h * w, *x.stride()), {"BC": 64, "BP": 64})
    return view


def packed(x, planes, scale, bias, kernel, stride, padding, dilation, groups, dtype, channels_last) -> Tensor:
    """CUDA implementation of ``sparsecomp::spike_conv2d_packed``; ``x`` is int8 in channels-last memory."""
    window = Window(tuple(kernel), tuple(stride), tuple(padding), tuple(dilation))
    out = window.empty_output(x, planes.shape[1], dtype, channels_last)
    binary_conv2d(x, planes, scale, bias, window, groups, out)
    return out


def binary_conv2d(
    x: Tensor, planes: Tensor, scale: Tensor, bias: Tensor | None, window: Window, groups: int, out: Tensor,
    select: Selection | None = None,
) -> None:  # fmt: skip
    """Write the binary convolution of int8 ``x`` to ``out``, all of it or what ``select`` says."""
    if out.numel() == 0:
        return
    x = x.contiguous(memory_format=torch.channels_last)
    plan = _plan(
        x.shape, planes.shape, out.shape, pixel_strides(out), window, groups, bias is not None,
        x.is_cuda and _is_hopper(x.device),
    )  # fmt: skip
    selected = (None, None, 0) if select is None else (select.count, select.rows, select.limit)
    arguments = (x, planes, scale, bias, out, *plan.numbers, *selected)
    plan.kernel(plan.grid, arguments, plan.constants, **plan.options)


class _Plan(NamedTuple):
    """Everything about a launch that sizes alone decide."""

    kernel: Launcher
    grid: tuple[int, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, int]


@lru_cache(maxsize=4096)
def _plan(
    x: tuple[int, ...], planes: tuple[int, ...], out: tuple[int, ...], out_strides: tuple[int, int, int],
    window: Window, groups: int, has_bias: bool, hopper: bool,
) -> _Plan:  # fmt: skip
    """The launch for operands of these shapes, on Hopper's own kernel or the portable one."""
    _, c, h, w = x
    digits, k, depth = planes
    n, _, oh, ow = out
    r, s = window.kernel
    cp, m = depth // (r * s), n * oh * ow
    hopper = hopper and cp == c // groups
    config = (hopper_config if hopper else portable_config)(m, k // groups, cp, digits)
    grid = (triton.cdiv(m, config.block_m) * triton.cdiv(k // groups, config.block_n) * groups,)
    numbers = (m, h, w, oh, ow, c, k, cp, *window.stride, *window.padding, *window.dilation, *out_strides)
    constants: dict[str, Any] = {
        "R": r, "S": s, "GROUPS": groups, "DIGITS": digits, "HAS_BIAS": has_bias,
        "BM": config.block_m, "BN": config.block_n, "BK": config.block_k,
    }  # fmt: skip
    if hopper:
        constants |= {"STAGES": config.stages, "num_warps": config.warps}
        return _Plan(_binary_conv_hopper, grid, numbers, constants, {})
    constants["EVEN_C"] = cp == c // groups
    return _Plan(_binary_conv, grid, numbers, constants, {"num_warps": config.warps, "num_stages": config.stages})


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _lies_dense_nhwc(x: Tensor) -> bool:
    return x.permute(0, 2, 3, 1).is_contiguous()


def _returns_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Whether ``conv2d`` on CUDA answers in channels-last memory: it does when either operand suggests it."""
    return _suggests_channels_last(x) or _suggests_channels_last(weight)


def _suggests_channels_last(x: Tensor) -> bool:
    """c10's ``suggest_memory_format`` rule for four dimensions: strides grow along C, W, H, N."""
    if x.stride(1) == 0:
        return False
    least = 0
    for d in (1, 3, 2, 0):
        if x.stride(d) < least or (d == 0 and least == x.stride(1)):
            return False
        least = x.stride(d) * max(x.shape[d], 1)
    return True
