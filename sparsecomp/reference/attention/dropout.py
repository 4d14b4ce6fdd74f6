"""Which weights of an attention dropout keeps: a function of a seed and a place alone, the same wherever it is asked.

So nothing is stored between an attention and its gradients, and each kernel asks for the pairs of its own tile. The
numbers are those of Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011) with the seed as
its key and a counter of (query, key // 8, stream, 0), where the stream counts heads of all batch entries. Its four
words are eight numbers of 16 bits, the lower half of a word first, one for each of the eight keys.
"""

import torch
from torch import Tensor

from sparsecomp.errors import FormatError

ALWAYS = 65536
"""Of so many chances a weight is kept in all: no dropout."""
_KEYS = (0x9E3779B9, 0xBB67AE85)
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def chances(probability: float) -> int:
    """In how many of ``ALWAYS`` cases a weight is kept that is dropped with a probability, to the nearest.

    Raises:
        FormatError: a probability that is not in [0, 1), or that leaves no chance at all.
    """
    kept = round((1 - probability) * ALWAYS) if 0 <= probability < 1 else 0
    if not kept:
        raise FormatError(f"dropout is {probability}, needs a probability from 0 on and below {1 - 1 / ALWAYS}")
    return kept


def drawn_pairs(seed: Tensor, stream: int, query: Tensor, key: Tensor, kept: int) -> Tensor:
    """Whether each weight is kept.

    Args:
        seed: (1,) int64.
        stream: batch entry · heads + head.
        query: (…, rows, 1) int64, positions.
        key: (…, 1, columns) int64, positions; eight by eight they are the keys of a group.
        kept: chances, of ``ALWAYS``.

    Returns:
        (…, rows, columns) bool.
    """
    query, group = torch.broadcast_tensors(query, key[..., ::8] // 8)
    words = philox_words(seed, query, group, torch.full_like(query, stream))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).flatten(-2) < kept


def philox_words(seed: Tensor, first: Tensor, second: Tensor, third: Tensor) -> list[Tensor]:
    """Four words of 32 bits, in int64, for counters of which the fourth word is 0."""
    count = [first & _WORD, second & _WORD, third & _WORD, torch.zeros_like(first)]
    key = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(_ROUNDS):
        (high, low), (other_high, other_low) = map(_product, _FACTORS, count[::2])
        count = [other_high ^ count[1] ^ key[0], other_low, high ^ count[3] ^ key[1], low]
        key = [(one + step) & _WORD for one, step in zip(key, _KEYS, strict=True)]
    return count


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """The higher and the lower 32 bits of a product of two words."""
    high = (word * (factor >> 16) + (word * (factor & 0xFFFF) >> 16)) >> 16
    return high, (word * factor) & _WORD
