"""Block lists in others' forms: FlexAttention's block masks, and matrices in BSR."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsecomp.attention.building import blocks_of_pattern, listed_blocks
from sparsecomp.attention.pairs import Pairs
from sparsecomp.errors import PatternError
from sparsecomp.formats.bsr import BSR
from sparsecomp.reference.attention.blocks import FULL, AttentionBlocks, unpack_bits

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from sparsecomp.attention.pattern import AttentionPattern


def to_flex(
    pattern: "AttentionPattern", q_len: int, k_len: int, block: int, device: torch.device
) -> "BlockMask":
    """See `AttentionPattern.to_flex`."""
    from torch.nn.attention.flex_attention import BlockMask  # it loads Inductor

    blocks = blocks_of_pattern(pattern, q_len, k_len, (block, block), device)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return pattern.keeps(Pairs(batch, head, query, key, (q_len, k_len)))

    columns = blocks.k_count.shape[2]
    partial, full = (_listed_from(start, blocks.index, columns) for start in (None, blocks.partial))
    return BlockMask.from_kv_blocks(
        blocks.partial, partial, blocks.count - blocks.partial, full, block, mask_mod, (q_len, k_len)
    )


def _listed_from(start: Tensor | None, index: Tensor, columns: int) -> Tensor:
    """(batch, heads, rows, columns) int32: the lists from a place in each on; any block where they are shorter."""
    place = torch.arange(columns, device=index.device).expand(*index.shape[:3], columns)
    place = place if start is None else place + start[..., None]
    return index.gather(3, place.clamp(max=max(index.shape[3] - 1, 0)))


def to_bsr(blocks: AttentionBlocks, dtype: torch.dtype) -> BSR:
    """See `AttentionPattern.to_bsr`."""
    if blocks.count.shape[:2] != (1, 1):
        raise PatternError(
            f"the pattern tells (batch, heads) {tuple(blocks.count.shape[:2])} apart, a matrix has room for one: take"
            " to_dense and the mask that you need"
        )
    _, _, row, column, tile = listed_blocks(blocks)
    order = torch.argsort(row * (blocks.k_count.shape[2] + 1) + column)
    tiles = torch.cat((unpack_bits(blocks.bits), unpack_bits(blocks.bits.new_full((1, *blocks.bits.shape[1:]), -1))))
    pointers = torch.nn.functional.pad(blocks.count[0, 0].cumsum(0), (1, 0)).int()
    values = tiles[tile.where(tile != FULL, len(tiles) - 1)[order]].to(dtype)
    return BSR(pointers, column[order].int(), values, shape=(blocks.q_len, blocks.k_len))
