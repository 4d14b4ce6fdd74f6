"""A picture of what a neuron sees of the grid below."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsecomp.errors import ExtraError
from sparsecomp.reference.local.graph import receptive_field

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def field_figure(layers: Sequence[Tensor], neuron: int, shape: tuple[int, int]) -> "Figure":
    """The cells of the (H, W) inputs that reach a neuron of the last layer, and by how many ways.

    Raises:
        ExtraError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ExtraError("field_figure needs matplotlib: pip install 'sparsecomp[plot]'") from error
    drawn = Figure(layout="constrained")
    axes = drawn.add_subplot()
    shown = axes.imshow(_ways(layers, neuron, shape[0] * shape[1]).view(shape).numpy(), cmap="viridis")
    drawn.colorbar(shown, label="ways to the neuron")
    axes.set_title(f"neuron {neuron} sees {receptive_field(layers, neuron).numel()} of {shape[0]} x {shape[1]}")
    return drawn


def _ways(layers: Sequence[Tensor], neuron: int, inputs: int) -> Tensor:
    """Over how many paths each input reaches the neuron."""
    ways = torch.zeros(layers[-1].shape[0], dtype=torch.float64, device="cpu")
    ways[neuron] = 1
    for level in reversed(range(len(layers))):
        index = layers[level].cpu()
        below = layers[level - 1].shape[0] if level else inputs
        ways = ways.new_zeros(below).index_add(0, index.flatten(), ways.repeat_interleave(index.shape[1]))
    return ways
