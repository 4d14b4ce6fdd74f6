"""Patterns of attention, and attention that computes only what they keep.

    pattern = LocalWindow(256, 0) | GlobalTokens(4) & causal()
    out = attention(query, key, value, pattern)
    print(pattern.spy(4096), pattern.statistics(4096))

A pattern says which keys each query attends to. It knows no lengths, and becomes block lists, a mask, a FlexAttention
block mask, a matrix or a picture for the lengths at hand.
"""

from sparsecomp.attention.choice import AttentionChoice
from sparsecomp.attention.drawing import PatternStatistics
from sparsecomp.attention.explicit import attend_by_weights, attention_weights
from sparsecomp.attention.flex import from_flex
from sparsecomp.attention.functional import attention, attention_choice
from sparsecomp.attention.given import Documents, FromFunction, FromTensor, PerHead
from sparsecomp.attention.packed import packed_attention
from sparsecomp.attention.pairs import Bounds, Pairs, Ranges
from sparsecomp.attention.pattern import AttentionPattern
from sparsecomp.attention.positions import (
    GlobalTokens,
    InBlocks,
    LocalWindow,
    PeriodicKeys,
    PrefixLM,
    RandomKeys,
    causal,
)
from sparsecomp.attention.published import (
    big_bird,
    longformer,
    random_blocks,
    sparse_transformer_fixed,
    sparse_transformer_strided,
)
from sparsecomp.attention.spiking import spiking_attention
from sparsecomp.ops.attention.decode_attention import decode_attention
from sparsecomp.ops.attention.masked_decode import masked_decode_attention
from sparsecomp.reference.attention.blocks import AttentionBlocks, blocks_of, dense_mask
from sparsecomp.reference.attention.elements import elements_of_mask, elements_of_matrix

__all__ = [
    "AttentionBlocks",
    "AttentionChoice",
    "AttentionPattern",
    "Bounds",
    "Documents",
    "FromFunction",
    "FromTensor",
    "GlobalTokens",
    "InBlocks",
    "LocalWindow",
    "Pairs",
    "PatternStatistics",
    "PerHead",
    "PeriodicKeys",
    "PrefixLM",
    "RandomKeys",
    "Ranges",
    "attend_by_weights",
    "attention",
    "attention_choice",
    "attention_weights",
    "big_bird",
    "blocks_of",
    "causal",
    "decode_attention",
    "dense_mask",
    "elements_of_mask",
    "elements_of_matrix",
    "from_flex",
    "longformer",
    "masked_decode_attention",
    "packed_attention",
    "random_blocks",
    "sparse_transformer_fixed",
    "sparse_transformer_strided",
    "spiking_attention",
]
