"""What `bench.local.speed` found, as tables and a plot; speeds are of stock Inductor's gather in the same mode."""

from collections.abc import Sequence

from bench.as_called import Row, Timed, beside, counted, left_out, step_of
from bench.plots import Lines, Plot
from bench.table import markdown_grid

_OURS = ("sparsecomp", "plain by sparsecomp")
_RIVAL = "Inductor"


def speeds(rows: Sequence[Row]) -> list[Timed]:
    """Of ours, wherever Inductor was measured too."""
    return [one for one in beside(_RIVAL, rows) if one.which in _OURS]


def table(rows: Sequence[Row]) -> str:
    """All parts that were measured, as Markdown."""
    parts = {name: [row for row in rows if row["layer"]["part"] == name] for name in _TABLES}
    made = [_TABLES[name](found) for name, found in parts.items() if found]
    return "\n\n".join(made + left_out(rows))


def _layers(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(key.split(", ")[0] for row in rows for key in row["ms"]))
    grid = [["layer", "rows", "step", "mode", *names, "bytes' floor"]]
    for row in sorted(rows, key=lambda row: (row["layer"]["training"], row["layer"]["n"], row["layer"]["pattern"])):
        for mode in dict.fromkeys(key.split(", ")[1] for key in row["ms"]):
            rival = row["ms"].get(f"{_RIVAL}, {mode}")
            cells = [_beside(row["ms"].get(f"{name}, {mode}"), rival, name) for name in names]
            floor = _ms(row.get("floor ms") if mode == "graph" else None)
            grid.append([_name(row), str(row["layer"]["rows"]), step_of(row["layer"]), mode, *cells, floor])
    return markdown_grid(grid)


def _tested(rows: Sequence[Row]) -> str:
    title = "Layers of fixed fan-in; in brackets the speed, of Inductor's gather in the same mode:"
    return "\n\n".join([title, _layers(rows)])


def _blocks(rows: Sequence[Row]) -> str:
    return "\n\n".join(["Residual blocks, a training step with SGD; in brackets the speed as above:", _layers(rows)])


def _grid(rows: Sequence[Row]) -> str:
    found = speeds(rows)
    title = f"A grid of {len(rows)} layers, as called; speeds are of Inductor's gather:"
    slowest = [["slowest layers", "rows", "step", "mode", _RIVAL, "ours", "speed"]]
    for one in sorted(found, key=lambda one: one.speed)[:10]:
        layer = one.row["layer"]
        slowest.append([
            _name(one.row), str(layer["rows"]), step_of(layer), f"{one.which}, {one.mode}", _ms(one.rival), _ms(one.ms),
            f"{one.speed:.2f}",
        ])  # fmt: skip
    return "\n\n".join([title, markdown_grid(counted(found)), markdown_grid(slowest)])


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


def _beside(ms: float | None, rival: float | None, name: str) -> str:
    return _ms(ms) if ms is None or rival is None or name == _RIVAL else f"{_ms(ms)} ({rival / ms:.1f})"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" if value < 0.1 else f"{value:.3g}"
