"""profile: counts are exact, times are plausible, the model is left alone."""

import json
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from rewriting import AttributeLIF, ConvNet
from torch import nn

import sparsecomp
from sparsecomp.compiler.profile import LayerProfile, Profile, block_size
from sparsecomp.errors import ExtraError
from sparsecomp.lowering.tuning.progress import Progress
from sparsecomp.nn import SparseLinear

try:
    from spikingjelly.activation_based import neuron
except ImportError:
    neuron = None


def test_density_and_empty_blocks_are_exact():
    model = nn.Sequential(nn.Identity(), nn.Conv2d(2, 4, 1))
    x = torch.zeros(1, 2, 14, 14)
    x[0, :, 0, 0] = 1
    x[0, 1, 13, 13] = torch.nan
    layer = sparsecomp.profile(model, x, repetitions=2).layers[1]
    assert (layer.name, layer.kind, layer.calls) == ("1", "Conv2d", 1)
    assert layer.density == pytest.approx(3 / (2 * 14 * 14))
    assert (layer.block, layer.empty_blocks) == (8, 0.5)
    assert layer.milliseconds > 0
    assert layer.samples_per_second == pytest.approx(1e3 / layer.milliseconds)


@pytest.mark.parametrize(("height", "block"), [(224, 16), (56, 16), (55, 8), (14, 8), (13, 4), (8, 4), (7, None)])
def test_the_block_rule(height, block):
    assert block_size(height) == block


@pytest.mark.parametrize("layer", [nn.Linear(8, 4), SparseLinear.from_linear(nn.Linear(8, 4), sparsity=0.5)])
def test_a_layer_alone_is_a_model_of_one(layer):
    (found,) = sparsecomp.profile(layer, torch.eye(8), repetitions=1).layers
    assert (found.kind, found.calls, found.density) == (type(layer).__name__, 1, 1 / 8)


def test_a_profile_without_layers_says_so():
    assert "no layer" in str(sparsecomp.profile(lambda x: x + 1, torch.ones(2)))


class Slow(nn.Module):
    """Takes two hundredths of a second a call, and what it is given."""

    def forward(self, x):
        time.sleep(0.02)
        return x


class Again(nn.Module):
    """Calls one layer for each time step, another once for all."""

    def __init__(self):
        super().__init__()
        self.step, self.unused, self.last = Slow(), Slow(), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(sum(self.step(part) for part in x))


def test_calls_and_their_times_add_up():
    x = torch.zeros(3, 5, 4)
    x[0], x[1, 0, 0] = 1, 2
    step, last = sparsecomp.profile(Again(), x, repetitions=2).layers
    assert [(layer.name, layer.calls) for layer in (step, last)] == [("step", 3), ("last", 1)]
    assert step.density == pytest.approx(21 / 60) and last.density == 1.0
    assert step.milliseconds >= 60 and last.milliseconds < step.milliseconds
    assert step.samples_per_second == pytest.approx(15e3 / step.milliseconds)


def test_the_state_stays():
    model = ConvNet().eval()
    model.second = nn.Sequential(model.second)
    result = sparsecomp.profile(model, torch.rand(2, 3, 8, 8), repetitions=1)
    names = ["first", "norm", "fire1", "second.0", "fire2", "head"]
    assert [(layer.name, layer.calls) for layer in result.layers] == [(name, 1) for name in names]
    assert all(module.v is None for module in model.modules() if isinstance(module, AttributeLIF))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("called", [False, True])
def test_of_a_compiled_model_its_own_layers_are_timed(called: bool) -> None:
    inner, x = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU())), torch.ones(2, 4)
    own, wrapped = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.compile(inner, backend="eager")
    own.compile(backend="eager")
    for model, names in ((wrapped, ["0", "1.0"]), (own, ["0", "1"]), (nn.Sequential(wrapped), ["0.0", "0.1.0"])):
        if called:
            model(x)
        result = sparsecomp.profile(model, x, repetitions=1)
        assert [layer.name for layer in result.layers] == names
        assert [layer.kind for layer in result.layers] == ["Linear", "ReLU"]
        assert all(layer.calls == 1 and layer.milliseconds > 0 for layer in result.layers)


def test_json_and_table():
    result = sparsecomp.profile(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), repetitions=1)
    assert json.loads(result.to_json())["layers"][0]["kind"] == "Linear"
    assert "Linear" in str(result)


