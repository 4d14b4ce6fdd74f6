"""Attention within documents that are packed one behind another, by offsets that stay on their device."""

from torch import Tensor

from sparsecomp.attention.nested import Jagged
from sparsecomp.errors import FormatError
from sparsecomp.ops.attention.block_attention import block_attention
from sparsecomp.ops.attention.packed_blocks import packed_blocks
from sparsecomp.reference.attention.blocks import DEFAULT_BLOCK


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, *, causal: bool = False,
    window: tuple[int | None, int | None] = (None, None), scale: float | None = None,
    softcap: float = 0.0, dropout: float = 0.0, seed: Tensor | None = None, block: tuple[int, int] = DEFAULT_BLOCK,
) -> Tensor:  # fmt: skip
    """softmax(scale · query keyᵀ) value within each document, as `torch.nn.attention.varlen.varlen_attn` computes it.

    Nested tensors of torch (layout jagged) are taken too, without offsets: (batch, tokens, heads, depth), or in the
    order of torch's attention, (batch, heads, tokens, depth). They give one that is nested like the query.

    Block lists are made on the device in each call, in sizes that follow from those of the operands: the host waits for
    nothing, and other lengths compile nothing anew.

    Args:
        query: (tokens, heads, depth), floating, any strides.
        key: (k_tokens, kv_heads, depth), where kv_heads divides heads: each serves so many heads in a row.
        value: (k_tokens, kv_heads, v_depth).
        cu_seqlens_q: (documents + 1,) int32, ascending, on the operands' device: where each document begins among the
            queries, and where the last ends; None with nested tensors, which know that. Tokens behind that attend to
            nothing, and their results are 0.
        cu_seqlens_k: the same among the keys; that of the queries if None.
        causal: a query attends to no key behind it, where a document's last query stands at its last key.
        window: how far before and behind it a query attends; None for any distance.
        scale, softcap, dropout, seed: as of `sparsecomp.attention.attention`.
        block: queries and keys of a block, powers of two from 32 on.

    Returns:
        (tokens, heads, v_depth); nested, with the sizes of the query but its depth.

    Raises:
        MaskError: offsets that are none, or an impossible block or window.
        FormatError: operands that do not belong together.
    """
    if query.is_nested or key.is_nested or value.is_nested:
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise FormatError("operands are nested, which have offsets of their own: leave out those that are given")
        q, k, v = map(Jagged.of, (query, key, value))
        if k.tokens != v.tokens:
            raise FormatError("key and value are nested by different offsets: they need the same tensor of these")
        return q.nested(packed_attention(
            q.packed, k.packed, v.packed, q.offsets.int(), k.offsets.int(), causal=causal, window=window, scale=scale,
            softcap=softcap, dropout=dropout, seed=seed, block=block,
        ))  # fmt: skip
    if cu_seqlens_q is None:
        raise FormatError("cu_seqlens_q is None: needs offsets, or nested tensors as operands")
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
