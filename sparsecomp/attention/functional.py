"""Attention by a pattern, as a function. Block lists are made once for each pattern, lengths and device."""

from torch import Tensor

from sparsecomp.attention.pattern import AttentionPattern, pattern_of
from sparsecomp.ops.attention.block_attention import block_attention
from sparsecomp.reference.attention.blocks import DEFAULT_BLOCK, AttentionBlocks


def attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: AttentionPattern, *, scale: float | None = None,
    softcap: float = 0.0, alibi: Tensor | None = None, block: tuple[int, int] = DEFAULT_BLOCK,
) -> Tensor:  # fmt: skip
    """softmax(scale · query keyᵀ) value over the pairs that a pattern keeps.

    As `torch.nn.functional.scaled_dot_product_attention` by the pattern's mask, for finite inputs; a query that keeps
    nothing gives zeros. Under `torch.compile` the pattern must be made outside of the compiled function, and its block
    lists are constants of the graph.

    Args:
        query: (batch, heads, q_len, depth), floating, any strides.
        key: (batch, kv_heads, k_len, depth), where kv_heads divides heads: each serves so many heads in a row.
        value: (batch, kv_heads, k_len, v_depth).
        scale: of the scores; 1 / sqrt(depth) if None.
        softcap: c in scores of c · tanh(scale · query keyᵀ / c); 0 for none.
        alibi: (heads,) float32, without gradients: added to a score is the head's number times (position of the key -
            position of the query) (Press et al., 2022).
        block: queries and keys of a block, powers of two from 32 on.

    Returns:
        (batch, heads, q_len, v_depth).

    Raises:
        PatternError: no pattern, or one for other lengths.
        MaskError: a pattern that tells other numbers of batch entries or heads apart, or an impossible block.
        FormatError: operands that do not belong together.
    """
    blocks = kept_blocks(query, key, pattern, block)
    return block_attention(query, key, value, blocks, scale=scale, softcap=softcap, alibi=alibi)[0]


def kept_blocks(query: Tensor, key: Tensor, pattern: AttentionPattern, block: tuple[int, int]) -> AttentionBlocks:
    """The pattern's block lists for operands, made now or kept from before.

    Raises:
        PatternError: no pattern, or one for other lengths.
        MaskError: an impossible block.
    """
    # lists are for one length: a range has Dynamo compile for numbers where it has symbols
    q_len, k_len = (len(range(size)) for size in (query.shape[-2], key.shape[-2]))
    return pattern_of(pattern).kept(q_len, k_len, block, query.device)
