"""Convolution and linear layers whose input holds small integers times one number (spikes and sums of spikes).

The functions here mean exactly a convolution and `linear`; what their input holds is a promise of the compiler's
analysis, and only buys speed. On the CPU they run the dense operator, which is also the oracle of every test. On CUDA
they split the weight in bytes (`sparsecomp.reference.digits`) and run on int8 tensor cores, or event-driven.

Under Inductor each op decomposes into a cast to int8, which Inductor fuses into the kernel that
produced the spikes, so that no separate pass reads them, and one product of these counts. The number in front of the
spikes is multiplied in at the end of that product, in float32: moved to the weight it could leave the dtype's range.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.errors import InputError
from sparsecomp.ops.library import ON_SPIKES, TAGS, decompose, implement, library
from sparsecomp.reference.digits import SPREAD, check_digits, multiplied_weight
from sparsecomp.reference.geometry import KERNEL_DIMS, Window, convolution_of, is_channels_last, laid_out
from sparsecomp.reference.precision import KERNEL_DTYPES

PROMISES = f"float scale=1.0, Tensor? factor=None, bool binary=False, float spread={SPREAD}, bool keep_input=False"

library.define(
    "spike_conv(Tensor x, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    f"int groups, int digits, str implementation, {PROMISES}) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    f"spike_linear(Tensor x, Tensor weight, Tensor? bias, int digits, str implementation, {PROMISES}) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# What both lower to: Inductor takes no operator that has a decomposition as it is.
library.define(
    "spike_conv_counts(Tensor counts, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, int groups, int digits, str implementation, float scale, Tensor? factor, float spread, "
    "bool channels_last) -> Tensor",
    tags=TAGS,
)


def spike_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    digits: int,
    implementation: str,
    scale: float = 1.0,
    factor: Tensor | None = None,
    binary: bool = False,
    spread: float = SPREAD,
    keep_input: bool = False,
) -> Tensor:
    """`conv1d`, `conv2d` or `conv3d` of an input that holds counts in [-128, 127] times `scale` or `factor`.

    Args:
        x: (N, C, …): int8, the counts themselves, or the dtype of `weight`, their products; on any device.
        weight: (K, C/groups, …), float32, float16 or bfloat16.
        bias: (K,) or None.
        stride, padding, dilation: an integer a dimension each.
        digits: signed bytes a weight (2: error 2^-15, 3: 2^-23, 4: 2^-31 of the channel's largest weight).
        implementation: `"binary"` (int8 tensor cores), `"skip"` (the same on non-idle pixels only), `"event"`
            (event-driven accumulation in float32) or `"direct"` (bytes times floats in float32, without tensor cores).
        scale: a number; a power of two unless `binary`.
        factor: one element of any value, in place of a scale, never beside one. Its gradient is what flows to `x`.
        binary: `x` is zero or not: the counts are 0 and 1, whatever the elements are. Needed for a factor, for scales
            that round, and for spikes that are a few units in the last place off.
        spread: a channel whose largest weight is so often the median of its non-zero ones, or is not finite, is
            multiplied with its floats, at the pace of float32.
        keep_input: a compiled graph keeps `x` itself for its backward, not its counts: others can write to its
            memory, or to that of `factor`, and the result of a write must be that of the dense operator.

    Returns:
        (N, K, …) of `weight`'s dtype, in the memory format of the dense operator's result.

    Raises:
        InputError: other digits than 2 to 4, or a scale beside a factor.
    """
    check_numbers(digits, scale, factor)
    return torch.ops.sparsecomp.spike_conv.default(
        x, weight, bias, stride, padding, dilation, groups, digits, implementation, scale, factor, binary, spread,
        keep_input,
    )  # fmt: skip


def spike_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    digits: int,
    implementation: str,
    scale: float = 1.0,
    factor: Tensor | None = None,
    binary: bool = False,
    spread: float = SPREAD,
    keep_input: bool = False,
) -> Tensor:
    """`linear` of an input (…, C) that holds counts times a number; see :func:`spike_conv`."""
    check_numbers(digits, scale, factor)
    return torch.ops.sparsecomp.spike_linear.default(
        x, weight, bias, digits, implementation, scale, factor, binary, spread, keep_input
    )


def check_numbers(digits: int, scale: float, factor: Tensor | None) -> None:
    """InputError for digits that no kernel has, or two multipliers of the counts."""
    check_digits(digits)
    if factor is not None and scale != 1:
        raise InputError(f"scale is {scale} beside a factor: leave one of the two out")


def _reference_conv(
    x, weight, bias, stride, padding, dilation, groups, digits, implementation,
    scale=1.0, factor=None, binary=False, spread=SPREAD, keep_input=False,
):  # fmt: skip
    return _dense_conv(x, weight, bias, stride, padding, dilation, groups, scale, factor)


def _dense_conv(x, weight, bias, stride, padding, dilation, groups, scale, factor):
    x = elements_multiplied(x, weight, scale, factor)
    with _compat.below_autograd():  # of one dimension it is a view of one of two, which must not be written to
        return convolution_of(weight)(x, weight, bias, stride, padding, dilation, groups)


def _reference_linear(
    x, weight, bias, digits, implementation, scale=1.0, factor=None, binary=False, spread=SPREAD, keep_input=False
):
    with _compat.below_autograd():  # else the result would count as a view
        return F.linear(elements_multiplied(x, weight, scale, factor), weight, bias)


def elements_multiplied(x: Tensor, weight: Tensor, scale: float, factor: Tensor | None) -> Tensor:
    """What the dense operator multiplies with: the elements, or what counts of one byte stand for."""
    return x if x.dtype is not torch.int8 else spike_elements_of(x, weight.dtype, scale, factor)


def counts_of(x: Tensor, scale: float, binary: bool) -> Tensor:
    """The whole numbers that `x` holds, as bytes. NaN, which an infinite factor makes of silence, counts -1."""
    if x.dtype is torch.int8:
        return x
    if binary:
        return (x.abs() > 0).to(torch.int8) - (x != x).to(torch.int8)
    return (x if scale == 1.0 else x * (1.0 / scale)).to(torch.int8)


def spike_elements_of(counts: Tensor, dtype: torch.dtype, scale: float, factor: Tensor | None) -> Tensor:
    """What `counts` are the counts of: the inverse of :func:`counts_of`."""
    if factor is not None:
        fired = torch.where(counts < 0, torch.nan, factor.reshape(()).to(dtype))
        return torch.where(counts == 0, 0.0, fired)
    return counts.to(dtype) if scale == 1.0 else counts.to(dtype) * scale


def kernels_take(x: Tensor, weight: Tensor, bias: Tensor | None, channels: int, rank: int) -> bool:
    """Whether the kernels take these operands, which may have changed since the graph was captured.

    The dense operator takes all others, or raises what eager raises.
    """
    same = [weight] if bias is None else [weight, bias]
    return (
        weight.dtype in KERNEL_DTYPES
        and weight.dim() == rank
        and weight.numel() > 0
        and (x.dtype is torch.int8 or x.dtype is weight.dtype)
        and channels == weight.shape[1]
        and all(operand.dtype is weight.dtype and operand.device == x.device for operand in same)
        and (bias is None or bias.shape == weight.shape[:1])
    )


def _cuda_conv(
    x, weight, bias, stride, padding, dilation, groups, digits, implementation,
    scale=1.0, factor=None, binary=False, spread=SPREAD, keep_input=False,
):  # fmt: skip
    indexed = 3 <= x.dim() <= 2 + KERNEL_DIMS and x.shape[1] % groups == 0 and weight.shape[0] % groups == 0
    if not indexed or not kernels_take(x, weight, bias, x.shape[1] // groups, x.dim()):
        return _dense_conv(x, weight, bias, stride, padding, dilation, groups, scale, factor)
    from sparsecomp.lowering.spiking import spike_conv  # loads Triton

    with _compat.below_autograd():
        return spike_conv.launch_conv(
            x, weight, bias, stride, padding, dilation, groups, digits, implementation, scale, factor, binary, spread
        )


def _cuda_linear(
    x, weight, bias, digits, implementation, scale=1.0, factor=None, binary=False, spread=SPREAD, keep_input=False
):
    if x.dim() == 0 or not kernels_take(x, weight, bias, x.shape[-1], 2):
        return _reference_linear(x, weight, bias, digits, implementation, scale, factor)
    from sparsecomp.lowering.spiking import spike_conv  # loads Triton

    with _compat.below_autograd():
        return spike_conv.launch_linear(x, weight, bias, digits, implementation, scale, factor, binary, spread)


def reference_counts(
    counts, weight, bias, stride, padding, dilation, groups, digits, implementation, scale, factor, spread,
    channels_last,
):  # fmt: skip
    w = weight if weight.dim() > 2 else weight[..., None, None]
    w = w.double() if implementation in ("event", "direct") else multiplied_weight(w, digits, spread)
    x = spike_elements_of(counts, torch.float64, scale, factor)
    bias = None if bias is None else bias.double()
    out = convolution_of(w)(x, w, bias, stride, padding, dilation, groups)
    return laid_out(out.to(weight.dtype), channels_last)


def _fake_counts(
    counts, weight, bias, stride, padding, dilation, groups, digits, implementation, scale, factor, spread,
    channels_last,
):  # fmt: skip
    size = Window.of(weight.shape, stride, padding, dilation).output_size(counts.shape[2:])
    return laid_out(counts.new_empty((counts.shape[0], weight.shape[0], *size), dtype=weight.dtype), channels_last)


def _cuda_counts(*arguments):
    from sparsecomp.lowering.spiking import spike_conv  # loads Triton

    return spike_conv.launch_counts(*arguments)


def _decompose_conv(
    x, weight, bias, stride, padding, dilation, groups, digits, implementation,
    scale=1.0, factor=None, binary=False, spread=SPREAD, keep_input=False,
):  # fmt: skip
    # eager's memory format, whatever rule torch has for it, read off the dense operator's fake
    dense = _dense_conv(x, weight, bias, stride, padding, dilation, groups, scale, factor)
    counts = _lowered(x, implementation, scale, binary)
    if counts.dtype is torch.int8:
        counts = laid_out(counts, channels_last=True)
    return torch.ops.sparsecomp.spike_conv_counts.default(
        counts, weight, bias, stride, padding, dilation, groups, digits, implementation, scale, factor, spread,
        is_channels_last(dense),
    )  # fmt: skip


def _decompose_linear(
    x, weight, bias, digits, implementation, scale=1.0, factor=None, binary=False, spread=SPREAD, keep_input=False
):
    counts = _lowered(x, implementation, scale, binary).reshape(-1, x.shape[-1], 1, 1)
    out = torch.ops.sparsecomp.spike_conv_counts.default(
        counts, weight, bias, [1, 1], [0, 0], [1, 1], 1, digits, implementation, scale, factor, spread, True
    )
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _lowered(x: Tensor, implementation: str, scale: float, binary: bool) -> Tensor:
    """Bytes, except where an implementation's own first pass reads whole numbers as they are."""
    return x if implementation in ("event", "skip") and scale == 1.0 and not binary else counts_of(x, scale, binary)


def save_spikes(ctx, x, weight, bias, scale, factor, binary, keep_input):
    """Keep what both gradients need, in setup of an autograd formula."""
    # the input itself, so that a write to it is the error that it is for the dense operator
    ctx.by_counts = x.dtype is torch.int8 or not (keep_input or _compat.plain_eager())
    ctx.save_for_backward(x, weight, factor if ctx.by_counts else None)
    ctx.bias_sizes = None if bias is None else list(bias.shape)
    ctx.promises = (scale, binary)
    # not what it was made of, which others may have written to by then
    _compat.keep_for_backward(x)


def saved_spikes(ctx, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Input and weight. A compiled graph is shown the way through bytes, a quarter of the memory to keep."""
    x, weight, factor = ctx.saved_tensors
    scale, binary = ctx.promises
    if x.dtype is torch.int8 or (ctx.by_counts and not torch.is_grad_enabled()):
        x = spike_elements_of(counts_of(x, scale, binary), dtype, scale, factor)
    return x, weight


def _save_conv(ctx, inputs, output):
    x, weight, bias, stride, padding, dilation, groups, _, _, scale, factor, binary, _, keep_input = inputs
    save_spikes(ctx, x, weight, bias, scale, factor, binary, keep_input)
    ctx.geometry = (stride, padding, dilation, groups)


def _backward_conv(ctx, grad):
    x, weight = saved_spikes(ctx, grad.dtype)
    stride, padding, dilation, groups = ctx.geometry
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.bias_sizes is not None and ctx.needs_input_grad[2]]
    grads = torch.ops.aten.convolution_backward.default(
        grad, x, weight, ctx.bias_sizes, stride, padding, dilation, False, [0] * len(stride), groups, needs
    )
    return (*grads, *(None,) * 11)


def _save_linear(ctx, inputs, output):
    x, weight, bias, _, _, scale, factor, binary, _, keep_input = inputs
    # as the dense operator, which otherwise takes no offence at a later write to its weight
    kept = weight if ctx.needs_input_grad[0] else None
    save_spikes(ctx, x, kept, bias, scale, factor, binary, keep_input)


def _backward_linear(ctx, grad):
    x, weight = saved_spikes(ctx, grad.dtype)
    rows = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1])  # Size.numel() would fix a symbolic size
    inputs = x.reshape(rows.shape[0], x.shape[-1])
    grad_x = grad @ weight if ctx.needs_input_grad[0] else None
    grad_w = rows.t() @ inputs if ctx.needs_input_grad[1] else None
    grad_b = rows.sum(0) if ctx.bias_sizes is not None and ctx.needs_input_grad[2] else None
    return grad_x, grad_w, grad_b, *(None,) * 7


implement("spike_conv", _reference_conv, _cuda_conv)
implement("spike_linear", _reference_linear, _cuda_linear)
implement("spike_conv_counts", reference_counts, _cuda_counts, _fake_counts)
for _name, _decomposition, _backward, _setup in (
    ("spike_conv", _decompose_conv, _backward_conv, _save_conv),
    ("spike_linear", _decompose_linear, _backward_linear, _save_linear),
):
    decompose(_name, _decomposition)
    torch.library.register_autograd(f"sparsecomp::{_name}", _backward, setup_context=_setup, lib=library)
ON_SPIKES.update((torch.ops.sparsecomp.spike_conv.default, torch.ops.sparsecomp.spike_linear.default))
