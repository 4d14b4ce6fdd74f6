"""When sparse pays, drawn from the benchmarks' results: small SVG files for the documentation.

A file carries the figures that it shows in its description, so that a test can tell that it is up to date without
drawing it again (matplotlib's output changes with its version).
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.table import RESULTS

PLOTS = Path(__file__).parents[1] / "docs" / "plots"

_SIZES = (2048, 3072, 4096, 8192)
_DTYPES = ("float32", "float16")
_TO_STOCK = "times as fast as stock dense"

Lines = dict[str, list[tuple[float, float]]]
"""Points by the legend's entry."""


class Plot(NamedTuple):
    """What a file shows.

    Attributes:
        title: with the machine.
        x, y: what the axes mean.
        panels: lines by the panel's title.
        log_x: whether the x axis is logarithmic.
    """

    title: str
    x: str
    y: str
    panels: dict[str, Lines]
    log_x: bool = False

    @property
    def figures(self) -> str:
        """All that is shown, as the file carries it."""
        return json.dumps(self._asdict(), sort_keys=True)


def plots(results: Path = RESULTS) -> dict[str, Plot]:
    """Every plot by the name of its file."""
    return {name: make(results) for name, make in MAKERS.items()}


def figures_of(path: Path) -> str:
    """What a drawn file says that it shows."""
    text = path.read_text()
    return bytes.fromhex(text.split("<dc:description>")[1].split("</dc:description>")[0]).decode()


def write(results: Path = RESULTS) -> None:
    """Draw all of them to `docs/plots`."""
    PLOTS.mkdir(exist_ok=True)
    for name, plot in plots(results).items():
        draw(plot, PLOTS / name)


def draw(plot: Plot, path: Path, y: str = "ratio") -> None:
    """Draw a plot; `y` is "ratio" (of a rival, which has a line at 1), "log" or "linear"."""
    import matplotlib  # the extra `bench`

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "sparsecomp", "font.size": 8}
    from matplotlib import pyplot

    count = len(plot.panels)
    size = (1 + 2.8 * count, 3)
    figure, axes = pyplot.subplots(1, count, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, (title, lines) in zip(axes[0], plot.panels.items(), strict=True):
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.2, label=name)
        axis.set(title=title, xlabel=plot.x, xscale="log" if plot.log_x else "linear")
        axis.set_yscale("linear" if y == "linear" else "log")
        if y == "ratio":
            axis.axhline(1, color="black", linewidth=0.8)
            ticks = [0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4]
            axis.set_yticks(ticks, list(map(str, ticks)))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(plot.y)
    axes[0][-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.suptitle(plot.title)
    metadata = {"Date": None, "Creator": None, "Description": plot.figures.encode().hex()}
    figure.savefig(path, bbox_inches="tight", metadata=metadata)
    pyplot.close(figure)


def _read(results: Path, name: str) -> tuple[str, list[dict[str, Any]]]:
    found = json.loads((results / name).read_text())
    return found["machine"]["gpu"].removeprefix("NVIDIA "), found["result"]


def _layers(which: str, training: bool, title: str) -> Callable[[Path], Plot]:
    def make(results: Path) -> Plot:
        gpu, rows = _read(results, "loop.json")
        speeds: dict[tuple[str, int, float], list[float]] = {}
        for row in rows:
            layer = row["layer"]
            if layer["training"] == training and layer["size"] in _SIZES and f"{which}, default" in row["ms"]:
                speed = row["ms"]["stock, default"] / row["ms"][f"{which}, default"]
                speeds.setdefault((layer["dtype"], layer["rows"], layer["sparsity"]), []).append(speed)
        panels: dict[str, Lines] = {dtype: {} for dtype in _DTYPES}
        for (dtype, count, sparsity), found in sorted(speeds.items()):
            if dtype in panels:
                point = (100 * sparsity, round(statistics.geometric_mean(found), 3))
                panels[dtype].setdefault(f"{count} row{'s' * (count > 1)}", []).append(point)
        return Plot(f"{title}, 2048² to 8192² (mean), {gpu}", "zeros in the weight, %", _TO_STOCK, panels)

    return make


def _spikes(results: Path) -> Plot:
    gpu, rows = _read(results, "snn_conv.json")
    names = {"binary": "binary", "binary from bytes": "binary, from bytes", "event": "event", "skip": "skip"}
    panels: dict[str, Lines] = {}
    for row in rows:
        if not row["case"].startswith("conv") or row["dtype"] != "float32" or row["spikes"] != "independent":
            continue
        lines = panels.setdefault(row["case"].removeprefix("conv 3x3 "), {})
        for key, name in names.items():
            speed = row["ms"]["dense tf32 channels_last"] / row["ms"][key]
            lines.setdefault(name, []).append((round(100 * row["density"], 1), round(speed, 3)))
    title = f"3×3 convolutions of spikes that are spread evenly, exact, beside TF32, {gpu}"
    return Plot(title, "ones in the input, %", "times as fast as cuDNN in TF32", panels, log_x=True)


def _groups_of_four(results: Path) -> Plot:
    gpu, rows = _read(results, "semi_structured.json")
    panels: dict[str, Lines] = {"in each call": {}, "promised to stay": {}}
    for row in rows:
        if row.get("dtype") != "float16":
            continue
        for panel, key in zip(panels, ("ours", "ours, frozen"), strict=True):
            if key in row["ms"]:
                point = (row["rows"], round(row["ms"]["dense"] / row["ms"][key], 3))
                panels[panel].setdefault(row["case"].removeprefix("2:4 "), []).append(point)
    return Plot(
        f"2:4 linear layers with bias and ReLU, float16, CUDA graph replays, {gpu}",
        "rows", "times as fast as dense", panels, log_x=True,
    )  # fmt: skip


MAKERS: dict[str, Callable[[Path], Plot]] = {
    "layers_frozen.svg": _layers("frozen", False, "SparseLinear, inference, weights promised to stay"),
    "layers.svg": _layers("sparsecomp", False, "SparseLinear, inference, no promise"),
    "layers_training.svg": _layers("sparsecomp", True, "SparseLinear, training step"),
    "spikes.svg": _spikes,
    "two_of_four.svg": _groups_of_four,
}
