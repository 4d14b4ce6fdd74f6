"""A transposed convolution of spikes becomes `sparsecomp::spike_conv_transpose`; see `spike_conv` for why."""

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp.passes.engine.rule import Context, Refusal, Rule, Verdict, Why, call, known_sizes, refuse
from sparsecomp.passes.graph.canonicalize import op_of
from sparsecomp.passes.spiking.frames import numbers, on_frames, site_of
from sparsecomp.passes.spiking.operand import TRANSPOSED, Operands, build_inputs, check_layer, choose, hooked
from sparsecomp.reference.geometry import TransposedWindow

_LAYERS = [getattr(torch.nn, f"ConvTranspose{dims}d") for dims in TRANSPOSED.values()]


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every transposed convolution is a candidate."""
    if any(hooked(node, ctx, layer) for layer in _LAYERS):
        return refuse(Why.HOOKED)
    op = op_of(node)
    if op is None or op.name not in TRANSPOSED:
        return None
    operands = check_layer(op, ctx)
    if isinstance(operands, Refusal):
        return operands
    weight = known_sizes(op.get("weight"))
    if weight is None:
        return refuse(Why.UNKNOWN_SHAPE)
    if ctx.options.implementation in ("event", "skip"):
        return refuse(Why.UNSUPPORTED_OP, op=f"{op.name} with implementation={ctx.options.implementation!r}")
    names = ("stride", "padding", "output_padding", "dilation")
    window = TransposedWindow.of(weight, *(numbers(op, name, TRANSPOSED[op.name]) for name in names))
    site = site_of(operands, weight[1] * op.get("groups"), window, ctx)
    if isinstance(site, Refusal):
        return site
    return choose(operands, site, ctx, lambda strategy: _build(operands, window, ctx))


RULE = Rule("spike_conv_transpose", consider, after=("fuse_neurons", "static_stem"))


def _build(operands: Operands, window: TransposedWindow, ctx: Context) -> fx.Node:
    op, (x, weight, bias, promise) = operands.op, build_inputs(operands, ctx)
    _, stride, padding, output_padding, dilation = map(list, window)
    how = (stride, padding, output_padding, op.get("groups"), dilation, operands.digits)

    def convolve(frames: fx.Node) -> fx.Node:
        target = torch.ops.sparsecomp.spike_conv_transpose.default
        return call(op.node.graph, op.node, target, frames, weight, bias, *how, *promise)

    return on_frames(op, x, convolve)
