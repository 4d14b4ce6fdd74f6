"""A training step of a network that is sparse from the first step, beside dense and masked ones: time and memory.

Two square layers with a ReLU between them; a step is forward, backward and fused AdamW, compiled, host included,
without TF32. `masked` multiplies a dense weight by its mask, as people write it. Memory is the most that torch holds at
once in such steps, parameters and optimizer included. A change of RigL's is timed alone, behind its backward. Of a step
the weights' gradients and AdamW are timed alone too, as replayed graphs, and a copy of the gradients, the traffic that
one kernel for both would spare.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.masked.masked_linear import MaskedLinear
from bench.parallel import measured
from bench.table import markdown_grid
from bench.timing import MODES, graph_ms, guarded, time_rivals, wait
from sparsecomp.nn import SparseLinear
from sparsecomp.ops import sddmm
from sparsecomp.runtime import RigL

SIZE, ROWS = 4096, 2048
SPARSITIES = (0.9, 0.95, 0.98)
DTYPES = ("float32", "bfloat16")


class Case(NamedTuple):
    """A network."""

    sparsity: float
    dtype: str


Layer = Callable[[nn.Linear, Tensor], nn.Module]
RIVALS: dict[str, tuple[Layer, str]] = {
    "dense": (lambda linear, mask: linear, "inductor"), "masked": (MaskedLinear, "inductor"),
    "masked by sparsecomp": (MaskedLinear, "sparsecomp"),
    "sparse by sparsecomp": (lambda linear, mask: SparseLinear.from_linear(linear, mask=mask), "sparsecomp"),
}  # fmt: skip
"""The layers, and what compiles them."""


class Trained(NamedTuple):
    """A network in training; called, a step."""

    model: nn.Module
    compiled: Any
    optimizer: torch.optim.Optimizer
    x: Tensor
    grad: Tensor

    def __call__(self) -> None:
        self.compiled(self.x).backward(self.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(modes: tuple[str, ...] = MODES, workers: int = 1) -> Iterator[dict[str, Any]]:
    """A row a case: milliseconds by rival and mode, and MiB."""
    cases = [Case(sparsity, dtype) for dtype in DTYPES for sparsity in SPARSITIES]
    for row in measured(partial(prepared, modes=modes), cases, workers, batch=1):
        print(row, flush=True)
        yield row


def prepared(case: Case, modes: tuple[str, ...]) -> Callable[[], dict[str, Any]]:
    """What measures a case, compiled in all modes."""
    torch.backends.cuda.matmul.allow_tf32 = False
    row: dict[str, Any] = {**case._asdict(), "ms": {}, "MiB": {}}
    steps: dict[str, dict[str, Trained]] = {mode: {} for mode in modes}
    for mode in modes:
        for name in RIVALS:
            guarded(row, f"{name}, {mode}", partial(_prepare, row, steps[mode], name, mode, case))

    def measure() -> dict[str, Any]:
        for mode, calls in steps.items():
            guarded(row, mode, partial(time_rivals, row, mode, calls, True))
        guarded(row, "RigL", lambda: row["ms"].update({"a change of RigL's": _change_ms(case)}))
        guarded(row, "parts", lambda: row["ms"].update(_parts_ms(case)))
        return row

    return measure


def _prepare(row: dict[str, Any], steps: dict[str, Trained], name: str, mode: str, case: Case) -> None:
    wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    steps[name] = step = trained(case, name, mode)
    for _ in range(4):  # compiles, records CUDA graphs
        step()
    if mode == "default":
        row["MiB"][name] = round((torch.cuda.max_memory_allocated() - before) / 2**20)


def trained(case: Case, name: str, mode: str) -> Trained:
    """A rival's network, its weights and mask those of all."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    make, backend = RIVALS[name]
    layers = []
    for _ in range(2):
        linear = nn.Linear(SIZE, SIZE, device="cuda", dtype=dtype)
        layers.append(make(linear, torch.rand(SIZE, SIZE, device="cuda") >= case.sparsity))
        del linear
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    x, grad = (torch.randn(ROWS, SIZE, device="cuda", dtype=dtype) for _ in range(2))
    compiled = torch.compile(model, backend=backend, mode=mode)
    return Trained(model, compiled, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True), x, grad)


def _change_ms(case: Case) -> float:
    """The least of some."""
    step = trained(case, "sparse by sparsecomp", "default")
    step()
    rigl, times = RigL(step.model, step.optimizer, every=1, end=10**6), []
    rigl.update()  # step 0 changes nothing
    for _ in range(5):
        with rigl.watch():
            step.model(step.x).backward(step.grad)
        wait()
        start = time.perf_counter()
        changed = rigl.update()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
        assert changed
    return round(min(times), 4)


def _parts_ms(case: Case) -> dict[str, float]:
    """What one kernel for gradient and optimizer would do in one, and what it would spare."""
    step = trained(case, "sparse by sparsecomp", "default")
    step.compiled(step.x).backward(step.grad)
    layers = [layer for layer in step.model.modules() if isinstance(layer, SparseLinear)]
    optimizer = torch.optim.AdamW(step.model.parameters(), lr=1e-6, fused=True, capturable=True)

    def gradients() -> list[Tensor]:
        patterns = [layer.weight.pattern for layer in layers]
        return [sddmm(step.grad.mT, step.x.mT, pattern.arrays, pattern.layout) for pattern in patterns]

    grads: list[Any] = [layer.values.grad for layer in layers]

    calls = {"gradients": gradients, "AdamW": optimizer.step, "a copy": lambda: [grad.clone() for grad in grads]}
    return {f"{name} of the stored": round(graph_ms([call]), 5) for name, call in calls.items()}


PARTS = ("gradients of the stored", "AdamW of the stored", "a copy of the stored")


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of a step, MiB, and in brackets how many times as fast as the dense step in the same mode; behind
    the first mode what is timed alone, where it was."""
    alone = ["a change of RigL's", *(name for name in PARTS if any(name in row["ms"] for row in rows))]
    grid = [["zeros", "dtype", "mode", *RIVALS, *(f"{name}, ms" for name in alone)]]
    for row in sorted(rows, key=lambda row: (row["dtype"], row["sparsity"])):
        for mode in MODES:
            dense = row["ms"].get(f"dense, {mode}")
            cells = [_cell(row, name, mode, dense) for name in RIVALS]
            told = [f"{row['ms'][name]:.3g}" if mode == "default" and name in row["ms"] else "" for name in alone]
            grid.append([f"{row['sparsity']:.0%}", row["dtype"], mode, *cells, *told])
    return markdown_grid(grid)


def _cell(row: dict[str, Any], name: str, mode: str, dense: float | None) -> str:
    ms = row["ms"].get(f"{name}, {mode}")
    if ms is None:
        return "–"
    speed = "" if name == "dense" or dense is None else f" ({dense / ms:.2f})"
    memory = f", {row['MiB'][name]} MiB" if mode == "default" and name in row["MiB"] else ""
    return f"{ms:.3g}{speed}{memory}"
