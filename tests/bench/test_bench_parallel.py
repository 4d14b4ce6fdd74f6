"""A case is measured when all are prepared, and alone: otherwise a figure would be of a busy machine."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from bench.parallel import measured


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
def test_a_worker_that_ends_early_ends_the_measurement() -> None:
    with pytest.raises(RuntimeError, match="exit code 3"):
        list(measured(fails, range(2), workers=2, batch=1))


@pytest.mark.slow(reason="starts processes")
def test_no_row_comes_after_the_time_is_over() -> None:
    assert list(measured(times, range(5), workers=1, batch=5, seconds=0)) == []
