"""Attention over listed pairs, and its gradients, in plain torch: the CPU implementation and the kernels' oracle.

Each pair gathers its query, key and value, so that time and memory follow the lists. The gradients of keys and values
are summed over the transposed lists, where those of one key stand together.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.reference.attention.scores import Scores, gradients_by_lists
from sparsecomp.reference.precision import accumulator


class _Head(NamedTuple):
    batch: int
    head: int
    kv_head: int


class _Listed(NamedTuple):
    """The list of one head: what walks, what is walked over, and how many lines there are."""

    line: Tensor
    other: Tensor
    lines: int

    @classmethod
    def of(cls, lists: Sequence[Tensor], batch: int, head: int) -> "_Listed":
        """Of pointers (B, H, lines + 1) and the index."""
        pointers, index = lists[:2]
        own = pointers[batch % len(pointers), head % pointers.shape[1]].long()
        line = torch.repeat_interleave(own.diff())
        first = own[:1]
        if not own.is_cuda:  # a slice; a GPU need not be waited for
            return cls(line, index[int(own[0]) : int(own[-1])].long(), len(own) - 1)
        return cls(line, index[first + torch.arange(len(line), device=line.device)].long(), len(own) - 1)


def element_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, lists: Sequence[Tensor], scores: Scores
) -> tuple[Tensor, Tensor]:
    """The result (batch, heads, q_len, v_depth) and the logsumexp (batch, heads, q_len), in the dtype sums are kept in.

    Plain torch, so that autograd can differentiate it any number of times.

    Args:
        q, k, v: as of `sparsecomp.ops.element_attention`.
        lists: the tensors of ``AttentionElements``, in its order.
        scores: of products.
    """
    sums = accumulator(q.dtype)
    q, k, v = q.to(sums), k.to(sums), v.to(sums)
    results = [_one_head(h, q[b, h], k[b, g], v[b, g], _Listed.of(lists, b, h), scores)
               for b, h, g in _heads(q, k)]  # fmt: skip
    out, logsumexp = (torch.stack(parts) for parts in zip(*results, strict=True))
    return out.view(*q.shape[:3], v.shape[3]), logsumexp.view(q.shape[:3])


def gradients_of_elements(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, grad_logsumexp: Tensor | None,
    lists: Sequence[Tensor], scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients by q, k and v, in the dtype sums are kept in."""
    operands, by_way = (grad, q, k, v, out, logsumexp), (lists[:2], lists[2:])
    return gradients_by_lists(elements_by_query, elements_by_key, operands, grad_logsumexp, by_way, scores)


def elements_by_query(grad, q, k, v, logsumexp, delta, lists: Sequence[Tensor], scores: Scores) -> Tensor:
    """The gradient by q of operands of one dtype, by the lists of the queries."""
    found = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for b, h, g in _heads(q, k):
        query, key, _ = _Listed.of(lists, b, h)
        _, by_score = _by_pair(h, query, key, q[b, h], k[b, g], v[b, g], grad[b, h], logsumexp[b, h], delta[b, h],
                               scores)  # fmt: skip
        found[b, h].index_add_(0, query, by_score[:, None] * k[b, g][key])
    return found


def elements_by_key(grad, q, k, v, logsumexp, delta, lists: Sequence[Tensor], scores: Scores) -> tuple[Tensor, Tensor]:
    """The gradients by k and v of operands of one dtype, by the lists of the keys."""
    by_k, by_v = (torch.zeros(one.shape, dtype=q.dtype, device=q.device) for one in (k, v))
    for b, h, g in _heads(q, k):
        key, query, _ = _Listed.of(lists, b, h)
        weight, by_score = _by_pair(h, query, key, q[b, h], k[b, g], v[b, g], grad[b, h], logsumexp[b, h], delta[b, h],
                                    scores)  # fmt: skip
        by_k[b, g].index_add_(0, key, by_score[:, None] * q[b, h][query])
        by_v[b, g].index_add_(0, key, weight[:, None] * grad[b, h][query])
    return by_k, by_v


def _heads(q: Tensor, k: Tensor) -> Iterator[_Head]:
    group = q.shape[1] // k.shape[1]
    return (_Head(b, h, h // group) for b in range(q.shape[0]) for h in range(q.shape[1]))


def _one_head(head: int, q: Tensor, k: Tensor, v: Tensor, listed: _Listed, scores: Scores) -> tuple[Tensor, Tensor]:
    (query, key, rows), slope = listed, None if scores.alibi is None else scores.alibi[head]
    score, _ = scores.of((q[query] * k[key]).sum(-1), key - query, slope)
    top = score.detach().new_full((rows,), -math.inf).scatter_reduce(0, query, score.detach(), "amax")
    top = top.masked_fill(top == -math.inf, 0)
    weight = torch.exp(score - top[query])
    total = torch.zeros_like(top).index_add(0, query, weight)
    some = total.masked_fill(total == 0, 1)
    # as torch's own: a query that keeps nothing gives zero
    out = v.new_zeros(rows, v.shape[1]).index_add(0, query, weight[:, None] * v[key]) / some[:, None]
    logsumexp = torch.where(total > 0, top + some.log(), torch.where(total.isnan(), total, -math.inf))
    return out, logsumexp


def _by_pair(
    head: int, query: Tensor, key: Tensor, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, logsumexp: Tensor,
    delta: Tensor, scores: Scores,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weight of each pair, and the gradient by its product of query and key."""
    slope = None if scores.alibi is None else scores.alibi[head]
    score, slope = scores.of((q[query] * k[key]).sum(-1), key - query, slope)
    weight = torch.exp(score - logsumexp.masked_fill(logsumexp == -math.inf, 0)[query])
    return weight, weight * ((grad[query] * v[key]).sum(-1) - delta[query]) * slope
