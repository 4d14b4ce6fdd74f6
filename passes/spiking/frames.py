"""What rules of convolutions share: how an input becomes a batch of maps, the window's numbers, and the gate's site."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.passes.cost import spiking as gate
from sparsecomp.passes.engine.rule import Context, Refusal, Why, call, known_sizes, refuse
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of
from sparsecomp.passes.spiking.operand import Operands, hosted, trains, writes_bytes
from sparsecomp.reference.geometry import AnyWindow, is_channels_last


def on_frames(op: CanonicalOp, x: fx.Node, convolve: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """`convolve` of the maps (N, C, …) in `x`, which may have a time axis in front, or no batch dimension."""
    node = op.node

    def emit(target: Any, *args: Any) -> fx.Node:
        return call(node.graph, node, target, *args)

    if op.step_mode == "m":
        return emit(torch.unflatten, convolve(emit(torch.flatten, x, 0, 1)), 0, (emit(torch.Tensor.size, x, 0), -1))
    if example_of(op.input).dim() < example_of(op.get("weight")).dim():
        return emit(torch.squeeze, convolve(emit(torch.unsqueeze, x, 0)), 0)
    return convolve(x)


def numbers(op: CanonicalOp, name: str, dims: int) -> list[int]:
    """A parameter of the window, a number a dimension."""
    value = op.get(name)
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def site_of(operands: Operands, outputs: int, window: AnyWindow, ctx: Context) -> gate.SiteInfo | Refusal:
    """What the gate is told of a convolution with so many output channels."""
    op = operands.op
    x = known_sizes(op.input)
    if x is None:
        return refuse(Why.UNKNOWN_SHAPE)
    rank = 2 + len(window.kernel)
    if op.step_mode == "m":
        x = [x[0] * x[1], *x[2:]]
    elif len(x) == rank - 1:
        x = [1, *x]
    if len(x) != rank:
        return refuse(Why.UNSUPPORTED_OP, op=f"{op.name} of {len(x)} dimensions")
    density, _ = ctx.density(op.node)
    return gate.SiteInfo(
        device=operands.device, itemsize=operands.dtype.itemsize,
        n=x[0], c=x[1], size=tuple(x[2:]), k=outputs, window=window,
        groups=op.get("groups"), digits=operands.digits, density=density.share, active=density.active,
        tf32=_compat.conv_tf32(), fused=writes_bytes(operands, ctx),
        channels_last=_runs_channels_last(op, rank),
        trained=trains(ctx), hosted=hosted(operands, ctx),
    )  # fmt: skip


def _runs_channels_last(op: CanonicalOp, rank: int) -> bool:
    """Whether the dense operator does: then its result lies so, be it for the input's or for the weight's sake."""
    out = example_of(op.node)
    if not isinstance(out, torch.Tensor):
        return False
    return is_channels_last(out.flatten(0, 1) if out.dim() > rank else out)
