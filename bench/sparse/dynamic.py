"""Training that ends sparse, by every way this project has, at equal steps and equal data, and five times as long.

Data, splits and networks are those of `bench.masked.resu_mnist`, each seed's shared by all methods; of a convolutional
network the linear layers alone are sparse. All methods keep as many weights of each layer, by ERK. `work` is the share
of the dense network's products in those layers (forward and both gradients) that the method needs in the mean of its
steps, `reached` their zeros at the end. No method was tuned. `python -m bench dynamic` takes an hour on two CPU cores.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from bench.masked import resu_mnist
from bench.masked.resu_mnist import LEARNING_RATE, Problem
from bench.table import markdown_grid
from sparsecomp import NM, ConstantFanIn, Unstructured, sparsify
from sparsecomp.nn import SparseLinear, wrap_module
from sparsecomp.runtime import SET, GradualPruning, RigL, SRigL, masked_weights, sr_ste, top_kast
from sparsecomp.training.dynamic.dynamic_sparsity import DynamicSparsity
from sparsecomp.training.schedules import sparsity_at

PROBLEMS = (Problem("MNIST", "MLP", 20), Problem("digits", "MLP", 40), Problem("MNIST", "conv", 10))
SPARSITIES = (0.8, 0.9, 0.95, 0.98)
SEEDS = 5
LONGER = 5
"""Times as many steps, for the extended budget of Evci et al. 2020."""
_CHANGES = 50


class Run(NamedTuple):
    """A network to train.

    Attributes:
        sparsity: share of the linear layers' weights that is 0 in the end; 0.5 of 2:4, 0 of the dense network.
        longer: times as many epochs as the problem has.
    """

    problem: Problem
    method: str
    sparsity: float
    longer: int
    seed: int


class Training(NamedTuple):
    """What trains a network, and the share of the dense network's work that it takes."""

    optimizer: torch.optim.Optimizer
    changes: DynamicSparsity | GradualPruning | None
    work: float


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def _is_linear(layer: nn.Module, name: str) -> bool:
    return isinstance(layer, nn.Linear)


def _every(steps: int) -> int:
    return max(steps // _CHANGES, 1)


def _dense(model: nn.Module, run: Run, steps: int) -> Training:
    return Training(_optimizer(model), None, 1.0)


def _static(model: nn.Module, run: Run, steps: int) -> Training:
    sparsify(model, Unstructured(run.sparsity, by="random", budget="erk"), filter=_is_linear)
    return Training(_optimizer(model), None, 1 - run.sparsity)


def _growing(kind: Any, layout: Any = Unstructured) -> "Maker":
    def make(model: nn.Module, run: Run, steps: int) -> Training:
        sparsify(model, layout(run.sparsity, by="random", budget="erk"), filter=_is_linear)
        optimizer, every = _optimizer(model), _every(steps)
        changes = kind(model, optimizer, end=int(0.75 * steps), every=every, seed=run.seed)
        # where patterns change by it, the gradient of the whole weight is one of three products
        whole = 0.0 if kind is SET else 0.75 * run.sparsity / 3 / every
        return Training(optimizer, changes, 1 - run.sparsity + whole)

    return make


def _gradual(model: nn.Module, run: Run, steps: int) -> Training:
    wrap_module(model, skip=[name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)])
    every = _every(steps)
    end = int(0.75 * steps) // every * every
    changes = GradualPruning(model, sparsity=run.sparsity, start=0, end=end, every=every, budget="erk")
    count = end // every + 1
    pruning = statistics.mean(sparsity_at(place, count, 0.0, run.sparsity, "cubic") for place in range(count))
    return Training(_optimizer(model), changes, 1 - (0.75 * pruning + 0.25 * run.sparsity))


def _top_kast(model: nn.Module, run: Run, steps: int) -> Training:
    trained = 1 - 2 * (1 - run.sparsity)
    top_kast(model, Unstructured(run.sparsity, budget="erk"), Unstructured(trained, budget="erk"), filter=_is_linear)
    return Training(_optimizer(model), None, (2 * (1 - run.sparsity) + 1 - trained) / 3)


def _two_of_four(decay: float) -> "Maker":
    def make(model: nn.Module, run: Run, steps: int) -> Training:
        sr_ste(model, NM(2, 4), decay=decay, filter=_is_linear)
        return Training(_optimizer(model), None, 2 / 3)

    return make


Maker = Callable[[nn.Module, Run, int], Training]
METHODS: dict[str, Maker] = {
    "dense": _dense, "static": _static, "RigL": _growing(RigL), "SET": _growing(SET),
    "SRigL": _growing(SRigL, ConstantFanIn), "gradual": _gradual, "Top-KAST": _top_kast,
    "STE 2:4": _two_of_four(0.0), "SR-STE 2:4": _two_of_four(2e-4),
}  # fmt: skip
RESU = "RESU cycle"
"""Which trains with a trainer of its own, and prunes convolutions too: it is left out of networks that have some."""


