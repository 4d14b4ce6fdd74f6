"""Neurons whose spikes one reader alone widens write them at full width.

Where layers behind them stay dense, bytes would be read again and written as numbers in a pass of its own, which
Inductor cannot join to the operators on either side. Runs last, when every reader that takes bytes has them.
"""

import operator
from collections.abc import Mapping

from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operator)
from sparsecomp.passes.engine.rule import Context, Plan, Rule, Verdict, call
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.spiking.lying import lie_alike
from sparsecomp.passes.spiking.neurons_behind import DESCRIBED, idle_readers
from sparsecomp.passes.spiking.widened import widened_from
from sparsecomp.reference.precision import KERNEL_DTYPES

_SPIKES, _ARGUMENTS = 0, 8
"""Of the operator: its spikes among the results, and its arguments before their dtype."""


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: described neurons whose spikes become numbers."""
    if node.target is not DESCRIBED:
        return None
    items = [one for one in node.users if one.target is operator.getitem and one.args[1] == _SPIKES]
    idle = idle_readers(items[0]) if len(items) == 1 else []
    readers = [one for item in items for one in item.users if one not in idle]
    if len(items) != 1 or len(readers) != 1 or not _widens(readers[0], items[0]):
        return None
    dead = (*idle, items[0])
    return Plan(lambda: _build(node, readers[0]), "its spikes are read as numbers, and written so", "wide", dead=dead)


_MAKE_BYTES = ("narrow_spikes", "byte_sums", "fuse_residual", "fuse_conv_neuron", "spike_attention", "spike_matmul")

RULE = Rule("wide_spikes", consider, after=(*_MAKE_BYTES, "neuron_norm"))


def _widens(reader: fx.Node, spikes: fx.Node) -> bool:
    """Whether a node is these bytes as numbers that a kernel writes, lying as they do."""
    made, given = example_of(reader), example_of(spikes)
    return widened_from(reader) is spikes and made.dtype in KERNEL_DTYPES and lie_alike(made, given)


def _build(node: fx.Node, reader: fx.Node) -> Mapping[fx.Node, fx.Node]:
    state_dtype = node.args[_ARGUMENTS - 1 : _ARGUMENTS] or (None,)
    args = (*node.args[: _ARGUMENTS - 1], *state_dtype, example_of(reader).dtype)
    made = call(node.graph, node, DESCRIBED, *args)
    return {node: made, reader: call(node.graph, reader, operator.getitem, made, _SPIKES)}
