"""conv2d or conv1d whose input is spikes becomes `sparsecomp::spike_conv2d`; conv1d as an image of height one.

A dense convolution multiplies floats; a spike is a small whole number, so the product can run on int8 tensor cores,
exactly, at a fraction of the float32 time. Whether that pays at this shape is the gate's business.
"""

from typing import Any

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp import _compat
from sparsecomp.passes.cost import spiking as gate
from sparsecomp.passes.engine.rule import Context, Refusal, Rule, Verdict, Why, call, refuse, sizes
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.spiking.operand import (
    Operands,
    build_inputs,
    check,
    choose,
    hooked,
    hosted,
    trains,
    writes_bytes,
)
from sparsecomp.reference.geometry import is_channels_last, output_size

_UNSUPPORTED = ("conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every conv1d and conv2d is a candidate; other convolutions are, if spikes reach them."""
    if hooked(node, ctx, torch.nn.Conv1d) or hooked(node, ctx, torch.nn.Conv2d):
        return refuse(Why.HOOKED)
    op = op_of(node)
    if op is None:
        return None
    if op.name in _UNSUPPORTED:
        return refuse(Why.UNSUPPORTED_OP, op=op.name) if ctx.fact(op.input, op.node) is not None else None
    if op.name not in ("conv1d", "conv2d"):
        return None
    operands = check(op, ctx)
    if isinstance(operands, Refusal):
        return operands
    geometry = _geometry(op)
    if isinstance(geometry, Refusal):
        return geometry
    site = _site(operands, geometry, ctx)
    if isinstance(site, Refusal):
        return site
    return choose(operands, site, ctx, lambda strategy: _build(operands, geometry, strategy, ctx))


RULE = Rule("spike_conv", consider, after=("fuse_neurons",))


def _build(operands: Operands, geometry: tuple[list[int], ...], strategy: str, ctx: Context) -> fx.Node:
    x, weight, bias, promise = build_inputs(operands, ctx)
    node, groups = operands.op.node, operands.op.get("groups", 1)

    def emit(target: Any, *args: Any) -> fx.Node:
        return call(node.graph, node, target, *args)

    multi_step = operands.op.step_mode == "m"
    frames = emit(torch.flatten, x, 0, 1) if multi_step else x
    flat = operands.op.name == "conv1d"
    if flat:
        frames, weight = emit(torch.unsqueeze, frames, -2), emit(torch.unsqueeze, weight, -2)
    target = torch.ops.sparsecomp.spike_conv2d.default
    out = emit(target, frames, weight, bias, *geometry, groups, operands.digits, strategy, *promise)
    out = emit(torch.squeeze, out, -2) if flat else out
    return emit(torch.unflatten, out, 0, (emit(torch.Tensor.size, x, 0), -1)) if multi_step else out


def _geometry(op: CanonicalOp) -> tuple[list[int], list[int], list[int]] | Refusal:
    """Stride, padding and dilation as pairs; string paddings resolved."""
    stride, dilation = _pair(op, "stride", 1), _pair(op, "dilation", 1)
    mode = op.get("padding_mode") or "zeros"
    if mode != "zeros":
        return refuse(Why.PADDING_MODE, mode=mode)
    padding = op.get("padding", 0)
    if not isinstance(padding, str):
        return stride, _pair(op, "padding", 0), dilation
    if padding == "valid":
        return stride, [0, 0], dilation
    kernel = _image(op, sizes(op.get("weight")))
    if padding != "same" or kernel is None:
        return refuse(Why.PADDING, padding=padding)
    totals = [dilation[i] * (kernel[2 + i] - 1) for i in range(2)]
    if any(total % 2 for total in totals):
        return refuse(Why.PADDING, padding=padding)
    return stride, [total // 2 for total in totals], dilation


def _site(operands: Operands, geometry: tuple[list[int], ...], ctx: Context) -> gate.SiteInfo | Refusal:
    op = operands.op
    x, weight = _image(op, sizes(op.input)), _image(op, sizes(op.get("weight")))
    if x is None or weight is None:
        return refuse(Why.UNKNOWN_SHAPE)
    if op.step_mode == "m":
        x = [x[0] * x[1], *x[2:]]
    if len(x) != 4:
        return refuse(Why.UNSUPPORTED_OP, op=f"{op.name} without a batch dimension")
    out = output_size(x[2:], weight[2:], *geometry)
    spikes = example_of(op.input)
    density, _ = ctx.density(op.node)
    return gate.SiteInfo(
        device=operands.device, itemsize=operands.dtype.itemsize,
        n=x[0], c=x[1], h=x[2], w=x[3], k=weight[0], r=weight[2], s=weight[3], out_h=out[0], out_w=out[1],
        groups=op.get("groups", 1), digits=operands.digits, density=density.share, active=density.active,
        tf32=_compat.conv_tf32(), fused=writes_bytes(operands, ctx),
        channels_last=isinstance(spikes, torch.Tensor) and is_channels_last(spikes),
        stride=(geometry[0][0], geometry[0][1]), trained=trains(ctx), hosted=hosted(operands, ctx),
    )  # fmt: skip


def _image(op: CanonicalOp, size: list[int] | None) -> list[int] | None:
    """A shape as the two-dimensional operator sees it: a signal is an image of height one."""
    return size if size is None or op.name == "conv2d" else [*size[:-1], 1, size[-1]]


def _pair(op: CanonicalOp, name: str, idle: int) -> list[int]:
    """A window parameter by rows and columns; `idle` is its value for the rows of a signal, and its default."""
    value = op.get(name, idle)
    values = [value] if isinstance(value, int) else list(value)
    if op.name == "conv1d":
        return [idle, *values]
    return values * 2 if len(values) == 1 else values
