"""Networks on a grid beside dense ones of as many parameters: same data, split, steps and order of batches.

A run trains one network from one seed. The dense network has the width and depth, of up to three layers, that comes
nearest to the sparse one's parameters, and its activation; beside a sine, whose parameters dense layers do not have, it
takes ReLU. In a network on a grid the data also goes straight to the head, past all blocks; the dense one is a plain
chain. No network was tuned. `compiled` means backend="sparsecomp" for the sparse and stock for the dense network;
bfloat16 means autocast.
"""

import itertools
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.local import problems
from bench.local.patterns import radius_for
from bench.local.problems import Problem
from bench.timing import eager_ms, wait
from sparsecomp.nn import GeoSparseNet, count_params, match_dense
from sparsecomp.nn.local.activations import activation_of

BATCH = 128
LEARNING_RATE = 2e-3
NETWORKS = ("sparse", "dense")
AXES: dict[str, tuple[Any, ...]] = {
    "k": (4, 8, 16, 32), "depth": (1, 2, 4), "activation": ("relu", "tanh", "gelu", "psann", "phase_psann"),
    "dtype": ("float32", "bfloat16"), "compiled": (False, True),
}  # fmt: skip
"""What is varied."""
MIDDLE = {"k": 8, "depth": 2, "activation": "relu", "dtype": "float32", "compiled": False}
"""What the others are where one is varied."""

Axes = dict[str, tuple[Any, ...]]
Row = dict[str, Any]


class Setting(NamedTuple):
    """What both networks share."""

    data: str
    k: int
    depth: int
    activation: str
    dtype: str
    compiled: bool
    epochs: int
    device: str


class Run(NamedTuple):
    """A network to train."""

    setting: Setting
    network: str
    seed: int

    @classmethod
    def of(cls, row: Row) -> "Run":
        """What gave a row."""
        return cls(setting_of(row), row["network"], row["seed"])


def setting_of(row: Row) -> Setting:
    """What a row shares with that of the other network, and with other seeds."""
    return Setting(*(row[name] for name in Setting._fields))


def around(axes: Axes) -> Iterator[dict[str, Any]]:
    """One axis varied at a time, each other one in its middle, or at its first value if that is not among them."""
    middle = {name: MIDDLE[name] if MIDDLE[name] in values else values[0] for name, values in axes.items()}
    yield middle
    for name, values in axes.items():
        yield from ({**middle, name: value} for value in values if value != middle[name])


def product(axes: Axes) -> Iterator[dict[str, Any]]:
    """All of all."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def runs(
    choices: Iterable[dict[str, Any]], names: Iterable[str], device: str, seeds: int, epochs: int | None
) -> list[Run]:  # fmt: skip
    """Every choice on every problem, by both networks and from every seed."""
    given = list(choices)
    return [
        Run(Setting(name, **choice, epochs=epochs or problems.load(name).epochs, device=device), network, seed)
        for name in names for choice in given for network in NETWORKS for seed in range(seeds)
    ]  # fmt: skip


def manifest(found: dict[str, Problem], missing: dict[str, str], axes: Axes, seeds: int) -> dict[str, Any]:
    """What a file of results is of, for whoever runs it again."""
    return {
        "axes": axes, "seeds": seeds, "batch": BATCH, "learning rate": LEARNING_RATE,
        "problems": {
            name: {"rows": len(one.x), "features": one.x.shape[1], "outputs": one.outputs, "digest": one.digest}
            for name, one in found.items()
        },
        "left out": missing, "system": platform.platform(), "cuda": torch.version.cuda,
        "versions": {name: _version(name) for name in ("sparsecomp", "numpy", "scikit-learn", "mlxtend")},
    }  # fmt: skip


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def trained(run: Run) -> Row:
    """Train a network; how well it does, and the times: of compiling, of training without that, of a step on a GPU."""
    torch.compiler.reset()
    setting, problem, device = run.setting, problems.load(run.setting.data), run.setting.device
    parts = problems.Split(*(part.to(device) for part in problems.split(problem, run.seed)))
    torch.manual_seed(run.seed)
    sparse = _sparse(setting, problem, run.seed)
    wanted = match_dense(count_params(sparse), problem.x.shape[1], problem.outputs, depths=range(1, 4))
    net = sparse if run.network == "sparse" else _dense(setting, problem, wanted.width, wanted.depth)
    net = net.to(device)
    call = _compiled(net, run) if setting.compiled else net
    step = _step(net, call, parts, problem, setting)
    batches = _batches(len(parts.x), setting.epochs, run.seed, device)
    first, rest = _seconds(step, batches[:1]), _seconds(step, batches[1:])
    row = {
        **setting._asdict(), "network": run.network, "seed": run.seed, "parameters": count_params(net),
        "matches": wanted.matches, "score": round(_score(net, parts, problem), 2), "steps": len(batches),
        "wall_s": round(rest, 3), "compile_s": round(first, 3) if setting.compiled else 0.0,
        "step_ms": round(rest / max(len(batches) - 1, 1) * 1e3, 4),
    }  # fmt: skip
    if device == "cuda":
        row["gpu_step_ms"] = round(eager_ms(lambda: step(batches[0])), 4)
    return row


def _sparse(setting: Setting, problem: Problem, seed: int) -> nn.Module:
    return GeoSparseNet(
        problem.x.shape[1], problem.outputs, shape=problem.shape, depth=setting.depth, k=setting.k, seed=seed,
        radius=radius_for(setting.k), activation_type=setting.activation,
    )  # fmt: skip


def _dense(setting: Setting, problem: Problem, width: int, depth: int) -> nn.Module:
    kind = setting.activation if not setting.activation.endswith("psann") else "relu"
    sizes = [problem.x.shape[1], *[width] * depth]
    hidden = (layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), activation_of(kind, pair[1])))
    return nn.Sequential(*hidden, nn.Linear(width, problem.outputs))


def _compiled(net: nn.Module, run: Run) -> Callable[[Tensor], Tensor]:
    return torch.compile(net, backend="sparsecomp" if run.network == "sparse" else "inductor")


def _step(
    net: nn.Module, call: Callable[[Tensor], Tensor], parts: problems.Split, problem: Problem, setting: Setting
) -> Callable[[Tensor], None]:  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    half = setting.dtype == "bfloat16"

    def step(rows: Tensor) -> None:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=half):
            out = call(parts.x[rows])
        problem.loss(out.float(), parts.y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _batches(rows: int, epochs: int, seed: int, device: str) -> Sequence[Tensor]:
    """Rows of each step; what is short of a batch is left out, so that all have one shape."""
    generator, size = torch.Generator().manual_seed(seed), min(BATCH, rows)
    orders = (torch.randperm(rows, generator=generator)[: rows // size * size] for _ in range(epochs))
    return torch.cat([order.view(-1, size) for order in orders]).to(device).unbind()


def _seconds(step: Callable[[Tensor], None], batches: Sequence[Tensor]) -> float:
    wait()
    start = time.perf_counter()
    for rows in batches:
        step(rows)
    wait()
    return time.perf_counter() - start


@torch.no_grad()
def _score(net: nn.Module, parts: problems.Split, problem: Problem) -> float:
    return problem.score(net.eval()(parts.test_x), parts.test_y)
