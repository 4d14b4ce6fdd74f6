"""Attention with a mask becomes `sparsecomp::block_attention`, which computes its non-empty blocks only.

If its mask is known to keep everything, or to be causal, torch's function may do the same without it, which is faster.

The mask is proved when a graph is compiled (`sparsecomp.passes.attention.mask`), or scanned in each call
(`sparsecomp.passes.attention.data_mask`). Pairs that are not kept are then no part of a sum at all: that is the same
for finite operands, of which a dropped one counts exactly 0. Dropout drops other weights than torch's would, as often.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

import sparsecomp.ops.apart
import sparsecomp.ops.attention.block_attention  # noqa: F401  (registers the operator)
from sparsecomp.lowering.launch.strided import name_of
from sparsecomp.ops.attention.block_attention import SEEDS
from sparsecomp.ops.attention.operands import place_of
from sparsecomp.passes.attention.data_mask import DataMask, data_mask
from sparsecomp.passes.attention.example_numbers import example_numbers
from sparsecomp.passes.attention.found import site_at
from sparsecomp.passes.attention.kept import numbers_as_added
from sparsecomp.passes.attention.mask import KnownMask, known_mask
from sparsecomp.passes.attention.mask_of_numbers import is_mask_of_numbers
from sparsecomp.passes.attention.place import in_place, may_be_trained, unfit
from sparsecomp.passes.attention.site import AttentionSite, viewed
from sparsecomp.passes.cost.attention import MaskedAttention, decide_attention, lists_in_parts
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, new_meta, refuse, replays
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.spiking.operand import cast
from sparsecomp.reference.attention.blocks import DEFAULT_BLOCK
from sparsecomp.reference.attention.dropout import ALWAYS, chances

_UNKNOWN = 0.75
"""Share of the blocks that a mask is thought to keep if it is data. Where all are, our kernel takes 1.02
times as long as torch's function with a mask, and 0.94 times with gradients; where half are, 0.57 and 0.53 times
(`bench/results/attention.json`, an H200)."""


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every attention with a mask is a site, at its last call."""
    site = site_at(node)
    return _judged(site, ctx) if isinstance(site, AttentionSite) else site


RULE = Rule("block_attention", consider, after=("decode_attention",))


def _judged(site: AttentionSite, ctx: Context) -> Plan | Refusal:
    problem = unfit(site, ctx)
    if problem is not None:
        return problem
    if ctx.eager:
        return refuse(
            Why.ATTENTION_AS_WRITTEN, detail="the graph runs op by op, and has no place for the mask's lists"
        )
    mask = known_mask(site, ctx)
    if isinstance(mask, Refusal):
        return _judged_as_data(site, mask, ctx)
    q, k, v = (one.shape for one in site.operands)
    work = MaskedAttention.of(q, k, v, mask.blocks, plain=_without_mask(site, mask), **_how(site, ctx))
    decision = decide_attention(work)
    if decision.dense and ctx.options.implementation == "auto":
        return Refusal(Why.GATE, {"detail": f"{work.described}; {decision.reason}"}, decision.estimate)
    how = "torch's function gives the same without it, " if decision.implementation == "sdpa" else ""
    reason = f"{mask.described}: {work.described}; {how}{decision.reason}; {_provided(site)}"
    readers = set(mask.formula.readers()) - set(site.nodes)
    dead = (*site.nodes[-2::-1], *(() if readers else mask.formula.nodes[::-1]))

    def build() -> Mapping[fx.Node, fx.Node]:
        if decision.implementation == "sdpa":
            return _function(site, ctx, mask.causal)
        return _built(site, ctx, mask.build(site.result), None, True, lists_in_parts(work))

    return Plan(build, reason, decision.implementation, "", dead, decision.estimate)


def _without_mask(site: AttentionSite, mask: KnownMask) -> float | None:
    """Share of the pairs that torch's function would compute without the mask; None if it gives something else."""
    q, _, v = (one.shape for one in site.operands)
    alike = not site.softcap and site.scale > 0 and q[3] == v[3]
    return None if not alike else 1.0 if mask.whole else 0.5 if mask.causal else None


def _judged_as_data(site: AttentionSite, known: Refusal, ctx: Context) -> Plan | Refusal:
    """Of a site whose mask is not known, for the reason given."""
    mask = data_mask(site, ctx)
    if isinstance(mask, Refusal):
        return known if known.why is Why.MASK_NOT_FROZEN else mask
    given, seen = ctx.options.density, _seen(site, mask, ctx)
    share = given if given is not None else _UNKNOWN if seen is None else seen
    q, k, v = (one.shape for one in site.operands)
    scanned = (*mask.sizes[:2], name_of(example_of(mask.node).dtype))
    biased = {} if seen is None else _of_bias(site, mask, ctx)
    work = MaskedAttention.assumed(q, k, v, share, DEFAULT_BLOCK, scanned=scanned, **biased, **_how(site, ctx))
    decision, described = decide_attention(work), mask.described(share, given is None and seen is not None)
    if decision.dense and ctx.options.implementation == "auto":
        if known.why is Why.MASK_NOT_FROZEN:
            return known
        advice = "; the option density says how many are" if given is None else ""
        return Refusal(Why.GATE, {"detail": f"{described}{advice}; {decision.reason}"}, decision.estimate)

    def build() -> Mapping[fx.Node, fx.Node]:
        read = mask._replace(node=numbers_as_added(site)) if mask.use == "add" else mask
        lists, added = read.build(site.result, work.trained)
        return _built(site, ctx, lists, added)

    reason = f"{described}; {decision.reason}; {_provided(site)}"
    return Plan(build, reason, "block_attention", "", site.nodes[-2::-1], decision.estimate)


