"""Scaled dot product attention over pairs that are listed one by one.

Its products with keys are a sampled dense-dense product, its softmax goes over what is stored, and its product with
values is one with a sparse matrix; all three are one pass over a query's list here, which keeps no weights. Who wants
those: `sparsecomp.attention.attention_weights`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError, MaskError
from sparsecomp.ops.attention.operands import (
    check_attended,
    differentiable_gradients,
    form_of,
    on_kernels,
    places_of,
    places_of_gradients,
    points_of,
    scale_of,
)
from sparsecomp.ops.library import TAGS, differentiable, implement, library
from sparsecomp.ops.sparse.linear import autocast
from sparsecomp.reference.attention import element_attention as reference
from sparsecomp.reference.attention.elements import AttentionElements
from sparsecomp.reference.attention.scores import Scores
from sparsecomp.reference.precision import without_autocast

library.define(
    "element_attention(Tensor q, Tensor k, Tensor v, Tensor[] lists, float scale, float softcap=0.0, "
    "Tensor? alibi=None) -> (Tensor, Tensor)",
    tags=TAGS,
)
library.define(
    "element_attention_gradients(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
    "Tensor? grad_logsumexp, Tensor[] lists, float scale, float softcap=0.0, Tensor? alibi=None) "
    "-> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)


def element_attention(
    q: Tensor, k: Tensor, v: Tensor, elements: AttentionElements, *, scale: float | None = None, softcap: float = 0.0,
    alibi: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale · q kᵀ) v over the listed pairs, as `block_attention` over those of blocks.

    Products and sums are float32 (float64 for float64), without tensor cores. A query that keeps nothing gives zeros.
    Two calls give the same bits on a GPU.

    Args:
        q: (batch, heads, q_len, depth), floating, any strides.
        k: (batch, kv_heads, k_len, depth), where kv_heads divides heads: each serves so many heads in a row.
        v: (batch, kv_heads, k_len, v_depth).
        elements: the kept pairs, for this batch or 1, these heads or 1, and these lengths; on the operands' device.
        scale, softcap, alibi: as of `block_attention`.

    Returns:
        The result and each query's logsumexp, as of `block_attention`. Gradients of both flow to q, k and v.

    Raises:
        FormatError: operands that do not belong together, or on a GPU more than 65,535 heads in the whole batch.
        MaskError: lists of other lengths, batch or heads.
    """
    scale = scale_of(q, scale)
    q, k = autocast(q, k)
    v, _ = autocast(v, v)
    if (elements.q_len, elements.k_len) != (q.shape[-2], k.shape[-2]):
        raise MaskError(
            f"the lists are of {elements.q_len} queries and {elements.k_len} keys, q has {q.shape[-2]} and k"
            f" {k.shape[-2]}: make them for these lengths"
        )
    return torch.ops.sparsecomp.element_attention.default(q, k, v, list(elements[2:]), scale, float(softcap), alibi)


def _check(
    q: Tensor, k: Tensor, v: Tensor, lists: Sequence[Tensor], scale: float, softcap: float, alibi: Tensor | None
) -> None:  # fmt: skip
    """All checks that look at no contents."""
    check_attended(q, k, v, softcap, alibi)
    if not math.isfinite(scale):
        raise FormatError(f"scale is {scale}, needs a number")
    fits = len(lists) == 4 and all(one.dtype is torch.int32 and one.device == q.device for one in lists)
    for pointers, index, length in zip(lists[::2], lists[1::2], (q.shape[2], k.shape[2]), strict=False):
        fits = fits and pointers.dim() == 3 and pointers.shape[0] in (1, q.shape[0]) and index.dim() == 1
        fits = fits and pointers.shape[1] in (1, q.shape[1]) and pointers.shape[2] == length + 1
    if not fits:
        raise MaskError(
            f"the lists are {', '.join(map(form_of, lists))}: need the four of"
            f" AttentionElements for batch 1 or {q.shape[0]}, heads 1 or {q.shape[1]} and lengths {q.shape[2]} and"
            f" {k.shape[2]}, on {q.device}"
        )


