"""Attention over listed blocks, and its gradients, in plain torch: the CPU implementation and the kernels' oracle.

Each block of queries gathers the key blocks of its list, so that time and memory follow the lists and not the dense
mask. The gradients of keys and values gather by the transposed lists, and nothing is added up in an unknown order.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.reference.attention.blocks import SURELY_ZERO, unpack_bits
from sparsecomp.reference.attention.dropout import ALWAYS, drawn_pairs
from sparsecomp.reference.attention.scores import Scores, delta_of, gradients_by_lists
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


class Place(NamedTuple):
    """One head of one batch entry.

    Attributes:
        batch, head: which.
        kv_head: the head of keys and values that it reads.
        stream: of the random numbers of its dropout.
    """

    batch: int
    head: int
    kv_head: int
    stream: int


OF_QUERIES, OF_KEYS = 1, 2
"""Lists of which the long ones are walked over in parts."""


class Scoring(NamedTuple):
    """How scores come from products of a query and a key, softcap · tanh(scale · product / softcap) + biases, and which
    weights of the softmax are dropped.

    Attributes:
        scale: of the products, from 0 on.
        softcap: 0 for none, which leaves scale · product.
        alibi: (heads,), None for none: the bias is alibi · (position of the key - position of the query).
        added: another bias, broadcasting to (batch, heads, q_len, k_len); None for none. Kernels read it only in blocks
            that are kept in part: elsewhere it is 0. Where it is finite and ``SURELY_ZERO`` at most the score is 0: a
            kept pair is so only where all of a query's are, and their scores are all equal then.
        seed: (1,) int64, of dropout; None where nothing is dropped.
        kept: of ``ALWAYS`` chances, in how many a weight is kept; kept ones are enlarged by the inverse.
        nothing_is_nan: a query that keeps nothing gives NaN, as a softmax over -inf does, where it gives zeros
            otherwise; the operator sees to it, neither this reference nor kernels do.
        parts: of which lists kernels walk over the long ones in parts: ``OF_QUERIES``, ``OF_KEYS``, their sum, or 0. It
            is a matter of time alone.
    """

    scale: float
    softcap: float = 0.0
    alibi: Tensor | None = None
    added: Tensor | None = None
    seed: Tensor | None = None
    kept: int = ALWAYS
    nothing_is_nan: bool = False
    parts: int = 0

    def of(self, place: Place, product: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The scores, and their derivatives by the products; `query` and `key` are positions that broadcast."""
        alibi = None if self.alibi is None else self.alibi[place.head]
        score, slope = Scores(self.scale, self.softcap).of(product, key - query, alibi)
        if self.added is not None:
            table = self.added[place.batch % len(self.added)]
            table = table[place.head % len(table)]
            places = (at.clamp(0, size - 1) for at, size in zip((query, key), table.shape, strict=True))  # or `_NONE`'s
            added = table[tuple(places)].to(score.dtype)
            lowest = (added <= SURELY_ZERO) & (added > -torch.inf)
            # as of a sum in which the score vanishes, derivatives stay
            both = score + added
            score = torch.where(lowest, both - both.detach(), both)
        return score, slope

    def enlarged(self, place: Place, query: Tensor, key: Tensor) -> Tensor | float:
        """What dropout multiplies weights by: 0 or the inverse of the share that is kept. Positions are (…, rows, 1)
        and (…, 1, columns)."""
        if self.seed is None:
            return 1.0
        return drawn_pairs(self.seed, place.stream, query, key, self.kept) * (ALWAYS / self.kept)


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
    results = [_one_head(at, q[b, h], k[b, g], v[b, g], *lists.of(b, h), lists.height, scoring)
               for at in _heads(q, k) for b, h, g in (at[:3],)]  # fmt: skip
    out, logsumexp = (torch.stack(parts) for parts in zip(*results, strict=True))
    return out.view(*q.shape[:3], v.shape[3]), logsumexp.view(q.shape[:3])


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, grad_logsumexp: Tensor | None,
    blocks: Sequence[Tensor], scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients by q, k and v, in the dtype sums are kept in."""
    operands = grad, q, k, v, out, logsumexp
    return gradients_by_lists(by_query, by_key, operands, grad_logsumexp, (blocks[:5], blocks[5:]), scoring)


def gradient_by_added(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, grad_logsumexp: Tensor | None,
    blocks: Sequence[Tensor], scoring: Scoring,
) -> Tensor:  # fmt: skip
    """The gradient by what a scoring adds, in the dtype sums are kept in."""
    sums = accumulator(q.dtype)
    grad, q, k, v, out, logsumexp = (one.to(sums) for one in (grad, q, k, v, out, logsumexp))
    assert scoring.added is not None
    walked = grad, q, k, v, logsumexp, delta_of(grad, out, grad_logsumexp)
    return by_added(*walked, blocks[:5], scoring, scoring.added.shape)


def by_query(grad, q, k, v, logsumexp, delta, lists: Sequence[Tensor], scoring: Scoring) -> Tensor:
    """The gradient by q of operands of one dtype, by the lists of the queries."""
    walked, found = Lists(*lists), torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = _finite(logsumexp)
    for at in _heads(q, k):
        b, h, g = at[:3]
        beside = (q[b, h], grad[b, h], logsumexp[b, h], delta[b, h])
        found[b, h] = _by_query(at, *beside, k[b, g], v[b, g], *walked.of(b, h), walked.height, scoring)
    return found


def by_key(grad, q, k, v, logsumexp, delta, lists: Sequence[Tensor], scoring: Scoring) -> tuple[Tensor, Tensor]:
    """The gradients by k and v of operands of one dtype, by the lists of the keys."""
    walked = Lists(*lists)
    found = tuple(torch.zeros(one.shape, dtype=q.dtype, device=q.device) for one in (k, v))
    logsumexp = _finite(logsumexp)
    for at in _heads(q, k):
        b, h, g = at[:3]
        beside = (q[b, h], grad[b, h], logsumexp[b, h], delta[b, h])
        parts = _by_key(at, k[b, g], v[b, g], *beside, *walked.of(b, h), walked.height, scoring)
        for whole, part in zip(found, parts, strict=True):
            whole[b, g] += part
    return found[0], found[1]


def by_added(
    grad, q, k, v, logsumexp, delta, lists: Sequence[Tensor], scoring: Scoring, sizes: Sequence[int]
) -> Tensor:
    """The gradient by what is added, of such sizes, of operands of one dtype, by the lists of the queries."""
    walked, logsumexp = Lists(*lists), _finite(logsumexp)
    found = torch.zeros(tuple(sizes), dtype=q.dtype, device=q.device)
    for at in _heads(q, k):
        b, h, g = at[:3]
        index, kept = walked.of(b, h)
        beside = (q[b, h], grad[b, h], logsumexp[b, h], delta[b, h])
        by_score, _, _ = _by_score(at, *beside, k[b, g], v[b, g], index, kept, walked.height, scoring)
        block_k = kept.shape[2] // max(index.shape[1], 1)
        _, key = _positions(len(by_score), walked.height, index, block_k)
        # behind a list's end nothing is kept, and its zeros may go anywhere
        pairs = by_score.new_zeros(*by_score.shape[:2], len(k[b, g]) + block_k)
        pairs.scatter_add_(2, key.clamp(min=0).expand_as(by_score), by_score)
        pairs = pairs.flatten(0, 1)[: len(q[b, h]), : len(k[b, g])]
        own = found[b % len(found), h % found.shape[1]]
        own += pairs.sum_to_size(own.shape)
    return found


def _finite(logsumexp: Tensor) -> Tensor:
    """With any finite number for queries that keep nothing."""
    return logsumexp.masked_fill(logsumexp == -torch.inf, 0)


def _heads(q: Tensor, k: Tensor) -> Iterator[Place]:
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    return (Place(b, h, h // group, b * heads + h) for b in range(q.shape[0]) for h in range(heads))


def _one_head(
    at: Place, q: Tensor, k: Tensor, v: Tensor, index: Tensor, kept: Tensor, block_q: int, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    block_k = kept.shape[2] // index.shape[1]
    product = in_blocks(q, block_q) @ gathered(k, index, block_k).mT
    query, key = _positions(len(product), block_q, index, block_k)
    score, _ = scoring.of(at, product, query, key)
    score = score.masked_fill(~kept, -torch.inf)
    top = score.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    weight = torch.exp(score - top)
    total = weight.sum(-1, keepdim=True)
    # as torch's own: a query that keeps nothing gives zero
    given = weight * scoring.enlarged(at, query, key)
    out = given @ gathered(v, index, block_k) / total.masked_fill(total == 0, 1)
    logsumexp = torch.where(total > 0, top + total.masked_fill(total == 0, 1).log(), -torch.inf)
    logsumexp = torch.where(total.isnan(), total, logsumexp)
    return out.flatten(0, 1)[: len(q)], logsumexp.flatten()[: len(q)]


def _by_query(at, q, grad, logsumexp, delta, k, v, index, kept, block_q, scoring) -> Tensor:
    by_score, slope, keys = _by_score(at, q, grad, logsumexp, delta, k, v, index, kept, block_q, scoring)
    return (by_score * slope @ keys).flatten(0, 1)[: len(q)]


def _by_score(
    at, q, grad, logsumexp, delta, k, v, index, kept, block_q, scoring
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient by scores (rows of blocks, height, width · columns), the scores' by products, and the keys."""
    block_k = kept.shape[2] // index.shape[1]
    keys, values = gathered(k, index, block_k), gathered(v, index, block_k)
    logsumexp, delta = (in_blocks(one[:, None], block_q) for one in (logsumexp, delta))
    product = in_blocks(q, block_q) @ keys.mT
    query, key = _positions(len(product), block_q, index, block_k)
    score, slope = scoring.of(at, product, query, key)
    weight = torch.exp(score - logsumexp).masked_fill(~kept, 0)
    by_score = weight * (in_blocks(grad, block_q) @ values.mT * scoring.enlarged(at, query, key) - delta)
    return by_score, slope, keys


