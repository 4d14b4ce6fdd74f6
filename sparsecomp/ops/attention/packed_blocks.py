"""Block lists of documents one behind another, made on the device of their offsets: no host waits for them."""

import torch
from torch import Tensor

from sparsecomp.errors import MaskError
from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.reference.attention import packed as reference
from sparsecomp.reference.attention.blocks import DEFAULT_BLOCK, AttentionBlocks, check_block_sizes
from sparsecomp.reference.attention.packed import PackedDocuments

library.define(
    "packed_blocks(Tensor q_offsets, Tensor k_offsets, int q_len, int k_len, int block_q, int block_k, int before, "
    "int after) -> (" + ", ".join(["Tensor"] * 10) + ")",
    tags=TAGS,
)


def packed_blocks(
    q_offsets: Tensor, k_offsets: Tensor, q_len: int, k_len: int, block: tuple[int, int] = DEFAULT_BLOCK, *,
    before: int | None = None, after: int | None = None,
) -> AttentionBlocks:  # fmt: skip
    """The blocks of documents one behind another, whose tokens attend to those of their own.

    What tokens before the first document or behind the last hold is in nothing. Lists have room for all blocks, so that
    no host need wait for what they hold; behind a list's end stands anything.

    Args:
        q_offsets, k_offsets: (documents + 1,) int32, ascending: where each document begins, and the last ends, among
            queries and among keys. Of offsets that do not ascend the blocks are unspecified.
        q_len, k_len: numbers of queries and keys.
        block: queries and keys of a block, powers of two from 32 on.
        before, after: how far before and behind itself a query attends, where the last query of a document stands at
            its last key; None for any distance. `after=0` is causal.

    Raises:
        MaskError: offsets that are none, or an impossible block or distance.
    """
    check_block_sizes(block)
    far = q_len + k_len
    sides = [far if side is None else side for side in (before, after)]
    if any(type(side) is not int or side < 0 for side in sides):
        raise MaskError(f"before and after are {before!r} and {after!r}, need numbers of keys from 0 on, or None")
    packed = PackedDocuments(q_len, k_len, *block, *(min(side, far) for side in sides))
    found = torch.ops.sparsecomp.packed_blocks.default(q_offsets, k_offsets, *packed)
    return AttentionBlocks(q_len, k_len, *block, *found)


def _check(q_offsets: Tensor, k_offsets: Tensor) -> None:
    alike = q_offsets.shape == k_offsets.shape and q_offsets.device == k_offsets.device
    plain = q_offsets.dim() == 1 and len(q_offsets) > 1 and q_offsets.dtype is k_offsets.dtype is torch.int32
    if not alike or not plain:
        raise MaskError(
            f"offsets are {_told(q_offsets)} and {_told(k_offsets)}, need (documents + 1,) of torch.int32 on one device"
        )


def _told(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"


def _blocks(q_offsets, k_offsets, *packed):
    _check(q_offsets, k_offsets)
    return tuple(reference.blocks_of_packed(q_offsets, k_offsets, PackedDocuments(*packed))[4:])


def _blocks_cuda(q_offsets, k_offsets, *packed):
    _check(q_offsets, k_offsets)
    from sparsecomp.lowering.attention import document_lists as lowered  # loads Triton

    p = PackedDocuments(*packed)
    if not (p.q_len and p.k_len):
        return tuple(one.zero_() for one in reference.empty_lists_of(q_offsets, p))
    return lowered.document_lists(q_offsets.contiguous(), k_offsets.contiguous(), p)


def _fake_blocks(q_offsets, k_offsets, *packed):
    _check(q_offsets, k_offsets)
    return reference.empty_lists_of(q_offsets, PackedDocuments(*packed))


implement("packed_blocks", _blocks, _blocks_cuda, _fake_blocks)
