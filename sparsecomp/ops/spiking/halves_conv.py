"""A float32 convolution on 16-bit tensor cores, as exact as float32: each number is split in two halves.

It means exactly `conv2d` of one group. On the CPU it is the dense operator.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.ops.library import TAGS, differentiable, implement, library
from sparsecomp.reference.geometry import Window, laid_out

library.define(
    "halves_conv(Tensor x, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "bool channels_last) -> Tensor",
    tags=TAGS,
)


def halves_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0), dilation: tuple[int, int] = (1, 1), channels_last: bool = False,
) -> Tensor:  # fmt: skip
    """`conv2d` of one group in float32, its error that of float32 whatever the range of the numbers (at most 1e-6 in
    the norm).

    On CUDA three products of float16 by tensor cores stand for one of float32 (Ootomo and Yokota, IJHPCA 2022, section
    4), with a scale for each output pixel and each output channel that the device finds. Where an operand holds NaN,
    infinity, or numbers too far apart for two halves, the block of outputs is summed in float32. Other dtypes than
    float32 are the dense operator's. Gradients are the dense operator's.

    Args:
        x: (N, C, H, W), of any strides.
        weight: (K, C, R, S), of x's dtype.
        bias: (K,), of x's dtype, or None.
        stride, padding, dilation: two numbers each.
        channels_last: how the result lies.

    Returns:
        (N, K, OH, OW) of x's dtype.
    """
    return torch.ops.sparsecomp.halves_conv.default(
        x, weight, bias, list(stride), list(padding), list(dilation), channels_last
    )


def _reference(x, weight, bias, stride, padding, dilation, channels_last):
    with _compat.below_autograd():
        return laid_out(F.conv2d(x, weight, bias, stride, padding, dilation), channels_last)


def _cuda(x, weight, bias, stride, padding, dilation, channels_last):
    from sparsecomp.lowering.spiking.halves_conv import addressable, launch_halves_conv, takes_images  # loads Triton

    if not (takes_images(x, weight, bias) and addressable(x)):
        return _reference(x, weight, bias, stride, padding, dilation, channels_last)
    return launch_halves_conv(x, weight, bias, stride, padding, dilation, channels_last)


def _fake(x, weight, bias, stride, padding, dilation, channels_last):
    size = Window.of(weight.shape, stride, padding, dilation).output_size(x.shape[2:])
    return laid_out(x.new_empty((x.shape[0], weight.shape[0], *size)), channels_last)


def _save(ctx, inputs, output):
    x, weight, bias, *ctx.geometry, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_sizes = None if bias is None else list(bias.shape)


def _backward(ctx, grad):
    x, weight = ctx.saved_tensors
    stride, padding, dilation = ctx.geometry
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.bias_sizes is not None and ctx.needs_input_grad[2]]
    grads = torch.ops.aten.convolution_backward.default(
        grad, x, weight, ctx.bias_sizes, stride, padding, dilation, False, [0, 0], 1, needs
    )
    return (*grads, *(None,) * 4)


implement("halves_conv", _reference, _cuda, _fake)
differentiable("halves_conv", _backward, _save)
