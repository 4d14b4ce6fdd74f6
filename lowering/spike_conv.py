"""CUDA implementations of the spike convolution ops: prescan, packed weights, kernel choice and launch."""

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsecomp.lowering.config import ConvConfig, hopper_config, portable_config
from sparsecomp.lowering.templates.binary_conv import binary_conv_kernel
from sparsecomp.lowering.templates.binary_conv_hopper import binary_conv_hopper_kernel
from sparsecomp.lowering.templates.pack_weight import pack_weight_kernel
from sparsecomp.lowering.templates.prescan import cast_flat_kernel, cast_strided_kernel
from sparsecomp.ops.weights import digit_bits, largest_mantissa, padded_channels

_packed_weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def conv2d(x, weight, bias, stride, padding, dilation, groups, digits, strategy) -> Tensor:
    """CUDA implementation of ``sparsecomp::spike_conv2d``."""
    planes, scale = packed_weight(weight, digits)
    return packed(
        to_bytes(x), planes, scale, bias, weight.shape[2:], stride, padding, dilation, groups, x.dtype,
        _returns_channels_last(x, weight),
    )  # fmt: skip


def linear(x, weight, bias, digits, strategy) -> Tensor:
    """CUDA implementation of ``sparsecomp::spike_linear``: a 1×1 convolution of rows."""
    planes, scale = packed_weight(weight, digits)
    rows = x.reshape(-1, x.shape[-1], 1, 1)
    out = packed(
        to_bytes(rows), planes, scale, bias, (1, 1), (1, 1), (0, 0), (1, 1), 1, x.dtype, True
    )  # fmt: skip
    return out.reshape(*x.shape[:-1], weight.shape[0])


def packed_weight(weight: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    """``pack_weight``, kept between eager calls until the weight is written to or replaced.

    Inside a CUDA graph capture nothing is kept: the split is captured too, so a replay sees the weight's new values.
    """
    if torch.cuda.is_current_stream_capturing() or weight.is_inference():
        return pack_weight(weight, digits)
    stamp = (weight._version, weight.data_ptr(), digits)
    entry = _packed_weights.get(weight)
    if entry is None or entry[0] != stamp:
        with torch.no_grad():
            entry = (stamp, pack_weight(weight, digits))
        _packed_weights[weight] = entry
    return entry[1]


def pack_weight(weight: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    """CUDA implementation of ``sparsecomp::pack_weight``; see ``split_weight``."""
    w = weight if weight.dim() == 4 else weight[:, :, None, None]
    k, c, r, s = w.shape
    cp = padded_channels(c)
    planes = torch.empty((digits, k, r * s * cp), dtype=torch.int8, device=w.device)
    scale = torch.empty((k,), dtype=torch.float32, device=w.device)
    if k:
        with torch.cuda.device_of(w):
            pack_weight_kernel[(k,)](
                w, planes, scale, k, c, cp, *w.stride(), R=r, S=s, DIGITS=digits, BITS=digit_bits(digits),
                TOP=largest_mantissa(digits), BLOCK=1024,
            )  # fmt: skip
    return planes, scale


def to_bytes(x: Tensor) -> Tensor:
    """The prescan: ``x`` (N, C, H, W) of small integers as int8, channels last."""
    n, c, h, w = x.shape
    out = torch.empty((n, h, w, c), dtype=torch.int8, device=x.device)
    view = out.permute(0, 3, 1, 2)
    if x.numel() == 0:
        return view
    with torch.cuda.device_of(x):
        if x.permute(0, 2, 3, 1).is_contiguous():
            block = 4096
            cast_flat_kernel[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
        else:
            grid = (n, triton.cdiv(h * w, 64), triton.cdiv(c, 64))
            cast_strided_kernel[grid](x, out, c, w, h * w, *x.stride(), BC=64, BP=64)
    return view


def packed(x, planes, scale, bias, kernel, stride, padding, dilation, groups, dtype, channels_last) -> Tensor:
    """CUDA implementation of ``sparsecomp::spike_conv2d_packed``; ``x`` is int8 in channels-last memory."""
    n, c, h, w = x.shape
    digits, k, depth = planes.shape
    oh, ow = ((size + 2 * p - d * (r - 1) - 1) // s + 1
              for size, p, d, r, s in zip((h, w), padding, dilation, kernel, stride, strict=True))  # fmt: skip
    layout = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty((n, k, oh, ow), dtype=dtype, device=x.device, memory_format=layout)
    m = n * oh * ow
    if m == 0 or k == 0:
        return out
    x = x.contiguous(memory_format=torch.channels_last)
    unpadded = c // groups == depth // (kernel[0] * kernel[1])
    hopper = unpadded and x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
    choose = hopper_config if hopper else portable_config
    config = choose(m, k // groups, depth // (kernel[0] * kernel[1]), digits)
    out_strides = (k, 1, k * oh * ow) if channels_last else (1, oh * ow, k * oh * ow)
    launch(x, planes, scale, bias, out, (m, h, w, oh, ow, c, k), (*stride, *padding, *dilation), out_strides,
           kernel, groups, config, hopper)  # fmt: skip
    return out


def launch(
    x, planes, scale, bias, out, sizes, window, out_strides, kernel, groups, config: ConvConfig, hopper: bool
) -> None:
    """Launch the binary convolution with one configuration, on Hopper's own kernel or the portable one."""
    m, _, _, _, _, c, k = sizes
    digits, _, depth = planes.shape
    r, s = kernel
    cp = depth // (r * s)
    grid = (triton.cdiv(m, config.block_m) * triton.cdiv(k // groups, config.block_n) * groups,)
    arguments = (x, planes, scale, bias, out, *sizes, cp, *window, *out_strides)
    constants = {
        "R": r, "S": s, "GROUPS": groups, "DIGITS": digits, "HAS_BIAS": bias is not None,
        "BM": config.block_m, "BN": config.block_n, "BK": config.block_k, "num_warps": config.warps,
    }  # fmt: skip
    with torch.cuda.device_of(x):
        if hopper:
            binary_conv_hopper_kernel[grid](*arguments, STAGES=config.stages, **constants)
        else:
            binary_conv_kernel[grid](
                *arguments, EVEN_C=cp == c // groups, num_stages=config.stages, **constants
            )  # fmt: skip


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

