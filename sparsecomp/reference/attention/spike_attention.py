"""Attention of spikes over listed blocks in plain torch: the CPU implementation, and the kernel's oracle."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.reference.attention.block_attention import Lists, gathered, in_blocks
from sparsecomp.reference.precision import accumulator


def spike_attention_reference(q: Tensor, k: Tensor, v: Tensor, lists: Sequence[Tensor], scale: float) -> Tensor:
    """scale · (M ⊙ q kᵀ) v, (batch, heads, q_len, v_depth), in the dtype sums are kept in.

    Args:
        q, k, v: (batch, heads, length, depth or v_depth).
        lists: the tensors of ``Lists``, of the queries.
        scale: of the result.
    """
    walked, sums = Lists(*lists), accumulator(q.dtype)
    q, k, v = q.to(sums), k.to(sums), v.to(sums)
    heads = [_one_head(q[b, h], k[b, h], v[b, h], *walked.of(b, h), walked.height)
             for b in range(q.shape[0]) for h in range(q.shape[1])]  # fmt: skip
    return torch.stack(heads).view(*q.shape[:3], v.shape[3]) * scale


def _one_head(q: Tensor, k: Tensor, v: Tensor, index: Tensor, kept: Tensor, block_q: int) -> Tensor:
    block_k = kept.shape[2] // index.shape[1]
    score = in_blocks(q, block_q) @ gathered(k, index, block_k).mT
    out = score.masked_fill(~kept, 0) @ gathered(v, index, block_k)
    return out.flatten(0, 1)[: len(q)]
