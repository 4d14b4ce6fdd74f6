"""Transposed convolutions whose input holds small integers times one number; see `spike_conv` for what that buys.

The operator means exactly a transposed convolution. On CUDA it runs on int8 tensor cores as a gather: a transposed
convolution is, output by output, a convolution with some of the weight's taps.
"""

import torch
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.ops.library import ON_SPIKES, TAGS, decompose, implement, library
from sparsecomp.ops.spiking.spike_conv import (
    PROMISES,
    check_numbers,
    counts_of,
    elements_multiplied,
    kernels_take,
    save_spikes,
    saved_spikes,
    spike_elements_of,
)
from sparsecomp.reference.digits import SPREAD, multiplied_weight
from sparsecomp.reference.geometry import (
    KERNEL_DIMS,
    TransposedWindow,
    by_output,
    is_channels_last,
    laid_out,
    transposed_of,
)

_WINDOW = "SymInt[] stride, SymInt[] padding, SymInt[] output_padding, int groups, SymInt[] dilation"

library.define(
    f"spike_conv_transpose(Tensor x, Tensor weight, Tensor? bias, {_WINDOW}, int digits, {PROMISES}) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# What it lowers to: Inductor takes no operator that has a decomposition as it is.
library.define(
    f"spike_conv_transpose_counts(Tensor counts, Tensor weight, Tensor? bias, {_WINDOW}, int digits, float scale, "
    "Tensor? factor, float spread, bool channels_last) -> Tensor",
    tags=TAGS,
)


def spike_conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    output_padding: list[int],
    groups: int,
    dilation: list[int],
    digits: int,
    scale: float = 1.0,
    factor: Tensor | None = None,
    binary: bool = False,
    spread: float = SPREAD,
    keep_input: bool = False,
) -> Tensor:
    """`conv_transpose1d`, `conv_transpose2d` or `conv_transpose3d` of counts in [-128, 127] times `scale` or `factor`.

    Args:
        x: (N, C, …), as of :func:`spike_conv`.
        weight: (C, K/groups, …), float32, float16 or bfloat16.
        bias: (K,) or None.
        stride, padding, output_padding, dilation: an integer a dimension each.
        digits, scale, factor, binary, spread, keep_input: as of :func:`spike_conv`.

    Returns:
        (N, K, …) of `weight`'s dtype, in the memory format of the dense operator's result.

    Raises:
        InputError: as of :func:`spike_conv`.
    """
    check_numbers(digits, scale, factor)
    return torch.ops.sparsecomp.spike_conv_transpose.default(
        x, weight, bias, stride, padding, output_padding, groups, dilation, digits, scale, factor, binary, spread,
        keep_input,
    )  # fmt: skip


def _reference(
    x, weight, bias, stride, padding, output_padding, groups, dilation, digits,
    scale=1.0, factor=None, binary=False, spread=SPREAD, keep_input=False,
):  # fmt: skip
    x = elements_multiplied(x, weight, scale, factor)
    with _compat.below_autograd():  # of one dimension it is a view of one of two, which must not be written to
        return transposed_of(weight)(x, weight, bias, stride, padding, output_padding, groups, dilation)


def _cuda(
    x, weight, bias, stride, padding, output_padding, groups, dilation, digits,
    scale=1.0, factor=None, binary=False, spread=SPREAD, keep_input=False,
):  # fmt: skip
    window = (stride, padding, output_padding, groups, dilation, digits)
    if not _is_whole(x, weight, *window[:5]) or not _kernels_take(x, weight, bias, groups):
        return _reference(x, weight, bias, *window, scale, factor)
    from sparsecomp.lowering.spiking import transposed_conv  # loads Triton

    with _compat.below_autograd():
        return transposed_conv.launch_transposed(x, weight, bias, *window, scale, factor, binary, spread)


def _is_whole(x, weight, stride, padding, output_padding, groups, dilation) -> bool:
    """Whether the operands' shapes go together, and give a map; of others the dense operator says what is wrong."""
    if not 3 <= x.dim() <= 2 + KERNEL_DIMS or weight.dim() != x.dim() or weight.numel() == 0:
        return False
    if x.shape[1] != weight.shape[0] or x.shape[1] % groups:
        return False
    size = TransposedWindow.of(weight.shape, stride, padding, output_padding, dilation).output_size(x.shape[2:])
    less = all(more < max(s, d) for more, s, d in zip(output_padding, stride, dilation, strict=True))
    return less and min(size) > 0 and min(*padding, *output_padding) >= 0


def _kernels_take(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> bool:
    """As of a convolution; the weight is looked at as one's."""
    return kernels_take(x, by_output(weight, groups), bias, x.shape[1] // groups, x.dim())


def _reference_counts(
    counts, weight, bias, stride, padding, output_padding, groups, dilation, digits, scale, factor, spread,
    channels_last,
):  # fmt: skip
    w = by_output(multiplied_weight(by_output(weight, groups), digits, spread), groups)
    x = spike_elements_of(counts, torch.float64, scale, factor)
    bias = None if bias is None else bias.double()
    out = transposed_of(w)(x, w, bias, stride, padding, output_padding, groups, dilation)
    return laid_out(out.to(weight.dtype), channels_last)


def _fake_counts(
    counts, weight, bias, stride, padding, output_padding, groups, dilation, digits, scale, factor, spread,
    channels_last,
):  # fmt: skip
    size = TransposedWindow.of(weight.shape, stride, padding, output_padding, dilation).output_size(counts.shape[2:])
    shape = (counts.shape[0], weight.shape[1] * groups, *size)
    return laid_out(counts.new_empty(shape, dtype=weight.dtype), channels_last)


def _cuda_counts(*arguments):
    from sparsecomp.lowering.spiking import transposed_conv  # loads Triton

    return transposed_conv.launch_transposed_counts(*arguments)


def _decompose(
    x, weight, bias, stride, padding, output_padding, groups, dilation, digits,
    scale=1.0, factor=None, binary=False, spread=SPREAD, keep_input=False,
):  # fmt: skip
    window = (stride, padding, output_padding, groups, dilation, digits)
    # eager's memory format, whatever rule torch has for it, read off the dense operator's fake
    dense = _reference(x, weight, bias, *window, scale, factor)
    counts = laid_out(counts_of(x, scale, binary), channels_last=True)
    return torch.ops.sparsecomp.spike_conv_transpose_counts.default(
        counts, weight, bias, *window, scale, factor, spread, is_channels_last(dense)
    )


def _save(ctx, inputs, output):
    x, weight, bias, *window, _, scale, factor, binary, _, keep_input = inputs
    save_spikes(ctx, x, weight, bias, scale, factor, binary, keep_input)
    ctx.geometry = window


def _backward(ctx, grad):
    x, weight = saved_spikes(ctx, grad.dtype)
    stride, padding, output_padding, groups, dilation = ctx.geometry
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.bias_sizes is not None and ctx.needs_input_grad[2]]
    grads = torch.ops.aten.convolution_backward.default(
        grad, x, weight, ctx.bias_sizes, stride, padding, dilation, True, output_padding, groups, needs
    )
    return (*grads, *(None,) * 11)


implement("spike_conv_transpose", _reference, _cuda)
implement("spike_conv_transpose_counts", _reference_counts, _cuda_counts, _fake_counts)
decompose("spike_conv_transpose", _decompose)
torch.library.register_autograd("sparsecomp::spike_conv_transpose", _backward, setup_context=_save, lib=library)
ON_SPIKES.add(torch.ops.sparsecomp.spike_conv_transpose.default)
