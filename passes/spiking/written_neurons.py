"""Whether neurons that are written by hand pay as our operator, where nobody asks for it.

In one launch with a layer on spikes what lies between is not written at all. In half precision, where Inductor's
kernels for the loop were measured, they may pay alone too.
"""

from collections.abc import Collection

import torch
from torch import fx

from sparsecomp.lowering.cache.signature import has_triton
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.passes.cost.conv_neuron import Behind, alone_beside_written
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.engine.rule import Context, known_sizes, replays
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.spiking.neurons_behind import DISABLED_BY, is_by_channel, leads_to, written_obstacle
from sparsecomp.passes.spiking.operand import CONVOLUTIONS
from sparsecomp.passes.spiking.spike_conv import conv_with_neurons
from sparsecomp.passes.spiking.spike_linear import linear_with_neurons
from sparsecomp.reference.geometry import is_channels_last


def paying(
    x: fx.Node | None, parameters: Collection[fx.Node], gone: Collection[fx.Node], behind: Behind, ctx: Context
) -> Decision | None:
    """The decision about neurons of all steps that are given `x` (T, N, K, …), with the layer ahead of them where a
    card could run both in one launch; None where there is nothing to decide.

    Args:
        parameters: of the neurons.
        gone: the nodes that they are written in.
        behind: what they do.
    """
    current, options = example_of(x), ctx.options
    if x is None or current is None or ctx.gradients or options.implementation not in ("auto", "binary"):
        return None
    device = ctx.device(current.device)
    if device.type != "cuda" or (ctx.target is None and not has_triton()) or known_sizes(x) is None:
        return None
    found = _with_its_layer(x, current, parameters, gone, behind, ctx)
    if found is not None or current.element_size() > 2:
        return found
    card = H100 if not torch.cuda.is_available() else card_of(current.device)
    card = card if ctx.target is None else ctx.target.card
    return alone_beside_written(current.numel(), 2, behind, card, not replays(options, device))


def _with_its_layer(
    x: fx.Node, current: torch.Tensor, parameters: Collection[fx.Node], gone: Collection[fx.Node], behind: Behind,
    ctx: Context,
) -> Decision | None:  # fmt: skip
    if {DISABLED_BY, "spike_conv", "spike_linear"}.intersection(ctx.options.disable):
        return None
    between = leads_to(x, _is_layer)
    if between is None or not all(is_by_channel(one, current) for one in parameters):
        return None
    linear = _is_linear(between.layer)
    readers = {user for user in x.users if _ends_in(user, gone)}
    if not linear and not is_channels_last(example_of(between.layer)):
        return None
    if written_obstacle(x, readers, between, linear, ctx):
        return None
    behind = between.on_the_way(behind, readers)
    return (linear_with_neurons if linear else conv_with_neurons)(between.layer, behind, ctx)


def _is_linear(node: fx.Node) -> bool:
    op = op_of(node)
    return op is not None and op.name == "linear"


def _is_layer(node: fx.Node) -> bool:
    op = op_of(node)
    return op is not None and (op.name in CONVOLUTIONS or op.name == "linear")


def _ends_in(node: fx.Node, gone: Collection[fx.Node]) -> bool:
    """Whether nodes alone read this one, or its shape or a part of it, that are gone."""
    if node in gone:
        return True
    op = op_of(node)
    passed = op is not None and op.has(Trait.VIEW | Trait.FILL) and not op.inplace
    return passed and all(_ends_in(user, gone) for user in node.users)
