"""Attention of spikes with a mask becomes `sparsecomp::spike_attention`, which computes its non-empty blocks only.

It has no softmax, so that a pair is dropped by a factor of 0, which makes NaN of what is not finite. Operands are
therefore proved to be whole numbers of known ranges; then every sum is exact, in the order of the kernel as in any. Who
calls the operator by name gets that of counts where they are proved, which is faster.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.ops.attention.operands import place_of
from sparsecomp.ops.attention.spike_attention import COUNTED_ATTENTION, MOST_SCORE, SPIKE_ATTENTION
from sparsecomp.passes.attention.mask import KnownMask, known_mask
from sparsecomp.passes.attention.place import in_place, may_be_trained, unfit
from sparsecomp.passes.attention.site import AttentionSite, viewed
from sparsecomp.passes.attention.spike_site import spike_site
from sparsecomp.passes.cost.attention import MaskedAttention
from sparsecomp.passes.cost.spike_attention import decide_spike_attention
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, refuse, replays
from sparsecomp.passes.graph.canonicalize import example_of, shape_of
from sparsecomp.passes.spiking.operand import cast
from sparsecomp.reference.facts import INTEGER_LIMIT, SparsityFact, fit_dtype

_SCALES = (1.0, 0.5, 0.25)
"""Of counts, as of `sparsecomp.ops.spike_attention`."""
_MOST_TF32, _MOST_SPLIT = 2**11, 2**22
"""Up to which whole numbers are exact in TF32, and as the sum of two such."""


class _Given(NamedTuple):
    """What is known of queries, keys and values.

    Attributes:
        nodes, facts: of each.
        depth, keys: of a query, and how many it may keep.
        dtype: of all.
    """

    nodes: tuple[fx.Node, ...]
    facts: tuple[SparsityFact | None, ...]
    depth: int
    keys: int
    dtype: torch.dtype


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: two products with a mask between, of which one operand at least is known to be sparse; or a call
    of the operator, whose operands may be counts."""
    if node.target is SPIKE_ATTENTION:
        return _judged_call(node, ctx)
    site = spike_site(node)
    if not isinstance(site, AttentionSite):
        return site if any(ctx.fact(one, node) is not None for one in node.all_input_nodes) else None
    readers, dtype = (site.nodes[0], site.nodes[0], node), example_of(node).dtype
    nodes = tuple(one.node for one in site.operands)
    facts = tuple(ctx.fact(one, reader) for one, reader in zip(nodes, readers, strict=True))
    given = _Given(nodes, facts, site.query.shape[3], site.key.shape[2], dtype)
    return None if all(fact is None for fact in facts) else _judged(site, given, ctx)


RULE = Rule("spike_attention", consider, after=("fuse_neurons", "reorder_products"))


def _judged_call(node: fx.Node, ctx: Context) -> Verdict:
    *operands, lists, scale = node.args
    nodes = tuple(one for one in operands if isinstance(one, fx.Node))
    dtype, (*_, keys, depth) = example_of(nodes[0]).dtype, shape_of(nodes[1]) or (None, None)
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    if ctx.options.implementation == "dense":
        return refuse(Why.FORCED_DENSE)
    if keys is None or depth is None:
        return refuse(Why.UNKNOWN_SHAPE)
    counts = _counts(_Given(nodes, tuple(ctx.fact(one, node) for one in nodes), depth, keys, dtype), ctx)
    if not counts:
        return counts if isinstance(counts, Refusal) else None
    reason = "its operands are counts, which are multiplied as float16"
    precision = "exact" if dtype is torch.float32 else "half"

    def build() -> Mapping[fx.Node, fx.Node]:
        return {node: call(node.graph, node, COUNTED_ATTENTION, *nodes, lists, scale)}

    return Plan(build, reason, "spike_attention", precision)


