"""Attention of spikes by a pattern: as spiking transformers have it, without a softmax."""

from torch import Tensor

from sparsecomp.attention.functional import kept_blocks
from sparsecomp.attention.pattern import AttentionPattern
from sparsecomp.errors import FormatError
from sparsecomp.ops.attention.spike_attention import spike_attention
from sparsecomp.reference.attention.blocks import DEFAULT_BLOCK, AttentionBlocks


def spiking_attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: AttentionPattern, *, scale: float = 1.0,
    block: tuple[int, int] = DEFAULT_BLOCK,
) -> Tensor:  # fmt: skip
    """scale · (M ⊙ query keyᵀ) value, where M is 1 for the pairs that a pattern keeps and 0 for others: the spiking
    self attention of Spikformer (Zhou et al., 2023, equation 6), of which only blocks are computed that hold a kept
    pair.

    Whole numbers, such as spikes and sums of them, give exact results in float32, rounded once, as long as operands
    are at most 2^11, scores 2^22 and sums 2^24 in size: spikes do where the depth times the keys that a query keeps is
    at most 2^24. Where torch's products may use TF32 on CUDA, these do, with scores that are exact to 2^11; scores of
    half precision are rounded to it. Values are finite. Under `torch.compile` a pattern must be
    made outside of the compiled function; this backend multiplies what it proves to be spikes as float16, which is as
    exact and faster.

    Args:
        query: (batch, heads, q_len, depth), floating, any strides; or (steps, batch, heads, q_len, depth).
        key: of as many dimensions, with k_len tokens.
        value: the same, of any depth.
        pattern: of the pairs, for this batch or 1, and these heads or 1; the same in all steps.
        scale: of the result.
        block: queries and keys of a block, powers of two from 32 on.

    Returns:
        Of the query's shape with the value's depth; zeros for a query that keeps nothing. Gradients flow to query, key
        and value by the same pairs, any number of times.

    Raises:
        PatternError: no pattern, or one for other lengths.
        MaskError: a pattern that tells other numbers of batch entries or heads apart, or an impossible block.
        FormatError: operands that do not belong together.
    """
    given = tuple(one.shape for one in (query, key, value))
    if not (query.dim() == key.dim() == value.dim() in (4, 5) and given[0][:-3] == given[1][:-3] == given[2][:-3]):
        shapes = ", ".join(str(tuple(shape)) for shape in given)
        raise FormatError(
            f"query, key and value are {shapes}: need (batch, heads, length, depth), or all with one number of time "
            "steps in front"
        )
    blocks = kept_blocks(query, key, pattern, block)
    if query.dim() == 4:
        return spike_attention(query, key, value, blocks, scale=scale)
    q, k, v = (one.flatten(0, 1) for one in (query, key, value))
    return spike_attention(q, k, v, _in_steps(blocks, len(query)), scale=scale).unflatten(0, query.shape[:2])


def _in_steps(blocks: AttentionBlocks, steps: int) -> AttentionBlocks:
    """The blocks of each batch entry again in each step."""
    if blocks.count.shape[0] == 1:
        return blocks
    lists = ("count", "partial", "index", "tile", "k_count", "k_partial", "k_index", "k_tile")
    return blocks._replace(**{name: getattr(blocks, name).tile((steps, 1, 1, 1)[: getattr(blocks, name).dim()])
                              for name in lists})  # fmt: skip