def _by_key(at, k, v, q, grad, logsumexp, delta, index, kept, block_k, scoring) -> tuple[Tensor, Tensor]:
    block_q = kept.shape[2] // index.shape[1]
    queries, grads = gathered(q, index, block_q), gathered(grad, index, block_q)
    logsumexp, delta = (gathered(one[:, None], index, block_q).mT for one in (logsumexp, delta))
    product = in_blocks(k, block_k) @ queries.mT
    key, query = _positions(len(product), block_k, index, block_q)
    score, slope = scoring.of(at, product, query, key)
    weight = torch.exp(score - logsumexp).masked_fill(~kept, 0)
    enlarged = scoring.enlarged(at, query.mT, key.mT)
    enlarged = enlarged.mT if isinstance(enlarged, Tensor) else enlarged
    by_score = weight * (in_blocks(v, block_k) @ grads.mT * enlarged - delta)
    by_k, by_v = by_score * slope @ queries, (weight * enlarged) @ grads
    return by_k.flatten(0, 1)[: len(k)], by_v.flatten(0, 1)[: len(k)]


def _positions(blocks: int, height: int, index: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Of the rows (blocks, height, 1), and of what they walk over (blocks, 1, lists · width)."""
    row = torch.arange(blocks * height, device=index.device).view(blocks, height, 1)
    walked = index[..., None] * width + torch.arange(width, device=index.device)
    return row, walked.flatten(1)[:, None]


def in_blocks(rows: Tensor, height: int) -> Tensor:
    """(n, depth) as (blocks, height, depth), filled up with zeros."""
    return F.pad(rows, (0, 0, 0, -len(rows) % height)).unflatten(0, (-1, height))


def gathered(rows: Tensor, index: Tensor, height: int) -> Tensor:
    """The blocks of (n, depth) in each list, (lists, width · height, depth); zeros behind a list's end."""
    blocks = F.pad(rows, (0, 0, 0, -len(rows) % height + height)).unflatten(0, (-1, height))
    return blocks[index].flatten(1, 2)
