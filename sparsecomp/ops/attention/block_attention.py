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
    "Tensor? added=None, Tensor? seed=None, int kept=65536, bool nothing_is_nan=False, int parts=0, "
    "bool by_added=False) -> (Tensor, Tensor, Tensor, Tensor)",
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
    """The gradients, with NaN where it goes from a query that keeps nothing: to all values of its head, and to itself,
    all keys and what was added to it if numbers were added. Where scores are replaced, none goes to what they were.
    Written in place, so that each lies as a graph was told."""
    if scoring.nothing_is_nan:
        nothing = logsumexp == -math.inf
        among = nothing.any(-1).unflatten(1, (kv_heads, -1)).any(-1)[..., None, None]
        by_q, by_k, by_v, by_added = found
        by_v.masked_fill_(among, math.nan)
        if scoring.added is not None:
            by_q.masked_fill_(nothing[..., None], math.nan)
            by_k.masked_fill_(among, math.nan)
            if by_added.numel():
                of_added = nothing[..., None].sum_to_size(*by_added.shape[:3], 1) > 0
                by_added.masked_fill_(of_added, math.nan)
    return found


def _fake_attention(q, k, v, blocks, *scoring):
    _check(q, k, v, blocks, Scoring(*scoring))
    return places_of(q, v)


def _gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, *how):
    found = _fake_gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, *how)
    if not logsumexp.numel() or not k.shape[2]:
        return tuple(one.zero_() for one in found)
    scoring, wants = _scoring_of(how)
    grad, out = (_unmarked(one, logsumexp, scoring) for one in (grad, out))
    given = grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, scoring
    with without_autocast(q):
        right = reference.gradients(*given)
        by_added = reference.gradient_by_added(*given) if wants else found[3]
    found = tuple(one.copy_(other) for one, other in zip(found, (*right, by_added), strict=True))
    return _marked_gradients(found, logsumexp, k.shape[1], scoring)


def _gradients_cuda(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, *how):
    if not on_kernels(q, k, v):
        return _gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, *how)
    from sparsecomp.lowering.attention import block_attention_gradients as lowered  # loads Triton

    found = _fake_gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, *how)
    scoring, _ = _scoring_of(how)
    grad, out = (_unmarked(one, logsumexp, scoring) for one in (grad, out))
    lowered.block_attention_gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, scoring, *found)
    return _marked_gradients(found, logsumexp, k.shape[1], scoring)


def _scoring_of(how: Sequence[Any]) -> tuple[Scoring, bool]:
    """What follows the block lists: how scores come about, and whether the gradient by what is added is wanted."""
    fields = len(Scoring._fields)
    return Scoring(*how[:fields]), bool(how[fields:] and how[fields])


def _fake_gradients(grad, q, k, v, out, logsumexp, grad_logsumexp, blocks, *how):
    scoring, wants = _scoring_of(how)
    added = scoring.added
    if not wants or added is None:
        return *places_of_gradients(q, k, v), q.new_empty(0)
    if any(apart not in (1, own) for apart, own in zip(blocks[0].shape[:2], added.shape[:2], strict=True)):
        raise MaskError(
            f"the blocks tell {tuple(blocks[0].shape[:2])} batch entries and heads apart, and what is added, which"
            f" wants a gradient, {tuple(added.shape[:2])}: give each numbers of its own, by expand"
        )
    return *places_of_gradients(q, k, v), torch.empty(added.shape, dtype=added.dtype, device=q.device)


_ADDED = Scoring._fields.index("added")


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep what gradients read; of what scores come from, what is added among the tensors that autograd watches."""
    q, k, v, ctx.kept, *scores = inputs
    scoring = Scoring(*scores)
    ctx.save_for_backward(q, k, v, scoring.added, *output)
    ctx.scoring, ctx.given = scoring._replace(added=None), len(scores)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Any, ...]:
    q, k, v, added, out, logsumexp = ctx.saved_tensors
    rest: list[Any] = [None] * ctx.given
    if grad is None and grad_logsumexp is None:
        return None, None, None, [None] * len(ctx.kept), *rest
    scoring = ctx.scoring._replace(added=added)
    wants = added is not None and ctx.needs_input_grad[4 + _ADDED]
    if torch.is_grad_enabled():
        found = _differentiable_gradients((q, k, v), (grad, grad_logsumexp), ctx.kept, scoring, wants)
    else:
        grad = torch.zeros_like(out) if grad is None else grad
        found = torch.ops.sparsecomp.block_attention_gradients.default(
            grad, q, k, v, out, logsumexp, grad_logsumexp, ctx.kept, *scoring, wants
        )
    if wants:
        rest[_ADDED] = found[3]
    return *found[:3], [None] * len(ctx.kept), *rest


def _differentiable_gradients(
    operands: tuple[Tensor, ...], grads: tuple[Tensor | None, Tensor | None], blocks: Sequence[Tensor],
    scoring: Scoring, wants: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients through plain torch, for those who differentiate them again."""
    added = [scoring.added] if wants and scoring.added is not None else []
    q, k, v, *biased = points = points_of((*operands, *added))
    scoring = scoring._replace(added=biased[0]) if biased else scoring
    found = reference.block_attention_reference(q, k, v, blocks, scoring)
    logsumexp, (grad, grad_logsumexp) = found[1].detach(), grads
    grad = None if grad is None else _unmarked(grad, logsumexp, scoring)
    by = [one.clone() for one in differentiable_gradients(found, points, (grad, grad_logsumexp))]
    return _marked_gradients((*by, q.new_empty(0))[:4], logsumexp, k.shape[1], scoring)


implement("block_attention", _attention, _attention_cuda, _fake_attention)
implement("block_attention_gradients", _gradients, _gradients_cuda, _fake_gradients)
differentiable("block_attention", _backward, _save)
