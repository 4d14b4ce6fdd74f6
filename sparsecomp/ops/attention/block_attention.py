"""Scaled dot product attention over the kept pairs of a mask that is given by blocks.

Time and memory follow the listed blocks. Pairs that are not kept are never part of a sum: neither their scores nor, in
blocks that are not listed, what their keys and values hold.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError, MaskError
from sparsecomp.ops.attention.operands import (
    check_attended,
    check_lists,
    differentiable_gradients,
    form_of,
    on_kernels,
    places_of,
    places_of_gradients,
    points_of,
    save_operands,
    scale_of,
)
from sparsecomp.ops.library import TAGS, differentiable, implement, library
from sparsecomp.ops.sparse.linear import autocast
from sparsecomp.reference.attention import block_attention as reference
from sparsecomp.reference.attention.block_attention import OF_KEYS, OF_QUERIES, Scoring
from sparsecomp.reference.attention.blocks import AttentionBlocks
from sparsecomp.reference.attention.dropout import ALWAYS, chances
from sparsecomp.reference.precision import without_autocast

SEEDS = 2**62
"""From 0 up to which torch's generator draws a seed of dropout."""

library.define(
    "block_attention(Tensor q, Tensor k, Tensor v, Tensor[] blocks, float scale, float softcap=0.0, "
    "Tensor? alibi=None, Tensor? added=None, Tensor? seed=None, int kept=65536, bool nothing_is_nan=False, "
    "int parts=0) -> (Tensor, Tensor)",
    tags=TAGS,
)
library.define(
    "block_attention_gradients(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
    "Tensor? grad_logsumexp, Tensor[] blocks, float scale, float softcap=0.0, Tensor? alibi=None, "
    "Tensor? added=None, Tensor? seed=None, int kept=65536, bool nothing_is_nan=False, int parts=0) "
    "-> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, *, scale: float | None = None, softcap: float = 0.0,
    alibi: Tensor | None = None, dropout: float = 0.0, seed: Tensor | None = None,
    in_parts: tuple[bool, bool] = (False, False),
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
        dropout: the chance, in [0, 1), that a weight is replaced by 0; the others are divided by the chance to stay.
            Chances are counted in 65536ths.
        seed: (1,) int64 on the operands' device: which weights are dropped follows from it, and from the places of
            query, key, head and batch entry, alone. By default torch's generator draws one, without waiting.
        in_parts: whether lists of queries, and of keys, that are long beside the rest are walked over in parts by
            several programs. Global tokens have such lists. It costs some launches, and changes nothing but time.

    Returns:
        The result (batch, heads, q_len, v_depth), and the natural logarithm of each query's sum of exponentials
        (batch, heads, q_len) in float32 (float64 for float64), -inf where nothing is kept. Gradients of both flow to
        q, k and v.

    Raises:
        FormatError: operands that do not belong together, or an impossible chance.
        MaskError: blocks of other lengths, batch or heads.
    """
    parts = OF_QUERIES * in_parts[0] + OF_KEYS * in_parts[1]
    how = {"scale": scale, "softcap": softcap, "alibi": alibi, "dropout": dropout, "seed": seed, "parts": parts}
    return attend_blocks(q, k, v, blocks, None, **how)


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, added: Tensor | None, *, scale: float | None,
    softcap: float, alibi: Tensor | None, dropout: float, seed: Tensor | None, parts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`block_attention`, with numbers that are added to scores, of which `scanned_blocks` made the blocks: by others,
    blocks that are kept whole would not have theirs added."""
    kept = chances(dropout)
    if kept == ALWAYS:
        seed = None
    elif seed is None:
        seed = new_seed(q.device)
    scale = scale_of(q, scale)
    q, k = autocast(q, k)
    v, _ = autocast(v, v)
    if (blocks.q_len, blocks.k_len) != (q.shape[-2], k.shape[-2]):
        raise MaskError(
            f"the blocks are of {blocks.q_len} queries and {blocks.k_len} keys, q has {q.shape[-2]} and k"
            f" {k.shape[-2]}: make them for these lengths"
        )
    if scale < 0:  # kernels look for the greatest score before they scale it
        q, scale = -q, -scale
    return torch.ops.sparsecomp.block_attention.default(
        q, k, v, list(blocks[4:]), scale, float(softcap), alibi, added, seed, kept, False, parts
    )


def new_seed(device: torch.device) -> Tensor:
    """A seed of dropout, drawn by torch's generator of the device: in a CUDA graph each replay draws another."""
    return torch.randint(SEEDS, (1,), device=device)


def _check(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Tensor], scoring: Scoring) -> None:
    """All checks that look at no contents."""
    scale, softcap, alibi, added, seed, kept, _, parts = scoring
    check_attended(q, k, v, softcap, alibi)
    if not scale >= 0:
        raise FormatError(f"scale is {scale}, needs a number from 0 on: negate q for a negative one")
    if added is not None and (not _broadcasts(added, (*q.shape[:3], k.shape[2])) or not added.is_floating_point()):
        raise FormatError(
            f"added is {form_of(added)}, needs a floating one that broadcasts to {(*q.shape[:3], k.shape[2])}"
        )
    if added is not None and added.requires_grad and torch.is_grad_enabled():
        raise FormatError("added has no gradient here, but wants one")
    if seed is not None and (seed.shape != (1,) or seed.dtype is not torch.int64 or seed.device != q.device):
        raise FormatError(f"seed is {form_of(seed)} on {seed.device}, needs (1,) int64 on {q.device}")
    if not (kept == ALWAYS or (seed is not None and 0 < kept < ALWAYS)):
        raise FormatError(f"kept is {kept}, needs {ALWAYS}, or with a seed a number from 1 to {ALWAYS - 1}")
    if not 0 <= parts <= OF_QUERIES + OF_KEYS:
        raise FormatError(f"parts is {parts}, needs {OF_QUERIES}, {OF_KEYS}, their sum, or 0")
    check_lists(blocks, q, k.shape[2])