def _seen(site: AttentionSite, mask: DataMask, ctx: Context) -> float | None:
    """Of numbers that are added: the share of blocks that they keep where the graph is compiled. If that is not known,
    all of those that may be biases, of which no block is empty; None of any other mask."""
    if mask.use != "add" or is_mask_of_numbers(mask.node, site.mask.reader):
        return None
    found = example_numbers(site, ctx)
    return 1.0 if found is None else min(found.share, _UNKNOWN) if found.only_masks else found.share


def _of_bias(site: AttentionSite, mask: DataMask, ctx: Context) -> dict[str, Any]:
    """What an estimate asks of numbers that are added to kept scores."""
    example = example_of(mask.node)
    trained = may_be_trained(site, ctx) and example.requires_grad
    return {"added": name_of(example.dtype), "bias": mask.sizes if trained else None}


def _provided(site: AttentionSite) -> str:
    drops = "; it drops other weights than torch would, as often" if site.dropout else ""
    return f"for finite inputs{drops}"


def _how(site: AttentionSite, ctx: Context) -> dict[str, Any]:
    """What an estimate asks beside sizes."""
    out = example_of(site.result)
    where = ctx.device(out.device)
    return {
        "device": where, "dtype": out.dtype, "trained": may_be_trained(site, ctx),
        "replayed": replays(ctx.options, where), "products": ctx.products, "target": ctx.target,
        "dropped": site.dropout > 0, "by_hand": site.gives_nan and site.mask.use != "add",
    }  # fmt: skip


def _operands(site: AttentionSite) -> list[fx.Node]:
    """Queries, keys and values of four dimensions, in the dtype of the result."""
    node, dtype = site.result, example_of(site.result).dtype
    return [cast(viewed(one.node, one.steps, node), dtype, node) for one in site.operands]


def _built(
    site: AttentionSite, ctx: Context, lists: list[fx.Node], added: fx.Node | None, known: bool = False, parts: int = 0
) -> Mapping[fx.Node, fx.Node]:
    node, out, (q, k, v) = site.result, example_of(site.result), _operands(site)
    kept = chances(site.dropout)
    seed = None if kept == ALWAYS else _drawn(out.device, node)
    target = torch.ops.sparsecomp.block_attention.default
    both = call(
        node.graph, node, target, q, k, v, lists, site.scale, site.softcap, None, added, seed, kept,
        site.gives_nan and not known, parts,
    )  # fmt: skip
    result = call(node.graph, node, operator.getitem, both, 0)
    return {node: _in_place(site, ctx, result, place_of(site.query.lying, site.value.lying))}


def _in_place(site: AttentionSite, ctx: Context, result: fx.Node, *lying: Tensor) -> fx.Node:
    """As `in_place`, for a result that gradients read, which those of attention written by hand do not."""
    node, found = site.result, in_place(site, result, *lying)
    return call(node.graph, node, torch.ops.sparsecomp.apart.default, found) if _may_be_written(site, ctx) else found


def _may_be_written(site: AttentionSite, ctx: Context) -> bool:
    """Whether somebody may write to the result before the gradients are computed."""
    if not may_be_trained(site, ctx):
        return False
    returned = site.gives_nan and site.result in ctx.analysis.seen_outside
    return returned or not ctx.analysis.unchanged(site.result, site.result)


def _function(site: AttentionSite, ctx: Context, causal: bool) -> Mapping[fx.Node, fx.Node]:
    """Torch's function without a mask."""
    node, (q, k, v) = site.result, _operands(site)
    result = call(node.graph, node, functional.scaled_dot_product_attention, q, k, v, None, site.dropout, causal)
    result.kwargs = {"scale": site.scale, "enable_gqa": site.query.shape[1] != site.key.shape[1]}
    # heads before tokens, or behind them: torch's kernels differ
    batch, heads, queries, _ = site.query.shape
    before = torch.empty((batch, heads, queries, site.value.shape[3]), device="meta")
    behind = torch.empty((batch, queries, heads, site.value.shape[3]), device="meta").transpose(1, 2)
    return {node: _in_place(site, ctx, result, before, behind)}


def _drawn(device: torch.device, like: fx.Node) -> fx.Node:
    """A seed of dropout, drawn by torch's generator in each call."""
    node = like.graph.call_function(torch.randint, (SEEDS, (1,)), {"device": device})
    node.meta = new_meta(like)
    return node
