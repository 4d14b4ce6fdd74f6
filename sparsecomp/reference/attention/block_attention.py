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

_NONE = -1
"""Behind a list's end: a block of zeros, since what another holds may be infinite, and 0 times that is NaN."""


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
        bits = self.bits
        if count.device.type == "cpu" and index.numel():  # the host need not wait; lists may have room to spare
            index, tile = (one[:, : max(int(count.max()), 1)] for one in (index, tile))
            bits = bits[: int(tile.max()) + 1]
        kept = unpack_bits(bits)
        kept = torch.cat((kept, kept.new_ones((1, *kept.shape[1:]))))  # FULL is the last
        listed = torch.arange(index.shape[1], device=index.device) < count[:, None]
        index = torch.where(listed, index, _NONE).long()
        places = torch.where(listed, tile, 0).long()
        return index, (kept[places] & listed[..., None, None]).transpose(1, 2).flatten(2)


class Scoring(NamedTuple):
    """How scores come from products of a query and a key: softcap · tanh(scale · product / softcap) + bias.

    Attributes:
        scale: of the products, from 0 on.
        softcap: 0 for none, which leaves scale · product.
        alibi: (heads,), None for none: the bias is alibi · (position of the key - position of the query).
    """

    scale: float
    softcap: float = 0.0
    alibi: Tensor | None = None

    def of(self, head: int, product: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The scores, and their derivatives by the products; `query` and `key` are positions that broadcast."""
        if self.softcap:
            capped = torch.tanh(product * (self.scale / self.softcap))
            score, slope = capped * self.softcap, (1 - capped * capped) * self.scale
        else:
            score, slope = product * self.scale, product.new_full((), self.scale)
        if self.alibi is not None:
            score = score + self.alibi[head].to(score.dtype) * (key - query)
        return score, slope


class _Head(NamedTuple):
    batch: int
    head: int
    kv_head: int


def block_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Tensor], scoring: Scoring
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result (batch, heads, q_len, v_depth) and the logsumexp (batch, heads, q_len), in the dtype sums are kept in.

    Plain torch, so that autograd can differentiate it any number of times.

    Args:
        q: (batch, heads, q_len, depth).
        k, v: (batch, heads / group, k_len, depth or v_depth).
        blocks: the tensors of ``AttentionBlocks``, in its order.
        scoring: of products.
    """
    lists, sums = Lists(*blocks[:5]), accumulator(q.dtype)
    q, k, v = q.to(sums), k.to(sums), v.to(sums)
    results = [_one_head(h, q[b, h], k[b, g], v[b, g], *lists.of(b, h), lists.height, scoring)
               for b, h, g in _heads(q, k)]  # fmt: skip
    out, logsumexp = (torch.stack(parts) for parts in zip(*results, strict=True))
    return out.view(*q.shape[:3], v.shape[3]), logsumexp.view(q.shape[:3])


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, grad_logsumexp: Tensor | None,
    blocks: Sequence[Tensor], scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients by q, k and v, in the dtype sums are kept in.

    A score's gradient is p · (grad · v - delta), with p = exp(score - logsumexp) and delta = grad · out less the
    gradient of the logsumexp (FlashAttention, appendix B.4).
    """
    sums = accumulator(q.dtype)
    grad, q, k, v, out, logsumexp = (one.to(sums) for one in (grad, q, k, v, out, logsumexp))
    delta = delta_of(grad, out, grad_logsumexp)
    by_q = by_query(grad, q, k, v, logsumexp, delta, blocks[:5], scoring)
    return by_q, *by_key(grad, q, k, v, logsumexp, delta, blocks[5:], scoring)


def delta_of(grad: Tensor, out: Tensor, grad_logsumexp: Tensor | None) -> Tensor:
    """What is taken from each gradient of a query's weights (batch, heads, q_len)."""
    delta = (grad * out).sum(-1)
    return delta if grad_logsumexp is None else delta - grad_logsumexp


def by_query(grad, q, k, v, logsumexp, delta, lists: Sequence[Tensor], scoring: Scoring) -> Tensor:
    """The gradient by q of operands of one dtype, by the lists of the queries."""
    walked, found = Lists(*lists), torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = _finite(logsumexp)
    for b, h, g in _heads(q, k):
        beside = (q[b, h], grad[b, h], logsumexp[b, h], delta[b, h])
        found[b, h] = _by_query(h, *beside, k[b, g], v[b, g], *walked.of(b, h), walked.height, scoring)
    return found


def by_key(grad, q, k, v, logsumexp, delta, lists: Sequence[Tensor], scoring: Scoring) -> tuple[Tensor, Tensor]:
    """The gradients by k and v of operands of one dtype, by the lists of the keys."""
    walked = Lists(*lists)
    found = tuple(torch.zeros(one.shape, dtype=q.dtype, device=q.device) for one in (k, v))
    logsumexp = _finite(logsumexp)
    for b, h, g in _heads(q, k):
        beside = (q[b, h], grad[b, h], logsumexp[b, h], delta[b, h])
        parts = _by_key(h, k[b, g], v[b, g], *beside, *walked.of(b, h), walked.height, scoring)
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
    head: int, q: Tensor, k: Tensor, v: Tensor, index: Tensor, kept: Tensor, block_q: int, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    block_k = kept.shape[2] // index.shape[1]
    product = _blocks(q, block_q) @ _gathered(k, index, block_k).mT
    score, _ = scoring.of(head, product, *_positions(len(product), block_q, index, block_k))
    score = score.masked_fill(~kept, -torch.inf)
    top = score.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    weight = torch.exp(score - top)
    total = weight.sum(-1, keepdim=True)
    # as torch's own: a query that keeps nothing gives zero
    out = weight @ _gathered(v, index, block_k) / total.masked_fill(total == 0, 1)
    logsumexp = torch.where(total > 0, top + total.masked_fill(total == 0, 1).log(), -torch.inf)
    logsumexp = torch.where(total.isnan(), total, logsumexp)
    return out.flatten(0, 1)[: len(q)], logsumexp.flatten()[: len(q)]


def _by_query(head, q, grad, logsumexp, delta, k, v, index, kept, block_q, scoring) -> Tensor:
    block_k = kept.shape[2] // index.shape[1]
    keys, values = _gathered(k, index, block_k), _gathered(v, index, block_k)
    logsumexp, delta = (_blocks(one[:, None], block_q) for one in (logsumexp, delta))
    product = _blocks(q, block_q) @ keys.mT
    score, slope = scoring.of(head, product, *_positions(len(product), block_q, index, block_k))
    weight = torch.exp(score - logsumexp).masked_fill(~kept, 0)
    by_score = weight * (_blocks(grad, block_q) @ values.mT - delta)
    return (by_score * slope @ keys).flatten(0, 1)[: len(q)]


def _by_key(head, k, v, q, grad, logsumexp, delta, index, kept, block_k, scoring) -> tuple[Tensor, Tensor]:
    block_q = kept.shape[2] // index.shape[1]
    queries, grads = _gathered(q, index, block_q), _gathered(grad, index, block_q)
    logsumexp, delta = (_gathered(one[:, None], index, block_q).mT for one in (logsumexp, delta))
    product = _blocks(k, block_k) @ queries.mT
    key, query = _positions(len(product), block_k, index, block_q)
    score, slope = scoring.of(head, product, query, key)
    weight = torch.exp(score - logsumexp).masked_fill(~kept, 0)
    by_score = weight * (_blocks(v, block_k) @ grads.mT - delta)
    by_k, by_v = by_score * slope @ queries, weight @ grads
    return by_k.flatten(0, 1)[: len(k)], by_v.flatten(0, 1)[: len(k)]


def _positions(blocks: int, height: int, index: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Of the rows (blocks, height, 1), and of what they walk over (blocks, 1, lists · width)."""
    row = torch.arange(blocks * height, device=index.device).view(blocks, height, 1)
    walked = index[..., None] * width + torch.arange(width, device=index.device)
    return row, walked.flatten(1)[:, None]


def _blocks(rows: Tensor, height: int) -> Tensor:
    """(n, depth) as (blocks, height, depth), filled up with zeros."""
    return F.pad(rows, (0, 0, 0, -len(rows) % height)).unflatten(0, (-1, height))


def _gathered(rows: Tensor, index: Tensor, height: int) -> Tensor:
    """The blocks of (n, depth) in each list, (lists, width · height, depth); zeros behind a list's end."""
    blocks = F.pad(rows, (0, 0, 0, -len(rows) % height + height)).unflatten(0, (-1, height))
    return blocks[index].flatten(1, 2)
