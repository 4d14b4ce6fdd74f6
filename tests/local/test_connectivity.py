"""Who reads whom on a grid, held against the definition written out a neuron at a time."""

import itertools
from functools import partial

import pytest
import torch
from pace import limit, processor_seconds

from sparsecomp.errors import ConfigError, FormatError
from sparsecomp.nn import build_geo_connectivity, expand_in_indices_to_edges
from sparsecomp.reference.local.connectivity import check_index, effective_fan_in

GRIDS = [(1, 1), (1, 7), (2, 2), (3, 5), (6, 4), (9, 9)]


def neighbourhood(shape, row, col, radius, wrap_mode, include_self=True):
    """Cells of the square around a neuron."""
    height, width = shape
    cells = set()
    for down, right in itertools.product(range(-radius, radius + 1), repeat=2):
        r, c = row + down, col + right
        if wrap_mode == "wrap":
            cells.add(r % height * width + c % width)
        elif 0 <= r < height and 0 <= c < width:
            cells.add(r * width + c)
    return cells if include_self else cells - {row * width + col}


def built(shape, k, **settings):
    """The index, or None where a neuron cannot have that many inputs."""
    try:
        return build_geo_connectivity(shape, k=k, **settings)
    except ConfigError:
        around = (2 * settings["radius"] + 1) ** 2
        own = not settings["include_self"]
        assert k > min(around - own, shape[0] * shape[1] - own)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("wrap_mode", ["clamp", "wrap"])
@pytest.mark.parametrize("pattern", ["local", "random", "hash"])
@pytest.mark.parametrize("shape", GRIDS)
def test_inputs_are_distinct_cells_of_the_neighbourhood(shape, pattern, wrap_mode, include_self):
    for radius, k in itertools.product((0, 1, 2, 5), (1, 3, 8, 16)):
        index = built(shape, k, pattern=pattern, radius=radius, wrap_mode=wrap_mode, include_self=include_self, seed=1)
        if index is None:
            continue
        assert index.shape == (shape[0] * shape[1], k) and index.dtype is torch.int32 and index.is_contiguous()
        for neuron, inputs in enumerate(index.tolist()):
            cells = neighbourhood(shape, *divmod(neuron, shape[1]), radius, wrap_mode, include_self)
            assert set(inputs) <= cells and len(set(inputs)) == min(k, len(cells))
        assert effective_fan_in(index).tolist() == [len(set(inputs)) for inputs in index.tolist()]


@pytest.mark.parametrize("wrap_mode", ["clamp", "wrap"])
def test_local_takes_the_nearest(wrap_mode):
    shape = (6, 7)
    for radius, k in ((1, 5), (2, 9), (3, 20)):
        index = build_geo_connectivity(shape, k=k, radius=radius, wrap_mode=wrap_mode).tolist()
        for neuron, inputs in enumerate(index):
            row, col = divmod(neuron, shape[1])
            distance = {}
            for reach in range(radius + 1):
                for cell in neighbourhood(shape, row, col, reach, wrap_mode):
                    distance.setdefault(cell, reach)
            nearest = sorted(distance.values())[:k]
            assert inputs[0] == neuron and [distance[cell] for cell in inputs][: len(nearest)] == nearest


def test_offsets_are_taken_in_their_order():
    index = build_geo_connectivity((3, 4), k=2, offsets=[(0, 1), (2, 0), (-1, -1)], wrap_mode="wrap")
    assert index[5].tolist() == [6, 1]  # (1, 1) reads (1, 2) and (3, 1), which is (0, 1)
    clamped = build_geo_connectivity((3, 4), k=2, offsets=[(0, 1), (0, 2), (-1, -1)])
    assert clamped[7].tolist() == [7, 2]  # at the right edge both of the first two are the edge, which counts once


def test_a_pattern_is_drawn_from_seed_and_layer():
    for pattern in ("random", "hash"):
        one, same, layer, seed = (
            build_geo_connectivity((20, 20), k=8, radius=3, pattern=pattern, seed=seed, layer=layer)
            for seed, layer in ((1, 0), (1, 0), (1, 1), (2, 0))
        )
        assert torch.equal(one, same)
        for other in (layer, seed):
            assert (one != other).any(1).float().mean() > 0.95
        torch.manual_seed(3)
        drawn = build_geo_connectivity((20, 20), k=8, radius=3, pattern=pattern)
        torch.manual_seed(3)
        assert torch.equal(drawn, build_geo_connectivity((20, 20), k=8, radius=3, pattern=pattern))


