"""Batched products of two tensors that both hold small integers times powers of two (spikes and sums of spikes).

The operator means exactly `matmul`; what its operands hold is a promise of the compiler's analysis, and only buys
speed. Under Inductor it decomposes to casts to int8, which are fused into what made the spikes, and a product of these
counts: summed in int32, times both scales, and rounded once.
"""

import torch
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.ops.library import TAGS, decompose, implement, library
from sparsecomp.ops.spiking.spike_conv import counts_of

library.define(
    "spike_matmul(Tensor a, Tensor b, float a_scale=1.0, float b_scale=1.0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# What it lowers to: Inductor takes no operator that has a decomposition as it is.
library.define("spike_matmul_counts(Tensor a, Tensor b, float scale, ScalarType dtype) -> Tensor", tags=TAGS)

_EXACT_DEPTH = 2**24 // 128**2
"""Products of two bytes are at most 2^14, so float32, which holds every whole number to 2^24, sums so many exactly."""


def spike_matmul(a: Tensor, b: Tensor, a_scale: float = 1.0, b_scale: float = 1.0) -> Tensor:
    """`a @ b` of tensors that hold counts in [-128, 127] times a scale.

    Args:
        a, b: (…, m, k) and (…, k, n) with equal batches, of any strides; float32, float16 or bfloat16, both alike.
        a_scale, b_scale: powers of two.

    Returns:
        (…, m, n) of their dtype, contiguous. Gradients are those of `matmul`.
    """
    return torch.ops.sparsecomp.spike_matmul.default(a, b, a_scale, b_scale)


def _reference(a, b, a_scale=1.0, b_scale=1.0):
    with _compat.below_autograd():  # else the result would count as a view, which must not be written to
        return torch.matmul(a, b)


def _cuda(a, b, a_scale=1.0, b_scale=1.0):
    from sparsecomp.lowering.spiking import spike_matmul as product  # loads Triton

    counts = counts_of(a, a_scale, False), counts_of(b, b_scale, False)
    return product.launch_spike_matmul(*counts, a_scale * b_scale, a.dtype)


def _decompose(a, b, a_scale=1.0, b_scale=1.0):
    counts = counts_of(a, a_scale, False), counts_of(b, b_scale, False)
    return torch.ops.sparsecomp.spike_matmul_counts.default(*counts, a_scale * b_scale, a.dtype)


def _reference_counts(a, b, scale, dtype):
    exact = torch.float32 if a.shape[-1] <= _EXACT_DEPTH else torch.float64
    return (a.to(exact) @ b.to(exact) * scale).to(dtype)


def _fake_counts(a, b, scale, dtype):
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


def _cuda_counts(a, b, scale, dtype):
    from sparsecomp.lowering.spiking import spike_matmul as product  # loads Triton

    return product.launch_spike_matmul(a, b, scale, dtype)


def _save(ctx, inputs, output):
    a, b, *_ = inputs
    ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None)


def _backward(ctx, grad):
    a, b = ctx.saved_tensors
    grad_a = None if b is None else grad @ b.transpose(-1, -2)
    grad_b = None if a is None else a.transpose(-1, -2) @ grad
    return grad_a, grad_b, None, None


implement("spike_matmul", _reference, _cuda)
implement("spike_matmul_counts", _reference_counts, _cuda_counts, _fake_counts)
decompose("spike_matmul", _decompose)
torch.library.register_autograd("sparsecomp::spike_matmul", _backward, setup_context=_save, lib=library)
