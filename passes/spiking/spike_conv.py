"""A convolution whose input is spikes becomes `sparsecomp::spike_conv`, in as many dimensions as kernels index.

A dense convolution multiplies floats; a spike is a small whole number, so the product can run on int8 tensor cores,
exactly, at a fraction of the float32 time. Whether that pays at this shape is the gate's business.
"""

from typing import Any

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp import _compat
from sparsecomp.passes.cost import spiking as gate
from sparsecomp.passes.engine.rule import Context, Refusal, Rule, Verdict, Why, call, known_sizes, refuse
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.spiking.operand import (
    CONVOLUTIONS,
    Operands,
    build_inputs,
    check_layer,
    choose,
    hooked,
    hosted,
    trains,
    unsupported_layer,
    writes_bytes,
)
from sparsecomp.reference.geometry import Window, is_channels_last

_LAYERS = [getattr(torch.nn, name.capitalize()) for name in CONVOLUTIONS]

_Geometry = tuple[list[int], list[int], list[int]]


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every convolution that kernels index is a candidate; others are, if spikes reach them."""
    if any(hooked(node, ctx, layer) for layer in _LAYERS):
        return refuse(Why.HOOKED)
    op = op_of(node)
    if op is None:
        return None
    if op.name not in CONVOLUTIONS:
        return unsupported_layer(op, [op.input], ctx) if op.name.startswith("conv") else None
    operands = check_layer(op, ctx)
    if isinstance(operands, Refusal):
        return operands
    geometry = geometry_of(op)
    if isinstance(geometry, Refusal):
        return geometry
    site = _site(operands, geometry, ctx)
    if isinstance(site, Refusal):
        return site
    return choose(operands, site, ctx, lambda strategy: _build(operands, geometry, strategy, ctx))


RULE = Rule("spike_conv", consider, after=("fuse_neurons", "static_stem"))


def _build(operands: Operands, geometry: _Geometry, strategy: str, ctx: Context) -> fx.Node:
    x, weight, bias, promise = build_inputs(operands, ctx)
    node, groups = operands.op.node, operands.op.get("groups")

    def emit(target: Any, *args: Any) -> fx.Node:
        return call(node.graph, node, target, *args)

    multi_step, alone = operands.op.step_mode == "m", _lacks_batch(operands.op)
    frames = emit(torch.flatten, x, 0, 1) if multi_step else emit(torch.unsqueeze, x, 0) if alone else x
    target = torch.ops.sparsecomp.spike_conv.default
    out = emit(target, frames, weight, bias, *geometry, groups, operands.digits, strategy, *promise)
    if alone:
        return emit(torch.squeeze, out, 0)
    return emit(torch.unflatten, out, 0, (emit(torch.Tensor.size, x, 0), -1)) if multi_step else out


def _lacks_batch(op: CanonicalOp) -> bool:
    """Whether the input is one map (C, …)."""
    return example_of(op.input).dim() < example_of(op.get("weight")).dim()


def geometry_of(op: CanonicalOp) -> _Geometry | Refusal:
    """Stride, padding and dilation, a number a dimension; string paddings resolved."""
    stride, dilation = _numbers(op, "stride"), _numbers(op, "dilation")
    mode = op.get("padding_mode") or "zeros"
    if mode != "zeros":
        return refuse(Why.PADDING_MODE, mode=mode)
    padding = op.get("padding")
    if not isinstance(padding, str):
        return stride, _numbers(op, "padding"), dilation
    if padding == "valid":
        return stride, [0] * len(stride), dilation
    weight = known_sizes(op.get("weight"))
    if padding != "same" or weight is None:
        return refuse(Why.PADDING, padding=padding)
    totals = [d * (extent - 1) for d, extent in zip(dilation, weight[2:], strict=True)]
    if any(total % 2 for total in totals):
        return refuse(Why.PADDING, padding=padding)
    return stride, [total // 2 for total in totals], dilation


def _site(operands: Operands, geometry: _Geometry, ctx: Context) -> gate.SiteInfo | Refusal:
    op = operands.op
    x, weight = known_sizes(op.input), known_sizes(op.get("weight"))
    if x is None or weight is None:
        return refuse(Why.UNKNOWN_SHAPE)
    if op.step_mode == "m":
        x = [x[0] * x[1], *x[2:]]
    elif len(x) == len(weight) - 1:
        x = [1, *x]
    if len(x) != len(weight):
        return refuse(Why.UNSUPPORTED_OP, op=f"{op.name} of {len(x)} dimensions")
    spikes = example_of(op.input)
    density, _ = ctx.density(op.node)
    return gate.SiteInfo(
        device=operands.device, itemsize=operands.dtype.itemsize,
        n=x[0], c=x[1], size=tuple(x[2:]), k=weight[0], window=Window.of(weight, *geometry),
        groups=op.get("groups"), digits=operands.digits, density=density.share, active=density.active,
        tf32=_compat.conv_tf32(), fused=writes_bytes(operands, ctx),
        channels_last=isinstance(spikes, torch.Tensor) and is_channels_last(spikes),
        trained=trains(ctx), hosted=hosted(operands, ctx),
    )  # fmt: skip


def _numbers(op: CanonicalOp, name: str) -> list[int]:
    """A parameter of the window, a number a dimension."""
    value = op.get(name)
    values = [value] if isinstance(value, int) else list(value)
    return values * CONVOLUTIONS[op.name] if len(values) == 1 else values
