"""snnTorch's networks: state in buffers, spikes that are multiplied by a factor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from snn_zoo import assert_exact, gradients_beside_eager, images, run_beside_eager, sixteenths
from torch import nn

pytestmark = pytest.mark.slow(reason="models of a library")

snn = pytest.importorskip("snntorch", reason="snnTorch is not installed")

NEURONS: dict[str, Callable[[], nn.Module]] = {
    "Leaky": lambda: snn.Leaky(beta=0.5, init_hidden=True),
    "Leaky zero": lambda: snn.Leaky(beta=0.5, init_hidden=True, reset_mechanism="zero"),
    "Leaky learnt": lambda: snn.Leaky(beta=0.5, init_hidden=True, learn_beta=True, learn_threshold=True),
    "Synaptic": lambda: snn.Synaptic(alpha=0.5, beta=0.5, init_hidden=True),
    "Alpha": lambda: snn.Alpha(alpha=0.75, beta=0.5, init_hidden=True),
    "Lapicque": lambda: snn.Lapicque(beta=0.5, init_hidden=True),
}


class ConvNet(nn.Module):
    """conv → pool → neuron → conv → pool → neuron → linear → neuron, a step a call or T steps a call."""

    def __init__(self, neuron: Callable[[], nn.Module], steps: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 5), nn.MaxPool2d(2), neuron(), nn.Conv2d(8, 16, 5), nn.MaxPool2d(2), neuron(),
            nn.Flatten(), nn.Linear(16 * 4 * 4, 10), neuron(),
        )  # fmt: skip
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.net(x) for _ in range(self.steps)])


def _reset(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, snn.SpikingNeuron):
            module.reset_mem()


def _neurons() -> tuple[type[nn.Module], ...]:
    return (snn.SpikingNeuron,)


def _images(count: int = 1) -> list[Any]:
    return [(images(2, 1, 28, 28, seed=seed),) for seed in range(count)]


@pytest.mark.parametrize("name", NEURONS)
def test_evaluation_is_exact_and_both_layers_on_spikes_are_rewritten(name):
    model = sixteenths(ConvNet(NEURONS[name])).eval()
    run = run_beside_eager(model, _images(3), _neurons(), reset=_reset, rounds=2)
    assert_exact(run)
    assert {run.rewritten(graph) for graph in range(len(run.reports))} == {2}


@pytest.mark.parametrize("how", ["graph", "aot"])
def test_several_steps_in_one_graph(how):
    model = sixteenths(ConvNet(NEURONS["Leaky"], steps=4)).eval()
    run = run_beside_eager(model, _images(), _neurons(), how=how)
    assert_exact(run)
    assert run.rewritten() == 2  # each for all steps


@pytest.mark.parametrize("name", ["Leaky", "Synaptic"])
def test_training_fires_the_same_and_has_the_same_gradients(name):
    model = sixteenths(ConvNet(NEURONS[name], steps=3)).train()
    expected, found = gradients_beside_eager(model, *_images(), _neurons())
    assert found.rewritten == 2
    assert found.flips(expected) == 0
    found.assert_close(expected)


def test_a_graded_spike_factor_moves_to_the_weight():
    model = sixteenths(ConvNet(lambda: snn.Leaky(beta=0.5, init_hidden=True, graded_spikes_factor=0.5))).eval()
    run = run_beside_eager(model, _images(2), _neurons())
    assert_exact(run)
    assert run.rewritten() == 2


def test_a_neuron_that_returns_its_state_to_the_caller():
    class Explicit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.fire, self.second = nn.Conv2d(1, 8, 3), snn.Leaky(beta=0.5), nn.Conv2d(8, 4, 3)

        def forward(self, x: torch.Tensor, mem: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            spikes, mem = self.fire(self.first(x), mem)
            return self.second(spikes), mem

    calls = [(images(2, 1, 9, 9, seed=seed), images(2, 8, 7, 7, seed=seed + 10)) for seed in range(3)]
    run = run_beside_eager(sixteenths(Explicit()).eval(), calls, _neurons())
    assert_exact(run)
    assert {run.rewritten(graph) for graph in range(len(run.reports))} == {1}
