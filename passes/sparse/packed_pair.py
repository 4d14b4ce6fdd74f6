"""A gated pair of 2:4 layers of few rows is one launch: activation(gate(x)) · up(x).

Both layers are multiplied by packed positions already (see `passes.sparse.packed`); nothing but their product reads
them. The pair reads x once and writes its product alone, rounded once.
"""

from typing import Any

import torch
from torch import fx

from sparsecomp.passes.engine.rule import Context, Plan, Rule, Verdict, call
from sparsecomp.passes.graph.canonicalize import example_of, op_of

_PACKED = torch.ops.sparsecomp.packed_linear.default
_PAIR = torch.ops.sparsecomp.packed_pair.default


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: a product of two layers by packed positions that read one x is a site."""
    op = op_of(node)
    if op is None or op.name != "mul" or op.inplace or op.out is not None:
        return None
    layers = [op.input, op.get("other")]
    if not all(isinstance(one, fx.Node) and one.target is _PACKED and len(one.users) == 1 for one in layers):
        return None
    first, second = layers
    if first is second or not _alike(first, second):
        return None
    # the one with an activation is the gate
    gate, up = (first, second) if second.args[6] == "none" else (second, first)
    if up.args[6] != "none" or gate.args[5] is not None or up.args[5] is not None:
        return None
    begin, end = sorted(layers, key=lambda layer: ctx.analysis.order[layer])
    if not all(ctx.analysis.unchanged(read, begin, node) for read in (*gate.all_input_nodes, *up.all_input_nodes)):
        return None
    reason = f"{gate.args[6]} of `{gate.name}` times `{up.name}` in one launch, rounded once"
    return Plan(lambda: {node: _build(node, gate, up)}, reason, "packed pair", dead=(end, begin))


RULE = Rule("packed_pair", consider, after=("sparse_linear",))


def _alike(first: fx.Node, second: fx.Node) -> bool:
    """Whether two layers read one x and are of one size and kind."""
    arguments: tuple[Any, Any] = (first.args, second.args)
    sizes = [tuple(example_of(one[1]).shape) for one in arguments]
    biases = [None if one[4] is None else example_of(one[4]).dtype for one in arguments]
    orders = [example_of(one[3]).dim() for one in arguments]
    same = (sizes, biases, orders)
    return arguments[0][0] is arguments[1][0] and all(one == other for one, other in same)


def _build(node: fx.Node, gate: fx.Node, up: fx.Node) -> fx.Node:
    x, activation = gate.args[0], gate.args[6]
    return call(node.graph, node, _PAIR, x, *gate.args[1:5], *up.args[1:5], activation)
