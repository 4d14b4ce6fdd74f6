"""What the study found: means and deviations over seeds, in which settings which network is better, and a plot."""

import csv
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.local.study import MIDDLE, NETWORKS, Setting, setting_of
from bench.plots import Lines, Plot
from bench.table import markdown_grid

Row = dict[str, Any]
_TIMES = ("step_ms", "gpu_step_ms", "wall_s", "compile_s")


class Mean(NamedTuple):
    """Of some seeds, with the standard deviation, which one seed does not have."""

    mean: float
    deviation: float | None

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {'–' if self.deviation is None else f'{self.deviation:.1f}'}"


class Pair(NamedTuple):
    """Both networks in a setting.

    Attributes:
        scores, times, parameters: by network.
        matches: whether the dense network has as many parameters within 1 %.
    """

    setting: Setting
    scores: dict[str, Mean]
    times: dict[str, dict[str, float]]
    parameters: dict[str, int]
    matches: bool

    @property
    def better(self) -> str | None:
        """The network whose mean is higher by more than both deviations together; None if neither's is or can be."""
        sparse, dense = (self.scores[network] for network in NETWORKS)
        if sparse.deviation is None or dense.deviation is None:
            return None
        if abs(sparse.mean - dense.mean) <= math.hypot(sparse.deviation, dense.deviation):
            return None
        return "sparse" if sparse.mean > dense.mean else "dense"


def pairs(rows: Sequence[Row]) -> list[Pair]:
    """Settings in which both networks were trained, in the order of their first rows."""
    groups: dict[Setting, dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault(setting_of(row), {}).setdefault(row["network"], []).append(row)
    return [_pair(setting, found) for setting, found in groups.items() if len(found) == len(NETWORKS)]


def _pair(setting: Setting, rows: dict[str, list[Row]]) -> Pair:
    return Pair(
        setting, {network: _mean([row["score"] for row in rows[network]]) for network in NETWORKS},
        {network: _medians(rows[network]) for network in NETWORKS},
        {network: rows[network][0]["parameters"] for network in NETWORKS}, rows["dense"][0]["matches"],
    )  # fmt: skip


def _mean(values: list[float]) -> Mean:
    return Mean(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)


def _medians(rows: list[Row]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in _TIMES if all(name in row for row in rows)}


def table(rows: Sequence[Row]) -> str:
    """Both networks in each setting as Markdown, and under it where which one is better."""
    found = pairs(rows)
    steps = [f"ms a step, {network}" for network in NETWORKS]
    grid = [["data", "setting", "parameters", *(f"{one}, %" for one in NETWORKS), "better", *steps, "compiling, s"]]
    for pair in found:
        times = [pair.times[network] for network in NETWORKS]
        grid.append([
            pair.setting.data, _named(pair.setting), _parameters(pair), *(str(pair.scores[one]) for one in NETWORKS),
            pair.better or "–", *(_step(one) for one in times),
            " / ".join(f"{one['compile_s']:.1f}" for one in times) if pair.setting.compiled else "–",
        ])  # fmt: skip
    return "\n\n".join([markdown_grid(grid), verdict(found)])


def verdict(found: Sequence[Pair]) -> str:
    """Where dense wins, where sparse does, and where the seeds differ by more than the networks."""
    tried = Counter(pair.setting.data for pair in found)
    said = []
    for network in reversed(NETWORKS):
        won = Counter(pair.setting.data for pair in found if pair.better == network)
        where = "; ".join(f"{name} {count} of {tried[name]}" for name, count in won.items())
        said.append(f"{network.capitalize()} wins in {won.total()} of {len(found)} settings{where and f' ({where})'}.")
    undecided = sum(pair.better is None for pair in found)
    said.append(f"In {undecided} the means differ by no more than their deviations over seeds, or there is one seed.")
    unmatched = sum(not pair.matches for pair in found)
    if unmatched:
        said.append(f"In {unmatched} no dense network has as many parameters within 1 %; the nearest stands there.")
    return " ".join(said)


def _named(setting: Setting) -> str:
    compiled = ", compiled" * setting.compiled
    return f"k={setting.k}, {setting.depth} blocks, {setting.activation}, {setting.dtype}{compiled}"


def _parameters(pair: Pair) -> str:
    sparse, dense = (pair.parameters[network] for network in NETWORKS)
    return f"{sparse:,} / {dense:,}" + " (unmatched)" * (not pair.matches)


def _step(times: dict[str, float]) -> str:
    on_gpu = f" ({times['gpu_step_ms']:.2f} on the GPU)" if "gpu_step_ms" in times else ""
    return f"{times['step_ms']:.2f}{on_gpu}"


def plot(rows: Sequence[Row], gpu: str) -> Plot:
    """Scores by k, a panel a problem, and a line for each setting that was trained with several k."""
    panels: dict[str, Lines] = {}
    for pair in sorted(pairs(rows), key=lambda pair: pair.setting.k):
        lines = panels.setdefault(pair.setting.data, {})
        for network in NETWORKS:
            point = (pair.setting.k, round(pair.scores[network].mean, 2))
            lines.setdefault(_line(network, pair.setting), []).append(point)
    for lines in panels.values():
        for line in [line for line, points in lines.items() if len(points) == 1]:
            del lines[line]
    title = f"GeoSparseNet beside dense networks of as many parameters, {gpu}"
    return Plot(title, "k", "accuracy or R², %", panels)


def _line(network: str, setting: Setting) -> str:
    values = {name: getattr(setting, name) for name in ("depth", "activation", "dtype", "compiled")}
    unusual = {name: value for name, value in values.items() if value != MIDDLE[name]}
    return ", ".join([network, *(name if value is True else f"{name} {value}" for name, value in unusual.items())])


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Every run as a line."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
