"""The estimators, by scikit-learn's own checks and by what they learn."""

import sys

import pytest
import torch

pytest.importorskip("sklearn", minversion="1.6")

import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from sparsecomp.errors import ConfigError, ExtraError
from sparsecomp.lowering.tuning.progress import Progress
from sparsecomp.nn import GeoSparseClassifier, GeoSparseRegressor
from sparsecomp.nn.local import estimators

pytestmark = pytest.mark.usefixtures("one_thread")
BOTH = pytest.mark.parametrize("kind", [GeoSparseRegressor, GeoSparseClassifier])


def data(kind, rows: int = 200):
    """Rows on a grid of 4 x 4 and what a neighbourhood of one cell says."""
    x = np.random.default_rng(0).normal(size=(rows, 16))
    y = np.sin(x[:, 5]) + x[:, 6] * 0.5
    return x, y if kind is GeoSparseRegressor else np.where(y > 0, "up", "down")


def small(kind, **settings):
    return kind(**{"hidden_layers": 1, "epochs": 5, "lr": 1e-2, "random_state": 0} | settings)


@pytest.mark.slow(reason="fits some hundred times")
@pytest.mark.filterwarnings("ignore")
@BOTH
def test_scikit_learns_own_checks(kind):
    check_estimator(small(kind, epochs=30, random_state=None))


@BOTH
def test_it_learns_and_stops_early(kind):
    x, y = data(kind)
    held = data(kind, 300)[0][200:], data(kind, 300)[1][200:]
    model = small(kind, epochs=200, early_stopping=True, patience=5, activation_type="tanh").fit(x, y, held)
    assert model.score(*held) > 0.8
    losses = [one["validation_loss"] for one in model.history_]
    assert len(losses) == model.n_iter_ < 200 and min(losses) == losses[-6]
    device = next(model.net_.parameters()).device
    if kind is GeoSparseClassifier:
        judged = log_loss(held[1], model.predict_proba(held[0]))
    else:
        judged = np.mean(((held[1] - model.predict(held[0])) / y.std(0)) ** 2)
    assert device.type == "cpu" and judged == pytest.approx(min(losses), rel=1e-5)


@BOTH
def test_a_bar_moves_with_each_epoch_where_one_is_asked_for(kind, monkeypatch):
    steps, bars = [], []
    monkeypatch.setattr(Progress, "advance", lambda bar: steps.append(bar))
    monkeypatch.setattr(estimators, "Progress", lambda *told: bars.append(told) or Progress(*told))
    small(kind, progress=False).fit(*data(kind))
    assert steps == bars == []
    small(kind, progress=True).fit(*data(kind))
    assert len(steps) == 5 and len(set(steps)) == 1 and bars == [("fit", 5)]


@BOTH
def test_seeds_decide_and_disturb_nobody(kind):
    x, y = data(kind)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, same, other = (small(kind, random_state=seed, pattern="random", radius=2).fit(x, y) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    index = [model.net_.blocks[0].fc1.in_index_per_out for model in (one, same, other)]
    assert torch.equal(index[0], index[1]) and not torch.equal(index[0], index[2])
    assert all(map(torch.equal, one.net_.state_dict().values(), same.net_.state_dict().values()))
    fixed = [small(kind, random_state=seed, pattern="random", geo_seed=3).fit(x, y) for seed in (0, 1)]
    assert torch.equal(*(model.net_.blocks[0].fc1.in_index_per_out for model in fixed))


@BOTH
def test_going_on(kind):
    x, y = data(kind)
    model = small(kind, warm_start=True).fit(x, y)
    net, losses = model.net_, [one["loss"] for one in model.history_]
    model.fit(x, y).partial_fit(x, y)
    assert model.net_ is net and model.n_iter_ == 11
    assert [one["loss"] for one in model.history_][:5] == losses and model.history_[-1]["loss"] < losses[-1]
    piecewise = small(kind)
    for _ in range(30):
        piecewise.partial_fit(x, y)
    assert piecewise.score(x, y) > 0.8


def test_classes():
    x, y = data(GeoSparseClassifier)
    model = small(GeoSparseClassifier).partial_fit(x[:10], ["up"] * 10, classes=["down", "flat", "up"])
    assert model.classes_.tolist() == ["down", "flat", "up"] and model.predict_proba(x).shape == (200, 3)
    with pytest.raises(ValueError, match="'left'"):
        model.partial_fit(x[:2], ["left", "up"])


def test_several_targets():
    x, y = data(GeoSparseRegressor)
    both = np.stack([y, 1000 - 50 * y], 1)
    model = small(GeoSparseRegressor, epochs=60).fit(x, both)
    assert model.predict(x).shape == (200, 2) and model.score(x, both) > 0.8


def test_the_grid_that_is_chosen():
    for features, k, side in ((16, 8, 4), (17, 8, 5), (1, 8, 3), (9, 9, 4)):
        x = np.random.default_rng(0).normal(size=(20, features))
        net = small(GeoSparseRegressor, k=k, radius=2, epochs=1).fit(x, x[:, 0]).net_
        assert net.config.grids == [(side, side)]
        assert isinstance(net.entry, torch.nn.Identity) == (features == side * side)


@pytest.mark.slow(reason="compiles")
def test_a_compiled_fit_learns_digits():
    x, y = load_digits(return_X_y=True)
    model = GeoSparseClassifier(hidden_layers=1, epochs=15, lr=1e-2, compile="sparsecomp", random_state=0)
    pipe = make_pipeline(StandardScaler(), model).fit(x[:1400], y[:1400])
    assert pipe.score(x[1400:], y[1400:]) > 0.9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs is 0"), ({"batch_size": 1.5}, "batch_size is 1.5"), ({"optimizer": "lbfgs"}, "adamw"),
        ({"lr": -1}, "lr is -1"), ({"dtype": "half"}, "needs one of float32"), ({"k": 10}, "at most 9 candidates"),
        ({"shape": (0, 4)}, "shape is"), ({"norm": "batch"}, "needs one of rms"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        small(GeoSparseRegressor, **settings).fit(*data(GeoSparseRegressor))


def test_without_scikit_learn(monkeypatch):
    monkeypatch.delitem(sys.modules, "sparsecomp.nn.local.estimators")
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    import sparsecomp.nn

    with pytest.raises(ExtraError, match=r"sparsecomp\[sklearn\]"):
        _ = sparsecomp.nn.GeoSparseRegressor
