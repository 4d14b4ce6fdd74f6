"""The gate of layers in half precision with their neurons, and their configurations, against what was measured."""

import json

import pytest

pytest.importorskip("triton")  # templates hold their kernels

from bench.spiking.conv_neuron import Case
from bench.spiking.conv_neuron_half import decision_of, problem_of, table
from bench.table import RESULTS
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.spiking.conv_neuron import CONV_NEURON
from sparsecomp.lowering.tuning.cards import KNOWN
from sparsecomp.lowering.tuning.cost import rank

FOUND = json.loads((RESULTS / "conv_neuron_half.json").read_text())
ROWS = [row for row in FOUND["result"] if row["configurations"]]
CARD, DEVICE = KNOWN[FOUND["machine"]["gpu"]], Device(FOUND["machine"]["gpu"], "9.0", FOUND["machine"]["triton"])


def case_of(row):
    return Case(row["case"], *row["shape"])


def chosen(row):
    """Milliseconds of the configuration that a row's layer gets now, None if that was not timed."""
    problem = problem_of(case_of(row))
    best = rank(CONV_NEURON.candidates(problem, DEVICE), problem, CARD)[0]
    return row["configurations"].get(str(best.config))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_no_layer_gets_a_way_that_took_longer(row):
    """One launch in the configuration of now, with what the launch of then took beside its own, the first: packing."""
    ms = chosen(row)
    if ms is None:
        pytest.skip("its configuration was not timed")
    fused = row["ms"]["fused"] - next(iter(row["configurations"].values())) + ms
    ways = {"dense": row["ms"]["stock"], "fused": fused}
    ways |= {"neurons": row["ms"]["neurons"]} if "neurons" in row["ms"] else {}
    taken = decision_of(case_of(row), CARD).implementation
    if taken not in ways:
        pytest.skip("the convolution with our neurons behind it was not timed")
    assert ways[taken] <= 1.05 * min(ways.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_the_configuration_is_about_the_fastest(row):
    ms = chosen(row)
    assert ms is None or ms <= 1.1 * min(row["configurations"].values())


def test_most_layers_gain():
    taken = [not decision_of(case_of(row), CARD).dense for row in ROWS]
    assert 3 * sum(taken) >= 2 * len(ROWS) and taken[0]


def test_a_row_without_figures_has_a_place_in_the_table():
    lost = {"case": "lost", "shape": [], "ms": {}, "configurations": {}, "left out": {"ways": "no memory"}}
    assert table([ROWS[0], lost]).splitlines()[-1].endswith("| {'ways': 'no memory'} |")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_the_estimate_of_stock_is_near_what_it_took(row):
    """Of layers that take longer than a few launches: it is fitted to these."""
    if row["ms"]["stock"] < 0.025:
        pytest.skip("launches are most of it")
    estimated = decision_of(case_of(row), CARD).seconds["dense"] * 1e3
    assert 0.75 * row["ms"]["stock"] < estimated < 1.25 * row["ms"]["stock"]
