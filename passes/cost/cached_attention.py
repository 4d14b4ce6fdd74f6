"""Whether few queries over a cache are attended faster by what a mask keeps than as torch computes it, cache and all.

Where in the cache a sequence is, its device knows alone. So all keys are reckoned with, but for the width of a window
that was proved, or the share that the option `density` gives. Torch's own takes at least the time of reading keys and
values, which it does for each head of the queries where the model repeats those of a group, and of writing these
copies.
"""

from typing import NamedTuple

import torch

from sparsecomp.lowering.attention.estimate import AttentionSizes
from sparsecomp.lowering.cache.signature import NO_TRITON, Device, has_triton
from sparsecomp.lowering.launch.strided import name_of
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import Target, target_of
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.sparse import fastest_candidate
from sparsecomp.reference.precision import KERNEL_DTYPES

_SCANS = 2
"""Launches that find where the keys are that a mask keeps."""
_BESIDE_READING, _OF_FEW = 3.4e-6, 3e-6
"""Seconds that torch's attention by a mask takes beyond a launch and what it reads, and what is added at most where
heads are too few for all processors (cuDNN on an H200, replayed: 13.4 µs for 8 sequences of 256 keys and 32 heads of
128 numbers; 9.2 for one, and 13.7 for one of 1024 keys)."""


class CachedAttention(NamedTuple):
    """An attention of few queries over a cache, by a mask.

    Attributes:
        device: where it runs.
        sizes: of the operands, with the heads that the cache has.
        read: keys of a sequence that are thought to be read.
        copies: how many of keys and values are copied for each head of the queries, as written.
        readers: attentions that read the mask.
        dtype: of all operands.
        replayed, products, target: as of `sparsecomp.passes.cost.sparse.Product`.
    """

    device: torch.device
    sizes: AttentionSizes
    read: int
    copies: int
    readers: int
    dtype: torch.dtype
    replayed: bool
    products: int
    target: Target | None = None

    def waited(self, time: Time) -> float:
        """Seconds that a caller waits for the attention, if it takes this time."""
        return time.waited(self.replayed, host.besides(False, self.products))

    @property
    def described(self) -> str:
        """For the report."""
        queries = "1 query" if self.sizes.q_len == 1 else f"{self.sizes.q_len} queries"
        return f"{queries} of each sequence, {self.read} of {self.sizes.k_len} keys"


def decide_cached(attention: CachedAttention) -> Decision:
    """The faster way by estimate: `masked_decode`, or as it is written, which is `dense`."""
    kind = attention.device.type
    if kind != "cuda" or attention.dtype not in KERNEL_DTYPES:
        return Decision("dense", f"no estimate of {attention.dtype} on {kind}")
    if not has_triton():
        return Decision("dense", f"no estimate. {NO_TRITON}")
    device, card = attention.target or target_of(attention.device)
    ours, torchs = _ours(attention, device, card), _torchs(attention, card)
    return fastest({"masked_decode": attention.waited(ours), "dense": attention.waited(torchs)})


def _ours(attention: CachedAttention, device: Device, card: Card) -> Time:
    from sparsecomp.lowering.attention.decode_attention import DECODE_ATTENTION, DecodeAttention

    p, s = attention, attention.sizes
    problem = DecodeAttention(
        s.batch, s.kv_heads, s.heads // s.kv_heads, s.q_len, s.k_len, 0, 0, 0, s.depth, s.v_depth, (), name_of(p.dtype),
        s.depth**-0.5, max(p.read - s.q_len, 0), 0, kept=(s.k_len, 0, 0, 1),
    )  # fmt: skip
    found = fastest_candidate(DECODE_ATTENTION.candidates(problem, device), problem, p, card)[0]
    scan = Time(_SCANS * card.launch + s.batch * s.q_len * s.k_len / card.bandwidth, _SCANS * host.LAUNCH)
    return found.plus(Time(scan.device / p.readers, scan.host / p.readers))


def _torchs(attention: CachedAttention, card: Card) -> Time:
    p, s = attention, attention.sizes
    row = s.k_len * (s.depth + s.v_depth) * p.dtype.itemsize * s.batch / card.bandwidth
    reading = row * (s.heads if p.copies else s.kv_heads)
    few = min(max(card.processors / (s.batch * s.heads) - 1.0, 0.0) * reading, _OF_FEW)
    time = Time(reading + few + card.launch + _BESIDE_READING, host.LAUNCH)
    copying = Time(row / 2 * (s.kv_heads + s.heads) + card.launch, host.LAUNCH)
    return time.plus(*[copying] * p.copies)
