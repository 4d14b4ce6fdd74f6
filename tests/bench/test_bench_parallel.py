"""A case is measured when all are prepared, and alone: otherwise a figure would be of a busy machine."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from bench.parallel import gathered, measured


def times(case: int) -> Callable[[], dict[str, Any]]:
    """Says when a case was ready, and when its measurement began and ended."""
    time.sleep(0.1 * case)
    ready = time.monotonic()

    def measure() -> dict[str, Any]:
        begun = time.monotonic()
        time.sleep(0.1)
        return {"case": case, "ready": ready, "begun": begun, "ended": time.monotonic()}

    return measure


def fails(case: int) -> Callable[[], dict[str, Any]]:
    """A worker that ends before it measures."""
    raise SystemExit(3)


@pytest.mark.slow(reason="starts processes")
def test_each_case_is_measured_alone_and_after_all_of_its_round_are_ready() -> None:
    rows = sorted(measured(times, range(5), workers=2, batch=2), key=lambda row: row["begun"])
    assert sorted(row["case"] for row in rows) == [0, 1, 2, 3, 4]
    first = [row for row in rows if row["case"] < 4]
    assert max(row["ready"] for row in first) < min(row["begun"] for row in first)
    assert all(row["ended"] <= later["begun"] for row, later in zip(rows, rows[1:], strict=False))


@pytest.mark.slow(reason="starts processes")
def test_workers_take_turns() -> None:
    rows = sorted(measured(times, range(2), workers=2, batch=1, turns=3), key=lambda row: row["begun"])
    pairs = [{row["case"] for row in rows[place : place + 2]} for place in (0, 2, 4)]
    assert len(rows) == 6 and pairs == [{0, 1}] * 3


def test_parts_of_a_row_become_one_with_the_least_of_its_times() -> None:
    parts = [
        {"network": "a", "ms": {"stock": 2.0}, "left out": {"ours": "no card"}},
        {"network": "b", "ms": {"stock": 9.0}},
        {"network": "a", "ms": {"stock": 3.0, "ours": 1.0}, "rates": [0.5]},
        {"network": "a", "ms": {"stock": 1.5}},
    ]
    *_, row = gathered(parts, ["network"])
    found = {"network": "a", "ms": {"stock": 1.5, "ours": 1.0}, "left out": {"ours": "no card"}, "rates": [0.5]}
    assert row == found


@pytest.mark.slow(reason="starts processes")
def test_a_worker_that_ends_early_ends_the_measurement() -> None:
    with pytest.raises(RuntimeError, match="exit code 3"):
        list(measured(fails, range(2), workers=2, batch=1))


@pytest.mark.slow(reason="starts processes")
def test_no_row_comes_after_the_time_is_over() -> None:
    assert list(measured(times, range(5), workers=1, batch=5, seconds=0)) == []
