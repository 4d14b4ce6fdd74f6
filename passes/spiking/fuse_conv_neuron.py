"""A spike convolution, or linear layer, and the neurons that alone read it become one operator over all time steps.

Apart, they are two launches with a float32 number for each neuron and step between them, of which the neuron keeps one
bit. Together they write spikes alone, and last membranes where they are asked for. The spikes are the same, bit by bit.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operator)
from sparsecomp.lowering.cache.signature import has_triton
from sparsecomp.lowering.spiking.implementations import SiteInfo
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.passes.cost import conv_neuron as gate
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, known_sizes, refuse, replays
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.spiking.neurons_behind import (
    DESCRIBED,
    LIF,
    Between,
    behind_of,
    between_of,
    idle_readers,
    launched_before,
    why_apart,
)
from sparsecomp.passes.spiking.operand import attribute
from sparsecomp.reference.facts import is_dyadic
from sparsecomp.reference.geometry import Window, is_channels_last

_SPIKES = 0
_CURRENTS: Mapping[Any, int] = {LIF: 2, DESCRIBED: 3}
"""Where the operators of both have what the neurons are given among their results."""
_CONV, _LINEAR = torch.ops.sparsecomp.spike_conv.default, torch.ops.sparsecomp.spike_linear.default
_OPERATORS: Mapping[Any, Any] = {
    LIF: torch.ops.sparsecomp.conv_lif.default, DESCRIBED: torch.ops.sparsecomp.conv_neuron.default
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Product:
    """The product of one site.

    Attributes:
        between: its call, and how neurons get what it gives.
        x, weight, bias: its operands.
        window: stride, padding and dilation.
        groups, digits, scale, binary, spread: as of `sparsecomp::spike_conv`.
    """

    between: Between
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    window: tuple[list[int], list[int], list[int]]
    groups: int
    digits: int
    scale: float
    binary: bool
    spread: float

    @property
    def node(self) -> fx.Node:
        return self.between.layer

    @property
    def is_linear(self) -> bool:
        return self.node.target is _LINEAR


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every fused neuron behind a product on int8 tensor cores is a candidate."""
    if node.target not in (LIF, DESCRIBED):
        return None
    layer = _layer(node, ctx)
    if layer is None:
        return None
    found = _considered(node, layer, ctx)
    if isinstance(found, Refusal):
        return Refusal(found.why, found.details, found.estimate, layer.node)
    steps = example_of(node.args[0]).shape[0]
    reason = f"with the neurons behind it in one launch, {steps} time steps; {found.reason}"
    written, place = bool(layer.between.others({node})), launched_before(node, layer.between, ctx)
    assert place is not None
    reason += "; what the neurons are given is written for others, too" if written else ""
    return Plan(
        lambda: _build(node, layer, written, place), reason, "fused", dead=_gone(node, layer.between),
        estimate=found.estimate, layer=layer.node, places=(place,),
    )  # fmt: skip


RULE = Rule("fuse_conv_neuron", consider, after=("narrow_spikes",), of_rewritten=True)


def _considered(node: fx.Node, layer: _Product, ctx: Context) -> Decision | Refusal:
    found = why_apart(node, layer.between, layer.is_linear, ctx)
    if found is not None:
        return refuse(Why.NOT_WITH_NEURONS, detail=found)
    x, asked = example_of(layer.x), ctx.options.neurons == "fuse"
    device = ctx.device(x.device)
    on_card = device.type == "cuda" and (ctx.target is not None or has_triton())
    if asked and not on_card:
        return Decision("fused", "neurons='fuse' was asked for")
    if not on_card:
        return refuse(Why.NOT_WITH_NEURONS, detail="on the CPU nothing is gained")
    out = example_of(layer.node)
    if not asked and not layer.is_linear and not is_channels_last(out):
        return refuse(Why.NOT_WITH_NEURONS, detail="its result is not channels-last, and bytes would be written apart")
    site = _site(layer, not replays(ctx.options, device))
    if site is None:
        return Decision("fused", "neurons='fuse' was asked for") if asked else refuse(Why.UNKNOWN_SHAPE)
    card = H100 if not torch.cuda.is_available() else card_of(x.device)
    decision = gate.decide(site, behind_of(node, layer.between), card if ctx.target is None else ctx.target.card)
    if asked:
        return decision._replace(implementation="fused", reason="neurons='fuse' was asked for")
    if decision.dense:
        return Refusal(Why.NOT_WITH_NEURONS, {"detail": decision.reason}, decision.estimate)
    return decision


def _layer(node: fx.Node, ctx: Context) -> _Product | None:
    """The product that gives a neuron operator its input."""
    between = between_of(node, lambda one: one.target in (_CONV, _LINEAR))
    if between is None:
        return None
    args: tuple[Any, ...] = between.layer.args
    if between.layer.target is _CONV:
        x, weight, bias, stride, padding, dilation, groups, digits, how, scale, factor, binary, spread, _ = args
    else:
        x, weight, bias, digits, how, scale, factor, binary, spread, _ = args
        stride, padding, dilation, groups = [1, 1], [0, 0], [1, 1], 1
    if how != "binary" or factor is not None or not is_dyadic(scale):
        return None
    window = stride, padding, dilation
    return _Product(between, x, weight, bias, window, groups, digits, scale, binary, spread)


