"""Patterns of FlexAttention's block masks."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsecomp.attention.given import FromFunction, FromTensor
from sparsecomp.attention.pattern import AttentionPattern
from sparsecomp.attention.positions import InBlocks
from sparsecomp.errors import PatternError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def from_flex(mask: "BlockMask") -> AttentionPattern:
    """The pattern of a FlexAttention block mask: full blocks, and what its function keeps of the partial ones.

    Raises:
        PatternError: something else.
    """
    from torch.nn.attention.flex_attention import BlockMask  # it loads Inductor

    if not isinstance(mask, BlockMask):
        raise PatternError(f"a {type(mask).__name__} is no BlockMask of torch.nn.attention.flex_attention")
    partial = _marked(mask.kv_num_blocks, mask.kv_indices)
    inside = InBlocks(FromTensor(partial), mask.BLOCK_SIZE) & FromFunction(mask.mask_mod, *partial.shape[:2])
    if mask.full_kv_num_blocks is None or mask.full_kv_indices is None:
        return inside
    full = _marked(mask.full_kv_num_blocks, mask.full_kv_indices)
    return inside | InBlocks(FromTensor(full), mask.BLOCK_SIZE)


def _marked(count: Tensor, index: Tensor) -> Tensor:
    """(batch, heads, rows, columns) bool: the blocks that lists name."""
    columns = index.shape[3]
    listed = torch.arange(columns, device=index.device) < count[..., None]
    marks = torch.zeros(*index.shape[:3], columns + 1, dtype=torch.bool, device=index.device)
    marks.scatter_(3, torch.where(listed, index.long(), columns), True)
    return marks[..., :columns]
