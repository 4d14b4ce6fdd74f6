"""Scaled dot product attention over the kept pairs of a mask that is given by blocks.

Time and memory follow the listed blocks. Pairs that are not kept are never part of a sum: neither their scores nor, in
blocks that are not listed, what their keys and values hold.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.errors import FormatError, MaskError
from sparsecomp.ops.library import TAGS, differentiable, implement, library
from sparsecomp.ops.sparse.linear import autocast
from sparsecomp.reference.attention import block_attention as reference
from sparsecomp.reference.attention.block_attention import Scoring
from sparsecomp.reference.attention.blocks import AttentionBlocks
from sparsecomp.reference.precision import KERNEL_DTYPES, accumulator, without_autocast

MOST_BYTES = 512
"""Of a query, key or value that kernels take: 256 numbers of 16 bits, 128 of float32."""

library.define(
    "block_attention(Tensor q, Tensor k, Tensor v, Tensor[] blocks, float scale, float softcap=0.0, "
    "Tensor? alibi=None) -> (Tensor, Tensor)",
    tags=TAGS,
)
library.define(
    "block_attention_gradients(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
    "Tensor? grad_logsumexp, Tensor[] blocks, float scale, float softcap=0.0, Tensor? alibi=None) "
    "-> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, *, scale: float | None = None, softcap: float = 0.0,
    alibi: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale · q kᵀ) v over the kept pairs, as `torch.nn.functional.scaled_dot_product_attention` with a mask.

    Sums are float32 (float64 for float64). A query that keeps nothing, or whose kept scores are all -inf, gives zeros
    and gradients of zero, as torch's own product by the same boolean mask does. Two calls give the same bits.

    Args:
        q: (batch, heads, q_len, depth), floating, any strides.
        k: (batch, kv_heads, k_len, depth), where kv_heads divides heads: each serves so many heads in a row.
        v: (batch, kv_heads, k_len, v_depth).
        blocks: the kept pairs, for this batch or 1, these heads or 1, and these lengths; on the operands' device.
        scale: of the scores; 1 / sqrt(depth) if None.
        softcap: c in scores of c · tanh(scale · q kᵀ / c), which lie between -c and c; 0 for none.
        alibi: (heads,) float32, which has no gradient: added to a score (after the cap) is the head's number times
            (position of the key - position of the query), both counted from 0.

    Returns:
        The result (batch, heads, q_len, v_depth), and the natural logarithm of each query's sum of exponentials
        (batch, heads, q_len) in float32 (float64 for float64), -inf where nothing is kept. Gradients of both flow to
        q, k and v.

    Raises:
        FormatError: operands that do not belong together.
        MaskError: blocks of other lengths, batch or heads.
    """
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
    q, k = autocast(q, k)
    v, _ = autocast(v, v)
    if (blocks.q_len, blocks.k_len) != (q.shape[-2], k.shape[-2]):
        raise MaskError(
            f"the blocks are of {blocks.q_len} queries and {blocks.k_len} keys, q has {q.shape[-2]} and k"
            f" {k.shape[-2]}: make them for these lengths"
        )
    if scale < 0:  # kernels look for the greatest score before they scale it
        q, scale = -q, -scale
    return torch.ops.sparsecomp.block_attention.default(q, k, v, list(blocks[4:]), scale, float(softcap), alibi)


