"""Evaluation-mode batch-norm after a rewritten convolution moves into the convolution's weight and bias.

Only where the graph runs op by op: there batch-norm is a pass over memory of its own. Under torch.compile Inductor
fuses it with what is behind it, and neurons that are an operator take it in (`fuse_neurons`, `neuron_norm`): folding
would only move rounding errors in front of a threshold. The folding is part of the graph, so later changes of the
weights or the statistics, and gradients, keep working.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp.passes.engine.rule import Context, Plan, Rule, Verdict, Why, call, refuse
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.spiking.operand import attribute

_CONV, _TRANSPOSED = torch.ops.sparsecomp.spike_conv.default, torch.ops.sparsecomp.spike_conv_transpose.default


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every batch-norm right behind a rewritten convolution is a candidate."""
    op = op_of(node)
    if op is None or op.name != "batch_norm":
        return None
    conv, multi_step = _producer(op)
    if conv.target not in (_CONV, _TRANSPOSED):
        return None
    if not ctx.eager:
        return refuse(Why.NOT_FOLDED, detail="Inductor, or the neurons behind it, take it in")
    if op.get("training"):
        return refuse(Why.NOT_FOLDED, detail="batch statistics depend on the convolution's result")
    if len(conv.users) != 1 or len(op.input.users) != 1:
        return refuse(Why.NOT_FOLDED, detail="the convolution's result has other consumers")
    if not all(ctx.analysis.unchanged(read, conv) for read in (conv, *conv.all_input_nodes)):
        return refuse(Why.NOT_FOLDED, detail="what the convolution read is written to in place")
    x = example_of(conv)
    if x is None or x.dtype is not torch.float32:
        return refuse(Why.NOT_FOLDED, detail="folding would round half-precision weights a second time")
    reason, dead = "one pass over memory less", (op.input, conv)
    return Plan(lambda: {node: _build(op, conv, multi_step)}, reason, "folded", dead=dead)


RULE = Rule("fold_batch_norm", consider, after=("spike_conv", "spike_conv_transpose"))


def _producer(op: CanonicalOp) -> tuple[fx.Node, bool]:
    """What made the input of a batch-norm, seen through the time axis that multi-step layers put back."""
    if op.step_mode == "m" and op.input.target is torch.unflatten:
        return op.input.args[0], True
    return op.input, False


def _build(op: CanonicalOp, conv: fx.Node, multi_step: bool) -> fx.Node:
    node = op.node

    def emit(target: Any, *args: Any) -> fx.Node:
        return call(node.graph, node, target, *args)

    parts = {name: attribute(op, name) for name in ("running_mean", "running_var", "weight", "bias")}
    inverse = emit(torch.rsqrt, emit(torch.add, parts["running_var"], op.get("eps")))
    scale = inverse if parts["weight"] is None else emit(torch.mul, inverse, parts["weight"])
    x, weight, bias, *geometry = conv.args
    shift = parts["running_mean"] if bias is None else emit(torch.sub, parts["running_mean"], bias)
    shift = emit(torch.mul, shift, scale)
    shift = emit(torch.neg, shift) if parts["bias"] is None else emit(torch.sub, parts["bias"], shift)
    scaled = _scaled(conv, weight, scale, emit)
    folded = call(node.graph, conv, conv.target, x, scaled, shift, *geometry)
    return emit(torch.unflatten, folded, *op.input.args[1:]) if multi_step else folded


def _scaled(conv: fx.Node, weight: Any, scale: fx.Node, emit: Callable[..., fx.Node]) -> fx.Node:
    """A convolution's weight, times a number an output channel."""
    stride: Any = conv.args[3]
    spread = (1,) * len(stride)  # a number a dimension
    if conv.target is _CONV:
        return emit(torch.mul, weight, emit(torch.reshape, scale, (-1, 1, *spread)))
    # (C, K / groups, …): a group's inputs have its outputs' numbers
    groups = conv.args[6]
    grouped = emit(torch.unflatten, weight, 0, (groups, -1))
    return emit(torch.flatten, emit(torch.mul, grouped, emit(torch.reshape, scale, (groups, 1, -1, *spread))), 0, 1)
