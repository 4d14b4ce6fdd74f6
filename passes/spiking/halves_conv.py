"""A float32 convolution of an exact network becomes `sparsecomp::halves_conv`, on 16-bit tensor cores.

What reads images instead of spikes, a network's stem, is dense; where the user keeps TF32 from it, it runs without
tensor cores. Three products of halves are as exact, so that this changes no more than the order of its sums.
"""

import torch
from torch import Tensor, fx, nn

import sparsecomp.ops  # noqa: F401  (registers the operator)
from sparsecomp import _compat
from sparsecomp.lowering.cache.signature import has_triton
from sparsecomp.lowering.spiking.convolution import Convolution
from sparsecomp.lowering.spiking.halves_conv import HalvesConv, takes_images
from sparsecomp.lowering.tuning.ceilings import target_of
from sparsecomp.passes.cost import halves_conv as gate
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, known_sizes, replays
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.spiking.operand import attribute, hooked, trains
from sparsecomp.passes.spiking.spike_conv import geometry_of
from sparsecomp.reference.geometry import Window, is_channels_last

_MOST_CHANNELS = 16
"""Of the input: the kernel takes any number, and is meant, and estimated, for images."""
_SURE = 1.5
"""Least gain by an estimate that nothing was fitted to."""


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: an exact convolution of few channels is a site, where there is a GPU to gain on."""
    op, options = op_of(node), ctx.options
    if op is None or op.name != "conv2d" or options.implementation == "dense" or hooked(node, ctx, nn.Conv2d):
        return None
    if options.precision != "exact":  # asked for: how fast it is on a GPU was estimated, and not measured
        return None
    tf32 = _compat.conv_tf32()
    decision = _decision(op, tf32, ctx)
    if decision is None:
        return None
    if not decision.dense and (decision.gain or 0.0) >= _SURE:
        reason = f"float32 as three products of halves: {decision.reason}"
        return Plan(lambda: {node: _build(op)}, reason, "halves", "exact", estimate=decision.estimate)
    detail = f"{decision.reason}, where {_SURE} times dense's speed is asked for"
    detail += "; dense is TF32, as torch.backends.cudnn.allow_tf32 lets it be" if tf32 else ""
    return Refusal(Why.GATE, {"detail": detail}, decision.estimate)


RULE = Rule("halves_conv", consider, after=("static_stem", "spike_conv"))


def _decision(op: CanonicalOp, tf32: bool, ctx: Context) -> Decision | None:
    """What the gate picks; None where there is nothing to choose."""
    x, weight, out, bias = (example_of(one) for one in (op.input, op.get("weight"), op.node, op.get("bias")))
    if x is None or weight is None or out is None or op.get("groups") != 1:
        return None
    device = ctx.device(x.device)
    legal = out.dtype is torch.float32 and takes_images(x, weight, bias) and x.shape[1] <= _MOST_CHANNELS
    if not legal or device.type != "cuda" or not has_triton():
        return None
    problem = _problem(op, x, weight, out)
    if problem is None:
        return None
    hosted = ctx.eager or not replays(ctx.options, device)
    trained = trains(ctx) and any(one.requires_grad for one in (x, weight))
    return gate.decide(problem, tf32, trained, hosted, *(ctx.target or target_of(device)))


def _problem(op: CanonicalOp, x: Tensor, weight: Tensor, out: Tensor) -> HalvesConv | None:
    geometry, sizes, kernel = geometry_of(op), known_sizes(op.input), known_sizes(op.get("weight"))
    if isinstance(geometry, Refusal) or sizes is None or kernel is None or 0 in sizes:
        return None
    window = Window.of(kernel, *geometry)
    if min(window.output_size(sizes[2:])) < 1:
        return None
    has_bias = op.get("bias") is not None
    conv = Convolution.of(sizes, kernel, window, channels_last=is_channels_last(out), has_bias=has_bias)
    strides = [_compat.size_hint(stride) for stride in x.stride()]
    known = tuple(stride for stride in strides if stride is not None)
    return HalvesConv(conv, known, not weight.is_contiguous()) if len(known) == len(strides) else None


def _build(op: CanonicalOp) -> fx.Node:
    geometry, out = geometry_of(op), example_of(op.node)
    assert out is not None and not isinstance(geometry, Refusal)
    weight, bias = attribute(op, "weight"), attribute(op, "bias")
    target = torch.ops.sparsecomp.halves_conv.default
    return call(op.node.graph, op.node, target, op.input, weight, bias, *geometry, is_channels_last(out))
