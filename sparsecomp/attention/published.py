"""Patterns that have a name: what the papers compose of windows, global tokens and random blocks."""

from sparsecomp.attention.pattern import AttentionPattern
from sparsecomp.attention.positions import GlobalTokens, InBlocks, LocalWindow, PeriodicKeys, RandomKeys, causal


def random_blocks(count: int, block: int, seed: int = 0, heads: int = 1) -> AttentionPattern:
    """`count` blocks of keys for each block of queries, drawn at random; see `RandomKeys`.

    Raises:
        PatternError: numbers below 1, or a negative seed.
    """
    return InBlocks(RandomKeys(count, seed, heads), block)


def big_bird(
    block: int = 64, window: int = 3, global_blocks: int = 2, random: int = 3, seed: int = 0, heads: int = 1
) -> AttentionPattern:
    """Windows, global tokens and random keys in blocks: BigBird-ITC (Zaheer et al., 2020, section 2).

    Args:
        block: tokens of a block.
        window: blocks of the window around a block, an odd number.
        global_blocks: first blocks, which attend to all and are attended to by all.
        random: random blocks of a block, the same seed drawing the same; 0 for none.
        heads: draws, as of `RandomKeys`.

    Raises:
        PatternError: a number that is negative, or below 1 where it must not be.
    """
    kept = LocalWindow(window // 2, window // 2) | GlobalTokens(global_blocks)
    return InBlocks(kept | RandomKeys(random, seed, heads) if random else kept, block)


def longformer(
    window: int, global_tokens: int | tuple[int, ...] = 0, dilation: int = 1, autoregressive: bool = False
) -> AttentionPattern:
    """A sliding window and global tokens (Beltagy et al., 2020, section 3).

    Args:
        window: keys of the window on each side, as `LocalWindow` counts them.
        global_tokens: as of `GlobalTokens`.
        dilation: as of `LocalWindow`.
        autoregressive: only keys up to the query's position.

    Raises:
        PatternError: a number that is negative, or below 1 where it must not be.
    """
    kept = LocalWindow(window, window, dilation) | GlobalTokens(global_tokens)
    return kept & causal() if autoregressive else kept


def sparse_transformer_strided(stride: int) -> AttentionPattern:
    """The last `stride` keys, and each `stride`-th before them (Child et al., 2019, section 4.3, strided).

    Raises:
        PatternError: a stride below 1.
    """
    return LocalWindow(stride, 0) | LocalWindow(None, 0, stride)


def sparse_transformer_fixed(stride: int, summaries: int = 1) -> AttentionPattern:
    """The query's own block up to it, and the last keys of each block (Child et al., 2019, section 4.3, fixed).

    Args:
        stride: tokens of a block.
        summaries: last keys of a block that all later queries attend to.

    Raises:
        PatternError: numbers below 1, or more summaries than a block has tokens.
    """
    return (InBlocks(LocalWindow(0, 0), stride) | PeriodicKeys(stride, summaries)) & causal()
