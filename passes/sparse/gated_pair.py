"""A gated pair of sparse layers of few rows is one launch: activation(gate(x)) · up(x).

Both layers have their kernels already (see `passes.sparse.linear`): those of 2:4 by packed positions, those in NARROW,
under the promise also of a CSR weight's narrow copy, and those in CSR. Nothing but their product reads them. The pair
reads x once and writes its product alone, rounded once. No kernel takes two bitmaps: two such layers stay apart, or
are a pair of what they store, and keep no bitmap then.
"""

from typing import Any, NamedTuple

import torch
from torch import fx

import sparsecomp.ops.sparse.bitmap_linear
import sparsecomp.ops.sparse.gated_pair  # noqa: F401  (registers the operators)
from sparsecomp.lowering.cache.signature import has_triton
from sparsecomp.lowering.launch.epilogue import ACTIVATIONS
from sparsecomp.lowering.sparse.gated_pair import PAIRS
from sparsecomp.passes.cost.gated_pair import decide
from sparsecomp.passes.cost.sparse import Product
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, known_sizes, refuse
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.passes.sparse.chain import Chain, circumstances
from sparsecomp.reference.patterns import Layout
from sparsecomp.reference.precision import KERNEL_DTYPES

_LINEAR = torch.ops.sparsecomp.sparse_linear.default
_BITMAP = torch.ops.sparsecomp.bitmap_linear.default
_PACKED = torch.ops.sparsecomp.packed_linear.default
_PAIR = torch.ops.sparsecomp.gated_pair.default
_PACKED_PAIR = torch.ops.sparsecomp.packed_pair.default


class _Layer(NamedTuple):
    """A sparse layer of a form that has a kernel for pairs.

    Attributes:
        chain: its operands; the layer is its only node.
        arrays: index arrays of its layout; of 2:4 packed positions behind them.
        bitmap: what it reads by a bitmap instead.
        grain: how many neighbours share a bit of that; 0 without one.
    """

    chain: Chain
    layout: Layout
    arrays: tuple[fx.Node, ...]
    bitmap: tuple[fx.Node, ...] = ()
    grain: int = 0

    @property
    def node(self) -> fx.Node:
        """That computes it."""
        return self.chain.nodes[0]

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that one kernel takes as a pair, if they read one x."""
        # those of distances in NARROW may differ
        arrays = self.arrays[:-1] if self.layout.format == "narrow" else self.arrays
        operands = (self.chain.sparse, *arrays, self.chain.bias)
        dtypes = [None if operand is None else example_of(operand).dtype for operand in operands]
        # packed positions of one row and of several lie in orders of their own
        return (self.layout.format, self.layout.block, self.layout.shape, example_of(self.arrays[-1]).dim(), *dtypes)


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
    if up.chain.activation != "none" or not _runs_kernels(gate, ctx):
        return None
    return _judged(node, gate, up, [op.input, op.get("other")], ctx)


RULE = Rule("gated_pair", consider, after=("sparse_linear",))


def _judged(node: fx.Node, gate: _Layer, up: _Layer, read: list[Any], ctx: Context) -> Verdict:
    products = [_product(one, ctx) for one in (gate, up)]
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
    activation = gate.chain.activation
    reason = (
        f"{'' if activation == 'none' else f'{activation} of '}`{gate.node.name}` times `{up.node.name}` in one launch "
        f"by {decision.implementation}, rounded once; {decision.reason}"
        f"{'; no bitmap is kept' if gate.bitmap or up.bitmap else ''}"
    )
    # constants that nobody reads any more are not kept
    dead = (end, begin, *(one for one in (*gate.bitmap, *up.bitmap) if one.op == "get_attr" and len(one.users) == 1))
    return Plan(lambda: {node: _build(node, gate, up)}, reason, "gated pair", dead=dead)


def _apart(detail: str) -> Refusal:
    return refuse(Why.PAIR_APART, detail=detail)


def _layer_behind(operand: Any) -> _Layer | None:
    """The layer that an operand is, or is an activation of, which was not fused then."""
    layer = _layer_of(operand)
    if layer is not None:
        return layer
    op = op_of(operand) if isinstance(operand, fx.Node) else None
    return _layer_of(op.input) if op is not None and op.name in ACTIVATIONS and not op.inplace else None


def _layer_of(node: Any) -> _Layer | None:
    if not isinstance(node, fx.Node):
        return None
    arguments: Any = node.args
    if node.target is _PACKED:
        x, values, indices, positions, bias, residual, activation = arguments
        layout = Layout("nm", (2, 4), (example_of(values).shape[0], 2 * example_of(values).shape[1]))
        return _Layer(Chain((node,), values, False, x, True, bias, residual, activation), layout, (indices, positions))
    if node.target is _LINEAR:
        x, values, pattern, bias, residual, written, transpose, activation, _ = arguments
        layout = Layout.read(written)
        if layout.format in PAIRS and not transpose:
            chain = Chain((node,), values, False, x, True, bias, residual, activation)
            return _Layer(chain, layout, tuple(pattern[: layout.own]))
    if node.target is _BITMAP:
        x, values, pattern, written, copy, grain, _, bias, residual, activation = arguments
        chain, layout = Chain((node,), values, False, x, True, bias, residual, activation), Layout.read(written)
        return _Layer(chain, layout, tuple(pattern), tuple(copy), grain) if layout.format in PAIRS else None
    return None


def _runs_kernels(layer: _Layer, ctx: Context) -> bool:
    out = example_of(layer.node)
    return ctx.device(out.device).type == "cuda" and out.dtype in KERNEL_DTYPES and has_triton()


def _product(layer: _Layer, ctx: Context) -> Product | None:
    """The layer's numbers; None if they are not known."""
    chain, layout, out = layer.chain, layer.layout, example_of(layer.node)
    shape, stored = known_sizes(chain.dense), known_sizes(chain.sparse)
    if shape is None or stored is None:
        return None
    fused = (chain.bias is not None, chain.residual is not None, chain.activation)
    entries = torch.Size(stored).numel() // torch.Size(layout.entry).numel()
    return Product.of(layout, entries, False, shape, True, out, *fused, **circumstances(chain, ctx, out.device))


def _build(node: fx.Node, gate: _Layer, up: _Layer) -> fx.Node:
    x, activation = gate.chain.dense, gate.chain.activation
    weights = [(one.chain.sparse, one.arrays, one.chain.bias) for one in (gate, up)]
    if gate.layout.format == "nm":
        flat = [operand for values, arrays, bias in weights for operand in (values, *arrays, bias)]
        return call(node.graph, node, _PACKED_PAIR, x, *flat, activation)
    flat = [operand for values, arrays, bias in weights for operand in (values, list(arrays), bias)]
    return call(node.graph, node, _PAIR, x, *flat, gate.layout.written(), activation)
