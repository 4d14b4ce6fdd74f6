"""Block lists of a mask that is data, made on its device in the graph: no host waits for what it holds."""

import torch
from torch import Tensor

from sparsecomp.errors import MaskError
from sparsecomp.ops.library import TAGS, decompose, differentiable, implement, library
from sparsecomp.reference.attention import scan as reference
from sparsecomp.reference.attention.blocks import DEFAULT_BLOCK, AttentionBlocks, check_block_sizes
from sparsecomp.reference.precision import KERNEL_DTYPES

_MOST_PAIRS = 2**14
"""Of a block that a program counts."""

library.define(
    "scanned_mask(Tensor mask, int q_len, int k_len, int block_q, int block_k, bool kept=True) -> ("
    + ", ".join(["Tensor"] * 10)
    + ")",
    tags=TAGS,
)
library.define("levelled_mask(Tensor mask) -> Tensor", tags=TAGS)


def scanned_blocks(
    mask: Tensor, q_len: int, k_len: int, block: tuple[int, int] = DEFAULT_BLOCK, *, kept: bool = True
) -> AttentionBlocks:
    """The blocks of a mask, without waiting for its device: each list has room for all blocks.

    Where `blocks_of` can be used, which waits, lists and bits take less memory; a kernel takes as long by either.

    Args:
        mask: (B or 1, H or 1, q_len or 1, k_len or 1) bool; or floating, of numbers that are added to scores. Of these
            -1e30 and less keep no pair; of a query that has no other, and not only -inf, the greatest keep theirs.
        q_len, k_len: numbers of queries and keys.
        block: queries and keys of a block, powers of two from 32 on.
        kept: what a bool mask holds where a pair is kept.

    Raises:
        MaskError: a mask of other dtype or dimensions, or an impossible block.
    """
    check_block_sizes(block)
    return AttentionBlocks(
        q_len, k_len, *block, *torch.ops.sparsecomp.scanned_mask.default(mask, q_len, k_len, *block, kept)
    )


def _check(mask: Tensor, q_len: int, k_len: int) -> None:
    fits = mask.dim() == 4 and mask.shape[2] in (1, q_len) and mask.shape[3] in (1, k_len)
    if not fits or not (mask.dtype is torch.bool or mask.is_floating_point()):
        raise MaskError(
            f"the mask is {tuple(mask.shape)} of {mask.dtype}, needs (batch or 1, heads or 1, {q_len} or 1, {k_len} or"
            " 1) of torch.bool, or floating"
        )


def _scan(mask, q_len, k_len, block_q, block_k, kept=True):
    _check(mask, q_len, k_len)
    return tuple(reference.scanned(mask, q_len, k_len, (block_q, block_k), kept)[4:])


def _scan_cuda(mask, q_len, k_len, block_q, block_k, kept=True):
    _check(mask, q_len, k_len)
    some = q_len and k_len and mask.numel() and block_q * block_k <= _MOST_PAIRS
    if not some or mask.dtype not in (torch.bool, *KERNEL_DTYPES):
        return _scan(mask, q_len, k_len, block_q, block_k, kept)
    from sparsecomp.lowering.attention import mask_scan as lowered  # loads Triton

    return lowered.mask_scan(mask, q_len, k_len, (block_q, block_k), kept)


def _fake_scan(mask, q_len, k_len, block_q, block_k, kept=True):
    _check(mask, q_len, k_len)
    return reference.empty_lists(mask.device, (mask.shape[0], mask.shape[1]), (q_len, k_len), (block_q, block_k))


implement("scanned_mask", _scan, _scan_cuda, _fake_scan)
implement("levelled_mask", reference.levelled)
decompose("levelled_mask", reference.levelled)
# what a whole row of scores is less changes no softmax
differentiable("levelled_mask", lambda ctx, grad: grad, lambda ctx, inputs, output: None)
