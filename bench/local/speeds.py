"""What `bench.local.speed` found, as tables and a plot; speeds are of stock Inductor's gather in the same mode."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bench.plots import Lines, Plot
from bench.table import markdown_grid

Row = dict[str, Any]
_REACHED = 0.97
"""Least speed, of Inductor's, at which a layer counts as no slower."""
_OURS = ("sparsecomp", "plain by sparsecomp")
_RIVAL = "Inductor"


class Speed(NamedTuple):
    """A time of ours, and Inductor's in the same mode."""

    row: Row
    which: str
    mode: str
    ms: float
    rival: float

    @property
    def times(self) -> float:
        """As fast as Inductor."""
        return self.rival / self.ms


def speeds(rows: Sequence[Row]) -> Iterator[Speed]:
    """Of ours, wherever Inductor was measured too."""
    for row in rows:
        for key, ms in row["ms"].items():
            which, mode = key.split(", ")
            rival = row["ms"].get(f"{_RIVAL}, {mode}")
            if which in _OURS and rival is not None:
                yield Speed(row, which, mode, ms, rival)


def table(rows: Sequence[Row]) -> str:
    """All parts that were measured, as Markdown."""
    parts = {name: [row for row in rows if row["layer"]["part"] == name] for name in _TABLES}
    made = [_TABLES[name](found) for name, found in parts.items() if found]
    reasons = Counter(item for row in rows for item in row.get("left out", {}).items())
    left_out = [f"Left out of {count} rows: {what} ({reason})." for (what, reason), count in reasons.items()]
    return "\n\n".join(made + left_out)


def _layers(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(key.split(", ")[0] for row in rows for key in row["ms"]))
    grid = [["layer", "rows", "step", "mode", *names, "bytes' floor"]]
    for row in sorted(rows, key=lambda row: (row["layer"]["training"], row["layer"]["n"], row["layer"]["pattern"])):
        for mode in dict.fromkeys(key.split(", ")[1] for key in row["ms"]):
            rival = row["ms"].get(f"{_RIVAL}, {mode}")
            cells = [_beside(row["ms"].get(f"{name}, {mode}"), rival, name) for name in names]
            floor = _ms(row.get("floor ms") if mode == "graph" else None)
            grid.append([_name(row), str(row["layer"]["rows"]), _step(row), mode, *cells, floor])
    return markdown_grid(grid)


def _tested(rows: Sequence[Row]) -> str:
    title = "Layers of fixed fan-in; in brackets the speed, of Inductor's gather in the same mode:"
    return "\n\n".join([title, _layers(rows)])


def _blocks(rows: Sequence[Row]) -> str:
    return "\n\n".join(["Residual blocks, a training step with SGD; in brackets the speed as above:", _layers(rows)])


def _grid(rows: Sequence[Row]) -> str:
    found = list(speeds(rows))
    title = f"A grid of {len(rows)} layers, as called; speeds are of Inductor's gather:"
    groups: dict[tuple[str, str, str], list[float]] = {}
    for speed in found:
        groups.setdefault((speed.which, _step(speed.row), speed.mode), []).append(speed.times)
    counts = [["layers", "step", "mode", "cases", f"at {_REACHED} or more", "geometric mean", "least", "most"]]
    for key, values in groups.items():
        reached = sum(value >= _REACHED for value in values)
        summary = (statistics.geometric_mean(values), min(values), max(values))
        counts.append([*key, str(len(values)), str(reached), *(f"{one:.2f}" for one in summary)])
    slowest = [["slowest layers", "rows", "step", "mode", _RIVAL, "ours", "speed"]]
    for speed in sorted(found, key=lambda speed: speed.times)[:10]:
        slowest.append([
            _name(speed.row), str(speed.row["layer"]["rows"]), _step(speed.row), f"{speed.which}, {speed.mode}",
            _ms(speed.rival), _ms(speed.ms), f"{speed.times:.2f}",
        ])  # fmt: skip
    return "\n\n".join([title, markdown_grid(counts), markdown_grid(slowest)])


def _curve(rows: Sequence[Row]) -> str:
    mode = "graph" if any("sparsecomp, graph" in row["ms"] for row in rows) else "default"
    how = "replayed CUDA graphs" if mode == "graph" else "as called"
    title = f"Cost by size ({how}), and picoseconds a weight and row:"
    grid = [["layer", "rows", "sparsecomp", _RIVAL, "ps a weight and row"]]
    for row in sorted(rows, key=lambda row: (row["layer"]["pattern"], row["layer"]["n"])):
        ours, rival = (row["ms"].get(f"{name}, {mode}") for name in ("sparsecomp", _RIVAL))
        layer = row["layer"]
        work = layer["n"] * layer["k"] * layer["rows"]
        share = "–" if ours is None else f"{ours / work * 1e9:.2f}"
        grid.append([_name(row), str(layer["rows"]), _beside(ours, rival, "sparsecomp"), _ms(rival), share])
    return "\n\n".join([title, markdown_grid(grid)])


_TABLES = {"table": _tested, "block": _blocks, "grid": _grid, "curve": _curve}


def plot(rows: Sequence[Row], gpu: str) -> Plot:
    """The curve: milliseconds by the number of neurons, a panel a pattern."""
    panels: dict[str, Lines] = {}
    for row in sorted(rows, key=lambda row: row["layer"]["n"]):
        layer = row["layer"]
        if layer["part"] == "curve":
            lines = panels.setdefault(layer["pattern"], {})
            for key, ms in row["ms"].items():
                lines.setdefault(key, []).append((layer["n"], round(ms, 4)))
    return Plot(f"Layers of fixed fan-in by size, inference, {gpu}", "neurons", "ms a call", panels, log_x=True)


def _name(row: Row) -> str:
    layer = row["layer"]
    dtype = "" if layer["dtype"] == "float32" else f", {layer['dtype']}"
    return f"n={layer['n']}, k={layer['k']}, {layer['pattern']}{dtype}"


def _step(row: Row) -> str:
    return "training" if row["layer"]["training"] else "inference"


def _beside(ms: float | None, rival: float | None, name: str) -> str:
    return _ms(ms) if ms is None or rival is None or name == _RIVAL else f"{_ms(ms)} ({rival / ms:.1f})"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" if value < 0.1 else f"{value:.3g}"
