"""Layers on spikes of every kind as a user calls them, beside stock compile of the same: host included, in turns.

A layer of each kind that is no plain convolution of whole tiles: odd channels, no batch dimension, transposed,
depthwise. Each stands behind a threshold, as behind a neuron, which writes bytes for ours and full width for stock.
TF32 is allowed to both; `sparsecomp` is what the gate picks, `forced` what it weighs against dense.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import sparsecomp
from bench.loop import Alone
from bench.parallel import measured
from bench.table import markdown_grid
from bench.timing import MODES, guarded, time_rivals

DTYPES = ("float32", "float16")
THRESHOLD = 1.175
"""Of normal inputs, 12 % are above it: the rate at which the benchmarks' networks fire."""


class Kind(NamedTuple):
    """A layer, the shape of its input, and the implementation that is forced."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    forced: str = "binary"


KINDS = {
    "conv 3x3, 48": Kind(partial(nn.Conv2d, 48, 48, 3, padding=1), (128, 48, 28, 28)),
    "conv 3x3, 100": Kind(partial(nn.Conv2d, 100, 100, 3, padding=1), (128, 100, 28, 28)),
    "conv 3x3, 128 to 100": Kind(partial(nn.Conv2d, 128, 100, 3, padding=1), (128, 128, 28, 28)),
    "conv 3x3, no batch": Kind(partial(nn.Conv2d, 64, 64, 3, padding=1), (64, 224, 224)),
    "linear, 4096 to 1000": Kind(partial(nn.Linear, 4096, 1000), (4096, 4096)),
    "transposed 4x4 / 2": Kind(partial(nn.ConvTranspose2d, 128, 128, 4, 2, 1), (64, 128, 28, 28)),
    "transposed 2x2 / 2": Kind(partial(nn.ConvTranspose2d, 256, 128, 2, 2), (64, 256, 28, 28)),
    "transposed 1d, 8 / 4": Kind(partial(nn.ConvTranspose1d, 128, 128, 8, 4, 2), (64, 128, 1024)),
    "transposed 3d, 2 / 2": Kind(partial(nn.ConvTranspose3d, 64, 64, 2, 2), (8, 64, 16, 28, 28)),
    "depthwise 3x3, 64": Kind(partial(nn.Conv2d, 64, 64, 3, padding=1, groups=64), (128, 64, 56, 56), "direct"),
    "depthwise 3x3, 256": Kind(partial(nn.Conv2d, 256, 256, 3, padding=1, groups=256), (128, 256, 28, 28), "direct"),
    "groups of 4": Kind(partial(nn.Conv2d, 128, 128, 3, padding=1, groups=32), (128, 128, 28, 28), "direct"),
}


class Case(NamedTuple):
    """A kind of layer in a dtype."""

    kind: str
    dtype: str


class OnSpikes(Alone):
    """A layer behind a threshold."""

    def forward(self, x: Tensor) -> Tensor:
        """What the layer makes of ones where `x` is above the threshold."""
        return self.layer((x > THRESHOLD).to(x.dtype))


def run(modes: tuple[str, ...] = MODES, names: tuple[str, ...] = tuple(KINDS), workers: int = 1) -> Iterator[dict]:
    """A row a case: milliseconds by rival and mode, what the gate picked, and errors beside float64."""
    cases = [Case(name, dtype) for name in names for dtype in DTYPES]
    for row in measured(partial(prepared, modes=modes), cases, min(workers, len(cases)), batch=2):
        print(row, flush=True)
        yield row


def prepared(case: Case, modes: tuple[str, ...]) -> Callable[[], dict[str, Any]]:
    """What measures a case, compiled in all modes."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    row: dict[str, Any] = {**case._asdict(), "ms": {}, "implementation": {}, "error": {}}
    calls: dict[str, dict[str, Callable[[], Tensor]]] = {mode: {} for mode in modes}
    layer, x = _operands(case)
    with torch.no_grad():
        exact = OnSpikes(layer.double())(x.double())
        layer.to(x.dtype)
        for mode, rivals in calls.items():
            for rival in ("stock", "sparsecomp", "forced"):
                prepare = partial(_prepare, row, rivals, rival, mode, case, layer, x, exact)
                guarded(row, f"{rival}, {mode}", prepare)

    def measure() -> dict[str, Any]:
        for mode, rivals in calls.items():
            guarded(row, mode, partial(time_rivals, row, mode, rivals, False))
        return row

    return measure


def _operands(case: Case) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    kind, dtype = KINDS[case.kind], getattr(torch, case.dtype)
    layer, x = kind.make().to("cuda", dtype).eval(), torch.randn(kind.shape, device="cuda").to(dtype)
    if x.dim() != 4:
        return layer, x
    return layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)  # pyright: ignore


def _prepare(
    row: dict[str, Any], calls: dict[str, Callable[[], Tensor]], rival: str, mode: str, case: Case, layer: nn.Module,
    x: Tensor, exact: Tensor,
) -> None:  # fmt: skip
    model = OnSpikes.alone(layer)
    if rival == "stock":
        compiled = torch.compile(model, mode=mode)
    else:
        forced = {"implementation": KINDS[case.kind].forced} if rival == "forced" else {}
        compiled = torch.compile(model, backend="sparsecomp", options={"mode": mode, **forced})
    for _ in range(3):  # compiles, records CUDA graphs
        compiled(x)
    out = compiled(x)
    row["error"][f"{rival}, {mode}"] = ((out - exact).norm() / exact.norm()).item()
    calls[rival] = lambda: compiled(x)
    if rival != "stock":
        report = sparsecomp.last_report()
        assert report is not None
        row["implementation"][f"{rival}, {mode}"] = [f"{one.implementation}: {one.reason}" for one in report.sites]


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds and stock's over ours, by case and mode, what the gate picked, and the forced one's error."""
    grid = [["layer", "dtype", "mode", "stock", "sparsecomp", "forced", "speed", "of forced", "picked", "error"]]
    for row in rows:
        for mode in MODES:
            found = [row["ms"].get(f"{rival}, {mode}") for rival in ("stock", "sparsecomp", "forced")]
            stock, ours, forced = found
            if stock is None or ours is None or forced is None:
                continue
            picked = row["implementation"][f"sparsecomp, {mode}"][-1].partition(":")[0]
            grid.append([
                row["kind"], row["dtype"], mode, *(f"{one:.4f}" for one in found), f"{stock / ours:.2f}",
                f"{stock / forced:.2f}", picked, f"{row['error'][f'forced, {mode}']:.0e}",
            ])  # fmt: skip
    return markdown_grid(grid)
