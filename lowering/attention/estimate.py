"""What estimates of attention share: how much is multiplied, and the problem of lists of which the mean is known."""

from math import ceil
from typing import NamedTuple

import torch

from sparsecomp.lowering.attention.problem import BlockAttention
from sparsecomp.lowering.launch.strided import name_of
from sparsecomp.reference.attention.blocks import AttentionBlocks
from sparsecomp.reference.attention.dropout import ALWAYS

BACKWARD = 2.5
"""Operations of both gradients over those of the result, which they compute again in part."""


class AttentionSizes(NamedTuple):
    """Sizes of the operands: queries (batch, heads, q_len, depth), keys and values with kv_heads and k_len."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    depth: int
    v_depth: int

    @property
    def operations(self) -> float:
        """Of the result, where all pairs are multiplied."""
        return 2.0 * self.batch * self.heads * self.q_len * self.k_len * (self.depth + self.v_depth)


def mean_lists(blocks: AttentionBlocks) -> tuple[float, float]:
    """Blocks that a list holds, by rows of queries and of keys; waits for the device."""
    by_q, by_k = (
        float(count.double().mean()) if count.numel() else 0.0 for count in (blocks.count, blocks.k_count)
    )  # fmt: skip
    return by_q, by_k


def longest_lists(blocks: AttentionBlocks) -> tuple[int, int]:
    """Blocks of the longest list, of queries and of keys; waits for the device."""
    by_q, by_k = (int(count.max()) if count.numel() else 0 for count in (blocks.count, blocks.k_count))
    return by_q, by_k


def even_problem(
    sizes: AttentionSizes, block: tuple[int, int], listed: tuple[float, float], dtype: torch.dtype, kept: int = ALWAYS
) -> BlockAttention:
    """Attention over even lists as long as these are on the mean: uneven ones share the processors.

    Args:
        block: queries and keys of one.
        listed: as of `mean_lists`.
        kept: as of ``Scoring``.
    """
    s = sizes
    width, k_width = (max(1, ceil(mean)) for mean in listed)
    return BlockAttention(
        s.batch, s.heads, s.heads // s.kv_heads, s.q_len, s.k_len, s.depth, s.v_depth, *block, width, k_width, False,
        False, name_of(dtype), s.depth**-0.5, (), kept=kept,
    )  # fmt: skip
