"""Attention by a pattern or a mask, as a function. Lists are made once for each pattern, lengths and device."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsecomp.attention.choice import AttentionChoice
from sparsecomp.attention.pattern import AttentionPattern, pattern_of
from sparsecomp.errors import ConfigError, FormatError, MaskError
from sparsecomp.ops.attention.block_attention import attend_blocks
from sparsecomp.ops.attention.element_attention import element_attention
from sparsecomp.ops.attention.mask_scan import scanned_blocks
from sparsecomp.reference.attention.blocks import DEFAULT_BLOCK, WIDE_BLOCK, AttentionBlocks


def attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: AttentionPattern | Tensor, *, scale: float | None = None,
    softcap: float = 0.0, alibi: Tensor | None = None, dropout: float = 0.0, seed: Tensor | None = None,
    block: tuple[int, int] | None = None, by: str = "auto",
) -> Tensor:  # fmt: skip
    """softmax(scale · query keyᵀ) value over the pairs that a pattern or a mask keeps.

    As `torch.nn.functional.scaled_dot_product_attention` by the pattern's mask, for finite inputs; a query that keeps
    nothing gives zeros. Under `torch.compile` a pattern must be made outside of the compiled function, and its block
    lists are constants of the graph; those of a mask are made anew in each call, on its device.

    Args:
        query: (batch, heads, q_len, depth), floating, any strides.
        key: (batch, kv_heads, k_len, depth), where kv_heads divides heads: each serves so many heads in a row.
        value: (batch, kv_heads, k_len, v_depth).
        pattern: or a mask that broadcasts to (batch, heads, q_len, k_len), whose block lists are made on its device,
            without waiting for it: of bool, True where a query attends to a key, or floating, of numbers that are added
            to scores, such as a bias by position, and of -inf where a query does not attend. These may be trained.
        scale: of the scores; 1 / sqrt(depth) if None.
        softcap: c in scores of c · tanh(scale · query keyᵀ / c); 0 for none.
        alibi: (heads,) float32, without gradients: added to a score is the head's number times (position of the key -
            position of the query) (Press et al., 2022).
        dropout: the chance, in [0, 1), that a weight is replaced by 0; the others are divided by the chance to stay.
        seed: (1,) int64, from which follows what is dropped; by default torch's generator draws one.
        block: queries and keys of a block, powers of two from 32 on; by default those of a pattern that are faster by
            estimate, (64, 64) or (128, 128).
        by: "blocks" computes the blocks that hold kept pairs (`ops.block_attention`), "elements" each kept pair alone
            (`ops.element_attention`), "dense" all pairs by torch's function with the mask, which takes no softcap and
            no alibi. "auto" takes the fastest by estimate, which `attention_choice` tells; off a GPU that is blocks.

    Returns:
        (batch, heads, q_len, v_depth).

    Raises:
        ConfigError: `by` is none of these, "dense" with a softcap or alibi, or neither "auto" nor "blocks" with a mask
            or dropout.
        PatternError: no pattern, or one for other lengths.
        MaskError: a pattern that tells other numbers of batch entries or heads apart, a mask of another dtype or
            shape, or an impossible block.
        FormatError: operands that do not belong together.
    """
    if query.is_nested or key.is_nested or value.is_nested:
        raise FormatError("operands are nested: sparsecomp.attention.packed_attention takes nested tensors")
    plain = softcap == 0 and alibi is None
    chooses = not isinstance(pattern, Tensor) and has_kernels(query, key, value)
    work = _work(query, key, value, plain) if chooses else ()
    block = _block(pattern, work) if block is None else block
    how = _by_blocks(by) if isinstance(pattern, Tensor) or dropout else _way(pattern, block, by, plain, work)
    if how == "dense":
        return _dense(query, key, value, pattern_of(pattern), scale)
    if how == "elements":
        elements = pattern_of(pattern).kept_elements(*_lengths(query, key), query.device)
        return element_attention(query, key, value, elements, scale=scale, softcap=softcap, alibi=alibi)[0]
    added, parts = None, 0
    if isinstance(pattern, Tensor):
        blocks, added = _scanned(query, key, pattern, block)
    else:
        blocks = kept_blocks(query, key, pattern, block)
        parts = pattern_of(pattern).list_parts(block, *work) if work else 0
    return attend_blocks(
        query, key, value, blocks, added, scale=scale, softcap=softcap, alibi=alibi, dropout=dropout, seed=seed,
        parts=parts,
    )[0]  # fmt: skip


def _by_blocks(by: str) -> str:
    if by not in ("auto", "blocks"):
        raise ConfigError(f"by is {by!r}, needs auto or blocks: a mask, and dropout, are computed by blocks alone")
    return "blocks"


def _scanned(
    query: Tensor, key: Tensor, mask: Tensor, block: tuple[int, int]
) -> tuple[AttentionBlocks, Tensor | None]:
    """The blocks of a mask, and what is added to scores."""
    numbers, scores = mask.is_floating_point(), (*query.shape[:-1], key.shape[-2])
    sizes = zip(reversed(mask.shape), reversed(scores), strict=False)
    fits = mask.dim() <= len(scores) == 4 and all(one in (1, size) for one, size in sizes)
    if not (numbers or mask.dtype is torch.bool) or not fits or mask.device != query.device:
        raise MaskError(
            f"the mask is {tuple(mask.shape)} of {mask.dtype} on {mask.device}, needs one of torch.bool, or floating,"
            f" on {query.device} that broadcasts to (batch, heads, queries, keys), here {scores}"
        )
    if mask.dtype is torch.float64 and query.dtype is not torch.float64:  # kernels add no doubles
        mask = mask.float()
    mask = mask[(None,) * (4 - mask.dim())]
    if numbers:
        mask = torch.ops.sparsecomp.levelled_mask.default(mask)
    return scanned_blocks(mask.detach(), query.shape[-2], key.shape[-2], block), mask if numbers else None


def attention_choice(
    query: Tensor, key: Tensor, value: Tensor, pattern: AttentionPattern, *, softcap: float = 0.0,
    alibi: Tensor | None = None, block: tuple[int, int] | None = None,
) -> AttentionChoice:  # fmt: skip
    """By which way `attention` computes these operands, with what it is estimated to take by each, and why.

    Args:
        query, key, value, pattern, softcap, alibi, block: as of `attention`.

    Raises:
        PatternError: no pattern, or one for other lengths.
        MaskError: an impossible block.
    """
    work = _work(query, key, value, softcap == 0 and alibi is None)
    if block is None:
        block = _block(pattern, work if has_kernels(query, key, value) else ())
    return pattern_of(pattern).chosen(block, *work)


def _block(pattern: AttentionPattern | Tensor, work: tuple[Any, ...]) -> tuple[int, int]:
    """The faster block of a pattern, if there is work to choose by."""
    return WIDE_BLOCK if work and pattern_of(pattern).wide_is_faster(*work) else DEFAULT_BLOCK


def has_kernels(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether estimates have something to choose among: on a GPU, where operands have the form that is needed."""
    on_card = query.device.type == "cuda" and query.dim() == key.dim() == value.dim() == 4
    return on_card and key.shape[1] > 0 and query.shape[1] % key.shape[1] == 0


