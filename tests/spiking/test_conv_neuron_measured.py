"""The gate of layers with their neurons, and their configurations, against `bench/results/conv_neuron.json`."""

import json

import pytest

pytest.importorskip("triton")  # templates hold their kernels

from bench.spiking.conv_neuron import Case, decision_of, problem_of, table
from bench.table import RESULTS
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.spiking.conv_lif import CONV_LIF
from sparsecomp.lowering.tuning.cards import KNOWN
from sparsecomp.lowering.tuning.cost import rank

FOUND = json.loads((RESULTS / "conv_neuron.json").read_text())
ROWS = [row for row in FOUND["result"] if row["configurations"]]
CARD, DEVICE = KNOWN[FOUND["machine"]["gpu"]], Device(FOUND["machine"]["gpu"], "9.0", FOUND["machine"]["triton"])


def case_of(row):
    return Case(row["case"], *row["shape"])


def chosen(row):
    """Milliseconds of the configuration that a row's layer gets now, None if that was not timed."""
    problem = problem_of(case_of(row))
    best = rank(CONV_LIF.candidates(problem, DEVICE), problem, CARD)[0]
    return row["configurations"].get(str(best.config))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_no_layer_gets_a_way_that_took_longer(row):
    """One launch in the configuration of now, with what the launch of then took beside its own, the first: packing."""
    ms = chosen(row)
    if ms is None:
        pytest.skip("its configuration was not timed")
    fused = row["ms"]["fused"] - next(iter(row["configurations"].values())) + ms
    decision = decision_of(case_of(row), CARD)
    mine, other = (row["ms"]["apart"], fused) if decision.dense else (fused, row["ms"]["apart"])
    assert mine <= 1.02 * other


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_the_configuration_is_about_the_fastest(row):
    ms = chosen(row)
    assert ms is None or ms <= 1.12 * min(row["configurations"].values())


def test_most_layers_gain_by_one_launch():
    decisions = [decision_of(case_of(row), CARD).implementation for row in ROWS]
    assert decisions.count("fused") >= 9 and decisions[0] == "fused"


def test_a_residual_has_a_table_of_its_own_once_it_was_measured():
    assert "residual in the launch" not in table([row for row in ROWS if "joined" not in row["ms"]])
    row = {**ROWS[0], "ms": {**ROWS[0]["ms"], "added": 0.2, "joined": 0.16}}
    assert table([row]).endswith("| 0.2000 | 0.1600 | 1.25 |")
