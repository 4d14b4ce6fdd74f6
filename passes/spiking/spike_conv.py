"""A convolution whose input is spikes becomes `sparsecomp::spike_conv`, in as many dimensions as kernels index.

A dense convolution multiplies floats; a spike is a small whole number, so the product can run on int8 tensor cores,
exactly, at a fraction of the float32 time. Whether that pays at this shape is the gate's business.
"""

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp.lowering.spiking.implementations import SiteInfo
from sparsecomp.passes.cost.conv_neuron import Behind
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.engine.rule import Context, Refusal, Rule, Verdict, Why, call, known_sizes, refuse
from sparsecomp.passes.graph.canonicalize import CanonicalOp, op_of
from sparsecomp.passes.spiking.frames import numbers, on_frames, site_of
from sparsecomp.passes.spiking.neurons_behind import neurons_behind
from sparsecomp.passes.spiking.operand import (
    CONVOLUTIONS,
    TRANSPOSED,
    Operands,
    build_inputs,
    check_layer,
    choose,
    hooked,
    together_or_written,
    unsupported_layer,
)
from sparsecomp.reference.geometry import Window

_LAYERS = [getattr(torch.nn, name.capitalize()) for name in CONVOLUTIONS]

_Geometry = tuple[list[int], list[int], list[int]]


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every convolution that kernels index is a candidate; others are, if spikes reach them."""
    if any(hooked(node, ctx, layer) for layer in _LAYERS):
        return refuse(Why.HOOKED)
    op = op_of(node)
    if op is None or op.name in TRANSPOSED:
        return None
    if op.name not in CONVOLUTIONS:
        return unsupported_layer(op, [op.input], ctx) if op.name.startswith("conv") else None
    found = _legal(op, ctx)
    if isinstance(found, Refusal):
        return found
    operands, geometry, site = found
    behind = neurons_behind(node, False, ctx)
    return choose(operands, site, ctx, lambda strategy: _build(operands, geometry, strategy, ctx), behind)


RULE = Rule("spike_conv", consider, after=("fuse_neurons", "static_stem"))


def conv_with_neurons(node: fx.Node, behind: Behind, ctx: Context) -> Decision | None:
    """The decision about one launch of a convolution and neurons behind it that are written by hand, if it is legal."""
    op = op_of(node)
    found = None if op is None or any(hooked(node, ctx, layer) for layer in _LAYERS) else _legal(op, ctx)
    return None if found is None or isinstance(found, Refusal) else together_or_written(found[0], found[2], behind, ctx)


def _legal(op: CanonicalOp, ctx: Context) -> tuple[Operands, _Geometry, SiteInfo] | Refusal:
    operands = check_layer(op, ctx)
    if isinstance(operands, Refusal):
        return operands
    geometry = geometry_of(op)
    if isinstance(geometry, Refusal):
        return geometry
    weight = known_sizes(op.get("weight"))
    if weight is None:
        return refuse(Why.UNKNOWN_SHAPE)
    site = site_of(operands, weight[0], Window.of(weight, *geometry), ctx)
    return site if isinstance(site, Refusal) else (operands, geometry, site)


def _build(operands: Operands, geometry: _Geometry, strategy: str, ctx: Context) -> fx.Node:
    op, (x, weight, bias, promise) = operands.op, build_inputs(operands, ctx)
    target, how = torch.ops.sparsecomp.spike_conv.default, (op.get("groups"), operands.digits, strategy)

    def convolve(frames: fx.Node) -> fx.Node:
        return call(op.node.graph, op.node, target, frames, weight, bias, *geometry, *how, *promise)

    return on_frames(op, x, convolve)


def geometry_of(op: CanonicalOp) -> _Geometry | Refusal:
    """Stride, padding and dilation, a number a dimension; string paddings resolved."""
    dims = CONVOLUTIONS[op.name]
    stride, dilation = numbers(op, "stride", dims), numbers(op, "dilation", dims)
    mode = op.get("padding_mode") or "zeros"
    if mode != "zeros":
        return refuse(Why.PADDING_MODE, mode=mode)
    padding = op.get("padding")
    if not isinstance(padding, str):
        return stride, numbers(op, "padding", dims), dilation
    if padding == "valid":
        return stride, [0] * len(stride), dilation
    weight = known_sizes(op.get("weight"))
    if padding != "same" or weight is None:
        return refuse(Why.PADDING, padding=padding)
    totals = [d * (extent - 1) for d, extent in zip(dilation, weight[2:], strict=True)]
    if any(total % 2 for total in totals):
        return refuse(Why.PADDING, padding=padding)
    return stride, [total // 2 for total in totals], dilation
