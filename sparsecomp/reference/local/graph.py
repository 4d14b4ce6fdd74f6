"""The wiring of a stack of layers as a graph: what reaches what, what nobody reads, which parts never meet."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import networkx
import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.reference.local.connectivity import check_index, effective_fan_in


class Wiring(NamedTuple):
    """What `examine_connectivity` found of a stack of layers."""

    unused_inputs: list[int]
    """Inputs of the first layer that no neuron reads."""
    components: int
    """Parts that no edge joins; an unused input is one by itself."""
    fan_in: list[float]
    """Mean distinct inputs of a neuron, by layer."""
    receptive_field: float
    """Mean inputs of the first layer that reach a neuron of the last."""


def connectivity_graph(layers: Sequence[Tensor], inputs: int) -> networkx.DiGraph:
    """A graph of nodes (layer, neuron), layer 0 being the inputs, and an edge for each input that a neuron reads.

    Args:
        layers: indices (n_out, k) from the first layer on, each into the neurons of the one before.
        inputs: neurons of layer 0.

    Returns:
        A graph whose edges have `count`, how often the neuron reads that input.

    Raises:
        FormatError: a layer reads beyond the one before.
    """
    graph = networkx.DiGraph()
    graph.add_nodes_from((0, neuron) for neuron in range(inputs))
    for level, index in enumerate(_checked(layers, inputs), 1):
        for neuron, read in enumerate(index.tolist()):
            graph.add_edges_from(
                ((level - 1, one), (level, neuron), {"count": count}) for one, count in Counter(read).items()
            )
    return graph


def receptive_field(layers: Sequence[Tensor], neuron: int) -> Tensor:
    """Inputs of the first layer that reach a neuron of the last one, ascending: int64."""
    reached = torch.tensor([neuron], device="cpu")
    for index in reversed(layers):
        reached = index.cpu()[reached].unique().long()
    return reached


def examine_connectivity(layers: Sequence[Tensor], inputs: int) -> Wiring:
    """What a stack of layers, as in `connectivity_graph`, leaves out, keeps apart and sees.

    Raises:
        FormatError: a layer reads beyond the one before.
    """
    graph = connectivity_graph(layers, inputs)
    read = layers[0].flatten().long().bincount(minlength=inputs)
    last = layers[-1].shape[0]
    seen = sum(receptive_field(layers, neuron).numel() for neuron in range(last))
    return Wiring(
        (read == 0).nonzero().flatten().tolist(),
        networkx.number_weakly_connected_components(graph),
        [effective_fan_in(index).double().mean().item() for index in layers],
        seen / last,
    )


def _checked(layers: Sequence[Tensor], inputs: int) -> list[Tensor]:
    if not layers:
        raise FormatError("there are no layers: give one index (n_out, k) or more")
    sizes = [inputs, *(index.shape[0] for index in layers)]
    return [check_index(index, *pair) for index, *pair in zip(layers, sizes, sizes[1:], strict=False)]