def _way(pattern: AttentionPattern, block: tuple[int, int], by: str, plain: bool, work: tuple[Any, ...]) -> str:
    if by not in ("auto", "blocks", "elements", "dense") or (by == "dense" and not plain):
        raise ConfigError(
            f"by is {by!r}, needs auto, blocks, elements or dense, the last without softcap and alibi"
        )
    if by != "auto" or not work:
        return "blocks" if by == "auto" else by
    return pattern_of(pattern).way(block, *work)


def _work(query: Tensor, key: Tensor, value: Tensor, plain: bool) -> tuple[Any, ...]:
    """The fields of `AttentionWork`."""
    (batch, heads), kv_heads, depth, v_depth = query.shape[:2], key.shape[1], query.shape[3], value.shape[3]
    sizes = (len(range(size)) for size in (batch, heads, kv_heads, *_lengths(query, key), depth, v_depth))
    trained = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    return (*sizes, query.dtype, query.device, trained, plain)


def _dense(query: Tensor, key: Tensor, value: Tensor, pattern: AttentionPattern, scale: float | None) -> Tensor:
    """By torch's function, with backends that give zeros for a query that keeps nothing."""
    mask = pattern.kept_mask(*_lengths(query, key), query.device)
    if query.shape[1] != key.shape[1]:
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)


def _lengths(query: Tensor, key: Tensor) -> tuple[int, int]:
    # lists are for one length: a range has Dynamo compile for numbers where it has symbols
    return len(range(query.shape[-2])), len(range(key.shape[-2]))


def kept_blocks(query: Tensor, key: Tensor, pattern: AttentionPattern, block: tuple[int, int]) -> AttentionBlocks:
    """The pattern's block lists for operands, made now or kept from before.

    Raises:
        PatternError: no pattern, or one for other lengths.
        MaskError: an impossible block.
    """
    return pattern_of(pattern).kept(*_lengths(query, key), block, query.device)
