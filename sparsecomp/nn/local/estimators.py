"""Networks on a grid as scikit-learn estimators."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.errors import ConfigError, ExtraError
from sparsecomp.lowering.tuning.progress import Progress
from sparsecomp.nn.local.config import Shape
from sparsecomp.nn.local.fitting import Fitter, epochs_of, optimizer_of
from sparsecomp.nn.local.net import GeoSparseNet

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ExtraError(
        "GeoSparseRegressor and GeoSparseClassifier need scikit-learn 1.6: pip install 'sparsecomp[sklearn]'"
    ) from error

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_Rows = tuple[Tensor, Tensor]
_OWN = (
    "k", "pattern", "radius", "offsets", "wrap_mode", "activation_type", "activation_config", "norm", "drop_path_max",
    "residual_alpha_init", "bias", "compute_mode", "input_shape",
)  # fmt: skip
"""Settings that go to the network as they are."""


class _GeoSparseEstimator(BaseEstimator):
    """What both estimators share; the arguments stand at `GeoSparseRegressor`."""

    def __init__(
        self, *, hidden_layers: int = 4, shape: Shape | Sequence[Shape] | None = None, k: int = 8,
        pattern: str = "local", radius: int = 1, offsets: Sequence[tuple[int, int]] | None = None,
        wrap_mode: str = "clamp", activation_type: str = "psann", activation_config: Mapping[str, Any] | None = None,
        norm: str = "rms", drop_path_max: float = 0.0, residual_alpha_init: float = 0.01, bias: bool = True,
        compute_mode: str = "compiled", input_shape: Shape | None = None, geo_seed: int | None = None,
        epochs: int = 200, batch_size: int = 128, lr: float = 1e-3, optimizer: str = "adam", weight_decay: float = 0.0,
        early_stopping: bool = False, patience: int = 20, validation_fraction: float = 0.1, warm_start: bool = False,
        compile: str | None = None, device: str = "auto", dtype: str = "float32", random_state: Any = None,
        progress: bool = False,
    ) -> None:  # fmt: skip
        self.hidden_layers, self.shape, self.k, self.pattern, self.radius = hidden_layers, shape, k, pattern, radius
        self.offsets, self.wrap_mode, self.activation_type = offsets, wrap_mode, activation_type
        self.activation_config, self.norm, self.drop_path_max = activation_config, norm, drop_path_max
        self.residual_alpha_init, self.bias, self.compute_mode = residual_alpha_init, bias, compute_mode
        self.input_shape, self.geo_seed, self.epochs, self.batch_size, self.lr = (
            input_shape, geo_seed, epochs, batch_size, lr
        )  # fmt: skip
        self.optimizer, self.weight_decay, self.early_stopping = optimizer, weight_decay, early_stopping
        self.patience, self.validation_fraction, self.warm_start = patience, validation_fraction, warm_start
        self.compile, self.device, self.dtype = compile, device, dtype
        self.random_state, self.progress = random_state, progress

    # -- what an estimator says of its targets

    def _begin(self, y: Any, classes: Any) -> int:
        """Look at the targets of a first fit; how many features the network has to give."""
        raise NotImplementedError

    def _target(self, y: Any) -> Tensor:
        """Targets as the loss takes them."""
        raise NotImplementedError

    def _loss(self, out: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    # -- fitting

    def fit(self, X: Any, y: Any, validation_data: tuple[Any, Any] | None = None) -> Self:
        """Train on rows X (n, features) and targets y.

        Args:
            validation_data: rows and targets to judge by, instead of a part of X.

        Raises:
            ConfigError: a setting is unknown, of another type or outside its domain.
        """
        again = self.warm_start and hasattr(self, "net_")
        X, y = self._checked(X, y, reset=not again)
        self._draw = check_random_state(self.random_state)
        with self._seeded():
            if not again:
                self._build(X, y, None)
            rows, held_out = self._split(X, y, validation_data)
            fitter, patience = self._fitter(), self.patience if self.early_stopping else None
            with Progress("fit", self.epochs) if self.progress else nullcontext() as bar:
                for losses in epochs_of(fitter, rows, self.epochs, held_out, patience):
                    self.history_.append(losses)
                    if bar is not None:
                        bar.advance()
        self.n_iter_ = len(self.history_)
        return self

    def _partial_fit(self, X: Any, y: Any, classes: Any) -> Self:
        first = not hasattr(self, "net_")
        X, y = self._checked(X, y, reset=first)
        if first:
            self._draw = check_random_state(self.random_state)
        with self._seeded():
            if first:
                self._build(X, y, classes)
            self.history_.append({"loss": self._fitter().epoch(self._rows(X), self._target(y))})
        self.n_iter_ = len(self.history_)
        return self

    def _build(self, X: Any, y: Any, classes: Any) -> None:
        outputs, features = self._begin(y, classes), X.shape[1]
        shape = self.shape
        if shape is None:
            side = max(math.isqrt(features - 1) + 1, math.isqrt(self.k) + 1)
            shape = side, side
        seed = int(torch.randint(2**31, (), device="cpu")) if self.geo_seed is None else self.geo_seed
        settings = {name: getattr(self, name) for name in _OWN}
        net = GeoSparseNet(features, outputs, shape=shape, depth=self.hidden_layers, seed=seed, **settings)
        self.net_ = net.to(self._device(), self._dtype())
        self._optimizer = optimizer_of(self.optimizer, self.net_, self.lr, self.weight_decay)
        self.history_: list[dict[str, float]] = []

    def _fitter(self) -> Fitter:
        for name in ("epochs", "batch_size", "patience"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, needs a whole number of 1 or more")
        call: Any = self.net_ if self.compile is None else torch.compile(self.net_, backend=self.compile, dynamic=True)
        return Fitter(self.net_, call, self._optimizer, self._loss, self.batch_size)

    def _split(self, X: Any, y: Any, given: tuple[Any, Any] | None) -> tuple[_Rows, _Rows | None]:
        """Rows to train on and rows to judge by, if any, with their targets."""
        held = None if given is None else self._checked(*given, reset=False)
        if given is None and self.early_stopping:
            X, held_rows, y, wanted = train_test_split(
                X, y, test_size=self.validation_fraction, random_state=self._draw
            )
            held = held_rows, wanted
        return (self._rows(X), self._target(y)), None if held is None else (self._rows(held[0]), self._target(held[1]))

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Within, torch draws by `random_state`; outside, as if nothing had been drawn."""
        device = self._device()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(self._draw.randint(np.iinfo(np.int32).max)))
            yield

    # -- data

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Any, Any]:
        checked: Any = validate_data(self, X, y, reset=reset, dtype="numeric", multi_output=True)
        return checked

    def _rows(self, X: Any) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(X), device=self._device()).to(self._dtype())

    @torch.no_grad()
    def _outputs(self, X: Any) -> Tensor:
        """What the network gives for rows, float64 on the CPU."""
        check_is_fitted(self, "net_")
        X = validate_data(self, X, reset=False, dtype="numeric")
        net, inputs = self.net_.eval(), self._rows(X)
        if not inputs.is_cuda:  # in float32 a row's last digit hangs on which rows are beside it
            net, inputs = copy.deepcopy(net).double(), inputs.double()
        return torch.cat([net(rows) for rows in inputs.split(_AT_ONCE)]).double().cpu()

    def _device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def _dtype(self) -> torch.dtype:
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}, needs one of {', '.join(_DTYPES)}")
        return _DTYPES[self.dtype]


