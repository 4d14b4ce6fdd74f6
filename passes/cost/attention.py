"""Whether attention with a mask is faster over its listed blocks, or without its mask, than as it is written.

With a mask torch's function runs on its slower kernels, and by hand the scores lie in memory.
"""

import math
from typing import Any, NamedTuple

import torch

from sparsecomp import _compat
from sparsecomp.lowering.attention.estimate import (
    BACKWARD,
    AttentionSizes,
    even_problem,
    longest_lists,
    mean_lists,
)
from sparsecomp.lowering.attention.problem import BlockAttention
from sparsecomp.lowering.cache.signature import NO_TRITON, Device, has_triton
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import Target, target_of
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.sparse import fastest_candidate
from sparsecomp.reference.attention.blocks import AttentionBlocks
from sparsecomp.reference.attention.dropout import ALWAYS
from sparsecomp.reference.precision import KERNEL_DTYPES

_MASKED, _PLAIN = 265 / 769, 300 / 769
"""What torch's function reaches of a card's rate in half precision, with a mask and without (an H200: 4 x 16 x 4096² x
64 in 1.036 and 0.918 ms, and 3.68 and 3.49 with gradients: `bench/results/attention.json`)."""
_DEEP = 0.45
"""The same of heads of more than 64 numbers: not measured with a mask, so no less than any of its kernels reaches."""
_PASSES = 5
"""Over all scores, of attention by hand, and as many for the gradients: eight where they lie in memory (the same in 4.2
and 8.3 ms: `bench/results/masked_attention.json`), and less where L2 holds them."""


