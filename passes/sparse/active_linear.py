"""A linear layer of one row behind a ReLU reads the weights of inputs that are not zero, and no others.

A layer at a token takes as long as its weight takes to read, and a ReLU leaves many inputs zero: their weights
are rows of the weight's transpose, which is kept under the promise that the weight stays. Which inputs are zero is seen
on the device in each call, so that the result is that of the dense layer.
"""

import math
from typing import Any

import torch
from torch import Tensor, fx

import sparsecomp.ops.sparse.active_linear  # noqa: F401  (registers the operator)
from sparsecomp.lowering.cache.signature import has_triton
from sparsecomp.lowering.sparse.active_linear import takes
from sparsecomp.lowering.tuning.ceilings import target_of
from sparsecomp.ops.sparse.active_linear import must_read_all
from sparsecomp.passes.cost.active_linear import ActiveLayer, decide
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.engine.constants import promised_node
from sparsecomp.passes.engine.rule import Context, Plan, Rule, Verdict, Why, call, known_sizes, refuse, replays
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.reference.facts import Origin

_ACTIVE_LINEAR = torch.ops.sparsecomp.active_linear.default


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: a linear layer of one row on what a ReLU gives is a site, where there is a GPU to gain on."""
    op = op_of(node)
    if op is None or op.name != "linear" or ctx.options.implementation == "dense":
        return None
    fact = ctx.fact(op.input, node)
    if fact is None or fact.origin is not Origin.RELU or not fact.exact_zeros:
        return None
    decision = _decision(op, node, ctx)
    if decision is None or decision.dense:
        return None
    weight = op.get("weight")
    held = ctx.constant(weight)
    if held is None and weight.op == "call_function":
        return None  # a weight that is worked out in each call is other rules' business
    if held is None:
        return refuse(Why.ACTIVE_AS_WRITTEN, detail=f"active inputs {decision.reason}")
    reason = (
        f"zeros of {fact.source or 'a ReLU'} leave weights out: {decision.reason}; its transpose is kept, "
        f"{held.numel() * held.itemsize / 2**20:.3g} MiB, under the promise that it stays"
    )
    return Plan(lambda: {node: _build(op, node, held)}, reason, "active", "", (), decision.estimate)


RULE = Rule("active_linear", consider, after=("fuse_neurons", "sparse_linear"))


def _decision(op: CanonicalOp, node: fx.Node, ctx: Context) -> Decision | None:
    """Which way is faster; None where there is nothing to choose."""
    x, weight, bias = (op.get(name) for name in ("input", "weight", "bias"))
    out, sizes, weights = example_of(node), known_sizes(x), known_sizes(weight)
    if out is None or sizes is None or weights is None or len(weights) != 2:
        return None
    device = ctx.device(out.device)
    operands = [example_of(one) for one in (x, weight, bias) if one is not None]
    alike = all(one is not None and one.dtype is out.dtype for one in operands)
    if device.type != "cuda" or not alike or _trains(operands, ctx) or not has_triton():
        return None
    if not takes(math.prod(sizes[:-1]), sizes[-1], weights[0], out.dtype):
        return None
    density, _ = ctx.density(node)
    layer = ActiveLayer(
        sizes[-1], weights[0], bias is not None, out.dtype, density.share, not replays(ctx.options, device),
        ctx.products,
    )  # fmt: skip
    return decide(layer, *(ctx.target or target_of(device)))


def _trains(operands: list[Any], ctx: Context) -> bool:
    return ctx.gradients and any(one.requires_grad for one in operands)


def _build(op: CanonicalOp, node: fx.Node, held: Tensor) -> fx.Node:
    source, name = op.get("weight"), [f"the weight `{op.get('weight')}`"]
    weight, every = (promised_node(node, make, [source], [held], name) for make in (_transposed, must_read_all))
    return call(node.graph, node, _ACTIVE_LINEAR, op.input, weight, every, op.get("bias"))


def _transposed(weight: Tensor) -> Tensor:
    return weight.mT.contiguous()
