"""Layers of few rows that read one x, such as queries, keys and values, are one launch.

Each was decided to run by a kernel for few rows, by a bitmap, by packed positions of 2:4 or in NARROW (see
`passes.sparse.linear`), and keeps what is kept for that: only the launches become one, which leaves the card neither
idle between them nor half empty in each, as a small layer does. Of more layers than a kernel takes, so many that follow
each other are one launch.
"""

import operator
from collections.abc import Mapping

import torch
from torch import fx

import sparsecomp.ops.sparse.siblings  # noqa: F401  (registers the operator)
from sparsecomp.lowering.sparse.siblings import MOST_SIBLINGS
from sparsecomp.passes.cost.siblings import decide_siblings
from sparsecomp.passes.engine.constants import constant_behind
from sparsecomp.passes.engine.rule import Context, Plan, Rule, Verdict, Why, call, module_path, refuse
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.sparse.few_rows import FewRows, few_rows_layer, product_of_layer, runs_kernels

_SIBLINGS = torch.ops.sparsecomp.siblings.default
_PROMISED = torch.ops.sparsecomp.promised.default


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: the first of such layers is a site."""
    layers = _together(node, ctx)
    if len(layers) < 2:
        return None
    products = [product_of_layer(one, ctx) for one in layers]
    known = [one for one in products if one is not None]
    if len(known) < len(products):
        return refuse(Why.UNKNOWN_SHAPE)
    if any(one.trained for one in known):
        return refuse(Why.LAUNCHES_APART, detail="gradients are asked for")
    last = layers[-1].node
    if ctx.mode_changes(node, last):
        return refuse(Why.LAUNCHES_APART, detail="gradients or autocast are switched between them")
    if not all(_is_there(operand, node, ctx) for one in layers for operand in _operands(one)):
        return refuse(Why.LAUNCHES_APART, detail="an operand of a later one is computed behind the first")
    if not all(ctx.analysis.unchanged(operand, node, one.node) for one in layers for operand in _operands(one)):
        return refuse(Why.LAUNCHES_APART, detail="an operand is written to between them")
    decision = decide_siblings(known, layers[0].grain)
    if decision.dense:
        return refuse(Why.LAUNCHES_APART, detail=decision.reason)
    *names, end = (f"`{module_path(one.node) or one.node.name}`" for one in layers)
    reason = f"{', '.join(names)} and {end} in one launch by {decision.implementation}; {decision.reason}"
    return Plan(lambda: _build(node, layers, ctx), reason, "shared input", dead=_later(layers, node, ctx))


RULE = Rule("shared_input", consider, after=("sparse_linear", "gated_pair"), of_rewritten=True)


def _together(node: fx.Node, ctx: Context) -> list[FewRows]:
    """The layers that can be one launch with this one, which is the first of them; none if it is not."""
    layer = few_rows_layer(node)
    if layer is None or not _has_kernel(layer) or layer.chain.residual is not None or not runs_kernels(layer, ctx):
        return []
    found = [few_rows_layer(user) for user in layer.chain.dense.users]
    alike = [one for one in found if one is not None and _kind(one) == _kind(layer)]
    alike.sort(key=lambda one: ctx.analysis.order[one.node])
    place = next(place for place, one in enumerate(alike) if one.node is node)
    return [] if place % MOST_SIBLINGS else alike[place : place + MOST_SIBLINGS]


def _has_kernel(layer: FewRows) -> bool:
    return bool(layer.bitmap) or layer.layout.format in ("nm", "narrow")


def _kind(layer: FewRows) -> tuple[object, ...]:
    """Equal for layers that one kernel takes."""
    # of a bitmap where chunks begin; of what else is stored all, and packed positions of one row lie in another order
    read = layer.bitmap[:1] or layer.arrays
    operands = (layer.chain.sparse, layer.chain.bias, *read)
    dtypes = [None if operand is None else example_of(operand).dtype for operand in operands]
    form = (layer.grain, not layer.copy) if layer.bitmap else (layer.layout.format, example_of(read[-1]).dim())
    return (layer.chain.dense, *form, layer.chain.activation, layer.chain.residual, *dtypes)


def _operands(layer: FewRows) -> list[fx.Node]:
    return layer.node.all_input_nodes


def _is_there(operand: fx.Node, node: fx.Node, ctx: Context) -> bool:
    """Whether an operand stands before a node, or can be made again there: an attribute, such as a constant of ours,
    which nobody else writes to, looked at in each call or not."""
    if ctx.analysis.order[operand] < ctx.analysis.order[node]:
        return True
    if operand.target is _PROMISED:
        return all(_is_there(one, node, ctx) for one in operand.all_input_nodes)
    return operand.op == "get_attr" and (constant_behind(operand) is not None or operand not in ctx.written)


def _later(layers: list[FewRows], node: fx.Node, ctx: Context) -> tuple[fx.Node, ...]:
    """What the layers read that stands behind the first of them and is made again before it, the last first."""
    later: dict[fx.Node, None] = {}
    pending = [operand for one in layers for operand in _operands(one)]
    while pending:
        operand = pending.pop()
        if ctx.analysis.order[operand] > ctx.analysis.order[node] and operand not in later:
            later[operand] = None
            pending += operand.all_input_nodes
    return tuple(sorted(later, key=ctx.analysis.order.__getitem__, reverse=True))


def _build(node: fx.Node, layers: list[FewRows], ctx: Context) -> Mapping[fx.Node, fx.Node]:
    made: dict[fx.Node, fx.Node] = {}

    def here(operand: fx.Node) -> fx.Node:
        if ctx.analysis.order[operand] < ctx.analysis.order[node]:
            return operand
        if operand not in made:
            made[operand] = node.graph.node_copy(operand, here)
        return made[operand]

    first, own = layers[0].chain, [one.layout.own for one in layers]
    stored = [array for one, size in zip(layers, own, strict=True) for array in one.arrays[:size]]
    kept = [array for one, size in zip(layers, own, strict=True) for array in (*one.arrays[size:], *one.copy)]
    outs = call(
        node.graph, node, _SIBLINGS, first.dense, [here(one.chain.sparse) for one in layers], list(map(here, stored)),
        [one.layout.written() for one in layers], list(map(here, kept)),
        [] if first.bias is None else [here(one.chain.bias) for one in layers], layers[0].grain,
        max(one.longest for one in layers), first.activation,
    )  # fmt: skip
    return {one.node: call(node.graph, one.node, operator.getitem, outs, place) for place, one in enumerate(layers)}
