"""Convolution and linear layers whose input holds small integers (spikes and sums of spikes).

The functions here mean exactly ``conv2d`` and ``linear``; that the input is integral is a promise of the compiler's
analysis, and only buys speed. On the CPU they run the dense operator, which is also the oracle of every test. On CUDA
they split the weight in bytes (``sparsecomp.ops.weights``) and run on int8 tensor cores, or event-driven.

Under Inductor each op decomposes (``decompositions``) into a cast to int8, which Inductor fuses into the kernel that
produced the spikes, so that no separate pass reads them, and a product of packed operands.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.ops.geometry import is_channels_last, output_size
from sparsecomp.ops.library import KERNEL_DTYPES, TAGS, library
from sparsecomp.ops.weights import join_weight, padded_channels, split_weight

library.define(
    "spike_conv2d(Tensor x, Tensor weight, Tensor? bias, SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, "
    "int groups, int digits, str strategy) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "spike_linear(Tensor x, Tensor weight, Tensor? bias, int digits, str strategy) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# What event and skip lower to: Inductor takes no operator that has a decomposition as it is.
library.define(
    "spike_conv2d_sparse(Tensor x, Tensor weight, Tensor? bias, SymInt[2] stride, SymInt[2] padding, "
    "SymInt[2] dilation, int groups, int digits, str strategy) -> Tensor",
    tags=TAGS,
)
library.define(
    "spike_linear_sparse(Tensor x, Tensor weight, Tensor? bias, int digits, str strategy) -> Tensor",
    tags=TAGS,
)
library.define("pack_weight(Tensor weight, int digits) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
library.define(
    "spike_conv2d_packed(Tensor x, Tensor planes, Tensor scale, Tensor? bias, int[2] kernel, SymInt[2] stride, "
    "SymInt[2] padding, SymInt[2] dilation, int groups, ScalarType dtype, bool channels_last) -> Tensor",
    tags=TAGS,
)


def spike_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    digits: int,
    strategy: str,
) -> Tensor:
    """``conv2d`` of an input that holds integers in [-128, 127].

    Args:
        x: (N, C, H, W), int8 or the dtype of ``weight``, on any device; every value an integer in [-128, 127].
        weight: (K, C/groups, R, S), float32, float16 or bfloat16.
        bias: (K,) or None.
        stride, padding, dilation: two integers each.
        digits: signed bytes a weight (2: error 2^-15, 3: 2^-23, 4: 2^-31 of the channel's largest weight).
        strategy: ``"binary"`` (int8 tensor cores), ``"skip"`` (the same on non-idle pixels only) or ``"event"``
            (event-driven accumulation in float32).

    Returns:
        (N, K, OH, OW) of ``weight``'s dtype, in the memory format ``conv2d`` would return.
    """
    return torch.ops.sparsecomp.spike_conv2d.default(
        x, weight, bias, stride, padding, dilation, groups, digits, strategy
    )


def spike_linear(x: Tensor, weight: Tensor, bias: Tensor | None, digits: int, strategy: str) -> Tensor:
    """``linear`` of an input (…, C) that holds integers in [-128, 127]; see :func:`spike_conv2d`."""
    return torch.ops.sparsecomp.spike_linear.default(x, weight, bias, digits, strategy)


def pack_weight(weight: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    """:func:`sparsecomp.ops.weights.split_weight`, in one launch on CUDA."""
    return torch.ops.sparsecomp.pack_weight.default(weight, digits)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions for Inductor: op overload to function of fake or proxy tensors."""
    return {
        torch.ops.sparsecomp.spike_conv2d.default: _decompose_conv2d,
        torch.ops.sparsecomp.spike_linear.default: _decompose_linear,
    }


def _reference_conv2d(x, weight, bias, stride, padding, dilation, groups, digits, strategy):
    return F.conv2d(_widened(x, weight), weight, bias, stride, padding, dilation, groups)


def _reference_linear(x, weight, bias, digits, strategy):
    return F.linear(_widened(x, weight), weight, bias)


def _widened(x: Tensor, weight: Tensor) -> Tensor:
    return x.to(weight.dtype) if x.dtype is torch.int8 else x


def _kernels_take(x: Tensor, weight: Tensor, bias: Tensor | None, channels: int, rank: int) -> bool:
    """Whether the kernels take these operands, which may have changed since the graph was captured.

    The dense operator takes all others, or raises what eager raises.
    """
    same = [weight] if bias is None else [weight, bias]
    return (
        weight.dtype in KERNEL_DTYPES
        and weight.dim() == rank
        and (x.dtype is torch.int8 or x.dtype is weight.dtype)
        and channels == weight.shape[1]
        and all(operand.dtype is weight.dtype and operand.device == x.device for operand in same)
        and (bias is None or bias.shape == weight.shape[:1])
    )


def _cuda_conv2d(x, weight, bias, stride, padding, dilation, groups, digits, strategy):
    batched = x.dim() == 4 and x.shape[1] % groups == 0 and weight.shape[0] % groups == 0
    if not batched or not _kernels_take(x, weight, bias, x.shape[1] // groups, 4):
        return _reference_conv2d(x, weight, bias, stride, padding, dilation, groups, digits, strategy)
    from sparsecomp.lowering import spike_conv  # loads Triton

    return spike_conv.conv2d(x, weight, bias, stride, padding, dilation, groups, digits, strategy)


def _cuda_linear(x, weight, bias, digits, strategy):
    if x.dim() == 0 or x.shape[-1] == 0 or not _kernels_take(x, weight, bias, x.shape[-1], 2):
        return _reference_linear(x, weight, bias, digits, strategy)
    from sparsecomp.lowering import spike_conv  # loads Triton

    return spike_conv.linear(x, weight, bias, digits, strategy)


def _cuda_pack_weight(weight, digits):
    from sparsecomp.lowering import spike_conv  # loads Triton

    return spike_conv.pack_weight(weight, digits)


def _fake_pack_weight(weight, digits):
    kernel = weight.shape[2:].numel() if weight.dim() == 4 else 1
    planes = weight.new_empty((digits, weight.shape[0], kernel * padded_channels(weight.shape[1])), dtype=torch.int8)
    return planes, weight.new_empty((weight.shape[0],), dtype=torch.float32)


def _reference_packed(x, planes, scale, bias, kernel, stride, padding, dilation, groups, dtype, channels_last):
    weight = join_weight(planes, scale, tuple(kernel), x.shape[1] // groups)
    out = F.conv2d(x.double(), weight, None if bias is None else bias.double(), stride, padding, dilation, groups)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return out.to(dtype).contiguous(memory_format=layout)


def _fake_packed(x, planes, scale, bias, kernel, stride, padding, dilation, groups, dtype, channels_last):
    size = [x.shape[0], planes.shape[1], *output_size(x.shape[2:], kernel, stride, padding, dilation)]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return x.new_empty(size, dtype=dtype).to(memory_format=layout)


def _cuda_packed(x, planes, scale, bias, kernel, stride, padding, dilation, groups, dtype, channels_last):
    from sparsecomp.lowering import spike_conv  # loads Triton

    return spike_conv.packed(x, planes, scale, bias, kernel, stride, padding, dilation, groups, dtype, channels_last)


def _decompose_conv2d(x, weight, bias, stride, padding, dilation, groups, digits, strategy):
    if strategy != "binary":
        return torch.ops.sparsecomp.spike_conv2d_sparse.default(
            x, weight, bias, stride, padding, dilation, groups, digits, strategy
        )
    # eager's memory format, whatever rule torch has for it, read off the dense operator's fake
    dense = F.conv2d(_widened(x, weight), weight, bias, stride, padding, dilation, groups)
    channels_last = is_channels_last(dense)
    x8 = x.to(torch.int8, memory_format=torch.channels_last)
    planes, scale = torch.ops.sparsecomp.pack_weight.default(weight, digits)
    return torch.ops.sparsecomp.spike_conv2d_packed.default(
        x8, planes, scale, bias, weight.shape[2:], stride, padding, dilation, groups, weight.dtype, channels_last
    )


def _decompose_linear(x, weight, bias, digits, strategy):
    if strategy != "binary":
        return torch.ops.sparsecomp.spike_linear_sparse.default(x, weight, bias, digits, strategy)
    x8 = x.to(torch.int8).reshape(-1, x.shape[-1], 1, 1)
    planes, scale = torch.ops.sparsecomp.pack_weight.default(weight, digits)
    out = torch.ops.sparsecomp.spike_conv2d_packed.default(
        x8, planes, scale, bias, [1, 1], [1, 1], [0, 0], [1, 1], 1, weight.dtype, True
    )
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _save_conv2d(ctx, inputs, output):
    x, weight, bias, stride, padding, dilation, groups, _, _ = inputs
    # The spikes fit in a byte: a quarter of the memory that the dense operator keeps for its backward.
    ctx.save_for_backward(x.to(torch.int8), weight)
    ctx.bias_sizes = None if bias is None else list(bias.shape)
    ctx.geometry = (stride, padding, dilation, groups)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # under create_graph
        raise NotImplementedError(
            "sparsecomp keeps spikes as bytes, through which a backward cannot be differentiated again: "
            "use implementation='dense' with create_graph=True"
        )


def _backward_conv2d(ctx, grad):
    _refuse_second_derivative()
    x8, weight = ctx.saved_tensors
    stride, padding, dilation, groups = ctx.geometry
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.bias_sizes is not None and ctx.needs_input_grad[2]]
    grads = torch.ops.aten.convolution_backward.default(
        grad, x8.to(weight.dtype), weight, ctx.bias_sizes, stride, padding, dilation, False, [0, 0], groups, needs
    )
    return (*grads, None, None, None, None, None, None)


def _save_linear(ctx, inputs, output):
    x, weight, bias, _, _ = inputs
    ctx.save_for_backward(x.to(torch.int8), weight)
    ctx.has_bias = bias is not None


def _backward_linear(ctx, grad):
    _refuse_second_derivative()
    x8, weight = ctx.saved_tensors
    rows = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])
    inputs = x8.to(weight.dtype).reshape(rows.shape[0], x8.shape[-1])
    grad_x = grad @ weight if ctx.needs_input_grad[0] else None
    grad_w = rows.t() @ inputs if ctx.needs_input_grad[1] else None
    grad_b = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    return grad_x, grad_w, grad_b, None, None


for _name, _cpu, _cuda, _fake, _save, _backward in (
    ("spike_conv2d", _reference_conv2d, _cuda_conv2d, _reference_conv2d, _save_conv2d, _backward_conv2d),
    ("spike_linear", _reference_linear, _cuda_linear, _reference_linear, _save_linear, _backward_linear),
    ("spike_conv2d_sparse", _reference_conv2d, _cuda_conv2d, _reference_conv2d, None, None),
    ("spike_linear_sparse", _reference_linear, _cuda_linear, _reference_linear, None, None),
    ("pack_weight", split_weight, _cuda_pack_weight, _fake_pack_weight, None, None),
    ("spike_conv2d_packed", _reference_packed, _cuda_packed, _fake_packed, None, None),
):
    library.impl(_name, _cpu, "CPU")
    library.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"sparsecomp::{_name}", _fake, lib=library)
    if _backward is not None:
        torch.library.register_autograd(f"sparsecomp::{_name}", _backward, setup_context=_save, lib=library)
