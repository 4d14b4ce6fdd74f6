"""Which blocks a mask is listed by: of 64 queries and keys, or of 128.

Wide blocks are multiplied faster, and hold more pairs that are dropped. By the rows of an H200 in
`bench/results/attention_long.json` (bfloat16), they took 0.93 to 0.98 of the time of a training step of heads of 128
numbers with a window of 16 blocks, and 1.01 to 1.17 of that of the result alone up to 65,536 tokens. On heads of 64
numbers they took 0.88 and 0.96 with lists of 128 blocks in the mean, and 1.1 to 1.6 with few blocks or few programs.
"""

from collections.abc import Callable

import torch

from sparsecomp.lowering.attention.estimate import mean_lists
from sparsecomp.reference.attention.blocks import AttentionBlocks

_LONG, _TRAINED = 128, 16
"""Blocks of 64 in the mean list, of queries and of keys, from which on wide ones may be faster: at all, and in a
training step of heads of more than 64 numbers."""
_MORE = 1.1
"""Times as many pairs that are multiplied by wide blocks, at most."""


def of_faster_block(
    blocks: AttentionBlocks, wide: Callable[[], AttentionBlocks], depth: int, dtype: torch.dtype, trained: bool
) -> AttentionBlocks:
    """These blocks, of 64, or those of 128 of the same mask; waits for the device.

    Args:
        depth: of a query or a value, the greater.
        dtype: of the operands.
    """
    least = _TRAINED if trained and depth > 64 else _LONG
    if depth > 128 or dtype is torch.float32 or min(mean_lists(blocks)) < least:
        return blocks
    found = wide()
    return found if _listed(found) <= _MORE * _listed(blocks) else blocks


def _listed(blocks: AttentionBlocks) -> float:
    """Keys that a block of queries is multiplied with, in the mean, times the queries."""
    return mean_lists(blocks)[0] * blocks.block_k
