"""A residual block that is one operator stays one, or its steps are written out for Inductor, whichever is faster.

`sparsecomp.nn.GeoSparseResidualBlock` calls the operator on a GPU whatever compiles it. Written out, its layers are the
operator `gather_dot`, or gathers that Inductor compiles to one loop with what stands around them.
"""

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from sparsecomp.ops.local.residual_block import Layer, by_operator, composed
from sparsecomp.passes.cost.local import FixedFanIn, decide_block
from sparsecomp.passes.engine.ordered import is_kept
from sparsecomp.passes.engine.rule import Context, Plan, Verdict, Why, call, known_sizes, new_meta, refuse
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.local.operator import lists_of
from sparsecomp.passes.sparse.chain import Chain, circumstances
from sparsecomp.reference.precision import accumulator

RESIDUAL_BLOCK = torch.ops.sparsecomp.residual_block.default


def consider_block(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: the first result of every such operator is a site."""
    block = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    if not isinstance(block, fx.Node) or block.target is not RESIDUAL_BLOCK:
        return None
    if ctx.options.implementation == "dense":
        return refuse(Why.FORCED_DENSE)
    if not all(is_kept(one, ctx, block) for one in block.all_input_nodes):
        return refuse(Why.GATHERED_AS_WRITTEN, detail="an operand is written to before the result is complete")
    layers = _layers(block, ctx)
    if layers is None:
        return refuse(Why.UNKNOWN_SHAPE)
    decision = decide_block(*layers)
    way = "residual_block" if ctx.eager else decision.implementation
    first, second = layers
    reason = f"a residual block, {first.fan_in} and {second.fan_in} inputs for each of {first.outputs} outputs; " \
             f"{decision.reason}"  # fmt: skip
    layer = by_operator if way == "gather_dot" else _gathering(first.dtype)

    def build() -> dict[fx.Node, fx.Node]:
        arguments = _promised(block, layers, ctx)
        if way == "residual_block":
            made = call(node.graph, node, RESIDUAL_BLOCK, *arguments)
            return {node: call(node.graph, node, operator.getitem, made, 0)}
        return {node: _written(arguments, node, layer)}

    return Plan(build, reason, way, "", (block,), decision.estimate, block)


def _layers(block: fx.Node, ctx: Context) -> tuple[FixedFanIn, FixedFanIn] | None:
    """Both layers' numbers; None if a shape is unknown."""
    arguments: Any = block.args
    x, _, first, _, second, _, first_index, second_index, *_, spread, _ = arguments
    shape, device = known_sizes(x), example_of(x).device
    found = []
    for layer, (index, *lists) in ((first, first_index), (second, second_index)):
        fan = known_sizes(index)
        if shape is None or fan is None:
            return None
        outputs, fan_in = fan
        how = circumstances(Chain((block,), layer[0], False, x, True, (*layer, None)[1]), ctx, device)
        found.append(FixedFanIn(
            ctx.device(device), torch.Size(shape[:-1]).numel(), shape[-1], outputs, fan_in, example_of(layer[0]).dtype,
            len(layer) > 1, False, "none", spread, bool(lists) or not how["trained"],
            followed=len(lists) > 2 and ctx.constant(index) is None, **how,
        ))  # fmt: skip
    return found[0], found[1]


def _promised(block: fx.Node, layers: tuple[FixedFanIn, FixedFanIn], ctx: Context) -> list[Any]:
    """The operator's arguments, lists of indices that are promised to stay as constants."""
    *arguments, first, second = cast(Any, block.args)[:8]
    for layer, (index, *lists) in zip(layers, (first, second), strict=True):
        arguments.append([index, *lists_of(index, layer, lists, block, ctx)])
    return [*arguments, *block.args[8:]]


def _gathering(dtype: torch.dtype) -> Layer:
    """A layer as one writes it in torch, summed in as many bits as by the operator."""
    wide = accumulator(dtype)

    def gathered(x: Any, layer: Sequence[Any], index: Sequence[Any], spread: str) -> Any:
        out = (x.to(wide)[..., index[0]] * layer[0].to(wide)).sum(-1)
        return (out + layer[1].to(wide) if layer[1:] else out).to(dtype)

    return gathered


def _written(given: list[Any], like: fx.Node, layer: Layer) -> fx.Node:
    """The block's result, step by step."""
    before, tracer = like.prev, GraphAppendingTracer(like.graph)
    *arguments, _ = cast(Any, fx.map_arg)(given, lambda node: fx.Proxy(node, tracer))
    dtypes = example_of(given[0]).dtype, example_of(given[2][0]).dtype
    out: Any = composed(*arguments, dtypes=dtypes, layer=layer)[0]
    while before.next is not like:
        before = before.next
        before.meta = new_meta(like)
    return out.node