@pytest.mark.parametrize("pattern", ["random", "hash"])
def test_every_cell_is_drawn_as_often(pattern):
    """Floyd's subsets are uniform: of 25 cells each is among 8 with probability 8/25, within 5 deviations."""
    index = build_geo_connectivity((100, 100), k=8, radius=2, wrap_mode="wrap", pattern=pattern, seed=5).long()
    here = torch.arange(10_000)[:, None]
    down, right = (index // 100 - here // 100 + 2) % 100, (index % 100 - here % 100 + 2) % 100
    counts = (down * 5 + right).flatten().bincount(minlength=25)
    assert counts.numel() == 25
    assert ((counts - 3200).abs() < 5 * (10_000 * 0.32 * 0.68) ** 0.5).all()


def mixed(word: int) -> int:
    """The finaliser of MurmurHash3, as published."""
    word &= 0xFFFFFFFF
    word = (word ^ word >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    word = (word ^ word >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return word ^ word >> 16


def test_the_hash_is_the_same_everywhere():
    """Another one would load no checkpoint of this one, so how its words are made is written out here."""
    key = 0
    for part in (7, 0, 2):  # the seed's low and high word, and the layer
        key = mixed(key * 31 + part)
    index = build_geo_connectivity((40, 50), k=3, radius=2, wrap_mode="wrap", pattern="hash", seed=7, layer=2)
    for neuron in range(0, 2000, 37):
        chosen: list[int] = []
        for turn in range(3):  # Floyd: 3 of 25
            place = mixed(mixed(neuron ^ key) + turn) * (22 + turn + 1) >> 32
            chosen.append(22 + turn if place in chosen else place)
        row, col = divmod(neuron, 50)
        wanted = [(row + cell // 5 - 2) % 40 * 50 + (col + cell % 5 - 2) % 50 for cell in chosen]
        assert index[neuron].tolist() == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"k": 10}, "at most 9 candidates"),
        ({"k": 9, "include_self": False}, "at most 8 candidates"),
        ({"k": 3, "offsets": [(0, 0), (0, 1)]}, "at most 2 candidates"),
        ({"offsets": [(0, 0), (0, 1, 2)]}, "offsets are"),
        ({"offsets": [(0, 0)] * 4, "pattern": "hash"}, "offsets belong"),
        ({"radius": -1}, "radius is -1"),
        ({"radius": 1.5}, "radius is 1.5"),
        ({"pattern": "ring"}, "needs one of local, random, hash"),
        ({"wrap_mode": "mirror"}, "needs one of clamp, wrap"),
        ({"k": 8, "allow_repeats": False}, "has 4 distinct inputs and k is 8"),
        ({"shape": (0, 3)}, "shape is"),
        ({"shape": 9}, "shape is"),
        ({"shape": "55"}, "shape is"),
        ({"shape": (5, 5, 5)}, "shape is"),
        ({"shape": (5, True)}, "shape is"),
        ({"k": True}, "k is True"),
        ({"offsets": [3, 4]}, "offsets are"),
        ({"offsets": [(0, 0), (0, 1.0)]}, "offsets are"),
        ({"shape": (2, 2), "k": 5}, "at most 4 candidates"),
        ({"shape": (2, 2), "k": 4, "include_self": False}, "at most 3 candidates"),
        ({"shape": (2**16, 2**15), "k": 1}, "2147483648 neurons of 1 inputs exceed"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(settings, message):
    given = {"shape": (5, 5), "k": 2} | settings
    with pytest.raises(ConfigError, match=message):
        build_geo_connectivity(given.pop("shape"), **given)


def test_edges():
    index = build_geo_connectivity((2, 3), k=2)
    inputs, outputs = expand_in_indices_to_edges(index)
    assert outputs.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5] and torch.equal(inputs, index.flatten())
    assert inputs.dtype is outputs.dtype is torch.int32


@pytest.mark.slow(reason="a million neurons")
@pytest.mark.parametrize("pattern", ["local", "random", "hash"])
def test_a_million_neurons_are_wired_within_five_seconds(pattern):
    made = []
    build = partial(build_geo_connectivity, (1000, 1000), k=16, radius=4, pattern=pattern, seed=0)
    assert processor_seconds(lambda: made.append(build())) < limit(5)
    assert made[0].shape == (1_000_000, 16)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([[0], [1], [2]], "is list, needs a tensor"), (torch.zeros(3, 2), "is torch.float32, needs a tensor"),
        (torch.zeros(3, 2, dtype=torch.int16), "is torch.int16"), (torch.zeros(3, dtype=torch.int32), r"shape \(3,\)"),
        (torch.zeros(4, 2, dtype=torch.int32), r"shape \(4, 2\), needs \(3, k\)"),
        (torch.zeros(3, 0, dtype=torch.int32), r"shape \(3, 0\)"),
        (torch.tensor([[0], [5], [1]]), "entries from 0 to 5, needs 0 to 4"),
        (torch.tensor([[0], [-1], [4]]), "entries from -1 to 4, needs 0 to 4"),
    ],
)  # fmt: skip
def test_what_is_no_index_of_a_layer(index, message):
    with pytest.raises(FormatError, match=message):
        check_index(index, 5, 3)


def test_an_index_is_int32_and_contiguous():
    given = torch.tensor([[0, 4, 2], [1, 0, 3]]).t()
    found = check_index(given, 5, 3)
    assert found.dtype is torch.int32 and found.is_contiguous() and torch.equal(found.long(), given)
    assert check_index(torch.empty(0, 2, dtype=torch.int32), 5, 0).shape == (0, 2)
    assert check_index(given.to("meta"), 1, 3).is_meta
    assert [one.tolist() for one in expand_in_indices_to_edges(found)] == [[0, 1, 4, 0, 2, 3], [0, 0, 1, 1, 2, 2]]
    assert effective_fan_in(torch.tensor([[3, 3, 3], [1, 2, 1], [0, 1, 2]])).tolist() == [1, 2, 3]
