"""Pictures of patterns, and how many pairs and blocks they keep."""

from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.attention.building import blocks_of_pattern, dense_mask_of, listed_blocks
from sparsecomp.errors import ExtraError, PatternError
from sparsecomp.formats.drawing import framed
from sparsecomp.reference.attention.blocks import FULL, AttentionBlocks, unpack_bits

if TYPE_CHECKING:
    from sparsecomp.attention.pattern import AttentionPattern

_DENSE = 2048
"""Queries or keys up to which pairs are drawn from the mask, above from blocks of `_CELL`."""
_CELL = (32, 32)
_PIXELS = 512


@dataclass(frozen=True)
class PatternStatistics:
    """Figures of a pattern at some lengths, over all batch entries and heads that it tells apart.

    Attributes:
        q_len, k_len: queries and keys.
        block: queries and keys of a block.
        pairs: share of pairs that are kept.
        full, partial, empty: share of blocks of which all, some or no pairs are kept.
        tiles: different blocks among those kept in part.
        longest, shortest: most and fewest blocks of keys for one block of queries.
        nbytes: of the block lists.
    """

    q_len: int
    k_len: int
    block: tuple[int, int]
    pairs: float
    full: float
    partial: float
    empty: float
    tiles: int
    longest: int
    shortest: int
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.q_len} queries x {self.k_len} keys: {self.pairs:.2%} of pairs kept\n"
            f"blocks of {self.block[0]} x {self.block[1]}: {self.full:.2%} full, {self.partial:.2%} partial"
            f" ({self.tiles} different), {self.empty:.2%} empty\n"
            f"a block of queries reads {self.shortest} to {self.longest} blocks of keys; {self.nbytes} bytes of lists"
        )


def statistics_of_blocks(blocks: AttentionBlocks) -> PatternStatistics:
    """See `AttentionPattern.statistics`; waits for the device."""
    batch, heads, rows = blocks.count.shape
    grid, pairs = batch * heads * rows * blocks.k_count.shape[2], batch * heads * blocks.q_len * blocks.k_len
    listed, partly = int(blocks.count.sum()), int(blocks.partial.sum())
    kept = int(_kept_in_blocks(blocks).sum())
    lists = blocks.count.flatten().tolist() or [0]
    return PatternStatistics(
        blocks.q_len, blocks.k_len, (blocks.block_q, blocks.block_k), kept / max(pairs, 1),
        (listed - partly) / max(grid, 1), partly / max(grid, 1), (grid - listed) / max(grid, 1), len(blocks.bits),
        max(lists), min(lists), sum(one.nbytes for one in blocks if isinstance(one, Tensor)),
    )  # fmt: skip


def _kept_in_blocks(blocks: AttentionBlocks) -> Tensor:
    """(batch, heads, rows, columns) int64: kept pairs of each block."""
    each = unpack_bits(blocks.bits).flatten(1).sum(1)
    each = torch.cat((each, each.new_tensor([blocks.block_q * blocks.block_k])))
    batch, head, row, column, tile = listed_blocks(blocks)
    kept = each.new_zeros(*blocks.count.shape, blocks.k_count.shape[2])
    kept[batch, head, row, column] = each[tile.where(tile != FULL, len(each) - 1)]
    return kept


def spy(
    pattern: "AttentionPattern", lengths: tuple[int, int], path: str | PathLike[str] | None, which: tuple[int, int],
    width: int,
) -> str | None:  # fmt: skip
    """See `AttentionPattern.spy`."""
    if type(width) is not int or width < 1:
        raise PatternError(f"width is {width!r}, needs a number of columns")
    if any(one >= size > 1 or one < 0 for one, size in zip(which, pattern.sizes, strict=True)):
        raise PatternError(f"there is no (batch, head) {which}: the pattern tells {pattern.sizes} apart")
    pairs, kept = _counted(pattern, lengths, which)
    if path is None:
        return framed(_share(kept, pairs, max(width // 2, 1), width))
    _draw(_share(kept, pairs, _PIXELS, _PIXELS), lengths, path)
    return None


def _counted(
    pattern: "AttentionPattern", lengths: tuple[int, int], which: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """(lines, columns) float64: pairs of each cell of the finest grid, and how many of them are kept."""
    batch, head = (one if size > 1 else 0 for one, size in zip(which, pattern.sizes, strict=True))
    device = torch.device("cpu")
    if max(lengths) <= _DENSE:
        kept = dense_mask_of(pattern, *lengths, device)[batch, head].double()
        return torch.ones_like(kept), kept
    kept = _kept_in_blocks(blocks_of_pattern(pattern, *lengths, _CELL, device))[batch, head].double()
    high, wide = (
        (length - torch.arange(cells, device=device) * side).clamp(max=side).double()
        for length, cells, side in zip(lengths, kept.shape, _CELL, strict=True)
    )
    return high[:, None] * wide, kept


def _share(kept: Tensor, pairs: Tensor, lines: int, columns: int) -> Tensor:
    """Share of kept pairs in each cell of a grid of at most (lines, columns)."""
    side = [max(-(-have // most), 1) for have, most in zip(kept.shape, (lines, columns), strict=True)]
    pad = (0, -kept.shape[1] % side[1], 0, -kept.shape[0] % side[0])
    found, all_ = (
        F.pad(one, pad).unflatten(1, (-1, side[1])).unflatten(0, (-1, side[0])).sum((1, 3)) for one in (kept, pairs)
    )
    return found / all_.clamp(min=1)


def _draw(shares: Tensor, lengths: tuple[int, int], path: str | PathLike[str]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ExtraError("spy with a path needs matplotlib: pip install 'sparsecomp[plot]'") from error
    figure = Figure(layout="constrained", figsize=(3.2, 3.2))
    axes = figure.add_subplot()
    extent = (0, lengths[1], lengths[0], 0)
    axes.imshow(shares.numpy(), cmap="Greys", vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="nearest")
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    figure.savefig(path)
