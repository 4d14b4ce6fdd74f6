"""Attention with a mask becomes `sparsecomp::block_attention`, which computes its non-empty blocks only.

The mask is proved when a graph is compiled (`sparsecomp.passes.attention.mask`), or scanned in each call
(`sparsecomp.passes.attention.data_mask`). Pairs that are not kept are then no part of a sum at all: that is the same
for finite operands, of which a dropped one counts exactly 0. Dropout drops other weights than torch's would, as often.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

import sparsecomp.ops.attention.block_attention  # noqa: F401  (registers the operator)
from sparsecomp.lowering.launch.strided import name_of
from sparsecomp.ops.attention.block_attention import SEEDS
from sparsecomp.ops.attention.operands import MOST_BYTES, place_of
from sparsecomp.passes.attention.data_mask import data_mask
from sparsecomp.passes.attention.mask import known_mask
from sparsecomp.passes.attention.sdpa import sdpa_site
from sparsecomp.passes.attention.site import AttentionSite, stepped, viewed
from sparsecomp.passes.attention.written import written_site
from sparsecomp.passes.cost.attention import MaskedAttention, decide_attention
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, new_meta, refuse, replays
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.passes.spiking.operand import cast
from sparsecomp.reference.attention.blocks import DEFAULT_BLOCK
from sparsecomp.reference.attention.dropout import ALWAYS, chances
from sparsecomp.reference.precision import KERNEL_DTYPES

_COPIES = ("contiguous", "reshape", "flatten")
_SWAPS = ("transpose", "permute")


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every attention with a mask is a site, at its last call."""
    op = op_of(node)
    if op is None or op.module is not None or op.out is not None:
        return None
    site = sdpa_site(op) if op.name == "scaled_dot_product_attention" else written_site(op)
    return _judged(site, ctx) if isinstance(site, AttentionSite) else site


RULE = Rule("block_attention", consider)


def _judged(site: AttentionSite, ctx: Context) -> Plan | Refusal:
    problem = _unfit(site, ctx)
    if problem is not None:
        return problem
    mask = known_mask(site, ctx)
    if isinstance(mask, Refusal):
        return _judged_as_data(site, mask, ctx)
    q, k, v = (one.shape for one in site.operands)
    work = MaskedAttention.of(q, k, v, mask.blocks, dropped=site.dropout > 0, **_how(site, ctx))
    decision = decide_attention(work)
    if decision.dense and ctx.options.implementation == "auto":
        return Refusal(Why.GATE, {"detail": f"{work.described}; {decision.reason}"}, decision.estimate)
    reason = f"{mask.described}: {work.described}; {decision.reason}; {_provided(site)}"
    readers = set(mask.formula.readers()) - set(site.nodes)
    dead = (*site.nodes[-2::-1], *(() if readers else mask.formula.nodes[::-1]))
    return Plan(
        lambda: _built(site, mask.build(site.result), None, known=True), reason, "block_attention", "", dead,
        decision.estimate,
    )  # fmt: skip


def _judged_as_data(site: AttentionSite, known: Refusal, ctx: Context) -> Plan | Refusal:
    """Of a site whose mask is not known, for the reason given."""
    mask = data_mask(site, ctx)
    if isinstance(mask, Refusal):
        return known if known.why is Why.MASK_NOT_FROZEN else mask
    given = ctx.options.density
    share, source = (1.0, "may be") if given is None else (given, "are assumed to be")
    q, k, v = (one.shape for one in site.operands)
    scanned = (*mask.leading, name_of(example_of(mask.node).dtype))
    work = MaskedAttention.assumed(
        q, k, v, share, DEFAULT_BLOCK, scanned=scanned, dropped=site.dropout > 0, **_how(site, ctx)
    )
    decision, described = decide_attention(work), mask.described(share, source)
    if decision.dense and ctx.options.implementation == "auto":
        if known.why is Why.MASK_NOT_FROZEN:
            return known
        advice = "; the option density says how many are" if given is None else ""
        return Refusal(Why.GATE, {"detail": f"{described}{advice}; {decision.reason}"}, decision.estimate)

    def build() -> Mapping[fx.Node, fx.Node]:
        return _built(site, *mask.build(site.result))

    reason = f"{described}; {decision.reason}; {_provided(site)}"
    return Plan(build, reason, "block_attention", "", site.nodes[-2::-1], decision.estimate)


def _provided(site: AttentionSite) -> str:
    drops = "; it drops other weights than torch would, as often" if site.dropout else ""
    return f"for finite inputs{drops}"