_AT_ONCE = 4096
"""Rows that are predicted at a time."""


class GeoSparseRegressor(RegressorMixin, _GeoSparseEstimator):
    """A network on a grid that predicts numbers by least squares; it standardises targets, not features.

    Settings of `GeoSparseConfig`, such as k and activation_type, go to the network.

    Args:
        hidden_layers: blocks.
        shape: (H, W) of the grid, or one a block; None takes the least square with as many cells as features, and more
            than k.
        geo_seed: of the connectivity; None draws it by `random_state`.
        epochs: passes over the data, at most.
        batch_size: rows of a step.
        lr, optimizer, weight_decay: "adam", "adamw" or "sgd", and its rates.
        early_stopping: stop when the loss on held-out rows has not fallen for `patience` epochs, and take the weights
            of the best one. The rows are `validation_data` of `fit`, or `validation_fraction` of its data.
        warm_start: `fit` goes on from the weights that are there.
        compile: train through torch.compile with this backend, such as "sparsecomp"; None does not.
        device: "auto" takes a CUDA GPU if there is one.
        dtype: "float32" or "float64".
        random_state: seed of weights, connectivity, order and split.
        progress: show a bar on a terminal.

    Attributes:
        net_: the `GeoSparseNet`.
        history_: losses by epoch.
        n_iter_: epochs that were run.
    """

    def partial_fit(self, X: Any, y: Any) -> Self:
        """One epoch on these rows, from the weights that are there."""
        return self._partial_fit(X, y, None)

    def predict(self, X: Any) -> np.ndarray:
        """(n,), or (n, targets) as in `fit`; float64."""
        out = self._outputs(X).numpy() * self._spread + self._mean
        return out[:, 0] if self._flat else out

    def _begin(self, y: Any, classes: Any) -> int:
        y = np.asarray(y, np.float64)
        self._flat, y = y.ndim == 1, y.reshape(len(y), -1)
        spread = y.std(0)
        self._mean, self._spread = y.mean(0), np.where(spread > 0, spread, 1.0)
        return y.shape[1]

    def _target(self, y: Any) -> Tensor:
        return self._rows((np.asarray(y, np.float64).reshape(len(y), -1) - self._mean) / self._spread)

    def _loss(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out, target)

    def __sklearn_tags__(self) -> Any:
        tags: Any = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class GeoSparseClassifier(ClassifierMixin, _GeoSparseEstimator):
    """A network on a grid that tells classes apart by cross-entropy; arguments and attributes of `GeoSparseRegressor`.

    Attributes:
        classes_: of the targets, in the order of `predict_proba`.
    """

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """One epoch on these rows, from the weights that are there.

        Args:
            classes: all that there are, which the first call may be given; by default those of its `y`.
        """
        return self._partial_fit(X, y, classes)

    def predict_proba(self, X: Any) -> np.ndarray:
        """(n, classes), float64, rows that sum to 1."""
        return self._outputs(X).softmax(1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """(n,), of the kind of the classes."""
        chosen = self._outputs(X).argmax(1).numpy()
        return self.classes_[chosen]

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Any, Any]:
        X, y = validate_data(self, X, y, reset=reset, dtype="numeric")
        check_classification_targets(y)
        return X, column_or_1d(y)

    def _begin(self, y: Any, classes: Any) -> int:
        self.classes_ = np.unique(y if classes is None else classes)
        return len(self.classes_)

    def _target(self, y: Any) -> Tensor:
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"y has classes {unknown}, known are {self.classes_}: give all of them to the first call")
        return torch.as_tensor(np.searchsorted(self.classes_, y), device=self._device())

    def _loss(self, out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out, target)
