"""Norse's networks: the state is a tuple that the caller carries, or None in the first call."""

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


def test_without_a_state_the_graph_breaks_between_neuron_and_layer_as_with_any_backend():
    """`requires_grad` is set on the fresh state, which Dynamo cannot trace; the results are right."""
    calls = [(images(2, 1, 14, 14, seed=seed), None, None) for seed in range(2)]
    run = run_beside_eager(_net().eval(), calls, _cells())
    assert_exact(run)


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
