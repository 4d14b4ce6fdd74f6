"""Few queries over a cache, by a mask, become `sparsecomp::masked_decode`, which reads the keys that the mask keeps.

A model with a static cache writes its keys in slots, and attends to all slots by a mask that it computes of the
position it is at, which its device knows alone. In each call the first key and the last that the mask keeps are found
on the device, once for all layers, and nothing else of the cache is read; keys that heads of a group share are read
once, and not repeated. The mask is read as it is: what is known of it beforehand, such as the width of a window, only
tells the estimate how much will be read.
"""

import math
import operator
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from sparsecomp.lowering.attention.estimate import AttentionSizes
from sparsecomp.ops.attention.decode_attention import MOST_KEYS, MOST_ROWS
from sparsecomp.passes.attention.found import site_at
from sparsecomp.passes.attention.kept import KeptMask, kept_mask
from sparsecomp.passes.attention.place import in_place, unfit
from sparsecomp.passes.attention.repeated import unrepeated
from sparsecomp.passes.attention.site import AttentionSite, View, viewed
from sparsecomp.passes.attention.width import width_of
from sparsecomp.passes.cost.cached_attention import CachedAttention, decide_cached
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, refuse, replays
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.spiking.operand import cast


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: an attention with a mask of few queries and more keys is a site, at its last call."""
    site = site_at(node)
    if not isinstance(site, AttentionSite):
        return None  # another rule says why
    queries, keys = site.query.shape[2], site.key.shape[2]
    return _judged(site, ctx) if queries <= MOST_ROWS and queries < keys else None


RULE = Rule("decode_attention", consider)


def _judged(site: AttentionSite, ctx: Context) -> Plan | Refusal:
    for problem in (unfit(site, ctx), _unfit(site, ctx)):
        if problem is not None:
            return problem
    mask = kept_mask(site, ctx)
    if isinstance(mask, Refusal):
        return mask
    (key, of_key), (value, of_value) = (unrepeated(one, site.result, ctx) for one in (site.key, site.value))
    if key.shape[1] != value.shape[1]:
        (key, of_key), (value, of_value) = (site.key, ()), (site.value, ())
    width = None if mask.drops or mask.added is not None else width_of(mask.node)
    work = _work(site, mask, key, len([one for one in (of_key, of_value) if one]), width, ctx)
    decision = decide_cached(work)
    told = "" if width is None else f", at most {width} of a query"
    described = f"of its mask `{mask.node.name}` the first key and the last that it keeps are found in each call{told}"
    if decision.dense and ctx.options.implementation == "auto":
        advice = "; the option density says how many keys are" if width is None and ctx.options.density is None else ""
        detail = f"{described}{advice}; {work.described}; {decision.reason}"
        return Refusal(Why.GATE, {"detail": detail}, decision.estimate)
    dead = (*site.nodes[-2::-1], *_alone(of_key, site.nodes), *_alone(of_value, site.nodes))
    reason = f"{described}: {work.described}; {decision.reason}; for finite inputs"
    return Plan(
        lambda: _built(site, mask, key, value, width), reason, "masked_decode", "", dead, decision.estimate
    )  # fmt: skip


def _unfit(site: AttentionSite, ctx: Context) -> Refusal | None:
    """Why this operator cannot stand in the site's place; None if it can."""
    out = example_of(site.result)
    problem = ""
    if ctx.eager:
        problem = "the graph runs op by op, where gradients may be asked for, and few queries over a cache have none"
    elif ctx.gradients and out.requires_grad:
        problem = "its gradients may be asked for, and few queries over a cache have none"
    elif site.dropout:
        problem = "it drops weights at random"
    elif site.key.shape[2] >= MOST_KEYS:
        problem = f"it has {site.key.shape[2]} keys, more than kernels count"
    elif any(one.lying.stride(-1) != 1 for one in (site.key, site.value)):
        problem = "numbers of a key or value do not lie side by side"
    elif any(example_of(one.node).dtype != out.dtype for one in (site.key, site.value)):
        problem = f"its keys and values are not of {out.dtype} as its result is"
    return refuse(Why.ATTENTION_AS_WRITTEN, detail=problem) if problem else None


def _work(
    site: AttentionSite, mask: KeptMask, key: View, copies: int, width: int | None, ctx: Context
) -> CachedAttention:
    q, out = site.query.shape, example_of(site.result)
    capacity, share = site.key.shape[2], 1.0 if ctx.options.density is None else ctx.options.density
    read = math.ceil(share * capacity) if width is None else min(width + q[2] - 1, capacity)
    where = ctx.device(out.device)
    sizes = AttentionSizes(q[0], q[1], key.shape[1], q[2], capacity, q[3], site.value.shape[3])
    return CachedAttention(
        where, sizes, read, copies, mask.readers, out.dtype, replays(ctx.options, where), ctx.products,
        ctx.target,
    )  # fmt: skip


def _alone(calls: tuple[fx.Node, ...], readers: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """The calls, and views of them for the readers, if nobody else reads them; else none."""
    views = tuple(user for node in calls[:1] for user in node.users if user not in readers)
    known = {*calls, *views, *readers}
    return (*views, *calls) if all(user in known for node in (*views, *calls) for user in node.users) else ()


def _built(site: AttentionSite, mask: KeptMask, key: View, value: View, width: int | None) -> Mapping[fx.Node, fx.Node]:
    node, out = site.result, example_of(site.result)

    def then(target: object, *args: object) -> fx.Node:
        return call(node.graph, node, target, *args)

    q, k, v = (viewed(one.node, one.steps, node) for one in (site.query, key, value))
    q, read = cast(q, out.dtype, node), mask.build(node)
    if read.empty is not None:  # by a query of zeros all keys weigh alike
        q = then(Tensor.masked_fill, q, read.empty, 0.0)
    most = -1 if width is None else min(width + site.query.shape[2] - 1, site.key.shape[2])
    both = then(
        torch.ops.sparsecomp.masked_decode.default, q, k, v, read.kept, read.ranges, most, site.scale, site.softcap
    )  # fmt: skip
    result = then(operator.getitem, both, 0)
    if site.gives_nan and (read.empty is None or mask.added is not None):
        nothing = then(Tensor.unsqueeze, then(Tensor.eq, then(operator.getitem, both, 1), -math.inf), -1)
        result = then(Tensor.masked_fill, result, nothing, math.nan)
    lying = torch.empty((*site.query.shape[:3], site.value.shape[3]), device="meta")
    return {node: in_place(site, result, lying)}
