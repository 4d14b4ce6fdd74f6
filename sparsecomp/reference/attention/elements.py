"""Which pairs of query and key an attention keeps, one by one: lists of keys by queries, and of queries by keys.

What blocks are to patterns that keep whole regions, lists are to those that keep single pairs here and there, of which
a block would hold few.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.errors import MaskError
from sparsecomp.formats.csr import CSR
from sparsecomp.reference.attention.blocks import AttentionBlocks, unpack_bits

_AT_ONCE = 2**26
"""Pairs of blocks that are written out in one go."""


class AttentionElements(NamedTuple):
    """The kept pairs (query, key) of an attention, as lists.

    All tensors are contiguous int32 of one device. B is the batch or 1, H the query heads or 1. The lists of all stand
    one behind another, so that the last pointer of one row of pointers is the first of the next.

    Attributes:
        q_len, k_len: numbers of queries and keys.
        pointers: (B, H, q_len + 1): query i keeps the keys index[pointers[i]] to index[pointers[i + 1] - 1].
        index: (pairs,), ascending for each query.
        k_pointers: (B, H, k_len + 1), the same for the queries that keep a key.
        k_index: (pairs,).
    """

    q_len: int
    k_len: int
    pointers: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    k_pointers: Tensor
    k_index: Tensor


def elements_of_mask(mask: Tensor) -> AttentionElements:
    """The kept pairs of a dense mask, on its device; on a GPU the host waits for it.

    Args:
        mask: (B or 1, H or 1, queries, keys) bool, True where a query attends to a key.

    Raises:
        MaskError: a mask of other dtype or dimensions, or of 2^31 pairs and more.
    """
    if mask.dtype != torch.bool or mask.dim() != 4:
        raise MaskError(
            f"the mask is {tuple(mask.shape)} of {mask.dtype}, needs (batch or 1, heads or 1, queries, keys) of"
            " torch.bool: True where a query attends to a key"
        )
    return _of_pairs(mask.nonzero(as_tuple=True), tuple(mask.shape))


def elements_of_matrix(matrix: CSR) -> AttentionElements:
    """The pairs that a matrix (queries, keys) stores, whatever their values.

    Raises:
        MaskError: 2^31 pairs and more.
    """
    this = matrix.compact()
    row = torch.repeat_interleave(this.crow.diff().long())
    nothing = torch.zeros_like(row)
    return _of_pairs((nothing, nothing, row, this.col.long()), (1, 1, *this.shape))


def elements_of_blocks(blocks: AttentionBlocks) -> AttentionElements:
    """The kept pairs of block lists, without a dense mask; waits for the device.

    Raises:
        MaskError: 2^31 pairs and more.
    """
    width = blocks.index.shape[3]
    listed = torch.arange(width, device=blocks.index.device) < blocks.count[..., None]
    places = (*listed.nonzero(as_tuple=True)[:3], blocks.index[listed].long(), blocks.tile[listed].long())
    tiles = unpack_bits(blocks.bits)
    tiles = torch.cat((tiles, tiles.new_ones((1, blocks.block_q, blocks.block_k))))  # FULL is the last
    found, some = [], (one.split(_AT_ONCE // tiles[0].numel()) for one in places)
    for batch, head, row, column, tile in zip(*some, strict=True):
        which, query, key = tiles[tile].nonzero(as_tuple=True)
        found.append((
            batch[which], head[which], row[which] * blocks.block_q + query, column[which] * blocks.block_k + key
        ))  # fmt: skip
    pairs = [torch.cat(parts) for parts in zip(*found, strict=True)]
    inside = (pairs[2] < blocks.q_len) & (pairs[3] < blocks.k_len)
    shape = (*blocks.count.shape[:2], blocks.q_len, blocks.k_len)
    return _of_pairs(tuple(one[inside] for one in pairs), shape)


def dense_mask_of_elements(elements: AttentionElements) -> Tensor:
    """The mask (B, H, q_len, k_len) bool that the lists stand for."""
    shape = (*elements.pointers.shape[:2], elements.q_len, elements.k_len)
    mask = torch.zeros(shape, dtype=torch.bool, device=elements.index.device)
    counts = elements.pointers.diff().flatten().long()
    mask.view(-1, elements.k_len)[torch.repeat_interleave(counts), elements.index.long()] = True
    return mask


def _of_pairs(pairs: tuple[Tensor, ...], shape: tuple[int, ...]) -> AttentionElements:
    """Of the batch entry, head, query and key of pairs in any order, each once."""
    batch, head, query, key = pairs
    if key.numel() >= 2**31:
        raise MaskError(f"the pattern keeps {key.numel()} pairs, lists hold fewer than 2^31: attend by its blocks")
    group, (q_len, k_len) = batch * shape[1] + head, shape[2:]
    lists: list[Tensor] = []
    for line, other, lines, others in ((query, key, q_len, k_len), (key, query, k_len, q_len)):
        order = torch.argsort((group * lines + line) * others + other)
        counts = torch.bincount(group * lines + line, minlength=shape[0] * shape[1] * lines)
        ends = counts.cumsum(0).view(*shape[:2], lines)
        before = F.pad(ends[..., -1:].flatten(), (1, 0))[:-1] if lines else ends.new_zeros(shape[0] * shape[1])
        lists += [torch.cat((before.view(*shape[:2], 1), ends), 2).int(), other[order].int()]
    return AttentionElements(q_len, k_len, *lists)
