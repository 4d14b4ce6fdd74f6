"""Layers of one row behind a ReLU as called: ours reads the weights of inputs that are not zero, stock reads all.

A model of eight layers in float16, each behind a ReLU, through `torch.compile`, host included, in turns in one process;
ours under the promise that weights stay. A share of the inputs is zero. The
weights are larger than the L2 cache. Stock is at its best of `reduce-overhead` and `max-autotune` where CUDA graphs are
replayed.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsecomp
from bench.loop import Alone
from bench.parallel import measured
from bench.table import markdown_grid
from bench.timing import guarded, relative_error, time_rivals

SIZES = ((28672, 8192), (11008, 4096))
ZEROS = (0.0, 0.5, 0.9, 0.97)
LAYERS = 8
RIVALS = {
    "default": ("stock", "sparsecomp"), "reduce-overhead": ("stock", "stock, max-autotune", "sparsecomp"),
}  # fmt: skip
"""By mode, who takes turns."""


class Layer(NamedTuple):
    """Features in and out."""

    k: int
    n: int


class Model(nn.Module):
    """Layers of the same input, each behind a ReLU of its own part of it; their results are added."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(layer.k, layer.n, device="cuda", dtype=torch.float16) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(layers, 1, k) to (1, n)."""
        return sum(layer(F.relu(part)) for layer, part in zip(self.layers, x, strict=True))  # pyright: ignore[reportReturnType]


def run(workers: int = 1) -> Iterator[dict[str, Any]]:
    """A row a layer and share of zeros: milliseconds by rival and mode, and the relative error of ours."""
    layers = [Layer(*size) for size in SIZES]
    for found in measured(prepared, layers, workers, batch=1):
        for row in found["rows"]:
            print(row, flush=True)
            yield row


def prepared(layer: Layer) -> Callable[[], dict[str, Any]]:
    """What measures a layer at all shares of zeros."""
    torch.manual_seed(0)
    model = Model(layer)
    x = torch.empty(LAYERS, 1, layer.k, device="cuda", dtype=torch.float16)
    calls: dict[str, dict[str, Callable[[], Tensor]]] = {}
    told: dict[str, Any] = {"layer": layer._asdict(), "implementation": {}}
    for mode, names in RIVALS.items():
        for name in names:
            guarded(told, f"{name}, {mode}", partial(_prepare, calls.setdefault(mode, {}), told, name, mode, model, x))
    return lambda: {"rows": [_row(told, calls, model, x, zeros) for zeros in ZEROS]}


def _prepare(
    calls: dict[str, Callable[[], Tensor]], told: dict[str, Any], name: str, mode: str, model: Model, x: Tensor
) -> None:  # fmt: skip
    own = Alone.alone(model)
    if name == "sparsecomp":
        compiled = torch.compile(own, backend="sparsecomp", options={"frozen": True, "mode": mode})
    else:
        compiled = torch.compile(own, mode=name.partition(", ")[2] or mode)
    x.normal_()
    with torch.no_grad():
        for _ in range(4):  # compiles, records CUDA graphs
            compiled(x)
    if name == "sparsecomp":
        report = sparsecomp.last_report()
        assert report is not None
        told["implementation"][mode] = [f"{site.implementation}: {site.reason}" for site in report.sites]
    calls[name] = lambda: compiled(x)


def _row(
    told: dict[str, Any], calls: dict[str, dict[str, Callable[[], Tensor]]], model: Model, x: Tensor, zeros: float
) -> dict[str, Any]:  # fmt: skip
    row: dict[str, Any] = {**told, "zeros": zeros, "ms": {}}
    signs = torch.where(torch.rand_like(x, dtype=torch.float32) < zeros, -1.0, 1.0)
    x.copy_((torch.randn_like(x).abs() + 0.01) * signs)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        found = calls["default"]["sparsecomp"]().double()
        row["error"] = relative_error(found, exact)
    for mode, rivals in calls.items():
        guarded(row, mode, partial(time_rivals, row, mode, rivals, False))
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds, and in brackets how many times as fast as the best of stock in the same mode."""
    grid = [["layer", "zeros", *(f"{who}, {mode}" for mode in RIVALS for who in ("stock", "ours"))]]
    for row in sorted(rows, key=lambda row: (-row["layer"]["k"], row["zeros"])):
        layer, cells = row["layer"], []
        for mode, names in RIVALS.items():
            ms = row["ms"]
            stock = min((ms[key] for name in names[:-1] if (key := f"{name}, {mode}") in ms), default=None)
            ours = ms.get(f"sparsecomp, {mode}")
            cells.append("–" if stock is None else f"{stock:.3g}")
            cells.append("–" if ours is None else f"{ours:.3g}" + ("" if stock is None else f" ({stock / ours:.2f})"))
        grid.append([f"{layer['k']} to {layer['n']}", f"{row['zeros']:.0%}", *cells])
    return markdown_grid(grid)
