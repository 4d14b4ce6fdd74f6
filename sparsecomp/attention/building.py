"""Masks and block lists of patterns.

A long sequence has too many pairs to look at each: at 131,072 tokens 1.7e10. So the pattern is asked for bounds of
blocks first, some rows of blocks at a time, and for pairs only of the blocks that the bounds leave open.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsecomp.attention.pairs import Pairs, Ranges
from sparsecomp.errors import PatternError
from sparsecomp.reference.attention.blocks import (
    EMPTY,
    FULL,
    AttentionBlocks,
    blocks_from_map,
    check_block_sizes,
    pack_bits,
)

if TYPE_CHECKING:
    from sparsecomp.attention.pattern import AttentionPattern

_AT_ONCE = 2**24
"""Blocks that are bounded, or pairs that are asked for, in one go."""


def dense_mask_of(pattern: "AttentionPattern", q_len: int, k_len: int, device: torch.device) -> Tensor:
    """See `AttentionPattern.to_dense`."""
    _check_lengths(pattern, q_len, k_len)
    numbers = [torch.arange(size, device=device) for size in (*pattern.sizes, q_len, k_len)]
    batch, head, query, key = (one.view(*(-1 if n == dim else 1 for n in range(4))) for dim, one in enumerate(numbers))
    kept = pattern.keeps(Pairs(batch, head, query, key, (q_len, k_len)))
    return kept.expand(*pattern.sizes, q_len, k_len).contiguous()


def blocks_of_pattern(
    pattern: "AttentionPattern", q_len: int, k_len: int, block: tuple[int, int], device: torch.device
) -> AttentionBlocks:
    """See `AttentionPattern.to_blocks`."""
    check_block_sizes(block)
    _check_lengths(pattern, q_len, k_len)
    rows, columns = -(-q_len // block[0]), -(-k_len // block[1])
    kinds = torch.full((*pattern.sizes, rows, columns), EMPTY, dtype=torch.int32, device=device)
    tiles = _Tiles(block, device)
    at_once = max(1, _AT_ONCE // max(kinds[:, :, 0].numel(), 1)) if rows else 1
    for first in range(0, rows, at_once):
        some = kinds[:, :, first : first + at_once]
        _fill(some, first, pattern, (q_len, k_len), block, tiles)
    return blocks_from_map(*tiles.numbered(kinds), q_len, k_len, block)


def _check_lengths(pattern: "AttentionPattern", q_len: int, k_len: int) -> None:
    for name, length in (("q_len", q_len), ("k_len", k_len)):
        if type(length) is not int or length < 0:
            raise PatternError(f"{name} is {length!r}, needs a number of positions")
    pattern.check(q_len, k_len)


class _Tiles:
    """The different partly kept blocks that were met, as rows of bits; some may be there twice."""

    def __init__(self, block: tuple[int, int], device: torch.device) -> None:
        self._found = [torch.empty(0, block[0], block[1] // 32, dtype=torch.int32, device=device)]
        self._count = 0

    def add(self, bits: Tensor) -> Tensor:
        """Numbers of blocks of bits, by which a map names them until the end."""
        tiles, number = torch.unique(bits, dim=0, return_inverse=True)
        self._found.append(tiles)
        self._count += len(tiles)
        return (number + self._count - len(tiles)).int()

    def numbered(self, kinds: Tensor) -> tuple[Tensor, Tensor]:
        """The map with the numbers of tiles of which none is there twice, and these."""
        tiles, number = torch.unique(torch.cat(self._found), dim=0, return_inverse=True)
        if not number.numel():
            return kinds, tiles
        return torch.where(kinds >= 0, number.int()[kinds.clamp(min=0)], kinds), tiles


def _fill(
    kinds: Tensor, first: int, pattern: "AttentionPattern", lengths: tuple[int, int], block: tuple[int, int],
    tiles: _Tiles,
) -> None:  # fmt: skip
    """Write to a part of the map of blocks, whose first row of blocks is `first`."""
    ranges, overhangs = _ranges(kinds, first, lengths, block)
    bounds = pattern.bounds(ranges)
    whole = (bounds.all & ~overhangs).expand_as(kinds)
    kinds.masked_fill_(whole, FULL)
    open_ = (bounds.some.expand_as(kinds) & ~whole).nonzero()
    for places in open_.split(max(1, _AT_ONCE // (block[0] * block[1]))):
        kept = _kept(places, first, pattern, lengths, block)
        bits = pack_bits(kept)
        full, empty = kept.flatten(1).all(1), ~kept.flatten(1).any(1)
        found = torch.where(full, FULL, EMPTY).int()
        partial = ~(full | empty)
        found[partial] = tiles.add(bits[partial])
        kinds[tuple(places.unbind(1))] = found


def _ranges(
    kinds: Tensor, first: int, lengths: tuple[int, int], block: tuple[int, int]
) -> tuple[Ranges, Tensor]:
    """The ranges of all blocks of the part, and which of them reach past the lengths."""
    device = kinds.device
    batch, head, row, column = (
        torch.arange(size, device=device).view(*(-1 if n == dim else 1 for n in range(4)))
        for dim, size in enumerate(kinds.shape)
    )
    (first_query, last_query), (first_key, last_key) = (
        (number * size, (number + 1) * size - 1) for number, size in zip((row + first, column), block, strict=True)
    )
    overhangs = (last_query >= lengths[0]) | (last_key >= lengths[1])
    last_query, last_key = last_query.clamp(max=lengths[0] - 1), last_key.clamp(max=lengths[1] - 1)
    return Ranges(batch, head, first_query, last_query, first_key, last_key, lengths), overhangs


def _kept(
    places: Tensor, first: int, pattern: "AttentionPattern", lengths: tuple[int, int], block: tuple[int, int]
) -> Tensor:
    """(blocks, block_q, block_k) bool: the kept pairs of blocks of the map; none past the lengths."""
    batch, head, row, column = (one[:, None, None] for one in places.unbind(1))
    query = (row + first) * block[0] + torch.arange(block[0], device=places.device)[:, None]
    key = column * block[1] + torch.arange(block[1], device=places.device)
    inside = (query < lengths[0]) & (key < lengths[1])
    query, key = query.clamp(max=lengths[0] - 1), key.clamp(max=lengths[1] - 1)
    return pattern.keeps(Pairs(batch, head, query, key, lengths)) & inside


def listed_blocks(blocks: AttentionBlocks) -> Iterator[Tensor]:
    """Batch entry, head, row, column and tile of every listed block, each a tensor of as many numbers."""
    width = blocks.index.shape[3]
    listed = torch.arange(width, device=blocks.index.device) < blocks.count[..., None]
    yield from listed.nonzero(as_tuple=True)[:3]
    yield blocks.index[listed].long()
    yield blocks.tile[listed].long()