def _unfit(site: AttentionSite, ctx: Context) -> Refusal | None:
    """Why the operator cannot stand in the site's place; None if it can."""
    if ctx.options.implementation == "dense":
        return refuse(Why.FORCED_DENSE)
    out, examples = example_of(site.result), [example_of(one.node) for one in site.operands]
    device, first, order = ctx.device(out.device).type, site.nodes[0], ctx.analysis.order
    if not out.dtype.is_floating_point or (device == "cuda" and out.dtype not in KERNEL_DTYPES):
        return refuse(Why.DTYPE, dtype=out.dtype)
    problem = ""
    if ctx.eager:
        problem = "the graph runs op by op, and has no place for the mask's lists"
    elif ctx.options.precision == "exact":
        problem = "precision='exact' multiplies what the mask drops too, be it NaN or infinite"
    elif device == "cuda" and max(site.query.shape[3], site.value.shape[3]) * out.dtype.itemsize > MOST_BYTES:
        problem = f"kernels take heads of {MOST_BYTES // out.dtype.itemsize} numbers at most"
    elif any(0 in example.shape for example in examples):
        problem = "it has no elements"
    elif not _fits(site):
        problem = "its mask is broader than its scores, and broadcasts them"
    elif any(example.device != out.device for example in examples):
        problem = "its operands are on several devices"
    elif first is not site.result and not all(ctx.analysis.unchanged(one.node, first) for one in site.operands):
        problem = "an operand is written to before the result is complete"
    elif any(order[first] < mode < order[site.result] for mode in ctx.modes):
        problem = "gradients or autocast are switched on the way"
    return refuse(Why.ATTENTION_AS_WRITTEN, detail=problem) if problem else None


def _fits(site: AttentionSite) -> bool:
    """Whether scores keep their shape when they are masked."""
    batch, heads, queries, _ = site.query.shape
    scores = (batch, *((heads,) if site.dims == 4 else ()), queries, site.key.shape[2])
    mask = example_of(site.mask.node).shape
    sizes = zip(reversed(mask), reversed(scores), strict=False)
    return len(mask) <= len(scores) and all(one in (1, size) for one, size in sizes)


def _how(site: AttentionSite, ctx: Context) -> dict[str, Any]:
    """What an estimate asks beside sizes."""
    out = example_of(site.result)
    where = ctx.device(out.device)
    return {
        "device": where, "dtype": out.dtype, "trained": ctx.gradients and out.requires_grad,
        "replayed": replays(ctx.options, where), "products": ctx.products, "target": ctx.target,
    }  # fmt: skip


def _built(
    site: AttentionSite, lists: list[fx.Node], added: fx.Node | None, known: bool = False
) -> Mapping[fx.Node, fx.Node]:
    node, out = site.result, example_of(site.result)
    q, k, v = (cast(viewed(one.node, one.steps, node), out.dtype, node) for one in site.operands)
    kept = chances(site.dropout)
    seed = None if kept == ALWAYS else _drawn(out.device, node)
    target = torch.ops.sparsecomp.block_attention.default
    both = call(
        node.graph, node, target, q, k, v, lists, site.scale, site.softcap, None, added, seed, kept,
        site.gives_nan and not known,
    )  # fmt: skip
    found = viewed(call(node.graph, node, operator.getitem, both, 0), site.back, node)
    if _only_copied(node, stepped(place_of(site.query.lying, site.value.lying), site.back)):
        return {node: found}
    return {node: _lying_as(out, found, node)}


def _drawn(device: torch.device, like: fx.Node) -> fx.Node:
    """A seed of dropout, drawn by torch's generator in each call."""
    node = like.graph.call_function(torch.randint, (SEEDS, (1,)), {"device": device})
    node.meta = new_meta(like)
    return node


def _only_copied(node: fx.Node, lying: Tensor) -> bool:
    """Whether nobody can tell that a result lies otherwise: its one reader makes it contiguous, maybe with dimensions
    swapped before. Two readers could tell, if one writes to what is no copy for the other.

    Args:
        lying: as the result will, on the device meta.
    """
    users = list(node.users)
    op = op_of(users[0]) if len(users) == 1 else None
    if op is None or op.inplace or op.name not in (*_COPIES, *_SWAPS):
        return False
    args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), lambda _: lying)
    function = getattr(Tensor, op.node.target) if isinstance(op.node.target, str) else op.node.target
    there = function(*args, **kwargs)
    if op.name in _SWAPS:
        return _only_copied(op.node, there)
    return there.is_contiguous() and example_of(op.node).is_contiguous()


def _lying_as(out: Tensor, found: fx.Node, like: fx.Node) -> fx.Node:
    """The result as it lay where it was written: whoever takes a view of it relies on that."""
    order = sorted(range(out.dim()), key=lambda dim: -out.stride(dim))
    if not out.permute(order).is_contiguous():
        return found
    if order == list(range(out.dim())):
        return call(like.graph, like, Tensor.contiguous, found)
    inside = call(like.graph, like, Tensor.contiguous, call(like.graph, like, Tensor.permute, found, order))
    return call(like.graph, like, Tensor.permute, inside, [order.index(dim) for dim in range(out.dim())])
