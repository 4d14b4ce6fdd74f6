"""Times of models as a user calls them, each beside a rival's in the same mode: what tables of them have in common."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Row = dict[str, Any]
REACHED = 0.97
"""Least speed, of the rival's, at which a model counts as no slower."""


class Timed(NamedTuple):
    """A time of a row, whose `ms` are by name and mode, and the rival's in the same mode."""

    row: Row
    which: str
    mode: str
    ms: float
    rival: float

    @property
    def speed(self) -> float:
        """Of the rival's."""
        return self.rival / self.ms


def beside(rival: str, rows: Iterable[Row]) -> Iterator[Timed]:
    """All times but the rival's own, where it was measured too."""
    for row in rows:
        for key, ms in row["ms"].items():
            which, mode = key.split(", ")
            if which != rival and f"{rival}, {mode}" in row["ms"]:
                yield Timed(row, which, mode, ms, row["ms"][f"{rival}, {mode}"])


def counted(layers: Iterable[Timed]) -> list[list[str]]:
    """A grid of the speeds of layers by name, step and mode: how many reach the rival, their mean and range."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for one in layers:
        groups.setdefault((one.which, step_of(one.row["layer"]), one.mode), []).append(one.speed)
    grid = [["layers", "step", "mode", "cases", f"at {REACHED} or more", "geometric mean", "least", "most"]]
    for key, speeds in groups.items():
        reached = sum(speed >= REACHED for speed in speeds)
        summary = (statistics.geometric_mean(speeds), min(speeds), max(speeds))
        grid.append([*key, str(len(speeds)), str(reached), *(f"{one:.2f}" for one in summary)])
    return grid


def left_out(rows: Iterable[Row]) -> list[str]:
    """What could not be measured, and in how many rows, with the reason."""
    reasons = Counter(item for row in rows for item in row.get("left out", {}).items())
    return [f"Left out of {count} rows: {what} ({reason})." for (what, reason), count in reasons.items()]


def step_of(what: Mapping[str, Any]) -> str:
    """The word for a row or a layer that says whether it is trained."""
    return "training" if what["training"] else "inference"
