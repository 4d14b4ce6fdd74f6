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
from sparsecomp.passes.spiking.neurons_behind import MOST_STEPS, NEURONS, Behind, fits, idle_readers, unviewed
from sparsecomp.reference.facts import is_dyadic
from sparsecomp.reference.geometry import Window, is_channels_last

_SPIKES, _MEMBRANE = range(2)


@dataclass(frozen=True, slots=True)
class _Product:
    """The product of one site.

    Attributes:
        node: its call.
        views: what stands between it and the neurons, the last first.
        x, weight, bias: its operands.
        window: stride, padding and dilation.
        groups, digits, scale, binary, spread: as of `sparsecomp::spike_conv`.
    """

    node: fx.Node
    views: tuple[fx.Node, ...]
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
    def is_linear(self) -> bool:
        return self.node.target is torch.ops.sparsecomp.spike_linear.default


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every fused neuron behind a product on int8 tensor cores is a candidate."""
    if node.target is not NEURONS:
        return None
    layer = _layer(node, ctx)
    if layer is None:
        return None
    found = _considered(node, layer, ctx)
    if isinstance(found, Refusal):
        return Refusal(found.why, found.details, found.estimate, layer.node)
    steps = example_of(node.args[0]).shape[0]
    reason = f"with the neurons behind it in one launch, {steps} time steps; {found.reason}"
    idle = [one for part in (*layer.views, layer.node) for one in idle_readers(part)]
    dead = (*idle, *layer.views, layer.node)
    return Plan(
        lambda: _build(node, layer), reason, "fused", dead=dead, estimate=found.estimate, layer=layer.node
    )  # fmt: skip


RULE = Rule("fuse_conv_neuron", consider, after=("narrow_spikes",), of_rewritten=True)


def _considered(node: fx.Node, layer: _Product, ctx: Context) -> Decision | Refusal:
    obstacle = _obstacle(node, layer, ctx)
    if obstacle is not None:
        return refuse(Why.NOT_WITH_NEURONS, detail=obstacle)
    if ctx.options.neurons == "fuse":
        return Decision("fused", "neurons='fuse' was asked for")
    x = example_of(layer.x)
    device = ctx.device(x.device)
    if device.type != "cuda" or (ctx.target is None and not has_triton()):
        return refuse(Why.NOT_WITH_NEURONS, detail="on the CPU nothing is gained")
    out = example_of(layer.node)
    if not layer.is_linear and not is_channels_last(out):
        return refuse(Why.NOT_WITH_NEURONS, detail="its result is not channels-last, and bytes would be written apart")
    site = _site(layer, not replays(ctx.options, device))
    if site is None:
        return refuse(Why.UNKNOWN_SHAPE)
    card = H100 if not torch.cuda.is_available() else card_of(x.device)
    steps, divides = Behind.of(node)
    decision = gate.decide(site, steps, card if ctx.target is None else ctx.target.card, divides)
    if decision.dense:
        return Refusal(Why.NOT_WITH_NEURONS, {"detail": decision.reason}, decision.estimate)
    return decision


def _layer(node: fx.Node, ctx: Context) -> _Product | None:
    """The product that gives a neuron operator its input, which nobody else reads."""
    views, found = unviewed(node.args[0])
    if not isinstance(found, fx.Node):
        return None
    args: tuple[Any, ...] = found.args
    if found.target is torch.ops.sparsecomp.spike_conv.default:
        x, weight, bias, stride, padding, dilation, groups, digits, how, scale, factor, binary, spread, _ = args
    elif found.target is torch.ops.sparsecomp.spike_linear.default:
        x, weight, bias, digits, how, scale, factor, binary, spread, _ = args
        stride, padding, dilation, groups = [1, 1], [0, 0], [1, 1], 1
    else:
        return None
    if how != "binary" or factor is not None or not is_dyadic(scale):
        return None
    window = stride, padding, dilation
    return _Product(found, tuple(views), x, weight, bias, window, groups, digits, scale, binary, spread)


def _obstacle(node: fx.Node, layer: _Product, ctx: Context) -> str | None:
    unchanged, between = ctx.analysis.unchanged, (*layer.views, layer.node)
    current, out, x = (example_of(one) for one in (node.args[0], layer.node, layer.x))
    if current is None or out is None or x is None:
        return "its shape is unknown"
    if out.dtype is not torch.float32:
        return f"its result is {out.dtype}; the neurons take float32"
    if not all(unchanged(one, one) for one in between):
        return "its result is written to in place"
    chain = {node, *between}.union(*map(idle_readers, between))
    if any(user not in chain for one in between for user in one.users):
        return "somebody else reads its result"
    if not all(unchanged(read, layer.node) for read in layer.node.all_input_nodes):
        return "what it reads is written to before the neurons read"
    if any(user.target is not operator.getitem for user in node.users):
        return "the neurons' results are read together"
    steps = current.shape[0]
    if steps > MOST_STEPS:
        return f"{steps} time steps: blocks hold up to {MOST_STEPS}"
    return None if fits(current, out, layer.is_linear) else "the neurons' channels are not its outputs"


def _site(layer: _Product, hosted: bool) -> SiteInfo | None:
    x, weight = known_sizes(layer.x), known_sizes(layer.weight)
    if x is None or weight is None:
        return None
    if layer.is_linear:
        x, weight = [prod(x[:-1]), x[-1], 1, 1], [*weight, 1, 1]
    return SiteInfo(
        device="cuda", itemsize=4, n=x[0], c=x[1], size=tuple(x[2:]), k=weight[0],
        window=Window.of(weight, *layer.window), groups=layer.groups, digits=layer.digits, density=None, active=None,
        tf32=False, channels_last=True, fused=True, hosted=hosted,
    )  # fmt: skip


def _build(node: fx.Node, layer: _Product) -> Mapping[fx.Node, fx.Node]:
    def emit(target: Any, *inputs: Any) -> fx.Node:
        return call(node.graph, node, target, *inputs)

    current, out = example_of(node.args[0]), example_of(layer.node)
    counts = _counts(layer, emit)
    if layer.is_linear:
        counts = emit(torch.reshape, counts, (-1, example_of(layer.weight).shape[1], 1, 1))
    kept = any(user.args[1] == _MEMBRANE and user.users for user in node.users)
    both = emit(
        torch.ops.sparsecomp.conv_lif.default, counts, layer.weight, layer.bias, *layer.window, layer.groups,
        layer.digits, layer.scale, layer.spread, layer.is_linear or is_channels_last(out), current.shape[0],
        *node.args[1:], kept,
    )  # fmt: skip
    results = {}
    for item in node.users:
        part = emit(operator.getitem, both, item.args[1])
        if layer.is_linear and (kept or item.args[1] == _SPIKES):
            part = emit(torch.flatten, part, 2 if item.args[1] == _SPIKES else 1)
        results[item] = part
    return results


def _counts(layer: _Product, emit: Any) -> fx.Node:
    """The input as bytes, as `sparsecomp.ops.spiking.spike_conv.counts_of` counts what is finite."""
    x = layer.x
    if example_of(x).dtype is torch.int8:
        return x
    if layer.binary:
        return emit(torch.Tensor.to, emit(torch.ne, x, 0), torch.int8)
    whole = x if layer.scale == 1.0 else emit(torch.mul, x, 1.0 / layer.scale)
    return emit(torch.Tensor.to, whole, torch.int8)
