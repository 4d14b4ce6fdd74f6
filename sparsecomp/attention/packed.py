"""Attention within documents that are packed one behind another, by offsets that stay on their device."""

from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.ops.attention.block_attention import block_attention
from sparsecomp.ops.attention.packed_blocks import packed_blocks
from sparsecomp.reference.attention.blocks import DEFAULT_BLOCK


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    causal: bool = False, window: tuple[int | None, int | None] = (None, None), scale: float | None = None,
    softcap: float = 0.0, dropout: float = 0.0, seed: Tensor | None = None, block: tuple[int, int] = DEFAULT_BLOCK,
) -> Tensor:  # fmt: skip
    """softmax(scale · query keyᵀ) value within each document, as `torch.nn.attention.varlen.varlen_attn` computes it.

    Block lists are made on the device in each call, in sizes that follow from those of the operands: the host waits for
    nothing, and other lengths compile nothing anew.

    Args:
        query: (tokens, heads, depth), floating, any strides.
        key: (k_tokens, kv_heads, depth), where kv_heads divides heads: each serves so many heads in a row.
        value: (k_tokens, kv_heads, v_depth).
        cu_seqlens_q: (documents + 1,) int32, ascending, on the operands' device: where each document begins among the
            queries, and where the last ends. Tokens behind that attend to nothing, and their results are 0.
        cu_seqlens_k: the same among the keys; that of the queries if None.
        causal: a query attends to no key behind it, where a document's last query stands at its last key.
        window: how far before and behind it a query attends; None for any distance.
        scale, softcap, dropout, seed: as of `sparsecomp.attention.attention`.
        block: queries and keys of a block, powers of two from 32 on.

    Returns:
        (tokens, heads, v_depth).

    Raises:
        MaskError: offsets that are none, or an impossible block or window.
        FormatError: operands that do not belong together.
    """
    if not query.dim() == key.dim() == value.dim() == 3:
        given = ", ".join(str(tuple(one.shape)) for one in (query, key, value))
        raise FormatError(f"query, key and value are {given}: need (tokens, heads, depth)")
    before, after = window
    blocks = packed_blocks(
        cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, query.shape[0], key.shape[0], block,
        before=before, after=0 if causal else after,
    )  # fmt: skip
    q, k, v = (one.transpose(0, 1)[None] for one in (query, key, value))
    found, _ = block_attention(q, k, v, blocks, scale=scale, softcap=softcap, dropout=dropout, seed=seed)
    return found[0].transpose(0, 1)
