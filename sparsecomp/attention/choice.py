"""By which way attention over a pattern is computed: by its blocks, by its single pairs, or by torch with its mask.

Blocks are multiplied by tensor cores whatever they hold, pairs are gathered one by one, and torch computes them all. So
blocks win where many are empty, pairs where few are kept, and torch where neither is so.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sparsecomp.attention.drawing import statistics_of_blocks
from sparsecomp.ops.attention.operands import MOST_BYTES
from sparsecomp.reference.attention.blocks import AttentionBlocks
from sparsecomp.reference.precision import KERNEL_DTYPES

if TYPE_CHECKING:
    from sparsecomp.lowering.attention.estimate import AttentionSizes
    from sparsecomp.lowering.attention.problem import BlockAttention
    from sparsecomp.lowering.cache.signature import Device
    from sparsecomp.lowering.tuning.cards import Card

_MASKED = 87 / 730
"""What the dense way, torch's memory-efficient kernel, reaches of a card's rate in half precision with a boolean mask,
all pairs counted: 4 x 16 x 4096 x 64 in 3.15 ms on an H200 (`bench/results/element_attention.json`)."""
_MOST_PAIRS = 2**28
"""Of lists, which take 8 bytes a pair."""
_MOST_MASK = 2**30
"""Bytes of a dense mask."""
_SURELY = 1.5
"""By what the dense way must win: which of torch's kernels takes a mask hangs on more than its size."""


class AttentionWork(NamedTuple):
    """What is to be attended.

    Attributes:
        batch, heads, kv_heads, q_len, k_len, depth, v_depth: sizes.
        dtype, device: of the operands.
        trained: whether gradients are asked for.
        plain: whether torch's function computes it: scores are neither capped nor biased.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    depth: int
    v_depth: int
    dtype: torch.dtype
    device: torch.device
    trained: bool
    plain: bool


class AttentionChoice(NamedTuple):
    """By which way attention is computed.

    Attributes:
        by: "blocks", "elements" or "dense".
        seconds: estimates by way; empty where there are none.
        reason: in words.
        parts: of blocks, which lists are walked over in parts, as of ``Scoring``.
    """

    by: str
    seconds: Mapping[str, float]
    reason: str
    parts: int = 0

    def __str__(self) -> str:
        return f"{self.by}: {self.reason}"


def chosen_way(work: AttentionWork, blocks: AttentionBlocks) -> AttentionChoice:
    """The fastest way by estimate, on a GPU; blocks on any other device. Waits for the device of the blocks."""
    if not all((work.batch, work.heads, work.q_len, work.k_len, work.depth, work.v_depth)):
        return AttentionChoice("blocks", {}, "there is nothing to multiply")
    wide = max(work.depth, work.v_depth) * work.dtype.itemsize > MOST_BYTES
    if work.device.type != "cuda" or work.dtype not in KERNEL_DTYPES or wide:
        return AttentionChoice("blocks", {}, f"no estimate for {work.dtype} on {work.device.type}")
    from sparsecomp.lowering.tuning.ceilings import target_of  # estimates load Triton

    return compared_ways(work, blocks, *target_of(work.device))


def compared_ways(work: AttentionWork, blocks: AttentionBlocks, device: "Device", card: "Card") -> AttentionChoice:
    """`chosen_way` on a device that is such a card; loads Triton."""
    from sparsecomp.lowering.attention.element_attention import MOST_HEADS
    from sparsecomp.lowering.attention.estimate import even_problem, longest_lists, mean_lists
    from sparsecomp.lowering.attention.list_parts import parts_by_estimate

    kept = statistics_of_blocks(blocks)
    lists = blocks.count.shape[0] * blocks.count.shape[1]
    pairs = round(kept.pairs * lists * work.q_len * work.k_len)
    problem = even_problem(_sizes(work), (blocks.block_q, blocks.block_k), mean_lists(blocks), work.dtype)
    parts = parts_by_estimate(problem, longest_lists(blocks), device, card)
    seconds = {"blocks": _by_blocks(work, problem, device, card)}
    if pairs <= _MOST_PAIRS and work.batch * work.heads <= MOST_HEADS:
        seconds["elements"] = _by_elements(work, pairs // lists, device, card)
    by = min(seconds, key=lambda name: seconds[name])
    if work.plain and lists * work.q_len * work.k_len <= _MOST_MASK and (work.depth | work.v_depth) % 8 == 0:
        seconds["dense"] = _dense(work, card)
        by = "dense" if _SURELY * seconds["dense"] < seconds[by] else by
    times = ", ".join(f"{1e6 * time:.1f} us by {name}" for name, time in seconds.items())
    told = f"{work.q_len} x {work.k_len} pairs with {kept.pairs:.2%} kept and {kept.empty:.1%} of blocks empty"
    return AttentionChoice(by, seconds, f"{told}; estimated {times}", parts)


def _by_blocks(work: AttentionWork, problem: "BlockAttention", device: "Device", card: "Card") -> float:
    from sparsecomp.lowering.attention.block_attention import BLOCK_ATTENTION
    from sparsecomp.lowering.attention.block_attention_gradients import ATTENTION_BY_KEY, ATTENTION_BY_QUERY

    return _fastest((BLOCK_ATTENTION, ATTENTION_BY_QUERY, ATTENTION_BY_KEY), work, problem, device, card)


def _by_elements(work: AttentionWork, pairs: int, device: "Device", card: "Card") -> float:
    from sparsecomp.lowering.attention.element_attention import ELEMENT_ATTENTION, ElementAttention
    from sparsecomp.lowering.attention.element_gradients import ELEMENTS_BY_KEY, ELEMENTS_BY_QUERY
    from sparsecomp.lowering.launch.strided import name_of

    w = work
    problem = ElementAttention(
        w.batch, w.heads, w.heads // w.kv_heads, w.q_len, w.k_len, w.depth, w.v_depth, pairs, False, False,
        name_of(w.dtype), w.depth**-0.5, (),
    )  # fmt: skip
    return _fastest((ELEMENT_ATTENTION, ELEMENTS_BY_QUERY, ELEMENTS_BY_KEY), work, problem, device, card)


def _fastest(
    operations: tuple[Any, ...], work: AttentionWork, problem: NamedTuple, device: "Device", card: "Card"
) -> float:
    """Seconds of the result, and of both gradients where they are asked for."""
    from sparsecomp.lowering.tuning import cost

    wanted = operations if work.trained else operations[:1]
    return sum(min((cost.seconds(one, problem, card) for one in operation.candidates(problem, device)),
                   default=float("inf")) for operation in wanted)  # fmt: skip


def _sizes(work: AttentionWork) -> "AttentionSizes":
    from sparsecomp.lowering.attention.estimate import AttentionSizes

    w = work
    return AttentionSizes(w.batch, w.heads, w.kv_heads, w.q_len, w.k_len, w.depth, w.v_depth)


def _dense(work: AttentionWork, card: "Card") -> float:
    from sparsecomp.lowering.attention.estimate import BACKWARD

    rate = card.half * _MASKED if work.dtype is not torch.float32 else card.fp32
    seconds = _sizes(work).operations / rate * (1 + BACKWARD * work.trained)
    return seconds + card.launch * (1 + 2 * work.trained)
