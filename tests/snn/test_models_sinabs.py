"""sinabs' networks, through `torch.compile` and `optimize`."""

import copy

import pytest
import torch
from snn_zoo import WEIGHT_RULES, assert_exact, gradients_beside_eager, images, run_beside_eager, sixteenths
from torch import nn

import sparsecomp

sinabs = pytest.importorskip("sinabs", reason="sinabs is not installed")
layers = pytest.importorskip("sinabs.layers", reason="sinabs is not installed")

pytestmark = pytest.mark.quick_cases(2)

BATCH, STEPS = 2, 3


def _single(kind: str) -> nn.Module:
    if kind == "LIF":
        return layers.LIFSqueeze(tau_mem=1.4426950408889634, batch_size=BATCH, spike_fn=sinabs.activation.SingleSpike)
    activation = sinabs.activation
    fire = {"IAF": activation.SingleSpike, "MaxSpike": activation.MaxSpike(3), "MultiSpike": activation.MultiSpike}
    return layers.IAFSqueeze(batch_size=BATCH, spike_fn=fire[kind])


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


def _neurons() -> tuple[type[nn.Module], ...]:
    return (layers.StatefulLayer,)


@pytest.mark.parametrize("how", ["graph", "aot"])
@pytest.mark.parametrize("kind", ["IAF", "LIF"])
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="an older torch breaks the graph at other lines too")
def test_compiled_each_state_of_the_network_is_one_graph_and_exact(kind, how):
    calls = [(images(BATCH * STEPS, 2, 14, 14, seed=seed),) for seed in range(3)]
    run = run_beside_eager(_net(kind), calls, _neurons(), how=how, reset=_reset, rounds=2)
    assert_exact(run)
    assert len(run.reports) == 2  # without a state, and with one
    assert run.rewritten(0) == run.rewritten(1) == 2


@pytest.mark.parametrize("kind", ["IAF", "LIF", "MaxSpike", "MultiSpike"])
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="an older torch breaks the graph at other lines too")
def test_training_is_one_graph_that_fires_the_same_and_has_the_same_gradients(kind):
    expected, found = gradients_beside_eager(_net(kind).train(), (images(BATCH * STEPS, 2, 14, 14),), _neurons())
    assert found.graphs == 1
    assert found.rewritten == (2 if kind in ("IAF", "LIF") else 0)
    assert found.flips(expected) == 0
    found.assert_close(expected)


OTHERS = {
    "ALIF": lambda: layers.ALIF(tau_mem=4.0, tau_adapt=4.0, spike_fn=sinabs.activation.SingleSpike),
    "ExpLeak": lambda: layers.ExpLeak(tau_mem=4.0),
}


@pytest.mark.slow(reason="models of a library")
@pytest.mark.parametrize("name", OTHERS)
def test_every_neuron_is_in_one_graph_with_its_layers(name):
    net = nn.Sequential(nn.Linear(6, 6), OTHERS[name](), nn.Linear(6, 4))
    expected, found = gradients_beside_eager(sixteenths(net).train(), (images(2, 5, 6),), _neurons())
    assert found.graphs == 1
    assert found.flips(expected) == 0
    found.assert_close(expected)


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


@pytest.mark.slow(reason="compiles a network")
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


@pytest.mark.slow(reason="Inductor compiles")
def test_unbounded_counts_stay_dense_and_say_why():
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
