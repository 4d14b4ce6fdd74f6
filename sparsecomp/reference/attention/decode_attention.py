"""Attention of a sequence's last queries over a cache of keys and values, in plain torch: the kernel's oracle.

It forms the scores of all keys that the cache has room for, and drops those that a query does not see.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.reference.attention.blocks import SURELY_ZERO
from sparsecomp.reference.attention.scan import pairs_kept_by
from sparsecomp.reference.attention.scores import Scores
from sparsecomp.reference.precision import accumulator


class Sight(NamedTuple):
    """Which keys a query sees, of those up to its own position.

    Attributes:
        window: keys before its own, -1 for all.
        sinks: first keys of the sequence, which all see.
    """

    window: int
    sinks: int

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether each query sees each key; positions that broadcast."""
        seen = key <= query
        return seen if self.window < 0 else seen & ((key >= query - self.window) | (key < self.sinks))


class Cache(NamedTuple):
    """Keys and values in the order of their positions.

    Attributes:
        k, v: (batch, heads, capacity, depth).
        known: (batch, capacity) bool, False where a page is none of the pool's.
    """

    k: Tensor
    v: Tensor
    known: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor, table: Tensor | None) -> "Cache":
        """Of a pool of pages (pages, heads, page, depth) by a table (batch, pages of a sequence), if there is one."""
        if table is None:
            return cls(k, v, torch.ones(len(k), k.shape[2], dtype=torch.bool, device=k.device))
        known = (table >= 0) & (table < len(k))
        place = table.where(known, 0).long()
        k, v = (one[place].transpose(1, 2).flatten(2, 3) for one in (k, v))
        return cls(k, v, known.repeat_interleave(k.shape[2] // max(table.shape[1], 1), 1))


def decode_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None, sight: Sight, scores: Scores
) -> tuple[Tensor, Tensor]:
    """The result (batch, heads, rows, v_depth) and the logsumexp (batch, heads, rows), in the dtype sums are kept in.

    Args:
        q, k, v, lengths, table: as of `sparsecomp.ops.decode_attention`.
        sight: what a query sees.
        scores: of products; `alibi` is a number a head.
    """
    rows, sums, cache = q.shape[2], accumulator(q.dtype), Cache.of(k, v, table)
    group, capacity = q.shape[1] // k.shape[1], cache.k.shape[2]
    query = (lengths.long()[:, None] - rows + torch.arange(rows, device=q.device))[:, :, None]
    key = torch.arange(capacity, device=q.device)
    seen = sight.of(query, key)
    # what nobody sees may hold anything
    read = seen.any(1)[:, None, :, None]
    keys, values = (one.to(sums).where(read, 0).repeat_interleave(group, 1) for one in cache[:2])
    product = torch.einsum("bhrd,bhkd->brkh", q.to(sums), keys)  # heads last, as their slopes broadcast
    score, _ = scores.of(product, key[:, None] - query[..., None], scores.alibi)
    out, logsumexp = _summed(score.where(seen[..., None], -math.inf).permute(0, 3, 1, 2), values)
    wrong = ((lengths < 0) | (lengths > capacity))[:, None] | (seen & ~cache.known[:, None]).any(2)
    wrong = wrong[:, None, :, None]
    return out.masked_fill(wrong, math.nan), logsumexp.masked_fill(wrong[..., 0], math.nan)


def masked_decode_reference(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, ranges: Tensor, scores: Scores
) -> tuple[Tensor, Tensor]:
    """As `decode_attention_reference`, where a mask says what a query sees.

    Args:
        q, k, v, kept, ranges: as of `sparsecomp.ops.masked_decode_attention` and `sparsecomp.ops.kept_range`.
    """
    sums, group, key = accumulator(q.dtype), q.shape[1] // k.shape[1], torch.arange(k.shape[2], device=q.device)
    read = (key >= ranges[:, :1]) & (key < ranges[:, 1:])
    keys, values = (one.to(sums).where(read[:, None, :, None], 0).repeat_interleave(group, 1) for one in (k, v))
    score, _ = scores.of(q.to(sums) @ keys.mT, key, None)
    if kept.is_floating_point():
        score, kept = score + kept.to(sums), kept != -math.inf
    out, logsumexp = _summed(score.where(kept & read[:, None, None], -math.inf), values)
    wrong = (ranges[:, 0] < 0) | (ranges[:, 1] < ranges[:, 0]) | (ranges[:, 1] > k.shape[2])
    wrong = wrong[:, None, None, None]
    return out.masked_fill(wrong, math.nan), logsumexp.masked_fill(wrong[..., 0], math.nan)


def seen_numbers_reference(added: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers that are added to scores with -inf where a query does not see a key, and whether it weighs what it sees
    alike (…, 1), since nothing is left of scores beside its numbers.

    Args:
        added: (…, rows, keys), as of `sparsecomp.reference.attention.scan.pairs_kept_by`.
    """
    kept, _ = pairs_kept_by(added, added.shape[-2], added.shape[-1])
    low = added <= SURELY_ZERO
    alike = low.all(-1, keepdim=True) & kept.any(-1, keepdim=True)
    return torch.where(kept, added.masked_fill(low, 0), -math.inf), alike


def kept_range_reference(kept: Tensor, batch: int) -> Tensor:
    """The first key that some query keeps and the one behind the last, (batch, 2) int32; 0 and 0 where none does."""
    keys = kept.shape[3]
    if keys == 0:
        return torch.zeros((batch, 2), dtype=torch.int32, device=kept.device)
    some, place = kept.any(1).any(1), torch.arange(keys, device=kept.device, dtype=torch.int32)
    last = torch.where(some, place + 1, 0).amax(-1)
    first = torch.where(some, place, keys).amin(-1)
    return torch.stack([torch.minimum(first, last), last], -1).to(torch.int32).expand(batch, 2).contiguous()


def _summed(score: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The means of values by scores (batch, heads, rows, capacity), of which -inf is not seen, and the logsumexp."""
    top = F.pad(score, (0, 1), value=-math.inf).amax(-1, keepdim=True)  # of no keys, too
    top = top.masked_fill(top == -math.inf, 0)
    weight = torch.exp(score - top)
    total = weight.sum(-1, keepdim=True)
    return weight @ values / total.masked_fill(total == 0, 1), (top + total.log())[..., 0]
