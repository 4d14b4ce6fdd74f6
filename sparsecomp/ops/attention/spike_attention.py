"""Attention of spikes, which has no softmax, over the kept pairs of a mask that is given by blocks.

It is linear in each operand, so that each gradient is such an attention too: that by the values walks the transposed
lists with queries and keys in each other's place, and so on. One operator is its own derivative, as often as one likes.

Of counts another operator has the same meaning. Under Inductor it decomposes to casts to float16, which are fused into
what made the spikes, and their product.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.errors import FormatError, MaskError
from sparsecomp.ops.attention.operands import check_attended, check_lists, form_of, on_kernels, place_of
from sparsecomp.ops.library import TAGS, decompose, differentiable, implement, library
from sparsecomp.ops.sparse.linear import autocast
from sparsecomp.reference.attention.blocks import AttentionBlocks
from sparsecomp.reference.attention.spike_attention import spike_attention_reference
from sparsecomp.reference.precision import without_autocast

library.define(
    "spike_attention(Tensor q, Tensor k, Tensor v, Tensor[] blocks, float scale) -> Tensor", tags=TAGS
)
library.define(
    "counted_attention(Tensor q, Tensor k, Tensor v, Tensor[] blocks, float scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# What it lowers to: Inductor takes no operator that has a decomposition as it is.
library.define(
    "spike_attention_counts(Tensor q, Tensor k, Tensor v, Tensor[] blocks, float scale, ScalarType dtype) -> Tensor",
    tags=TAGS,
)
SPIKE_ATTENTION = torch.ops.sparsecomp.spike_attention.default
COUNTED_ATTENTION = torch.ops.sparsecomp.counted_attention.default

MOST_SCORE = 2048
"""Up to which float16 holds every whole number."""


def spike_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, *, scale: float = 1.0, counts: bool = False
) -> Tensor:
    """scale · (M ⊙ q kᵀ) v, where M is 1 for kept pairs and 0 for others: the spiking self attention of Spikformer
    (Zhou et al., 2023, equation 6) by a mask.

    Sums are float32 (float64 for float64). Of whole numbers in float32 they are exact, and the result is rounded once,
    as long as q, k and v are at most 2^11, scores q kᵀ 2^22 and sums 2^24 in size: of spikes, where the depth times
    the number of keys is at most 2^24. Where torch's products may use TF32 on CUDA, these do: scores are then exact to
    2^11. Scores of half precision are rounded to it, as torch's are. Values are finite: what a dropped pair has of NaN
    or infinity reaches a result or not, by whether its block is listed.

    Args:
        q: (batch, heads, q_len, depth), floating, any strides.
        k: (batch, heads, k_len, depth).
        v: (batch, heads, k_len, v_depth).
        blocks: the kept pairs, for this batch or 1, these heads or 1, and these lengths; on the operands' device.
        scale: of the result.
        counts: a promise that q, k and v hold whole numbers to 2048, each tensor times one of 1, 1/2 and 1/4, and that
            the scores of these numbers are at most 2048. It buys speed of float32, and exact scores of bfloat16: CUDA
            multiplies them as float16, which holds them all.

    Returns:
        (batch, heads, q_len, v_depth); zeros for a query that keeps nothing. Gradients flow to q, k and v.

    Raises:
        FormatError: operands that do not belong together.
        MaskError: blocks of other lengths, batch or heads.
    """
    q, k = autocast(q, k)
    v, _ = autocast(v, v)
    if q.dim() == k.dim() == 4 and (blocks.q_len, blocks.k_len) != (q.shape[2], k.shape[2]):
        raise MaskError(
            f"the blocks are of {blocks.q_len} queries and {blocks.k_len} keys, q has {q.shape[2]} and k"
            f" {k.shape[2]}: make them for these lengths"
        )
    operator = COUNTED_ATTENTION if counts else SPIKE_ATTENTION
    return operator(q, k, v, list(blocks[4:]), float(scale))


def _check(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Tensor]) -> None:
    """All checks that look at no contents."""
    check_attended(q, k, v, 0.0, None)
    if q.shape[1] != k.shape[1]:
        raise FormatError(f"q and k are {form_of(q)} and {form_of(k)}: need one number of heads")
    check_lists(blocks, q, k.shape[2])


def _attention(q, k, v, blocks, scale, dtype=None):
    out = _fake_attention(q, k, v, blocks, scale, dtype)
    if not (q.numel() and k.numel() and v.numel()):
        return out.zero_()
    with without_autocast(q):
        return out.copy_(spike_attention_reference(q, k, v, blocks[:5], scale))


def _attention_cuda(q, k, v, blocks, scale, dtype=None):
    if not on_kernels(q, k, v):
        return _attention(q, k, v, blocks, scale, dtype)
    from sparsecomp.lowering.attention import spike_attention as lowered  # loads Triton

    out = _fake_attention(q, k, v, blocks, scale, dtype)
    lowered.spike_attention(q, k, v, blocks, scale, out, _compat.matmul_tf32())
    return out


def _fake_attention(q, k, v, blocks, scale, dtype=None):
    _check(q, k, v, blocks)
    like = place_of(q, v)
    return like if dtype in (None, q.dtype) else torch.empty_like(like, dtype=dtype)


def _counted_cuda(q, k, v, blocks, scale):
    return _attention_cuda(q.half(), k.half(), v.half(), blocks, scale, q.dtype)


def _decompose(q, k, v, blocks, scale):
    halves = q.half(), k.half(), v.half()
    return torch.ops.sparsecomp.spike_attention_counts.default(*halves, blocks, scale, q.dtype)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.blocks, ctx.scale = inputs
    ctx.save_for_backward(q, k, v)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, v = ctx.saved_tensors
    of_q, of_k, of_v, *_ = ctx.needs_input_grad
    blocks = ctx.blocks
    turned = [*blocks[5:], *blocks[:5]]
    by_q = SPIKE_ATTENTION(grad, v, k, blocks, ctx.scale) if of_q else None
    by_k = SPIKE_ATTENTION(v, grad, q, turned, ctx.scale) if of_k else None
    by_v = SPIKE_ATTENTION(k, q, grad, turned, ctx.scale) if of_v else None
    return by_q, by_k, by_v, [None] * len(blocks), None


implement("spike_attention", _attention, _attention_cuda, _fake_attention)
implement("counted_attention", _attention, _counted_cuda, _fake_attention)
implement("spike_attention_counts", _attention, _attention_cuda, _fake_attention)
decompose("counted_attention", _decompose)
for _name in ("spike_attention", "counted_attention"):
    differentiable(_name, _backward, _save)