def _judged(site: AttentionSite, given: _Given, ctx: Context) -> Plan | Refusal:
    problem = unfit(site, ctx)
    if problem is None:
        problem = _differ(site)
    if problem is not None:
        return problem
    if ctx.eager:
        return _as_written("the graph runs op by op, and has no place for the mask's lists")
    counts = _counts(given, ctx)
    if isinstance(counts, Refusal):
        return counts
    mask = known_mask(site, ctx)
    if isinstance(mask, Refusal):
        return mask
    work = _work(site, mask, ctx)
    decision = decide_spike_attention(work, counts)
    if decision.dense and ctx.options.implementation == "auto":
        return Refusal(Why.GATE, {"detail": f"{work.described}; {decision.reason}"}, decision.estimate)
    reason = f"{mask.described}: {work.described}; {decision.reason}"
    readers = set(mask.formula.readers()) - set(site.nodes)
    dead = (*site.nodes[-2::-1], *(() if readers else mask.formula.nodes[::-1]))
    precision = "exact" if given.dtype is torch.float32 else "half"
    return Plan(
        lambda: _built(site, mask, counts), reason, "spike_attention", precision, dead, decision.estimate
    )  # fmt: skip


def _as_written(detail: str) -> Refusal:
    return refuse(Why.ATTENTION_AS_WRITTEN, detail=detail)


def _differ(site: AttentionSite) -> Refusal | None:
    """Why the dtypes on the way are not one; None if they are."""
    dtype = example_of(site.result).dtype
    differ = [node.name for node in site.nodes if example_of(node).dtype is not dtype]
    return _as_written(f"`{differ[0]}` is of another dtype than the result") if differ else None


def _counts(given: _Given, ctx: Context) -> bool | Refusal:
    """Whether the operands are counts, as of `sparsecomp.ops.spike_attention`; why they are not known to give exact
    sums."""
    known: list[SparsityFact] = []
    for node, read in zip(given.nodes, given.facts, strict=True):
        fact = None if read is None else fit_dtype(read, given.dtype)
        if fact is None or not (fact.on_grid and fact.finite) or fact.lo is None or fact.hi is None:
            why = ctx.analysis.why_not(node) or ("too little is known of it" if fact is None else fact.described())
            return refuse(Why.NOT_SPIKES, detail=f"`{node.name}`: {why}")
        known.append(fact)
    q, k, v = (fact.largest for fact in known)
    score = q * k * given.depth
    sums = score * v * given.keys
    most = _MOST_TF32 if _compat.matmul_tf32() else _MOST_SPLIT
    if max(q, k, v) <= _MOST_TF32 and score <= most and sums <= INTEGER_LIMIT[torch.float32]:
        counts = score <= MOST_SCORE and all(fact.scale in _SCALES for fact in known)
        if counts or given.dtype is torch.float32:
            return counts
    return _as_written(f"whole numbers up to {max(q, k, v)}, scores up to {score} and sums up to {sums} may be rounded")


def _work(site: AttentionSite, mask: KnownMask, ctx: Context) -> MaskedAttention:
    q, k, v = (one.shape for one in site.operands)
    out = example_of(site.result)
    where = ctx.device(out.device)
    return MaskedAttention.of(
        q, k, v, mask.blocks, device=where, dtype=out.dtype, trained=may_be_trained(site, ctx),
        replayed=replays(ctx.options, where), products=ctx.products, target=ctx.target,
    )  # fmt: skip


def _built(site: AttentionSite, mask: KnownMask, counts: bool) -> Mapping[fx.Node, fx.Node]:
    node, dtype = site.result, example_of(site.result).dtype
    operands = [cast(viewed(one.node, one.steps, node), dtype, node) for one in site.operands]
    target = COUNTED_ATTENTION if counts else SPIKE_ATTENTION
    result = call(node.graph, node, target, *operands, mask.build(node), site.scale)
    return {node: in_place(site, result, place_of(site.query.lying, site.value.lying))}