def cases(problems: tuple[Problem, ...] = PROBLEMS, sparsities: tuple[float, ...] = SPARSITIES) -> Iterator[Run]:
    """Every method at every sparsity; the first and the best known of those that stay sparse, longer too."""
    for problem in problems:
        yield Run(problem, "dense", 0.0, 1, 0)
        yield from (Run(problem, method, 0.5, 1, 0) for method in METHODS if method.endswith("2:4"))
        for sparsity in sparsities:
            for method in ("static", "RigL", "SET", "SRigL", "gradual", "Top-KAST", RESU):
                if method != RESU or problem.network == "MLP":
                    yield Run(problem, method, sparsity, 1, 0)
            if problem.network == "MLP":
                yield from (Run(problem, method, sparsity, LONGER, 0) for method in ("static", "RigL"))


def run(seeds: int = SEEDS) -> Iterator[dict[str, Any]]:
    """One row a case: test accuracy of each seed in percent, its mean and deviation, the work and the zeros reached."""
    with resu_mnist.workers_of_one_thread() as workers:
        every = list(cases())
        found = workers.map(trained, [case._replace(seed=seed) for case in every for seed in range(seeds)])
        for case in every:
            rows = [next(found) for _ in range(seeds)]
            row = {**case.problem._asdict(), **case._asdict(), **resu_mnist.summary(rows)}
            del row["problem"], row["seed"]
            print(row, flush=True)
            yield row


def trained(case: Run) -> dict[str, float]:
    """Figures of one network."""
    sample, epochs = resu_mnist.Sample.of(case.problem.data, case.seed), case.longer * case.problem.epochs
    steps = epochs * sample.steps
    model = resu_mnist.make_network(case.problem, case.seed)
    if case.method == RESU:
        config = resu_mnist.config(steps, 0.4, case.sparsity)
        figures = resu_mnist.cycled(model, sample.batches, config, sample.right, case.seed)
        return {"accuracy": figures["accuracy"], "reached": figures["sparsity"]}
    training = METHODS[case.method](model, case, steps)
    for epoch in range(epochs):
        for x, y in sample.batches(epoch):
            _step(model, training, x, y)
    return {"accuracy": sample.right(model.eval()), "reached": _zeros(model), "work": training.work}


def _step(model: nn.Module, training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer, changes, _ = training
    optimizer.zero_grad()
    with changes.watch() if isinstance(changes, DynamicSparsity) else nullcontext():
        functional.cross_entropy(model(x), y).backward()
    if isinstance(changes, DynamicSparsity) and changes.update():
        return
    optimizer.step()
    if isinstance(changes, GradualPruning):
        changes.update()


def _zeros(model: nn.Module) -> float:
    """Share of the linear layers' weights, as they are multiplied."""
    stored = total = 0
    masks = {name: masked.mask.mask for name, (_, masked) in masked_weights(model).items()}
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLinear):
            stored, total = stored + layer.weight.matrix.nnz, total + layer.weight.numel()
        elif isinstance(layer, nn.Linear):
            kept = masks.get(f"{name}.weight", layer.weight != 0)
            stored, total = stored + int(kept.sum()), total + kept.numel()
    return 1 - stored / total


def table(rows: list[dict[str, Any]]) -> str:
    """Accuracies as Markdown, a row a method and a column a sparsity, and under it what beats a static pattern."""
    parts = []
    for problem in dict.fromkeys((row["data"], row["network"]) for row in rows):
        own = [row for row in rows if (row["data"], row["network"]) == problem]
        columns = sorted({row["sparsity"] for row in own})
        grid = [[f"{problem[0]} {problem[1]}, accuracy, %", *(f"{share:.0%} zeros" for share in columns)]]
        for key in dict.fromkeys((row["method"], row["longer"]) for row in own):
            cells = {row["sparsity"]: _cell(row) for row in own if (row["method"], row["longer"]) == key}
            grid.append([_named(*key), *(cells.get(share, "") for share in columns)])
        parts += [markdown_grid(grid), _verdict(own)]
    return "\n\n".join(parts)


def _named(method: str, longer: int) -> str:
    return method if longer == 1 else f"{method}, {longer}× the steps"


def _cell(row: dict[str, Any]) -> str:
    work = f" ({row['work']:.2f})" if "work" in row else ""
    return f"{row['mean']:.1f} ± {row['sd']:.1f}{work}"


def _verdict(rows: list[dict[str, Any]]) -> str:
    """By more than both deviations together, at equal steps."""
    static = {row["sparsity"]: row for row in rows if row["method"] == "static" and row["longer"] == 1}
    better, worse = [], []
    for row in rows:
        beside = static.get(row["sparsity"])
        if beside is None or row is beside or row["longer"] != 1:
            continue
        ahead, both = row["mean"] - beside["mean"], (row["sd"] ** 2 + beside["sd"] ** 2) ** 0.5
        if abs(ahead) > both:
            (better if ahead > 0 else worse).append(f"{row['method']} at {row['sparsity']:.0%}")
    return f"Better than a static pattern: {', '.join(better) or 'nothing'}. Worse: {', '.join(worse) or 'nothing'}."
