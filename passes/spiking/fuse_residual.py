"""What skips a block of a spiking network is joined with the spikes that end it, in the launch that makes them.

The blocks of SEW-ResNet give `residual + spikes`, `residual * spikes` or `residual * (1 - spikes)`. Apart, the spikes
are written, read again with the residual, and the result is written, each a byte a neuron and step; in one launch the
spikes never leave the registers. The bytes are the same, whatever they hold: sums that pass a byte wrap around in both.
"""

import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operator)
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call
from sparsecomp.passes.facts.spike_sources import RESIDUAL
from sparsecomp.passes.graph.canonicalize import example_of, op_of, target_name
from sparsecomp.passes.spiking.lying import lie_alike
from sparsecomp.passes.spiking.neurons_behind import idle_readers, unviewed

_LAYERS = (torch.ops.sparsecomp.conv_lif.default, torch.ops.sparsecomp.conv_neuron.default)
_SPIKES, *_OTHERS = range(4)


class _Site(NamedTuple):
    """One way to see a sum or product of bytes.

    Attributes:
        connect: as of `sparsecomp::conv_lif`.
        layer: the layer with its neurons.
        chain: what stands between the layer and the result, the last first: `1 - spikes`, views, the spikes.
        residual: the other operand.
    """

    connect: str
    layer: fx.Node
    chain: tuple[fx.Node, ...]
    residual: fx.Node

    @property
    def joined(self) -> fx.Node:
        """The operand that is the spikes, or the view of them."""
        return self.chain[self.connect == "iand"]


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every sum and product of bytes that a layer's neurons give is a candidate."""
    order = ctx.analysis.order
    # 1 - spikes is then made in the launch as well; of two layers the later one has the other's spikes before it
    sites = sorted(_sites(node), key=lambda site: (site.connect == "iand", order[site.layer]), reverse=True)
    obstacles = [_obstacle(node, site, ctx) for site in sites]
    for site, obstacle in zip(sites, obstacles, strict=True):
        if obstacle is None:
            idle = [one for part in site.chain for one in idle_readers(part)]
            reason = f"{_FORMS[site.connect]} in the launch that makes the spikes"
            place = site.layer if _is_there(site, ctx) else node
            return Plan(
                lambda site=site, place=place: _build(node, site, place), reason, "fused",
                dead=(*idle, *site.chain, site.layer), layer=site.layer, places=(place,),
            )  # fmt: skip
    return Refusal(Why.RESIDUAL_APART, {"detail": obstacles[0]}, layer=sites[0].layer) if sites else None


RULE = Rule("fuse_residual", consider, after=("fuse_conv_neuron",), of_rewritten=True)

_FORMS = {"add": "residual + spikes", "and": "residual · spikes", "iand": "residual · (1 - spikes)"}


def _sites(node: fx.Node) -> Iterator[_Site]:
    op, made = op_of(node), example_of(node)
    if op is None or op.name not in ("add", "mul") or op.inplace or op.out is not None or op.get("alpha", 1) != 1:
        return
    operands = op.input, op.get("other")
    if made is None or any(getattr(example_of(one), "dtype", None) is not torch.int8 for one in (node, *operands)):
        return
    for spikes, residual in (operands, operands[::-1]):
        if op.name == "add":
            yield from _behind(spikes, "add", (), residual)
        elif (fired := _taken_from_one(spikes)) is not None:
            yield from _behind(fired, "iand", (spikes,), residual)
        else:
            yield from _behind(spikes, "and", (), residual)


def _behind(spikes: fx.Node, connect: str, chain: tuple[fx.Node, ...], residual: fx.Node) -> Iterator[_Site]:
    """The site of an operand that is a layer's spikes, or a view of them; none if it is not."""
    views, found = unviewed(spikes)
    if found.target is not operator.getitem or found.args[1] != _SPIKES:
        return
    layer: Any = found.args[0]
    if layer.target in _LAYERS and not layer.kwargs and layer.args[_place(layer) : _place(layer) + 1] in ((), (None,)):
        yield _Site(connect, layer, (*chain, *views, found), residual)


def _place(layer: fx.Node) -> int:
    """Where a layer's residual stands among its arguments."""
    return RESIDUAL[target_name(layer) or ""]


def _taken_from_one(x: fx.Node) -> fx.Node | None:
    """y of `1 - y`."""
    op = op_of(x)
    if op is None or op.name not in ("sub", "rsub") or op.inplace or op.out is not None or op.get("alpha", 1) != 1:
        return None
    one, taken = (op.input, op.get("other")) if op.name == "sub" else (op.get("other"), op.input)
    is_one = isinstance(one, int | float) and one == 1
    return taken if is_one and isinstance(taken, fx.Node) else None


def _obstacle(node: fx.Node, site: _Site, ctx: Context) -> str | None:
    unchanged, before, (*_, spikes) = ctx.analysis.unchanged, node.prev, site.chain
    joined, residual, layer = example_of(site.joined), example_of(site.residual), site.layer
    if residual.shape != joined.shape:
        return f"the residual is {tuple(residual.shape)}, and the spikes are {tuple(joined.shape)}"
    if joined.shape != example_of(spikes).shape and not _is_flat(joined, example_of(spikes)):
        return "it is joined with another view of the spikes"
    if not lie_alike(residual, joined):
        return "the residual lies in another order than the spikes"
    chain = {node, *site.chain}.union(*map(idle_readers, site.chain))
    if site.residual in site.chain or any(user not in chain for part in site.chain for user in part.users):
        return "somebody else reads the spikes"
    others = [user for user in layer.users if user is not spikes]
    if any(user.target is not operator.getitem or user.args[1] not in _OTHERS for user in others):
        return "somebody else reads the spikes"
    if _is_there(site, ctx):
        return None if unchanged(site.residual, layer, before) else "the residual is written to before it is read"
    if not all(unchanged(read, layer, before) for read in layer.all_input_nodes):
        return "what the layer reads is written to before the residual is there"
    order = ctx.analysis.order
    if any(order[user] < order[node] for part in others for user in part.users):
        return "what the layer gives besides is read before the residual is there"
    return None


def _is_there(site: _Site, ctx: Context) -> bool:
    """Whether the residual is made before the layer runs; else the layer has to wait for it."""
    return ctx.analysis.order[site.residual] < ctx.analysis.order[site.layer]


def _is_flat(joined: torch.Tensor, spikes: torch.Tensor) -> bool:
    """Whether a view of maps of one pixel, as a linear layer's are, leaves out the pixels."""
    return joined.shape == spikes.shape[:3] and all(size == 1 for size in spikes.shape[3:])


def _build(node: fx.Node, site: _Site, place: fx.Node) -> Mapping[fx.Node, fx.Node]:
    with node.graph.inserting_before(place):
        return _joined(node, site)


def _joined(node: fx.Node, site: _Site) -> Mapping[fx.Node, fx.Node]:
    def emit(target: Any, *inputs: Any) -> fx.Node:
        return call(node.graph, site.layer, target, *inputs)

    layer, place = site.layer, _place(site.layer)
    both = emit(layer.target, *layer.args[:place], site.residual, site.connect, *layer.args[place + 2 :])
    results = {}
    for item in site.layer.users:
        part = emit(operator.getitem, both, item.args[1])
        if item is not site.chain[-1]:
            results[item] = part
            continue
        flat = example_of(node).dim() < example_of(item).dim()
        results[node] = emit(torch.flatten, part, 2) if flat else part
    return results
