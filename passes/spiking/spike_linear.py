"""linear whose input is spikes becomes `sparsecomp::spike_linear`; see `spike_conv` for why."""

import math

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp import _compat
from sparsecomp.passes.cost import spiking as gate
from sparsecomp.passes.cost.conv_neuron import Behind
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.engine.rule import Context, Refusal, Rule, Verdict, Why, call, known_sizes, refuse
from sparsecomp.passes.graph.canonicalize import op_of
from sparsecomp.passes.spiking.batched_product import batched_product
from sparsecomp.passes.spiking.neurons_behind import neurons_behind
from sparsecomp.passes.spiking.operand import (
    Operands,
    build_inputs,
    check_layer,
    choose,
    hooked,
    hosted,
    together_or_written,
    trains,
    unsupported_layer,
    writes_bytes,
)
from sparsecomp.passes.spiking.spike_matmul import facts_of_both
from sparsecomp.reference.geometry import Window


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every linear is a candidate; other products are, if spikes reach them."""
    if hooked(node, ctx, torch.nn.Linear):
        return refuse(Why.HOOKED)
    op = op_of(node)
    if op is None or op.name.startswith("conv"):
        return None
    if op.name != "linear":
        product = batched_product(node)
        if product is not None and facts_of_both(product, ctx) is not None:
            return None  # `spike_matmul` judges it
        return unsupported_layer(op, node.all_input_nodes, ctx)
    operands = check_layer(op, ctx)
    if isinstance(operands, Refusal):
        return operands
    site = _site(operands, ctx)
    if isinstance(site, Refusal):
        return site
    behind = neurons_behind(node, True, ctx)
    return choose(operands, site, ctx, lambda strategy: _build(operands, strategy, ctx), behind)


def linear_with_neurons(node: fx.Node, behind: Behind, ctx: Context) -> Decision | None:
    """The decision about one launch of a layer and neurons behind it that are written by hand, if it is legal."""
    op = op_of(node)
    operands = None if op is None or hooked(node, ctx, torch.nn.Linear) else check_layer(op, ctx)
    if operands is None or isinstance(operands, Refusal):
        return None
    site = _site(operands, ctx)
    return None if isinstance(site, Refusal) else together_or_written(operands, site, behind, ctx)


RULE = Rule("spike_linear", consider, after=("fuse_neurons", "sparse_linear", "sparse_matmul", "active_linear"))
"""A product with a sparse weight has no dense one to split."""


def _build(operands: Operands, strategy: str, ctx: Context) -> fx.Node:
    x, weight, bias, promise = build_inputs(operands, ctx)
    node, target = operands.op.node, torch.ops.sparsecomp.spike_linear.default
    return call(node.graph, node, target, x, weight, bias, operands.digits, strategy, *promise)


def _site(operands: Operands, ctx: Context) -> gate.SiteInfo | Refusal:
    op = operands.op
    x, weight = known_sizes(op.input), known_sizes(op.get("weight"))
    if x is None or weight is None:
        return refuse(Why.UNKNOWN_SHAPE)
    if len(weight) != 2:
        return refuse(Why.UNSUPPORTED_OP, op="linear with a vector for a weight")
    density, _ = ctx.density(op.node)
    return gate.SiteInfo(
        device=operands.device, itemsize=operands.dtype.itemsize,
        n=math.prod(x[:-1]), c=x[-1], size=(1, 1), k=weight[0], window=Window.centred((1, 1), (1, 1)), groups=1,
        digits=operands.digits, density=density.share, active=density.active,
        tf32=_compat.matmul_tf32(), channels_last=True, fused=writes_bytes(operands, ctx),
        trained=trains(ctx), hosted=hosted(operands, ctx),
    )  # fmt: skip
