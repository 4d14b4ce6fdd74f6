"""The cost model against every configuration that was measured: `bench/results/tuning.json`."""

import json
from statistics import geometric_mean

import pytest

from bench.table import RESULTS
from bench.tuning import H100_DEVICE, problem_of, ranked
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.lowering.tuning.cost import seconds
from sparsecomp.lowering.tuning.operations import all_operations

ROWS = [row for row in json.loads((RESULTS / "tuning.json").read_text())["result"] if "problem" in row]
pytest.importorskip("triton")  # templates hold their kernels

ORDERS = [ranked(row) for row in ROWS]
"""Of each problem's candidates, the cheapest by cost first."""
CASES = sorted({row["case"] for row in ROWS})


def losses(case: str | None = None) -> list[float]:
    """How many times the fastest's time the first by cost takes, for each problem of a kernel, or of all."""
    rows = zip(ROWS, ORDERS, strict=True)
    return [row["ms"][order[0]] / min(row["ms"].values()) for row, order in rows if case in (None, row["case"])]


def test_all_that_was_measured_is_ranked():
    assert len(ROWS) >= 38 and sum(len(row["ms"]) for row in ROWS) >= 800
    for row, order in zip(ROWS, ORDERS, strict=True):
        assert sorted(order) == sorted(row["ms"]), row["problem"]


def test_the_fastest_is_among_the_first_three_by_cost():
    found = [min(row["ms"], key=row["ms"].get) in order[:3] for row, order in zip(ROWS, ORDERS, strict=True)]
    assert sum(found) / len(found) >= 0.8  # 32 of 38


def test_the_default_configuration_is_nearly_the_fastest():
    assert geometric_mean(losses()) <= 1.03  # 1.020
    assert max(losses()) <= 1.15  # 1.126


@pytest.mark.parametrize("case", CASES)
def test_no_kernel_is_ranked_badly(case):
    assert geometric_mean(losses(case)) <= 1.04  # binary_conv 1.027, pack_weight 1.027


@pytest.mark.parametrize("case", CASES)
def test_estimates_of_the_fastest_are_times_to_believe_in(case):
    """0.93 to 1.28 of the measured times: implementations and templates are compared by them."""
    for row in ROWS:
        if row["case"] == case:
            fastest = min(row["ms"], key=row["ms"].get)
            problem = problem_of(row)
            candidates = all_operations()[case].candidates(problem, H100_DEVICE)
            chosen = next(one for one in candidates if f"{one.template.name}:{one.config}" == fastest)
            assert seconds(chosen, problem, H100) * 1e3 == pytest.approx(row["ms"][fastest], rel=0.35), row["problem"]