def _site(layer: _Product, hosted: bool) -> SiteInfo | None:
    x, weight = known_sizes(layer.x), known_sizes(layer.weight)
    if x is None or weight is None:
        return None
    if layer.is_linear:
        x, weight = [prod(x[:-1]), x[-1], 1, 1], [*weight, 1, 1]
    return SiteInfo(
        device="cuda", itemsize=example_of(layer.node).dtype.itemsize, n=x[0], c=x[1], size=tuple(x[2:]), k=weight[0],
        window=Window.of(weight, *layer.window), groups=layer.groups, digits=layer.digits, density=None, active=None,
        tf32=False, channels_last=True, fused=True, hosted=hosted,
    )  # fmt: skip


def _gone(neurons: fx.Node, between: Between) -> tuple[fx.Node, ...]:
    """What nobody reads any more once the layer and its neurons are one operator, the last first.

    Who reads what the neurons are given, or views of that, reads the operator's.
    """
    idle = [one for part in between.nodes for one in idle_readers(part)]
    gone, views = {neurons, *idle}, between.nodes[: between.nodes.index(between.given)]
    for one in views:
        if gone.issuperset(one.users):
            gone.add(one)
    return (*idle, *(one for one in between.nodes if one in gone or one not in views))


def _build(node: fx.Node, layer: _Product, written: bool, place: fx.Node) -> Mapping[fx.Node, fx.Node]:
    with node.graph.inserting_before(place):
        return _together(node, layer, written)


def _together(node: fx.Node, layer: _Product, written: bool) -> Mapping[fx.Node, fx.Node]:
    def emit(target: Any, *inputs: Any) -> fx.Node:
        return call(node.graph, node, target, *inputs)

    current, out = example_of(node.args[0]), example_of(layer.node)
    counts = _counts(layer, emit)
    if layer.is_linear:
        counts = emit(torch.reshape, counts, (-1, example_of(layer.weight).shape[1], 1, 1))
    kept = any(user.args[1] != _SPIKES and user.users for user in node.users)
    both = emit(
        _OPERATORS[node.target], counts, layer.weight, layer.bias, *layer.window, layer.groups, layer.digits,
        layer.scale, layer.spread, layer.is_linear or is_channels_last(out), current.shape[0],
        *(_described if node.target is DESCRIBED else _library)(node, layer.between, emit), kept,
        *_besides(layer.between, current, node, written, emit),
    )  # fmt: skip
    results = {}
    for item in node.users:
        part = emit(operator.getitem, both, item.args[1])
        if layer.is_linear and (kept or item.args[1] == _SPIKES):
            part = emit(torch.flatten, part, 2 if item.args[1] == _SPIKES else 1)
        results[item] = part
    if written:
        given = layer.between.given
        part = emit(operator.getitem, both, _CURRENTS[node.target])
        results[given] = emit(torch.reshape, part, tuple(example_of(given).shape))
    return results


def _library(node: fx.Node, between: Between, emit: Any) -> tuple[Any, ...]:
    """Arguments of `sparsecomp::conv_lif` from the first membrane on, of those of `sparsecomp::lif`."""
    _, v, v0, *norm_and_neuron = node.args
    if between.norm is not None:
        norm_and_neuron[:5] = _norm(between)
    return (v, v0, *norm_and_neuron)


def _described(node: fx.Node, between: Between, emit: Any) -> tuple[Any, ...]:
    """Arguments of `sparsecomp::conv_neuron` from the mean on, of those of `sparsecomp::neuron`."""
    args: tuple[Any, ...] = node.args
    _, states, starts, parameters, numbers, step, *_ = args
    flat = [emit(torch.flatten, one) for one in parameters]
    return (*_norm(between), states, starts, flat, numbers, step)


def _norm(between: Between) -> tuple[Any, ...]:
    """Mean, variance, factor and bias of a batch-norm, and its epsilon."""
    op = between.norm
    if op is None:
        return (None, None, None, None, 0.0)
    return (*(attribute(op, name) for name in ("running_mean", "running_var", "weight", "bias")), op.get("eps"))


def _besides(
    between: Between, current: torch.Tensor, node: fx.Node, written: bool, emit: Any
) -> tuple[Any, ...]:  # fmt: skip
    """The last arguments, of a sum on the way to the neurons, whether what they are given is `written`, and
    the dtype of described ones' states."""
    added = between.added_in_bytes(node)
    if added is not None and example_of(between.added).shape != current.shape:
        added = emit(torch.reshape, added, current.shape)
    kept = node.args[7:] if node.target is DESCRIBED else ()
    if written or any(kept):
        return (None, "add", added, written, *kept)
    return () if added is None else (None, "add", added)


def _counts(layer: _Product, emit: Any) -> fx.Node:
    """The input as bytes, as `sparsecomp.ops.spiking.spike_conv.counts_of` counts what is finite."""
    x = layer.x
    if example_of(x).dtype is torch.int8:
        return x
    if layer.binary:
        return emit(torch.Tensor.to, emit(torch.ne, x, 0), torch.int8)
    whole = x if layer.scale == 1.0 else emit(torch.mul, x, 1.0 / layer.scale)
    return emit(torch.Tensor.to, whole, torch.int8)