def test_columns_that_say_nothing_are_left_out():
    def headers(model: nn.Module, *shape: int) -> list[str]:
        table = sparsecomp.profile(model, torch.ones(shape), repetitions=1).to_table()
        return [str(column.header) for column in table.columns]

    always = ["layer", "kind", "calls", "ms", "samples/s", "density"]
    assert headers(nn.Sequential(nn.Linear(4, 4)), 2, 4) == always
    assert headers(nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(64, 1)), 1, 1, 8, 8) == [
        *always, "block", "empty blocks",
    ]  # fmt: skip


def test_no_repetitions_are_refused():
    with pytest.raises(ValueError, match="repetitions=0"):
        sparsecomp.profile(nn.Linear(4, 4), torch.ones(1, 4), repetitions=0)


class Options(nn.Module):
    """A layer that takes no tensor."""

    def forward(self, size: int) -> torch.Tensor:
        return torch.ones(size, 2)


class Around(nn.Module):
    """Calls it, and a layer with nothing, by keyword and without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = Options(), Options(), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(3).sum() + self.second(size=2).sum() + self.third(x[:0]).sum() + self.last(x)


def test_of_what_is_no_tensor_or_empty_no_share_is_taken() -> None:
    layers = sparsecomp.profile(Around(), torch.ones(3, 2), repetitions=1).layers
    assert [(layer.name, layer.calls) for layer in layers] == [("first", 1), ("second", 1), ("third", 1), ("last", 1)]
    assert [layer.density for layer in layers] == [None, None, None, 1.0]


class Functional(nn.Module):
    """Convolves and multiplies by functions, a neuron with a surrogate between them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.weight = nn.Parameter(torch.rand(4, 2, 3, 3)), nn.Parameter(torch.rand(5, 4))
        self.fire = neuron.LIFNode(step_mode="s") if neuron is not None else nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            y = F.conv2d(x, self.kernel)
        z = self.fire(F.relu(y)).mean((2, 3))
        return F.linear(z, self.weight) + F.linear(input=z, weight=self.weight) + z @ self.weight.T


class Outer(nn.Module):
    """Calls it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Functional()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) + self.block(x)


def test_functions_that_are_layers_are_named_after_the_module_that_calls_them() -> None:
    x = torch.zeros(3, 2, 8, 8)
    x[:, 0] = 1
    profile = sparsecomp.profile(Outer(), x, repetitions=1)
    layers = {layer.name: layer for layer in profile.layers}
    kind = type(Outer().block.fire).__name__
    assert {name: (layer.kind, layer.calls) for name, layer in layers.items()} == {
        "block.conv2d": ("F.conv2d", 4), "block.relu": ("F.relu", 2), "block.fire": (kind, 2),
        "block.linear": ("F.linear", 4), "block.matmul": ("matmul", 2),
    }  # fmt: skip
    assert layers["block.conv2d"].density == 0.5 and layers["block.conv2d"].milliseconds > 0


def test_two_calls_of_a_function_are_told_apart_by_their_lines() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, torch.ones(3, 3))
        return F.linear(x, torch.zeros(3, 3))

    first, second = sparsecomp.profile(model, torch.ones(1, 3), repetitions=1).layers
    assert [(layer.name, layer.calls) for layer in (first, second)] == [("linear", 1), ("linear_1", 1)]


@pytest.mark.skipif(neuron is None, reason="needs spikingjelly")
def test_a_neuron_is_one_layer_whatever_it_is_made_of() -> None:
    model = nn.Sequential(nn.Linear(4, 4), neuron.LIFNode())
    layers = sparsecomp.profile(model, torch.rand(2, 4), repetitions=1).layers
    assert [(layer.name, layer.kind) for layer in layers] == [("0", "Linear"), ("1", "LIFNode")]


def test_the_plot_has_a_row_a_layer() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    profile = Profile("cpu", 1, [
        LayerProfile("a", "Linear", 1, 2.0, 1.0, 0.25), LayerProfile("b", "Conv2d", 1, 0.5, 1.0, 0.5, 8, 0.75),
    ])  # fmt: skip
    times, shares = profile.plot().axes
    assert [bar.get_width() for bar in times.patches] == [2.0, 0.5]
    assert [label.get_text() for label in times.get_yticklabels()] == ["a (Linear)", "b (Conv2d)"]
    assert [bar.get_width() for bar in shares.patches] == [0.25, 0.5, 0.0, 0.75]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ExtraError, match=r"sparsecomp\[plot\]"):
        Profile("cpu", 1).plot()


def test_a_long_run_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(Progress, "advance", lambda self: steps.append(self._title))
    sparsecomp.profile(nn.Linear(4, 4), torch.ones(1, 4), repetitions=3)
    assert steps == ["profiling"] * 4  # one pass measures sparsity
