"""Which neurons alone read what a layer gives: asked when the layer is judged, and when both become one launch."""

from typing import Any, NamedTuple

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operator)
from sparsecomp.lowering.spiking.lif import is_power_of_two
from sparsecomp.passes.engine.rule import Context
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.reference.geometry import is_channels_last

NEURONS = torch.ops.sparsecomp.lif.default
MOST_STEPS = 16
"""A block holds all steps of its pixels; with more, few pixels would share what is loaded of a weight."""
DISABLED_BY = "fuse_conv_neuron"


class Behind(NamedTuple):
    """Neurons behind a layer, of so many time steps; `divides`: each takes a division."""

    steps: int
    divides: bool

    @classmethod
    def of(cls, neurons: fx.Node) -> "Behind":
        """What a call of neurons does."""
        *_, charge, tau = neurons.args[:10]
        assert isinstance(tau, int | float)
        return cls(example_of(neurons.args[0]).shape[0], charge == "lif" and not is_power_of_two(tau))


def neurons_behind(layer: fx.Node, linear: bool, ctx: Context) -> Behind | None:
    """The neurons that a card can run with a layer in one launch, if there are such."""
    out, reader = example_of(layer), layer
    if DISABLED_BY in ctx.options.disable or out is None or out.dtype is not torch.float32:
        return None
    while reader.target is not NEURONS:
        if reader is not layer and reshaped(reader) is None:
            return None
        idle = idle_readers(reader)
        readers = [user for user in reader.users if user not in idle]
        if len(readers) != 1 or not ctx.analysis.unchanged(reader, reader):
            return None
        reader = readers[0]
    current = example_of(reader.args[0])
    if current is None or current.shape[0] > MOST_STEPS or not fits(current, out, linear):
        return None
    return Behind.of(reader) if linear or is_channels_last(out) else None


def fits(current: torch.Tensor, out: torch.Tensor, linear: bool) -> bool:
    """Whether neurons take a layer's result (T · N, K, …), or (…, K) of a linear one, step by step, by its channels."""
    if linear:
        return current.dim() == 3 and current.shape[2] == out.shape[-1]
    return current.shape[2:] == out.shape[1:]


def reshaped(node: fx.Node) -> fx.Node | None:
    """What a node gives in another shape, as it lies; None if it does anything else."""
    op = op_of(node)
    return op.input if op is not None and op.has(Trait.ROW_MAJOR) and op.has(Trait.VIEW) else None


def unviewed(node: Any) -> tuple[list[fx.Node], Any]:
    """The nodes, the last first, that give another one in other shapes, as it lies, and that one."""
    views = []
    while isinstance(node, fx.Node) and (viewed := reshaped(node)) is not None:
        views.append(node)
        node = viewed
    return views, node


def idle_readers(node: fx.Node) -> list[fx.Node]:
    """Views and casts of a node that nobody reads, the last first.

    Of a view, a first membrane was made that is now a number; spikes were widened for readers that take bytes now.
    """
    found = []
    for user in node.users:
        op = op_of(user)
        if op is None or not op.has(Trait.VIEW | Trait.CAST) or op.inplace:
            continue
        behind = idle_readers(user)
        if all(one in behind for one in user.users):
            found += [*behind, user]
    return found
