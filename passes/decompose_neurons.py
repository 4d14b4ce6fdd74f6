"""spikingjelly's opaque neuron operators become plain operators, so that Inductor can fuse what stands around them.

On CUDA `sj_lif`, `sj_if` and `sj_plif` are Triton kernels that Inductor cannot look into: batch-norm before and the
cast to one byte after are then passes over memory of their own. Unrolled over time in the graph, the three become one
kernel. The arithmetic is that of spikingjelly's reference, in the same order, in float32.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from sparsecomp.passes.canonicalize import op_of
from sparsecomp.passes.rule import Context, Plan, Rule, Verdict, Why, call, example, refuse

MAX_STEPS = 16
"""Longer sequences would make kernels that take minutes to compile."""

_NEURONS = ("sj_lif::forward", "sj_if::forward", "sj_plif::forward")
_SPIKES, _VOLTAGE, _CHARGED = range(3)


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every neuron operator is a candidate."""
    op = op_of(node)
    if op is None or op.name not in _NEURONS:
        return None
    x = example(node.args[0])
    if x is None:
        return refuse(Why.UNKNOWN_SHAPE)
    if x.device.type != "cuda" and ctx.options.neurons != "inline":
        return refuse(Why.NOT_INLINED, detail="on the CPU the operator is no Triton kernel, and nothing is gained")
    if ctx.eager:
        return refuse(Why.NOT_INLINED, detail="run op by op, the operator's own kernel is faster")
    if torch.is_grad_enabled():
        return refuse(
            Why.NOT_INLINED, detail="gradients are enabled, so the operator keeps its own backward; use torch.no_grad()"
        )
    steps = int(x.shape[0])  # guards on the number of steps, as the operator's own kernel does
    if steps > MAX_STEPS:
        return refuse(Why.NOT_INLINED, detail=f"{steps} time steps: unrolled up to {MAX_STEPS}")
    items = [user for user in node.users if user.target is operator.getitem]
    if len(items) != len(node.users):
        return refuse(Why.NOT_INLINED, detail="the operator's result is used as a whole")
    reason = f"{steps} time steps unrolled, to fuse with the layers around"
    return Plan(lambda: _build(node, items, op.name, steps), reason, "inline")


RULE = Rule("decompose_neurons", consider)


@dataclass(frozen=True, slots=True)
class _Emitter:
    """Emits calls with the provenance of one node."""

    like: fx.Node

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        return call(self.like.graph, self.like, target, *args)


def _build(node: fx.Node, items: list[fx.Node], name: str, steps: int) -> Mapping[fx.Node, fx.Node]:
    emit, args = _Emitter(node), _arguments(node)
    charge = _CHARGES[name](emit, args)
    dtype = example(args["x_seq"]).dtype
    v, spikes, voltages, charged = args["v_init"], [], [], []
    for step in range(steps):
        x = emit(torch.select, args["x_seq"], 0, step)
        h = charge(x if dtype is torch.float32 else emit(torch.Tensor.float, x), v)
        spike = emit(torch.Tensor.to, emit(torch.ge, h, args["threshold"]), torch.float32)
        v = _reset(emit, h, spike, args)
        spikes.append(spike if dtype is torch.float32 else emit(torch.Tensor.to, spike, dtype))
        voltages.append(v)
        charged.append(h)
    results = {
        _SPIKES: lambda: emit(torch.stack, spikes),
        _VOLTAGE: lambda: emit(torch.stack, voltages) if args["store_v_seq"] else v,
        _CHARGED: lambda: emit(torch.stack, charged),
    }
    return {item: results[cast(int, item.args[1])]() for item in items}


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The call's arguments by the names of spikingjelly's schema, which differs in the first two between releases."""
    names = [argument.name for argument in node.target._schema.arguments]  # pyright: ignore
    defaults = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}  # pyright: ignore
    bound = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    bound["x_seq"], bound["v_init"] = bound[names[0]], bound[names[1]]
    return bound


def _reset(emit: _Emitter, h: fx.Node, spike: fx.Node, args: Mapping[str, Any]) -> fx.Node:
    if args["reset"] is None:
        return emit(torch.sub, h, emit(torch.mul, spike, args["threshold"]))
    kept = emit(torch.mul, emit(torch.rsub, spike, 1.0), h)
    return emit(torch.add, emit(torch.mul, spike, args["reset"]), kept)


def _leak(emit: _Emitter, args: Mapping[str, Any], decay: Callable[[fx.Node], fx.Node]) -> Callable[..., fx.Node]:
    """The charge of a leaky neuron: `decay` is division by tau or multiplication by its learnt inverse."""
    rest = 0.0 if args["reset"] is None else args["reset"]

    def charge(x: fx.Node, v: fx.Node) -> fx.Node:
        above = emit(torch.sub, v, rest)
        if args["decay_input"]:
            return emit(torch.add, v, decay(emit(torch.sub, x, above)))
        return emit(torch.add, emit(torch.sub, v, decay(above)), x)

    return charge


def _lif(emit: _Emitter, args: Mapping[str, Any]) -> Callable[..., fx.Node]:
    return _leak(emit, args, lambda value: emit(torch.div, value, args["tau"]))


def _plif(emit: _Emitter, args: Mapping[str, Any]) -> Callable[..., fx.Node]:
    rate = emit(torch.sigmoid, emit(torch.Tensor.float, args["w"]))
    return _leak(emit, args, lambda value: emit(torch.mul, value, rate))


def _if(emit: _Emitter, args: Mapping[str, Any]) -> Callable[..., fx.Node]:
    return lambda x, v: emit(torch.add, v, x)


_CHARGES = {"sj_lif::forward": _lif, "sj_plif::forward": _plif, "sj_if::forward": _if}
