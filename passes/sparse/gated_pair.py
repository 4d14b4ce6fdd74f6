"""A gated pair of sparse layers of few rows is one launch: activation(gate(x)) · up(x).

Both layers have their kernels already (see `passes.sparse.linear`): those of 2:4 by packed positions, those in NARROW,
under the promise also of a CSR weight's narrow copy, those in CSR, and those by bitmaps. Nothing but their product
reads them. The pair reads x once and writes its product alone, rounded once. Two layers by bitmaps are a pair of these,
or of what they store, and keep no bitmap then.
"""

from typing import Any

import torch
from torch import fx

import sparsecomp.ops.sparse.bitmap_pair
import sparsecomp.ops.sparse.gated_pair  # noqa: F401  (registers the operators)
from sparsecomp.lowering.launch.epilogue import ACTIVATIONS
from sparsecomp.lowering.sparse.bitmap_pair import BITMAP_PAIR
from sparsecomp.passes.cost.gated_pair import decide
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, refuse
from sparsecomp.passes.graph.canonicalize import op_of
from sparsecomp.passes.sparse.few_rows import FewRows, few_rows_layer, product_of_layer, runs_kernels

_BITMAP_PAIR = torch.ops.sparsecomp.bitmap_pair.default
_PAIR = torch.ops.sparsecomp.gated_pair.default
_PACKED_PAIR = torch.ops.sparsecomp.packed_pair.default


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: a product of two such layers that read one x, one of them without activation, is a site."""
    op = op_of(node)
    if op is None or op.name != "mul" or op.inplace or op.out is not None:
        return None
    first, second = (_layer_behind(operand) for operand in (op.input, op.get("other")))
    if first is None or second is None or first.node is second.node or first.chain.dense is not second.chain.dense:
        return None
    if first.layout.shape[0] != second.layout.shape[0]:
        return None
    # the one with an activation is the gate
    gate, up = (first, second) if second.chain.activation == "none" else (second, first)
    if up.chain.activation != "none" or not runs_kernels(gate, ctx):
        return None
    return _judged(node, gate, up, [op.input, op.get("other")], ctx)


RULE = Rule("gated_pair", consider, after=("sparse_linear",))


def _judged(node: fx.Node, gate: FewRows, up: FewRows, read: list[Any], ctx: Context) -> Verdict:
    products = [product_of_layer(one, ctx) for one in (gate, up)]
    if products[0] is None or products[1] is None:
        return refuse(Why.UNKNOWN_SHAPE)
    if products[0].trained or products[1].trained:
        return _apart("gradients are asked for")
    shared = [f"`{one.node.name}`" for one in (gate, up) if len(one.node.users) > 1]
    if shared:
        return _apart(f"{' and '.join(shared)} is read by others too")
    if gate.node not in read or up.node not in read:
        return None  # an activation was left behind for a reason of the layer's own
    if gate.kind != up.kind:
        return _apart("the layers differ in their format, their dtypes, or in whether there is a bias")
    if gate.chain.residual is not None or up.chain.residual is not None:
        return _apart("something is added to a layer beside its bias")
    begin, end = sorted((gate.node, up.node), key=lambda layer: ctx.analysis.order[layer])
    operands = {*gate.node.all_input_nodes, *up.node.all_input_nodes}
    if not all(ctx.analysis.unchanged(operand, begin, node) for operand in operands):
        return _apart("an operand is written to before the result is complete")
    decision = decide(products[0], products[1], (gate.grain, up.grain))
    if decision.dense:
        return _apart(decision.reason)
    activation, by_bitmaps = gate.chain.activation, decision.implementation == BITMAP_PAIR.name
    unread = () if by_bitmaps else (*gate.bitmap, *up.bitmap)
    reason = (
        f"{'' if activation == 'none' else f'{activation} of '}`{gate.node.name}` times `{up.node.name}` in one launch "
        f"by {decision.implementation}, rounded once; {decision.reason}{'; no bitmap is kept' if unread else ''}"
    )
    # constants that nobody reads any more are not kept
    dead = (end, begin, *(one for one in unread if one.op == "get_attr" and len(one.users) == 1))
    build = _build_by_bitmaps if by_bitmaps else _build
    return Plan(lambda: {node: build(node, gate, up)}, reason, "gated pair", dead=dead)


def _apart(detail: str) -> Refusal:
    return refuse(Why.PAIR_APART, detail=detail)


def _layer_behind(operand: Any) -> FewRows | None:
    """The layer that an operand is, or is an activation of, which was not fused then."""
    layer = few_rows_layer(operand)
    if layer is not None:
        return layer
    op = op_of(operand) if isinstance(operand, fx.Node) else None
    return few_rows_layer(op.input) if op is not None and op.name in ACTIVATIONS and not op.inplace else None


def _build(node: fx.Node, gate: FewRows, up: FewRows) -> fx.Node:
    x, activation = gate.chain.dense, gate.chain.activation
    weights = [(one.chain.sparse, one.arrays, one.chain.bias) for one in (gate, up)]
    if gate.layout.format == "nm":
        flat = [operand for values, arrays, bias in weights for operand in (values, *arrays, bias)]
        return call(node.graph, node, _PACKED_PAIR, x, *flat, activation)
    flat = [operand for values, arrays, bias in weights for operand in (values, list(arrays), bias)]
    return call(node.graph, node, _PAIR, x, *flat, gate.layout.written(), activation)


def _build_by_bitmaps(node: fx.Node, gate: FewRows, up: FewRows) -> fx.Node:
    flat = [
        operand for one in (gate, up)
        for operand in (one.chain.sparse, list(one.arrays), one.layout.written(), one.copy, one.chain.bias)
    ]  # fmt: skip
    longest = max(gate.longest, up.longest)
    return call(node.graph, node, _BITMAP_PAIR, gate.chain.dense, *flat, gate.grain, longest, gate.chain.activation)