def _attention(q, k, v, lists, scale, softcap=0.0, alibi=None):
    _check(q, k, v, lists, scale, softcap, alibi)
    out, logsumexp = places_of(q, v)
    if not logsumexp.numel() or not k.shape[2]:
        return out.zero_(), logsumexp.fill_(-math.inf)
    with without_autocast(q):
        found, sums = reference.element_attention_reference(q, k, v, lists, Scores(scale, softcap, alibi))
    return out.copy_(found), logsumexp.copy_(sums)


def _attention_cuda(q, k, v, lists, scale, softcap=0.0, alibi=None):
    _check(q, k, v, lists, scale, softcap, alibi)
    if not on_kernels(q, k, v):
        return _attention(q, k, v, lists, scale, softcap, alibi)
    from sparsecomp.lowering.attention import element_attention as lowered  # loads Triton

    out, logsumexp = places_of(q, v)
    lowered.element_attention(q, k, v, lists, Scores(scale, softcap, alibi), out, logsumexp)
    return out, logsumexp


def _fake_attention(q, k, v, lists, scale, softcap=0.0, alibi=None):
    _check(q, k, v, lists, scale, softcap, alibi)
    return places_of(q, v)


def _gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, lists, scale, softcap=0.0, alibi=None):
    found = _fake_gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, lists, scale, softcap, alibi)
    if not logsumexp.numel() or not k.shape[2]:
        return tuple(one.zero_() for one in found)
    with without_autocast(q):
        right = reference.gradients_of_elements(
            grad, q, k, v, out, logsumexp, grad_logsumexp, lists, Scores(scale, softcap, alibi)
        )
    return tuple(one.copy_(other) for one, other in zip(found, right, strict=True))


def _gradients_cuda(grad, q, k, v, out, logsumexp, grad_logsumexp, lists, scale, softcap=0.0, alibi=None):
    if not on_kernels(q, k, v):
        return _gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, lists, scale, softcap, alibi)
    from sparsecomp.lowering.attention import element_gradients as lowered  # loads Triton

    found = _fake_gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, lists, scale, softcap, alibi)
    scores = Scores(scale, softcap, alibi)
    lowered.element_gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, lists, scores, *found)
    return found


def _fake_gradients(grad, q, k, v, *_):
    return places_of_gradients(q, k, v)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep what gradients read: q, k and v, the result and the logsumexp; `kept`, the lists, and `scores`, all that
    follows."""
    q, k, v, ctx.kept, *ctx.scores = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, logsumexp = ctx.saved_tensors
    rest = ([None] * len(ctx.kept), *[None] * len(ctx.scores))
    if grad is None and grad_logsumexp is None:
        return None, None, None, *rest
    if torch.is_grad_enabled():
        return *_differentiable_gradients((q, k, v), (grad, grad_logsumexp), ctx.kept, Scores(*ctx.scores)), *rest
    grad = torch.zeros_like(out) if grad is None else grad
    return *torch.ops.sparsecomp.element_attention_gradients.default(
        grad, q, k, v, out, logsumexp, grad_logsumexp, ctx.kept, *ctx.scores
    ), *rest


def _differentiable_gradients(
    operands: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], lists: Sequence[Tensor], scores: Scores
) -> tuple[Tensor, ...]:
    """The gradients through plain torch, for those who differentiate them again."""
    q, k, v = points = points_of(operands)
    found = reference.element_attention_reference(q, k, v, lists, scores)
    return differentiable_gradients(found, points, grads)


implement("element_attention", _attention, _attention_cuda, _fake_attention)
implement("element_attention_gradients", _gradients, _gradients_cuda, _fake_gradients)
differentiable("element_attention", _backward, _save)
