"""sinabs' networks, through `optimize`: Dynamo's graph breaks inside the neurons, the modules' graph does not."""

import copy

import pytest
import torch
from snn_zoo import WEIGHT_RULES, images, sixteenths
from torch import nn

import sparsecomp

sinabs = pytest.importorskip("sinabs", reason="sinabs is not installed")
layers = pytest.importorskip("sinabs.layers", reason="sinabs is not installed")

BATCH, STEPS = 2, 3


def _single(kind: str) -> nn.Module:
    if kind == "LIF":
        return layers.LIFSqueeze(tau_mem=1.4426950408889634, batch_size=BATCH, spike_fn=sinabs.activation.SingleSpike)
    fire = {"IAF": sinabs.activation.SingleSpike, "MaxSpike": sinabs.activation.MaxSpike(3)}[kind]
    return layers.IAFSqueeze(batch_size=BATCH, spike_fn=fire)


def _net(kind: str) -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3), _single(kind), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), _single(kind), nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip
    return sixteenths(net).eval()


def _reset(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, layers.StatefulLayer):
            module.reset_states()


@pytest.mark.parametrize("kind", ["IAF", "LIF"])
def test_optimize_is_exact_over_calls_and_resets(kind):
    eager = _net(kind)
    x = images(BATCH * STEPS, 2, 14, 14)
    with torch.no_grad():
        eager(x)
        _reset(eager)
        model = copy.deepcopy(eager)
        optimized = sparsecomp.optimize(model, x, implementation="binary", strict=True)
        sites = [site for site in optimized.report.sites if site.rule in WEIGHT_RULES]
        assert [site.rewritten for site in sites] == [False, True, True]
        for call in range(4):
            x = images(BATCH * STEPS, 2, 14, 14, seed=call)
            expected = eager(x)
            torch.testing.assert_close(optimized(x), expected, rtol=0, atol=0)
            assert expected.abs().max() > 0
            for mine, theirs in zip(model.buffers(), eager.buffers(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
            if call == 1:
                _reset(eager), _reset(model)


@pytest.mark.slow(reason="compiles many graphs")
def test_bounded_counts_stay_dense_because_a_potential_may_be_nan():
    model = _net("MaxSpike")
    x = images(BATCH * STEPS, 2, 14, 14)
    with torch.no_grad():
        expected = model(x)
        _reset(model)
        optimized = sparsecomp.optimize(model, x, implementation="binary")
        reasons = [site.reason for site in optimized.report.sites if site.rule in WEIGHT_RULES]
        assert len(reasons) == 3 and all("NaN possible" in reason for reason in reasons[1:])
        _reset(model)
        torch.testing.assert_close(optimized(x), expected)


@pytest.mark.slow(reason="compiles many graphs")
def test_unbounded_counts_stay_dense_and_say_why():
    """Dynamo gives up on the whole forward, so that only the modules' graph can name the sites."""
    net = nn.Sequential(nn.Conv2d(2, 4, 3), layers.IAFSqueeze(batch_size=BATCH), nn.Conv2d(4, 4, 3))
    model = sixteenths(net).eval()
    x = images(BATCH * STEPS, 2, 8, 8)
    with torch.no_grad():
        expected = model(x)
        _reset(model)
        optimized = sparsecomp.optimize(model, x, implementation="binary")
        sites = [site for site in optimized.report.sites if site.rule == "spike_conv"]
        assert [site.rewritten for site in sites] == [False, False]
        assert "not small integers: integers -inf..inf, NaN possible" in sites[1].reason
        _reset(model)
        torch.testing.assert_close(optimized(x), expected)
