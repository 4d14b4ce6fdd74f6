"""Attention over listed blocks, and its gradients, in plain torch: the CPU implementation and the kernels' oracle.

Each block of queries gathers the key blocks of its list, so that time and memory follow the lists and not the dense
mask. The gradients of keys and values gather by the transposed lists, and nothing is added up in an unknown order.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.reference.attention.blocks import unpack_bits
from sparsecomp.reference.precision import accumulator


class Lists(NamedTuple):
    """One direction of ``AttentionBlocks``: its lists and tiles, by rows."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    partial: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    tile: Tensor
    bits: Tensor

    @property
    def height(self) -> int:
        """Rows of a block."""
        return self.bits.shape[1]

    def of(self, batch: int, head: int) -> tuple[Tensor, Tensor]:
        """``index`` (rows of blocks, width) and which pairs are kept (rows of blocks, height, width · columns)."""
        count, index, tile = (one[batch % len(one)] for one in (self.count, self.index, self.tile))
        count, index, tile = (one[head % len(one)] for one in (count, index, tile))
        kept = unpack_bits(self.bits)
        kept = torch.cat((kept, kept.new_ones((1, *kept.shape[1:]))))  # FULL is the last
        listed = torch.arange(index.shape[1], device=index.device) < count[:, None]
        index = torch.where(listed, index, 0).long()
        places = torch.where(listed, tile, 0).long()
        return index, (kept[places] & listed[..., None, None]).transpose(1, 2).flatten(2)


class _Head(NamedTuple):
    batch: int
    head: int
    kv_head: int


def block_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result (batch, heads, q_len, v_depth) and the logsumexp (batch, heads, q_len), in the dtype sums are kept in.

    Plain torch, so that autograd can differentiate it any number of times.

    Args:
        q: (batch, heads, q_len, depth).
        k, v: (batch, heads / group, k_len, depth or v_depth).
        blocks: the tensors of ``AttentionBlocks``, in its order.
        scale: of the scores.
    """
    lists, sums = Lists(*blocks[:5]), accumulator(q.dtype)
    q, k, v = q.to(sums), k.to(sums), v.to(sums)
    results = [_one_head(q[b, h], k[b, g], v[b, g], *lists.of(b, h), lists.height, scale) for b, h, g in _heads(q, k)]
    out, logsumexp = (torch.stack(parts) for parts in zip(*results, strict=True))
    return out.view(*q.shape[:3], v.shape[3]), logsumexp.view(q.shape[:3])


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, grad_logsumexp: Tensor | None,
    blocks: Sequence[Tensor], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients by q, k and v, in the dtype sums are kept in.

    A score's gradient is p · (grad · v - delta), with p = exp(score - logsumexp) and delta = grad · out less the
    gradient of the logsumexp (FlashAttention, appendix B.4).
    """
    sums = accumulator(q.dtype)
    grad, q, k, v, out, logsumexp = (one.to(sums) for one in (grad, q, k, v, out, logsumexp))
    delta = delta_of(grad, out, grad_logsumexp)
    by_q = by_query(grad, q, k, v, logsumexp, delta, blocks[:5], scale)
    return by_q, *by_key(grad, q, k, v, logsumexp, delta, blocks[5:], scale)


def delta_of(grad: Tensor, out: Tensor, grad_logsumexp: Tensor | None) -> Tensor:
    """What is taken from each gradient of a query's weights (batch, heads, q_len)."""
    delta = (grad * out).sum(-1)
    return delta if grad_logsumexp is None else delta - grad_logsumexp


def by_query(grad, q, k, v, logsumexp, delta, lists: Sequence[Tensor], scale: float) -> Tensor:
    """The gradient by q of operands of one dtype, by the lists of the queries."""
    walked, found = Lists(*lists), torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = _finite(logsumexp)
    for b, h, g in _heads(q, k):
        beside = (q[b, h], grad[b, h], logsumexp[b, h], delta[b, h])
        found[b, h] = _by_query(*beside, k[b, g], v[b, g], *walked.of(b, h), walked.height, scale)
    return found


