"""spikingjelly's neuron operators, unrolled in the graph, against the operators themselves."""

from typing import Any

import pytest
import torch
from rewriting import rewritten, site
from torch import nn

neuron, functional, surrogate = (
    pytest.importorskip(f"spikingjelly.activation_based.{name}") for name in ("neuron", "functional", "surrogate")
)

NEURONS = {
    "lif": lambda: neuron.LIFNode(tau=3.0, step_mode="m"),
    "lif no decay": lambda: neuron.LIFNode(tau=3.0, decay_input=False, step_mode="m"),
    "lif soft reset": lambda: neuron.LIFNode(v_reset=None, v_threshold=0.7, step_mode="m"),
    "lif reset to 0.1": lambda: neuron.LIFNode(v_reset=0.1, step_mode="m"),
    "lif atan": lambda: neuron.LIFNode(surrogate_function=surrogate.ATan(), step_mode="m"),
    "if": lambda: neuron.IFNode(step_mode="m"),
    "if soft reset": lambda: neuron.IFNode(v_reset=None, step_mode="m"),
    "plif": lambda: neuron.ParametricLIFNode(init_tau=1.7, step_mode="m"),
    "plif soft reset": lambda: neuron.ParametricLIFNode(v_reset=None, decay_input=False, step_mode="m"),
    "stored voltages": lambda: neuron.LIFNode(step_mode="m", store_v_seq=True),
    "single-step": lambda: neuron.LIFNode(),
}


def _input(steps: int = 4, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(steps, 2, 3, 5, 5, generator=torch.Generator().manual_seed(seed))


def _voltages(module: Any) -> list[torch.Tensor]:
    stored = [module.v_seq] if getattr(module, "store_v_seq", False) else []
    return [module.v, *stored]


@pytest.mark.parametrize("make", NEURONS.values(), ids=NEURONS)
def test_bits_equal_the_operators(make):
    eager, module = make(), make()
    with torch.no_grad():
        for seed in range(2):  # the second call starts from the first one's potential
            expected = eager(_input(seed=seed))
            found, report = rewritten(module, _input(seed=seed), neurons="inline")
            assert 0 < expected.mean() < 1
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            for a, b in zip(_voltages(module), _voltages(eager), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
    found_site = site(report, "decompose_neurons")
    assert found_site.rewritten and found_site.implementation == "inline"


def test_a_convolution_behind_still_sees_spikes():
    model = nn.Sequential(neuron.LIFNode(step_mode="m"), nn.Flatten(0, 1), nn.Conv2d(3, 4, 3))
    with torch.no_grad():
        expected = model(_input())
        functional.reset_net(model)
        found, report = rewritten(model, _input(), neurons="inline")
    torch.testing.assert_close(found, expected)
    assert site(report, "decompose_neurons").rewritten and site(report, "spike_conv").rewritten


@pytest.mark.parametrize(
    ("options", "steps", "grad", "reason"),
    [
        ({}, 4, False, "on the CPU"),
        ({"neurons": "inline"}, 17, False, "17 time steps"),
        ({"neurons": "inline"}, 4, True, "gradients are enabled"),
    ],
)
def test_what_stays_an_operator_says_why(options, steps, grad, reason):
    with torch.set_grad_enabled(grad):
        _, report = rewritten(neuron.LIFNode(step_mode="m"), _input(steps), **options)
    assert not site(report, "decompose_neurons").rewritten
    assert reason in site(report, "decompose_neurons").reason


def test_a_neuron_that_is_not_unrolled_stays_opaque_but_known():
    model = nn.Sequential(neuron.QIFNode(step_mode="m"), nn.Flatten(0, 1), nn.Conv2d(3, 4, 3))
    with torch.no_grad():
        _, report = rewritten(model, _input(), neurons="inline")
    assert not [found for found in report.sites if found.rule == "decompose_neurons"]
    assert site(report, "spike_conv").rewritten
