"""The cost model against every configuration that was measured: `bench/results/tuning.json`."""

import json
from math import exp, log

import pytest

from bench.table import RESULTS
from bench.tuning import ranked

ROWS = [row for row in json.loads((RESULTS / "tuning.json").read_text())["result"] if "problem" in row]
NOISE = 1.02
"""Two timings of one candidate differ by as much."""


def losses(rows, first):
    """How much slower than the fastest the best of the ``first`` candidates by cost is."""
    return [min(row["ms"][name] for name in ranked(row)[:first]) / min(row["ms"].values()) for row in rows]


def mean(numbers):
    return exp(sum(map(log, numbers)) / len(numbers))


def test_the_suite_is_there():
    assert len(ROWS) >= 38 and sum(len(row["ms"]) for row in ROWS) >= 800


def test_the_best_is_among_the_first_three_by_cost():
    found = [loss <= NOISE for loss in losses(ROWS, 3)]
    assert sum(found) / len(found) >= 0.8
    exactly = [loss == 1 for loss in losses(ROWS, 3)]
    assert sum(exactly) / len(exactly) >= 0.6


def test_choosing_by_cost_alone_costs_little():
    alone = losses(ROWS, 1)
    assert mean(alone) <= 1.04
    assert max(alone) <= 1.15


@pytest.mark.parametrize("case", sorted({row["case"] for row in ROWS}))
def test_no_kernel_is_ranked_badly(case):
    assert mean(losses([row for row in ROWS if row["case"] == case], 1)) <= 1.06
