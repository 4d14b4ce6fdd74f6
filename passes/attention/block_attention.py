"""Attention with a mask that is known when a graph is compiled becomes `sparsecomp::block_attention`.

The mask is proved (`sparsecomp.passes.attention.mask`), and only its non-empty blocks are computed. Pairs that are not
kept are then no part of a sum at all: that is the same for finite operands, of which a dropped one counts exactly 0.
"""

import operator
from collections.abc import Mapping

import torch
from torch import Tensor, fx

import sparsecomp.ops.attention.block_attention  # noqa: F401  (registers the operator)
from sparsecomp.ops.attention.block_attention import MOST_BYTES, place_of
from sparsecomp.passes.attention.mask import KnownMask, known_mask
from sparsecomp.passes.attention.sdpa import sdpa_site
from sparsecomp.passes.attention.site import AttentionSite, stepped, viewed
from sparsecomp.passes.attention.written import written_site
from sparsecomp.passes.cost.attention import MaskedAttention, decide_attention
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, refuse, replays
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.passes.spiking.operand import cast
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
        return mask
    work = _work(site, mask, ctx)
    decision = decide_attention(work)
    if decision.dense and ctx.options.implementation == "auto":
        return Refusal(Why.GATE, {"detail": f"{work.described}; {decision.reason}"}, decision.estimate)
    reason = f"{mask.described}: {work.described}; {decision.reason}; for finite inputs"
    readers = set(mask.formula.readers()) - set(site.nodes)
    dead = (*site.nodes[-2::-1], *(() if readers else mask.formula.nodes[::-1]))
    return Plan(lambda: _built(site, mask), reason, "block_attention", "", dead, decision.estimate)


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


def _work(site: AttentionSite, mask: KnownMask, ctx: Context) -> MaskedAttention:
    out = example_of(site.result)
    where = ctx.device(out.device)
    q, k, v = (one.shape for one in site.operands)
    return MaskedAttention.of(
        q, k, v, mask.blocks, device=where, dtype=out.dtype, trained=ctx.gradients and out.requires_grad,
        replayed=replays(ctx.options, where), products=ctx.products, target=ctx.target,
    )  # fmt: skip


def _built(site: AttentionSite, mask: KnownMask) -> Mapping[fx.Node, fx.Node]:
    node, out = site.result, example_of(site.result)
    q, k, v = (cast(viewed(one.node, one.steps, node), out.dtype, node) for one in site.operands)
    target = torch.ops.sparsecomp.block_attention.default
    both = call(node.graph, node, target, q, k, v, mask.build(node), site.scale, site.softcap)
    found = viewed(call(node.graph, node, operator.getitem, both, 0), site.back, node)
    if _only_copied(node, stepped(place_of(site.query.lying, site.value.lying), site.back)):
        return {node: found}
    return {node: _lying_as(out, found, node)}


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
