"""The wiring as a graph, held against closed forms of the grid and powers of its adjacency matrix."""

import networkx
import pytest
import torch

from sparsecomp.errors import FormatError
from sparsecomp.nn import (
    build_geo_connectivity,
    connectivity_graph,
    examine_connectivity,
    field_figure,
    receptive_field,
)


def square(k: int = 9, **settings) -> torch.Tensor:
    return build_geo_connectivity((7, 7), k=k, **settings)


def test_the_field_of_a_stack_grows_by_the_radius():
    for depth, seen in ((1, 9), (2, 25), (3, 49)):
        field = receptive_field([square()] * depth, 24).tolist()
        rows, cols = {cell // 7 for cell in field}, {cell % 7 for cell in field}
        assert len(field) == seen and rows == cols == set(range(3 - depth, 4 + depth))
    assert receptive_field([square()], 0).tolist() == [0, 1, 7, 8]


def test_the_graph_is_the_index():
    layers = [square(4), square(3, pattern="random", seed=0)]
    graph = connectivity_graph(layers, 49)
    assert graph.number_of_nodes() == 3 * 49
    for level, index in enumerate(layers, 1):
        for neuron, inputs in enumerate(index.tolist()):
            assert {one for _, one in graph.predecessors((level, neuron))} == set(inputs)
    corner = connectivity_graph([square()], 49)
    assert sum(data["count"] for *_, data in corner.in_edges((1, 0), data=True)) == 9
    for neuron in (0, 24, 48):
        field = receptive_field(layers, neuron).tolist()
        assert {(0, one) for one in field} == {one for one in networkx.ancestors(graph, (2, neuron)) if one[0] == 0}


def test_what_is_found_of_a_wiring():
    found = examine_connectivity([square()] * 2, 49)
    assert found.unused_inputs == [] and found.components == 1
    assert found.fan_in == [pytest.approx(19 * 19 / 49)] * 2  # along an axis of 7: 3 cells, 2 at both ends
    assert found.receptive_field == pytest.approx((29 / 7) ** 2)  # 5 cells, 4 and 3 at both ends
    apart = torch.arange(6)[:, None] // 2 * 2
    found = examine_connectivity([apart], 6)  # pairs of neurons that read the first of two inputs
    assert found.unused_inputs == [1, 3, 5] and found.components == 6 and found.receptive_field == 1


def test_layers_that_do_not_fit():
    with pytest.raises(FormatError, match="needs 0 to 47"):
        connectivity_graph([square()], 48)
    with pytest.raises(FormatError, match="no layers"):
        examine_connectivity([], 4)


def test_the_picture_shows_the_ways():
    pytest.importorskip("matplotlib")
    figure = field_figure([square()] * 2, 24, (7, 7))
    axes = figure.axes[0]
    shown = torch.tensor(axes.images[0].get_array().tolist())
    along = torch.tensor([0.0, 1, 2, 3, 2, 1, 0])
    assert torch.equal(shown, torch.outer(along, along)) and "sees 25 of 7 x 7" in axes.get_title()