class MaskedAttention(NamedTuple):
    """An attention over listed blocks.

    Attributes:
        device: where it runs.
        sizes: of the operands.
        block: queries and keys of a block.
        listed: as of `mean_lists`.
        dtype: of all operands.
        trained, replayed, products, target: as of `sparsecomp.passes.cost.sparse.Product`.
        scanned: of a mask whose lists are made in each call: its batch entries, its heads and its dtype; None for none.
        dropped: whether weights are dropped at random.
        by_hand: scores and weights are tensors of their own. Not where a mask is added to them: of that Inductor makes
            torch's function in the spellings that it knows.
        longest: blocks of the longest list, of queries and of keys; None where that is not known.
        added: dtype of numbers that are added to the scores of all blocks that are kept; empty for none.
        bias: sizes of these, if their gradient may be asked for: batch, heads, queries and keys, each 1 where they are
            the same for all.
        plain: share of pairs that torch's function computes if it gives the same without a mask: one half where it is
            told that a mask is causal; None if it does not.
    """

    device: torch.device
    sizes: AttentionSizes
    block: tuple[int, int]
    listed: tuple[float, float]
    dtype: torch.dtype
    trained: bool
    replayed: bool
    products: int
    target: Target | None = None
    scanned: tuple[int, int, str] | None = None
    dropped: bool = False
    by_hand: bool = False
    plain: float | None = None
    longest: tuple[int, int] | None = None
    added: str = ""
    bias: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], blocks: AttentionBlocks, **how: Any
    ) -> "MaskedAttention":
        """Of operands of these shapes (batch, heads, length, depth); waits for the device of the blocks."""
        block = (blocks.block_q, blocks.block_k)
        listed, longest = mean_lists(blocks), longest_lists(blocks)
        return cls(sizes=_sizes(q, k, v), block=block, listed=listed, longest=longest, **how)

    @classmethod
    def assumed(
        cls, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], share: float, block: tuple[int, int],
        **how: Any,
    ) -> "MaskedAttention":  # fmt: skip
        """As `of`, of which so many blocks are thought to be listed."""
        listed = (share * -(-k[2] // block[1]), share * -(-q[2] // block[0]))
        return cls(sizes=_sizes(q, k, v), block=block, listed=listed, **how)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key, in all heads."""
        s = self.sizes
        return s.batch * s.heads * s.q_len * s.k_len

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        return -(-self.sizes.q_len // self.block[0]), -(-self.sizes.k_len // self.block[1])

    @property
    def share(self) -> float:
        """Of blocks that are listed."""
        return self.listed[0] / max(self.grid[1], 1)

    @property
    def described(self) -> str:
        """For the report."""
        return f"{self.sizes.q_len} x {self.sizes.k_len} pairs with {1 - self.share:.1%} of blocks empty"

    def waited(self, time: Time) -> float:
        """Seconds that a caller waits for the attention, if it takes this time."""
        return time.waited(self.replayed, host.besides(self.trained, self.products))


def _sizes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> AttentionSizes:
    return AttentionSizes(q[0], q[1], k[1], q[2], k[2], q[3], v[3])


class _Rates(NamedTuple):
    """On one core: seconds of a call and of each head, nanoseconds for each pair and for each of a pair's products, and
    how often that again for the gradients."""

    call: float
    head: float
    pair: float
    product: float
    gradients: float


_OURS, _TORCHS = _Rates(60e-6, 110e-6, 5.2, 0.034, 2.6), _Rates(30e-6, 0.0, 0.7, 0.0203, 2.4)
"""On a core with AVX-512 (torch 2.13): the least of a core's times, of 1024 to 4096 queries and keys of depth 32 to 128
with 5 to 42 % of blocks listed, beside torch's function in a graph of Inductor's."""

_BY_HAND_ON_CPU, _CAUSAL_ON_CPU, _PLAIN_ON_CPU = 1.6, 0.9, 0.97
"""Of the time of torch's function with a mask: 1.6 to 2.0, 0.52 to 0.94 and 0.81 to 0.98, of 256 to 2048 queries and
keys; with gradients 1.2, 0.73 and 0.97 (the same core)."""


def decide_attention(attention: MaskedAttention) -> Decision:
    """The fastest way by estimate: `block_attention`, `sdpa` without a mask, or as it is written, which is `dense`."""
    kind = attention.device.type
    if kind == "cuda" and attention.dtype in KERNEL_DTYPES:
        if not has_triton():
            return Decision("dense", f"no estimate. {NO_TRITON}")
        return compare_attention(attention, *(attention.target or target_of(attention.device)))
    if kind != "cpu" or attention.dtype is not torch.float32 or attention.scanned or attention.dropped:
        more = " with dropout or a mask that is data" if attention.scanned or attention.dropped else ""
        return Decision("dense", f"no estimate of {attention.dtype}{more} on {kind}")
    height, width = attention.block
    listed = attention.sizes.batch * attention.sizes.heads * attention.grid[0] * attention.listed[0] * height * width
    torchs = _on_cpu(attention, attention.pairs, _TORCHS)
    seconds = {"block_attention": _on_cpu(attention, listed, _OURS)}
    if attention.plain is not None:
        seconds["sdpa"] = torchs * (_CAUSAL_ON_CPU if attention.plain < 1 else _PLAIN_ON_CPU)
    return fastest({**seconds, "dense": torchs * (_BY_HAND_ON_CPU if attention.by_hand else 1)})


def _on_cpu(attention: MaskedAttention, pairs: float, rates: _Rates) -> float:
    s = attention.sizes
    nanoseconds = pairs * (rates.pair + rates.product * (s.depth + s.v_depth))
    seconds = nanoseconds * 1e-9 / torch.get_num_threads() + rates.head * s.batch * s.heads
    return rates.call + seconds * (1 + rates.gradients * attention.trained)


def compare_attention(attention: MaskedAttention, device: Device, card: Card) -> Decision:
    """`decide_attention` for a CUDA device that is such a card; loads Triton."""
    p = attention
    times = {"block_attention": _ours(p, device, card), "dense": (_by_hand if p.by_hand else _function)(p, card)}
    if p.plain is not None:
        times["sdpa"] = _function(p, card, p.plain)
    return fastest({name: p.waited(time) for name, time in times.items()})


def _ours(attention: MaskedAttention, device: Device, card: Card) -> Time:
    from sparsecomp.lowering.attention.added_gradient import ATTENTION_BY_ADDED, AddedGradient
    from sparsecomp.lowering.attention.block_attention import BLOCK_ATTENTION
    from sparsecomp.lowering.attention.block_attention_gradients import ATTENTION_BY_KEY, ATTENTION_BY_QUERY
    from sparsecomp.lowering.attention.list_parts import LAUNCHES
    from sparsecomp.lowering.attention.mask_scan import MASK_SCAN, MaskScan

    p = attention
    problem = _problem(p)._replace(parts=_parts(p, device, card))
    operations = [BLOCK_ATTENTION, *([ATTENTION_BY_QUERY, ATTENTION_BY_KEY] if p.trained else [])]
    times = [fastest_candidate(one.candidates(problem, device), problem, p, card)[0] for one in operations]
    times += [Time(LAUNCHES * card.launch, 0.0)] * (problem.parts.bit_count() * len(operations) // 2)
    if p.bias is not None:
        by_added = AddedGradient(*problem)._replace(added_sizes=p.bias)
        times.append(fastest_candidate(ATTENTION_BY_ADDED.candidates(by_added, device), by_added, p, card)[0])
    if p.scanned is not None:
        batch, heads, dtype = p.scanned
        scan = MaskScan(batch, heads, p.sizes.q_len, p.sizes.k_len, *p.block, (0, 0, 0, 0), dtype)
        times.append(fastest_candidate(MASK_SCAN.candidates(scan, device), scan, p, card)[0])
    return times[0].plus(*times[1:])


def _problem(attention: MaskedAttention) -> BlockAttention:
    p = attention
    return even_problem(p.sizes, p.block, p.listed, p.dtype, ALWAYS - p.dropped)._replace(added=p.added)


def lists_in_parts(attention: MaskedAttention) -> int:
    """The lists of which the long ones are walked over in parts, as of ``Scoring``; 0 off a GPU."""
    p = attention
    if p.device.type != "cuda" or p.dtype not in KERNEL_DTYPES or not has_triton():
        return 0
    return _parts(p, *(p.target or target_of(p.device)))


def _parts(attention: MaskedAttention, device: Device, card: Card) -> int:
    from sparsecomp.lowering.attention.list_parts import parts_by_estimate

    longest = attention.longest
    return 0 if longest is None else parts_by_estimate(_problem(attention), longest, device, card)


def _function(attention: MaskedAttention, card: Card, share: float | None = None) -> Time:
    """Torch's: with a mask, or without one, of such a share of the pairs."""
    p, s = attention, attention.sizes
    deep, half = max(s.depth, s.v_depth) > 64, p.dtype is not torch.float32
    reached = _DEEP if deep else _MASKED if share is None else _PLAIN
    rate = card.half * reached if half else card.tf32 if _compat.matmul_tf32() else card.fp32
    rows = s.batch * (s.kv_heads * s.k_len + s.heads * s.q_len)
    traffic = rows * (s.depth + s.v_depth) * p.dtype.itemsize
    operations = s.operations * (1.0 if share is None else share)
    forward = Time(max(operations / rate, traffic / card.bandwidth) + card.launch, host.LAUNCH)
    backward = Time(BACKWARD * operations / rate + 2 * card.launch, 2 * host.LAUNCH)
    if p.bias is not None and share is None:
        backward = backward.plus(_of_bias(p, p.bias, card))
    return forward.plus(backward) if p.trained else forward


def _of_bias(attention: MaskedAttention, bias: tuple[int, ...], card: Card) -> Time:
    """What torch takes for the gradient by a bias: one of each score is written, and what belongs to the same number of
    the bias added up."""
    p = attention
    alike = math.prod(bias) < p.pairs
    return Time((1 + alike) * (p.pairs * p.dtype.itemsize / card.bandwidth + card.launch), (1 + alike) * host.LAUNCH)


def _by_hand(attention: MaskedAttention, card: Card) -> Time:
    """Two products, and what is between them in one kernel: never estimated at less than the function."""
    p, function = attention, _function(attention, card)
    passes = _PASSES * (1 + p.trained) * p.pairs * p.dtype.itemsize / card.bandwidth
    return Time(max(passes, function.device), 3 * function.host)