def _check(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Tensor], scale: float, softcap: float, alibi: Tensor | None
) -> None:  # fmt: skip
    """All checks that look at no contents."""
    if not (q.dim() == k.dim() == v.dim() == 4 and q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise FormatError(
            f"q, k and v are {_told(q)}, {_told(k)} and {_told(v)}: need (batch, heads, length, depth) of one floating"
            " dtype"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise FormatError(
            f"q, k and v are {_told(q)}, {_told(k)} and {_told(v)}: need one batch, k of the depth of q, v of the heads"
            " and length of k"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise FormatError(f"q has {q.shape[1]} heads, k has {k.shape[1]}: the latter must divide the former")
    if not scale >= 0:
        raise FormatError(f"scale is {scale}, needs a number from 0 on: negate q for a negative one")
    if not softcap >= 0:
        raise FormatError(f"softcap is {softcap}, needs a number above 0, or 0 for none")
    if alibi is not None and (alibi.shape != q.shape[1:2] or alibi.dtype is not torch.float32 or alibi.requires_grad):
        raise FormatError(f"alibi is {_told(alibi)}, needs ({q.shape[1]},) float32, without gradients")
    if len(blocks) != 10:
        raise MaskError(f"blocks are {len(blocks)} tensors, need the ten of AttentionBlocks in its order")
    for length, lists in ((q.shape[2], blocks[:5]), (k.shape[2], blocks[5:])):
        _check_lists(lists, q.shape[0], q.shape[1], length)


def _check_lists(lists: Sequence[Tensor], batch: int, heads: int, length: int) -> None:
    count, partial, index, tile, bits = lists
    rows = -(-length // max(bits.shape[1], 1)) if bits.dim() == 3 else -1
    fits = count.dim() == 3 and count.shape[0] in (1, batch) and count.shape[1] in (1, heads) and count.shape[2] == rows
    fits = fits and partial.shape == count.shape == index.shape[:3] and tile.shape == index.shape
    if not fits or any(one.dtype is not torch.int32 for one in lists):
        raise MaskError(
            f"the blocks have lists {tuple(count.shape)}, indices {tuple(index.shape)} and tiles {tuple(bits.shape)}:"
            f" a length of {length} needs lists (1 or {batch}, 1 or {heads}, {rows}), all int32"
        )


def _told(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def place_of(q: Tensor, v: Tensor) -> Tensor:
    """Where the result goes, which lies as q does."""
    return torch.empty_like(q) if q.shape[3] == v.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Where the result goes, and the logsumexp."""
    return place_of(q, v), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


def _attention(q, k, v, blocks, scale, softcap=0.0, alibi=None):
    _check(q, k, v, blocks, scale, softcap, alibi)
    out, logsumexp = _results(q, v)
    if not logsumexp.numel() or not k.shape[2]:
        return out.zero_(), logsumexp.fill_(-math.inf)
    with without_autocast(q):
        found, sums = reference.block_attention_reference(q, k, v, blocks, Scoring(scale, softcap, alibi))
    return out.copy_(found), logsumexp.copy_(sums)


def _attention_cuda(q, k, v, blocks, scale, softcap=0.0, alibi=None):
    _check(q, k, v, blocks, scale, softcap, alibi)
    if not _on_kernels(q, k, v):
        return _attention(q, k, v, blocks, scale, softcap, alibi)
    from sparsecomp.lowering.attention import block_attention as lowered  # loads Triton

    out, logsumexp = _results(q, v)
    lowered.block_attention(q, k, v, blocks, Scoring(scale, softcap, alibi), out, logsumexp)
    return out, logsumexp


def _on_kernels(q: Tensor, k: Tensor, v: Tensor) -> bool:
    some = q.numel() and k.numel() and v.numel()
    return bool(some) and q.dtype in KERNEL_DTYPES and max(q.shape[3], v.shape[3]) * q.itemsize <= MOST_BYTES


def _fake_attention(q, k, v, blocks, scale, softcap=0.0, alibi=None):
    _check(q, k, v, blocks, scale, softcap, alibi)
    return _results(q, v)


def _gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, scale, softcap=0.0, alibi=None):
    found = _fake_gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, scale, softcap, alibi)
    if not logsumexp.numel() or not k.shape[2]:
        return tuple(one.zero_() for one in found)
    with without_autocast(q):
        right = reference.gradients(
            grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, Scoring(scale, softcap, alibi)
        )
    return tuple(one.copy_(other) for one, other in zip(found, right, strict=True))


def _gradients_cuda(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, scale, softcap=0.0, alibi=None):
    if not _on_kernels(q, k, v):
        return _gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, scale, softcap, alibi)
    from sparsecomp.lowering.attention import block_attention_gradients as lowered  # loads Triton

    found = _fake_gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, scale, softcap, alibi)
    scoring = Scoring(scale, softcap, alibi)
    lowered.block_attention_gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, scoring, *found)
    return found


def _fake_gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, scale, softcap=0.0, alibi=None):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.blocks, *ctx.scoring = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, logsumexp = ctx.saved_tensors
    rest = ([None] * len(ctx.blocks), *[None] * len(ctx.scoring))
    if grad is None and grad_logsumexp is None:
        return None, None, None, *rest
    if torch.is_grad_enabled():
        return *_differentiable_gradients((q, k, v), grad, grad_logsumexp, ctx.blocks, Scoring(*ctx.scoring)), *rest
    grad = torch.zeros_like(out) if grad is None else grad
    return *torch.ops.sparsecomp.block_attention_gradients.default(
        grad, q, k, v, out, logsumexp, grad_logsumexp, ctx.blocks, *ctx.scoring
    ), *rest


def _differentiable_gradients(
    operands: tuple[Tensor, ...], grad: Tensor | None, grad_logsumexp: Tensor | None, blocks: Sequence[Tensor],
    scoring: Scoring,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients through plain torch, for those who differentiate them again."""
    q, k, v = points = [one if one.requires_grad else _compat.leaf_of(one) for one in operands]
    found = reference.block_attention_reference(q, k, v, blocks, scoring)
    pairs = [(one.to(given.dtype), given) for one, given in zip(found, (grad, grad_logsumexp), strict=True)
             if given is not None]  # fmt: skip
    outs, grads = zip(*pairs, strict=True)
    return torch.autograd.grad(outs, points, grads, create_graph=True, materialize_grads=True)


implement("block_attention", _attention, _attention_cuda, _fake_attention)
implement("block_attention_gradients", _gradients, _gradients_cuda, _fake_gradients)
differentiable("block_attention", _backward, _save)
