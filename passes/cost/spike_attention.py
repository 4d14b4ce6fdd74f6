"""Whether attention of spikes with a mask is faster over its listed blocks than as two products and a mask."""

import torch

from sparsecomp import _compat
from sparsecomp.lowering.attention.estimate import even_problem
from sparsecomp.lowering.attention.problem import BlockAttention
from sparsecomp.lowering.cache.signature import NO_TRITON, Device, has_triton
from sparsecomp.lowering.launch.strided import name_of
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import target_of
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.attention import MaskedAttention
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.dense import matmul_work, time_of
from sparsecomp.passes.cost.sparse import fastest_candidate
from sparsecomp.reference.precision import KERNEL_DTYPES


def decide_spike_attention(attention: MaskedAttention, counts: bool) -> Decision:
    """`spike_attention` or `dense`, by estimate.

    Args:
        counts: as of `sparsecomp.ops.spike_attention`.
    """
    p = attention
    if p.device.type != "cuda" or p.dtype not in KERNEL_DTYPES:
        return Decision("dense", f"no estimate of {p.dtype} on {p.device.type}")
    if not has_triton():
        return Decision("dense", f"no estimate. {NO_TRITON}")
    device, card = p.target or target_of(p.device)
    ours, dense = _ours(p, counts, device, card), _dense(p, card)
    return fastest({"spike_attention": p.waited(ours), "dense": p.waited(dense)})


def _ours(attention: MaskedAttention, counts: bool, device: Device, card: Card) -> Time:
    p, s = attention, attention.sizes
    narrowed = counts and p.dtype is not torch.float16
    problem = even_problem(s, p.block, p.listed, torch.float16 if narrowed else p.dtype)
    problems = [problem._replace(result=name_of(p.dtype)) if narrowed else problem]
    if p.trained:  # by queries, keys and values, each of which is such an attention
        turned = (p.block[1], p.block[0]), (p.listed[1], p.listed[0])
        by_queries = s._replace(depth=s.v_depth, v_depth=s.depth)
        by_keys, by_values = (one._replace(q_len=s.k_len, k_len=s.q_len) for one in (by_queries, s))
        problems.append(even_problem(by_queries, p.block, p.listed, p.dtype))
        problems += [even_problem(one, *turned, p.dtype) for one in (by_keys, by_values)]
    longest = p.longest or (0, 0)
    times = [_launched(p, one, longest[place > 1], device, card) for place, one in enumerate(problems)]
    if narrowed and p.trained:  # what makes them writes them twice
        numbers = s.batch * s.heads * (s.q_len * s.depth + s.k_len * (s.depth + s.v_depth))
        times.append(Time(2 * numbers / card.bandwidth, 0.0))
    return times[0].plus(*times[1:])


def _launched(attention: MaskedAttention, even: BlockAttention, longest: int, device: Device, card: Card) -> Time:
    """Of lists that are even, or of the longest alone, which may take one program longer."""
    from sparsecomp.lowering.attention.spike_attention import SPIKE_ATTENTION

    even = even._replace(single=_compat.matmul_tf32() and even.dtype == "float32")
    alone = even._replace(batch=1, heads=1, q_len=min(even.q_len, even.block_q), width=max(longest, 1))
    candidates = SPIKE_ATTENTION.candidates(even, device)
    times = (fastest_candidate(candidates, one, attention, card)[0] for one in (even, alone))
    return max(times, key=lambda time: time.device)


def _dense(attention: MaskedAttention, card: Card) -> Time:
    """Two products, or six with the gradients, and passes over the scores between."""
    p, s = attention, attention.sizes
    heads = s.batch * s.heads
    queries, keys, values = [heads, s.q_len, s.depth], [heads, s.depth, s.k_len], [heads, s.k_len, s.v_depth]
    scores, result = [heads, s.q_len, s.k_len], [heads, s.q_len, s.v_depth]
    first = time_of(matmul_work(queries, keys, scores, p.dtype), card)
    second = time_of(matmul_work(scores, values, result, p.dtype), card)
    assert first is not None and second is not None  # of all dtypes that kernels take
    masked = Time(2 * p.pairs * p.dtype.itemsize / card.bandwidth + card.launch, host.LAUNCH)
    once = first.plus(second, masked)
    return once.plus(first, first, second, second, masked) if p.trained else once
