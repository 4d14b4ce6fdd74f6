"""Block lists of a mask that is only known on its device, in sizes that do not depend on what it holds.

There is room for every block in each list and for the bits of every block, and a block's tile is the one at its place,
so that kernels can fill in all of it side by side. Counts stay on the device, where attention's kernels read them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.reference.attention.blocks import EMPTY, FULL, SURELY_ZERO, AttentionBlocks, lists_of_map, pack_bits

_LARGE = 64.0
"""Beside numbers up to this float32 knows a logarithm to a part in 100,000."""
_DROWNING = -(2.0**29)
"""A number beside which float32 rounds scores from -16 to 16 away."""


def pairs_kept_by(mask: Tensor, q_len: int, k_len: int, kept: bool = True) -> tuple[Tensor, Tensor]:
    """Which pairs a mask keeps, and of which it says nothing but that: bool tensors (B, H, q_len, k_len).

    Numbers that are added keep a pair unless they are ``SURELY_ZERO`` or less. Where all of a query's are, but not
    -inf, those that are greatest are kept: beside numbers so large its scores are all equal.

    Args:
        mask: (B, H, q_len or 1, k_len or 1), bool, or floating, of numbers that are added to scores.
        kept: what a bool mask holds where a pair is kept.
    """
    mask = mask.expand(*mask.shape[:2], q_len, k_len)
    if mask.dtype is torch.bool:
        found = mask if kept else ~mask
        return found, torch.ones_like(found)
    low = mask <= SURELY_ZERO
    greatest = mask.masked_fill(mask.isnan(), torch.inf).amax(-1, keepdim=True) if k_len else mask
    alike = low & (mask == greatest) & (mask > -torch.inf)
    return torch.where(low.all(-1, keepdim=True), alike, ~low), mask == 0


def levelled(mask: Tensor) -> Tensor:
    """Numbers that are added to scores, less the greatest of each query's where those are all large.

    A gradient reads the logarithm of a query's sum of exponentials in float32, which beside 1e9 tells nothing of it.
    Where float32 leaves nothing of the scores themselves either, those of the greatest numbers are made equal.

    Args:
        mask: (…, k_len or 1), floating.
    """
    if mask.shape[-1] == 0:
        return mask.clone()
    top = mask.amax(-1, keepdim=True)
    large = (top.abs() > _LARGE) & (top > SURELY_ZERO) & (top < torch.inf)
    found = mask - torch.where(large, top, 0.0)
    if mask.dtype == torch.float64:
        return found
    alike = torch.where(mask == top, torch.finfo(mask.dtype).min, -torch.inf)
    return torch.where(large & (top <= _DROWNING), alike, found)


def scanned(mask: Tensor, q_len: int, k_len: int, block: tuple[int, int], kept: bool) -> AttentionBlocks:
    """The block lists of a mask; arguments as of `pairs_kept_by`, and ``block`` as of ``AttentionBlocks``."""
    overhang = (0, -k_len % block[1], 0, -q_len % block[0])
    pairs, plain = (F.pad(one, overhang) for one in pairs_kept_by(mask, q_len, k_len, kept))
    batch, heads, rows, columns = (*pairs.shape[:2], pairs.shape[2] // block[0], pairs.shape[3] // block[1])
    pairs, plain = (one.view(batch, heads, rows, block[0], columns, block[1]).transpose(3, 4) for one in (pairs, plain))
    some, whole = pairs.flatten(4).any(-1), (pairs & plain).flatten(4).all(-1)
    number = torch.arange(some.numel(), dtype=torch.int32, device=mask.device).view(some.shape)
    kinds = torch.where(some, torch.where(whole, FULL, number), EMPTY).int()
    tiles = pairs.reshape(-1, *block)
    return AttentionBlocks(
        q_len, k_len, *block, *lists_of_map(kinds, columns), pack_bits(tiles),
        *lists_of_map(kinds.transpose(2, 3), rows), pack_bits(tiles.mT),
    )  # fmt: skip


def empty_lists(
    device: torch.device, leading: tuple[int, int], lengths: tuple[int, int], block: tuple[int, int],
    tiles: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Where lists with room for every block go, and their bits: the ten tensors of ``AttentionBlocks``.

    Args:
        leading: batch entries and heads of the mask.
        lengths: of queries and keys.
        tiles: for how many bits have room; None for those of every block.
    """
    rows, columns = (-(-length // side) for length, side in zip(lengths, block, strict=True))
    tiles = leading[0] * leading[1] * rows * columns if tiles is None else tiles

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def lists(n: int, width: int) -> tuple[Tensor, ...]:
        return new(*leading, n), new(*leading, n), new(*leading, n, width), new(*leading, n, width)

    return (*lists(rows, columns), new(tiles, block[0], block[1] // 32), *lists(columns, rows),
            new(tiles, block[1], block[0] // 32))  # fmt: skip
