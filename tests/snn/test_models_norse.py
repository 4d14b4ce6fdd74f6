"""Norse's networks: the state is a tuple that the caller carries, or None in the first call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from snn_zoo import assert_exact, gradients_beside_eager, images, run_beside_eager, sixteenths
from torch import nn

import sparsecomp

pytestmark = pytest.mark.slow(reason="models of a library")

norse = pytest.importorskip("norse.torch", reason="Norse is not installed")

# dt * tau_mem_inv = dt * tau_syn_inv = 1/2, so that every step is exact
PARAMETERS = norse.LIFParameters(
    tau_mem_inv=torch.tensor(512.0), tau_syn_inv=torch.tensor(512.0), v_th=torch.tensor(1.0)
)
DT = 2.0**-10


def _lif() -> nn.Module:
    return norse.LIFCell(PARAMETERS, dt=DT)


class ConvNet(nn.Module):
    """conv → LIF → conv → LIF → linear, a step a call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.lif1, self.pool = nn.Conv2d(1, 8, 3), _lif(), nn.MaxPool2d(2)
        self.conv2, self.lif2, self.head = nn.Conv2d(8, 16, 3), _lif(), nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: torch.Tensor, first: Any, second: Any) -> tuple[torch.Tensor, Any, Any]:
        spikes, first = self.lif1(self.conv1(x), first)
        spikes, second = self.lif2(self.conv2(self.pool(spikes)), second)
        return self.head(spikes.flatten(1)), first, second


def _state(seed: int, *shape: int) -> Any:
    return norse.LIFFeedForwardState(v=images(*shape, seed=seed), i=images(*shape, seed=seed + 50))


def _passed(seed: int) -> tuple[Any, ...]:
    return images(2, 1, 14, 14, seed=seed), _state(seed, 2, 8, 12, 12), _state(seed, 2, 16, 4, 4)


def _cells() -> tuple[type[nn.Module], ...]:
    return (norse.LIFCell,)


def _net() -> nn.Module:
    return sixteenths(ConvNet())


@pytest.mark.parametrize("how", ["graph", "aot"])
def test_with_its_state_passed_in(how):
    run = run_beside_eager(_net().eval(), [_passed(seed) for seed in range(3)], _cells(), how=how)
    assert_exact(run)
    assert len(run.reports) == 1 and run.rewritten() == 2


@pytest.mark.parametrize("how", ["graph", "aot"])
def test_without_a_state_neuron_and_next_layer_are_in_one_graph(how):
    """Norse says of the state that it makes that it requires a gradient, for which nobody can ask."""
    calls = [(2048 * images(2, 1, 14, 14, seed=seed), None, None) for seed in range(2)]
    calls += [(images(2, 1, 14, 14, seed=9), _state(3, 2, 8, 12, 12), _state(4, 2, 16, 4, 4))]
    run = run_beside_eager(_net().eval(), calls, _cells(), how=how)
    assert run.flips == 0
    assert len(run.reports) == 2 and run.rewritten(0) == run.rewritten(1) == 2  # without a state, and with one


SEQUENCES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{name: (lambda name=name: getattr(norse, name)(), 1) for name in ["LIF", "LIFAdEx", "LIFEx"]},
    "LIFRecurrent": (lambda: norse.LIFRecurrent(6, 6, autapses=True), 1),
    "Izhikevich": (lambda: norse.Izhikevich(norse.tonic_spiking), 1),
    **{name: (lambda name=name: getattr(norse, name)(), 0) for name in ["LIFBoxCell", "LIFRefracCell", "LIFAdExCell"]},
    "LIFRecurrentCell": (lambda: norse.LIFRecurrentCell(6, 6, autapses=True), 0),  # a copy would lose their hook
    "CobaLIFCell": (lambda: norse.CobaLIFCell(6, 6), 0),
}


class Between(nn.Module):
    """linear → neuron without a state → linear."""

    def __init__(self, neuron: nn.Module) -> None:
        super().__init__()
        self.first, self.neuron, self.last = nn.Linear(6, 6), neuron, nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.neuron(1000 * self.first(x))[0])


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_neuron_without_a_state_is_in_one_graph_with_its_layers_and_trains_as_eager(name):
    make, steps = SEQUENCES[name]
    model = Between(make())
    x = images(*([5] if steps else []), 3, 6)
    expected, found = gradients_beside_eager(model, (x,), (type(model.neuron),))
    assert found.flips(expected) == 0
    assert found.graphs == 1
    found.assert_close(expected)


def test_what_a_module_shares_still_breaks_the_graph_so_that_its_gradient_is_kept():
    model = Between(norse.IAF())
    run = run_beside_eager(model.eval(), [(images(5, 3, 6),)], (norse.IAF,))
    assert run.flips == 0
    assert len(run.reports) > 1
    assert model.neuron.p.v_reset.requires_grad


def test_without_a_state_optimize_works_at_the_level_of_modules():
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.lif, self.last = nn.Conv2d(1, 8, 3), _lif(), nn.Conv2d(8, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.lif(self.conv(x))[0])

    model, x = sixteenths(Step()).eval(), 1024 * images(2, 1, 9, 9)
    with torch.no_grad():
        expected = model(x)
        optimized = sparsecomp.optimize(model, x, implementation="binary")
        assert [site.rewritten for site in optimized.report.sites if site.rule == "spike_conv"] == [False, True]
        torch.testing.assert_close(optimized(x), expected, rtol=0, atol=0)


def test_training_fires_the_same_and_has_the_same_gradients():
    class OneInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = ConvNet()

        def forward(self, x: torch.Tensor, v1: torch.Tensor, i1: torch.Tensor, v2: torch.Tensor, i2: torch.Tensor):
            state = norse.LIFFeedForwardState
            return self.net(x, state(v=v1, i=i1), state(v=v2, i=i2))[0]

    x, first, second = _passed(0)
    model = sixteenths(OneInput()).train()
    expected, found = gradients_beside_eager(model, (x, first.v, first.i, second.v, second.i), _cells())
    assert found.rewritten == 2
    assert found.flips(expected) == 0
    found.assert_close(expected)
