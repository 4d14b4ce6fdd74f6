"""Documents one behind another, whose tokens attend to those of their own: what their offsets say, and its blocks."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.reference.attention.blocks import AttentionBlocks, blocks_of
from sparsecomp.reference.attention.scan import empty_lists


class PackedDocuments(NamedTuple):
    """How documents are packed, apart from where each begins.

    Attributes:
        q_len, k_len: numbers of queries and keys; those behind the last document attend to nothing.
        block_q, block_k: as of ``AttentionBlocks``.
        before, after: a query attends to keys at most so far before and behind it, where a document's last query
            stands at its last key.
    """

    q_len: int
    k_len: int
    block_q: int
    block_k: int
    before: int
    after: int


def packed_mask(q_offsets: Tensor, k_offsets: Tensor, packed: PackedDocuments) -> Tensor:
    """Which pairs are kept: (1, 1, q_len, k_len) bool."""
    q_document, q_place = _placed(q_offsets, packed.q_len)
    k_document, k_place = _placed(k_offsets, packed.k_len)
    lengths = [F.pad(offsets.diff(), (0, 1)) for offsets in (q_offsets, k_offsets)]
    distance = (q_place + (lengths[1] - lengths[0])[q_document])[:, None] - k_place
    same = (q_document[:, None] == k_document) & (q_document < len(q_offsets) - 1)[:, None]
    return (same & (distance <= packed.before) & (distance >= -packed.after))[None, None]


def _placed(offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The document of each position, as many as there are for none, and the place in it."""
    position = torch.arange(length, device=offsets.device, dtype=offsets.dtype)
    document = torch.searchsorted(offsets, position, right=True) - 1
    document = torch.where(document < 0, len(offsets) - 1, document)
    return document, position - offsets[document]


def tiles_of(documents: int, packed: PackedDocuments) -> int:
    """No more blocks are kept in part: what a document keeps is convex, and the edge of such a thing crosses no more
    than twice as many blocks as it has rows and columns of them."""
    rows, columns = -(-packed.q_len // packed.block_q), -(-packed.k_len // packed.block_k)
    return min(rows * columns, 2 * (rows + columns + 2 * documents))


def empty_lists_of(q_offsets: Tensor, packed: PackedDocuments) -> tuple[Tensor, ...]:
    """Where the block lists go."""
    p, tiles = packed, tiles_of(len(q_offsets) - 1, packed)
    return empty_lists(q_offsets.device, (1, 1), (p.q_len, p.k_len), (p.block_q, p.block_k), tiles)


def blocks_of_packed(q_offsets: Tensor, k_offsets: Tensor, packed: PackedDocuments) -> AttentionBlocks:
    """The block lists, with room for those of any offsets."""
    found = blocks_of(packed_mask(q_offsets, k_offsets, packed), (packed.block_q, packed.block_k))
    places = empty_lists_of(q_offsets, packed)
    for one, place in zip(found[4:], places, strict=True):
        place.zero_()
        place[tuple(map(slice, one.shape))] = one
    return AttentionBlocks(*found[:4], *places)
