"""Which pairs of query and key an attention keeps, by blocks: what its kernels read instead of a dense mask.

A kernel walks, for each block of queries, the list of key blocks in which some pair is kept. It asks for single pairs
only in blocks that are not kept whole, where it reads one bit a pair. Few different blocks occur in a regular pattern
(three in a sliding window), so that equal ones are stored once, as a tile that many blocks name. The gradients of keys
and values walk the transposed lists, which are stored too.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.errors import MaskError

DEFAULT_BLOCK = (64, 64)
"""Queries and keys of a block. On an H200 each kernel was 1.1 times as fast as with (128, 128) on a window of 256 and
heads of 64 numbers. Kernels multiply tiles of at most the size of a block."""
WIDE_BLOCK = (128, 128)
"""Faster on an H200 where lists are long: see `sparsecomp.lowering.attention.block_choice`."""
FULL = -1
"""In a map of blocks and in ``tile``: every pair is kept."""
EMPTY = -2
"""In a map of blocks: no pair is kept."""
SURELY_ZERO = -1e30
"""A number that is added to scores, from which on their exponentials are 0 beside any score of common size."""
_WORD = 32


class AttentionBlocks(NamedTuple):
    """The kept pairs (query, key) of an attention, by blocks of ``block_q`` queries and ``block_k`` keys.

    All tensors are contiguous. B is the batch or 1, H the query heads or 1; Qb and Kb are the numbers of blocks, the
    last of which may reach past the lengths: pairs there are never kept. A list holds first the blocks that are kept in
    part, ascending, and then those that are kept whole, ascending; what stands behind its end is unspecified, but a
    valid block.

    Attributes:
        q_len, k_len: numbers of queries and keys.
        block_q, block_k: powers of two from 32 on.
        count: (B, H, Qb) int32, key blocks in the list of each query block.
        partial: (B, H, Qb) int32, how many of them are kept in part.
        index: (B, H, Qb, width) int32, the key blocks; ``width`` is that of the longest list, at least 1
            where there are key blocks.
        tile: (B, H, Qb, width) int32, for each listed block its row of ``bits``, or ``FULL``.
        bits: (tiles, block_q, block_k / 32) int32, contiguous: bit j of word w is set where the query attends to key
            32·w + j of the block. No two rows are equal.
        k_count, k_partial: (B, H, Kb), the same for the query blocks in the list of each key block.
        k_index, k_tile: (B, H, Kb, k_width) int32; a tile has the same number in both directions.
        k_bits: (tiles, block_k, block_q / 32) int32, each tile transposed.
    """

    q_len: int
    k_len: int
    block_q: int
    block_k: int
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    partial: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    tile: Tensor
    bits: Tensor
    k_count: Tensor
    k_partial: Tensor
    k_index: Tensor
    k_tile: Tensor
    k_bits: Tensor


def blocks_of(mask: Tensor, block: tuple[int, int] = DEFAULT_BLOCK) -> AttentionBlocks:
    """The blocks of a dense mask, on its device; on a GPU the host waits for it.

    It needs about three bytes of memory an element of the mask beyond the mask.

    Args:
        mask: (B or 1, H or 1, queries, keys) bool, True where a query attends to a key.
        block: queries and keys of a block, powers of two from 32 on.

    Raises:
        MaskError: a mask of other dtype or dimensions, or an impossible block.
    """
    if mask.dtype != torch.bool or mask.dim() != 4:
        raise MaskError(
            f"the mask is {tuple(mask.shape)} of {mask.dtype}, needs (batch or 1, heads or 1, queries, keys) of"
            " torch.bool: True where a query attends to a key"
        )
    check_block_sizes(block)
    (q_len, k_len), (block_q, block_k) = mask.shape[2:], block
    padded = F.pad(mask, (0, -k_len % block_k, 0, -q_len % block_q))
    b, h, q, k = padded.shape
    words = pack_bits(padded).view(b, h, q // block_q, block_q, k // block_k, block_k // _WORD).transpose(3, 4)
    flat = words.reshape(-1, block_q, block_k // _WORD)
    full, empty = (flat == -1).flatten(1).all(1), (flat == 0).flatten(1).all(1)
    block_map = torch.full(full.shape, EMPTY, dtype=torch.int32, device=mask.device).masked_fill_(full, FULL)
    inside = ~(full | empty)
    tiles, row = torch.unique(flat[inside], dim=0, return_inverse=True)
    block_map[inside] = row.int()
    return blocks_from_map(block_map.view(b, h, q // block_q, k // block_k), tiles, q_len, k_len, block)


def blocks_from_map(
    block_map: Tensor, bits: Tensor, q_len: int, k_len: int, block: tuple[int, int] = DEFAULT_BLOCK
) -> AttentionBlocks:
    """The blocks of a pattern that knows what each block holds, without its dense mask.

    Args:
        block_map: (B or 1, H or 1, Qb, Kb) int32: ``FULL``, ``EMPTY``, or a row of ``bits``. Blocks that reach past a
            length are not ``FULL``.
        bits: (tiles, block_q, block_k / 32) int32, see ``AttentionBlocks``; zero past the lengths.
        q_len, k_len: numbers of queries and keys.
        block: queries and keys of a block.

    Raises:
        MaskError: the map, the bits, the lengths and the block do not fit one another.
    """
    check_block_sizes(block)
    block_q, block_k = block
    grid = (-(-q_len // block_q), -(-k_len // block_k))
    if block_map.dtype != torch.int32 or block_map.dim() != 4 or block_map.shape[2:] != grid:
        raise MaskError(
            f"the map of blocks is {tuple(block_map.shape)} of {block_map.dtype}, needs (batch or 1, heads or 1,"
            f" {grid[0]}, {grid[1]}) of torch.int32 for {q_len} queries and {k_len} keys in blocks of {block}"
        )
    if bits.dtype != torch.int32 or bits.shape[1:] != (block_q, block_k // _WORD):
        raise MaskError(
            f"the tiles are {tuple(bits.shape)} of {bits.dtype}, need (tiles, {block_q}, {block_k // _WORD}) of"
            " torch.int32"
        )
    bits = bits.contiguous()
    k_bits = pack_bits(unpack_bits(bits).transpose(1, 2))
    return AttentionBlocks(
        q_len, k_len, block_q, block_k, *lists_of_map(block_map), bits, *lists_of_map(block_map.transpose(2, 3)),
        k_bits,
    )  # fmt: skip


def dense_mask(blocks: AttentionBlocks) -> Tensor:
    """The mask (B, H, q_len, k_len) bool that ``blocks`` stand for."""
    b, h, q_blocks, width = blocks.index.shape
    k_blocks = blocks.k_count.shape[2]
    listed = torch.arange(width, device=blocks.index.device) < blocks.count[..., None]
    batch, head, row, _ = torch.nonzero(listed, as_tuple=True)
    tiles = unpack_bits(blocks.bits)
    tiles = torch.cat((tiles, tiles.new_ones((1, blocks.block_q, blocks.block_k))))  # FULL is the last
    dense = tiles.new_zeros((b, h, q_blocks, k_blocks, blocks.block_q, blocks.block_k))
    dense[batch, head, row, blocks.index[listed].long()] = tiles[blocks.tile[listed].long()]
    dense = dense.transpose(3, 4).reshape(b, h, q_blocks * blocks.block_q, k_blocks * blocks.block_k)
    return dense[:, :, : blocks.q_len, : blocks.k_len]


def pack_bits(kept: Tensor) -> Tensor:
    """int32 words (..., n / 32) of a bool tensor (..., n): bit j of word w is element 32·w + j."""
    if not kept.numel():
        return kept.new_empty((*kept.shape[:-1], kept.shape[-1] // _WORD), dtype=torch.int32)
    bytes_of = kept.contiguous().view(torch.uint8).unflatten(-1, (-1, 8))
    return (bytes_of * _powers(kept.device)).sum(-1, dtype=torch.uint8).view(torch.int32)


def unpack_bits(words: Tensor) -> Tensor:
    """The bool tensor (..., 32·n) of int32 words (..., n): the inverse of ``pack_bits``."""
    if not words.numel():
        return words.new_empty((*words.shape[:-1], words.shape[-1] * _WORD), dtype=torch.bool)
    return (words.contiguous().view(torch.uint8)[..., None] & _powers(words.device)).flatten(-2) != 0


def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)


def check_block_sizes(block: tuple[int, int]) -> None:
    """Raise MaskError for a block that kernels have no tiles of."""
    sizes = block if isinstance(block, tuple) and len(block) == 2 else (0,)
    if any(type(size) is not int or size < _WORD or size & (size - 1) for size in sizes):
        raise MaskError(f"a block of {block!r}: needs (queries, keys), both powers of two from {_WORD} on")


def lists_of_map(block_map: Tensor, width: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``count``, ``partial``, ``index`` and ``tile`` of the rows of a map.

    Args:
        width: of the lists; None for that of the longest, for which the host waits.
    """
    block_map = block_map.contiguous()
    count = (block_map != EMPTY).sum(-1, dtype=torch.int32)
    partial = (block_map >= 0).sum(-1, dtype=torch.int32)
    rank = torch.where(block_map >= 0, 0, torch.where(block_map == FULL, 1, 2))
    if width is None:
        width = max(int(count.max()), 1) if count.numel() else 1
    index = rank.argsort(dim=-1, stable=True)[..., :width]
    tile = block_map.gather(-1, index).clamp_(min=FULL)
    return count, partial, index.int().contiguous(), tile