def by_key(grad, q, k, v, logsumexp, delta, lists: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """The gradients by k and v of operands of one dtype, by the lists of the keys."""
    walked = Lists(*lists)
    found = tuple(torch.zeros(one.shape, dtype=q.dtype, device=q.device) for one in (k, v))
    logsumexp = _finite(logsumexp)
    for b, h, g in _heads(q, k):
        beside = (q[b, h], grad[b, h], logsumexp[b, h], delta[b, h])
        parts = _by_key(k[b, g], v[b, g], *beside, *walked.of(b, h), walked.height, scale)
        for whole, part in zip(found, parts, strict=True):
            whole[b, g] += part
    return found[0], found[1]


def _finite(logsumexp: Tensor) -> Tensor:
    """With any finite number for queries that keep nothing."""
    return logsumexp.masked_fill(logsumexp == -torch.inf, 0)


def _heads(q: Tensor, k: Tensor) -> Iterator[_Head]:
    group = q.shape[1] // k.shape[1]
    return (_Head(b, h, h // group) for b in range(q.shape[0]) for h in range(q.shape[1]))


def _one_head(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, kept: Tensor, block_q: int, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    block_k = kept.shape[2] // index.shape[1]
    score = (_blocks(q, block_q) @ _gathered(k, index, block_k).mT * scale).masked_fill(~kept, -torch.inf)
    top = score.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    weight = torch.exp(score - top)
    total = weight.sum(-1, keepdim=True)
    # as torch's own: a query that keeps nothing gives zero
    out = weight @ _gathered(v, index, block_k) / total.masked_fill(total == 0, 1)
    logsumexp = torch.where(total > 0, top + total.masked_fill(total == 0, 1).log(), -torch.inf)
    logsumexp = torch.where(total.isnan(), total, logsumexp)
    return out.flatten(0, 1)[: len(q)], logsumexp.flatten()[: len(q)]


def _by_query(q, grad, logsumexp, delta, k, v, index, kept, block_q, scale) -> Tensor:
    block_k = kept.shape[2] // index.shape[1]
    keys, values = _gathered(k, index, block_k), _gathered(v, index, block_k)
    logsumexp, delta = (_blocks(one[:, None], block_q) for one in (logsumexp, delta))
    weight = torch.exp(_blocks(q, block_q) @ keys.mT * scale - logsumexp).masked_fill(~kept, 0)
    by_score = weight * (_blocks(grad, block_q) @ values.mT - delta)
    return (by_score @ keys * scale).flatten(0, 1)[: len(q)]


def _by_key(k, v, q, grad, logsumexp, delta, index, kept, block_k, scale) -> tuple[Tensor, Tensor]:
    block_q = kept.shape[2] // index.shape[1]
    queries, grads = _gathered(q, index, block_q), _gathered(grad, index, block_q)
    logsumexp, delta = (_gathered(one[:, None], index, block_q).mT for one in (logsumexp, delta))
    weight = torch.exp(_blocks(k, block_k) @ queries.mT * scale - logsumexp).masked_fill(~kept, 0)
    by_score = weight * (_blocks(v, block_k) @ grads.mT - delta)
    by_k, by_v = by_score @ queries * scale, weight @ grads
    return by_k.flatten(0, 1)[: len(k)], by_v.flatten(0, 1)[: len(k)]


def _blocks(rows: Tensor, height: int) -> Tensor:
    """(n, depth) as (blocks, height, depth), filled up with zeros."""
    return F.pad(rows, (0, 0, 0, -len(rows) % height)).unflatten(0, (-1, height))


def _gathered(rows: Tensor, index: Tensor, height: int) -> Tensor:
    """The blocks of (n, depth) in each list, (lists, width · height, depth)."""
    return _blocks(rows, height)[index].flatten(1, 2)