def _broadcasts(tensor: Tensor, shape: Sequence[int]) -> bool:
    pairs = zip(tensor.shape, shape, strict=False)
    return tensor.dim() == len(shape) and all(one in (1, size) for one, size in pairs)


def _attention(q, k, v, blocks, *scoring):
    _check(q, k, v, blocks, Scoring(*scoring))
    out, logsumexp = places_of(q, v)
    if not logsumexp.numel() or not k.shape[2]:
        return out.zero_(), logsumexp.fill_(-math.inf)
    with without_autocast(q):
        found, sums = reference.block_attention_reference(q, k, v, blocks, Scoring(*scoring))
    return _marked(out.copy_(found), logsumexp.copy_(sums), Scoring(*scoring))


def _attention_cuda(q, k, v, blocks, *scoring):
    _check(q, k, v, blocks, Scoring(*scoring))
    if not on_kernels(q, k, v):
        return _attention(q, k, v, blocks, *scoring)
    from sparsecomp.lowering.attention import block_attention as lowered  # loads Triton

    out, logsumexp = places_of(q, v)
    lowered.block_attention(q, k, v, blocks, Scoring(*scoring), out, logsumexp)
    return _marked(out, logsumexp, Scoring(*scoring))


def _marked(out: Tensor, logsumexp: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """The results, with NaN for queries that keep nothing, if that is wanted."""
    if scoring.nothing_is_nan:
        out.masked_fill_((logsumexp == -math.inf)[..., None], math.nan)
    return out, logsumexp


def _unmarked(one: Tensor, logsumexp: Tensor, scoring: Scoring) -> Tensor:
    """A result or its gradient with zeros for queries that keep nothing, if they have NaN."""
    return one.masked_fill((logsumexp == -math.inf)[..., None], 0.0) if scoring.nothing_is_nan else one


def _marked_gradients(
    found: tuple[Tensor, ...], logsumexp: Tensor, kv_heads: int, scoring: Scoring
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients, with NaN where it goes from a query that keeps nothing: to all values of its head, and to itself
    and all keys if numbers were added. Where scores are replaced, none goes to what they were. Written in place, so
    that each lies as a graph was told."""
    if scoring.nothing_is_nan:
        nothing = logsumexp == -math.inf
        among = nothing.any(-1).unflatten(1, (kv_heads, -1)).any(-1)[..., None, None]
        by_q, by_k, by_v = found
        by_v.masked_fill_(among, math.nan)
        if scoring.added is not None:
            by_q.masked_fill_(nothing[..., None], math.nan)
            by_k.masked_fill_(among, math.nan)
    return found


def _fake_attention(q, k, v, blocks, *scoring):
    _check(q, k, v, blocks, Scoring(*scoring))
    return places_of(q, v)


def _gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, *scoring):
    found = _fake_gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, *scoring)
    if not logsumexp.numel() or not k.shape[2]:
        return tuple(one.zero_() for one in found)
    grad, out = (_unmarked(one, logsumexp, Scoring(*scoring)) for one in (grad, out))
    with without_autocast(q):
        right = reference.gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, Scoring(*scoring))
    found = tuple(one.copy_(other) for one, other in zip(found, right, strict=True))
    return _marked_gradients(found, logsumexp, k.shape[1], Scoring(*scoring))


def _gradients_cuda(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, *scoring):
    if not on_kernels(q, k, v):
        return _gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, *scoring)
    from sparsecomp.lowering.attention import block_attention_gradients as lowered  # loads Triton

    found = _fake_gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, *scoring)
    grad, out = (_unmarked(one, logsumexp, Scoring(*scoring)) for one in (grad, out))
    lowered.block_attention_gradients(
        grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, Scoring(*scoring), *found
    )  # fmt: skip
    return _marked_gradients(found, logsumexp, k.shape[1], Scoring(*scoring))


def _fake_gradients(grad, q, k, v, *_):
    return places_of_gradients(q, k, v)


def _backward(ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, logsumexp = ctx.saved_tensors
    rest = ([None] * len(ctx.kept), *[None] * len(ctx.scores))
    if grad is None and grad_logsumexp is None:
        return None, None, None, *rest
    if torch.is_grad_enabled():
        return *_differentiable_gradients((q, k, v), grad, grad_logsumexp, ctx.kept, Scoring(*ctx.scores)), *rest
    grad = torch.zeros_like(out) if grad is None else grad
    return *torch.ops.sparsecomp.block_attention_gradients.default(
        grad, q, k, v, out, logsumexp, grad_logsumexp, ctx.kept, *ctx.scores
    ), *rest


def _differentiable_gradients(
    operands: tuple[Tensor, ...], grad: Tensor | None, grad_logsumexp: Tensor | None, blocks: Sequence[Tensor],
    scoring: Scoring,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients through plain torch, for those who differentiate them again."""
    q, k, v = points = points_of(operands)
    found = reference.block_attention_reference(q, k, v, blocks, scoring)
    logsumexp = found[1].detach()
    grad = None if grad is None else _unmarked(grad, logsumexp, scoring)
    by = differentiable_gradients(found, points, (grad, grad_logsumexp))
    return _marked_gradients(tuple(one.clone() for one in by), logsumexp, k.shape[1], scoring)


implement("block_attention", _attention, _attention_cuda, _fake_attention)
implement("block_attention_gradients", _gradients, _gradients_cuda, _fake_gradients)
differentiable("block_attention", _backward, save_operands)
