"""Loops over time: each layer runs once on all steps, with eager's spikes and gradients; what must stay a loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import Surrogate, dyadic, rewritten, site
from snn_zoo import assert_exact, gradients_beside_eager, images, run_beside_eager, sixteenths
from torch import Tensor, fx, nn

from sparsecomp.compiler.capture import Graph
from sparsecomp.options import Options
from sparsecomp.passes.graph.contract import contracted, contractible, reorder
from sparsecomp.passes.spiking import fuse_steps

pytestmark = pytest.mark.quick_cases(1)

T = 5
RULE = "fuse_steps"
Forward = Callable[[nn.Module, Tensor], Tensor]


def _counts(function: Callable[..., Any], *inputs: Any, **options: Any) -> dict[str, int]:
    """How often the rewritten graph calls each function."""
    counts: dict[str, int] = {}

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        parsed = Options.parse(None, {"neurons": "fuse", "strict": True, "verify": True, **options})
        Graph.of_dynamo(gm, example_inputs, {}, parsed).rewrite(parsed)
        for node in gm.graph.nodes:
            if node.users:
                name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
                counts[name] = counts.get(name, 0) + 1
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return counts


class Loop(nn.Module):
    """Two layers and hand-written neurons, in a loop over time that `run` writes."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 4, 3)
        self.norm, self.head, self.back = nn.BatchNorm2d(8), nn.Linear(4 * 3 * 3, 5), nn.Conv2d(4, 2, 1)
        self.run = run
        dyadic(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def _fire(v: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    v = v / 2 + x
    spikes = (v >= 1.0).float()
    return spikes, v * (1 - spikes)


def stacked(net: Any, x: Tensor) -> Tensor:
    first: Any = 0.0
    second: Any = 0.0
    out = []
    for t in range(x.shape[0]):
        spikes, first = _fire(first, net.norm(net.first(x[t])))
        spikes, second = _fire(second, net.second(F.max_pool2d(spikes, 2, stride=1, padding=0)))
        out.append(net.head(F.max_pool2d(spikes, 2, stride=2, ceil_mode=True).flatten(1)))
    return torch.stack(out)


def summed(net: Any, x: Tensor) -> Tensor:
    first: Any = 0.0
    out: Any = 0.0
    for step in x.unbind():
        spikes, first = _fire(first, net.first(step))
        out = out + net.second(spikes).view(x.shape[1], -1)
    return out / x.shape[0]


def written(net: Any, x: Tensor) -> Tensor:
    """Each step is written to its place."""
    first: Any = 0.0
    out = x.new_zeros(x.shape[0], x.shape[1], 8, 8, 8)
    for t in range(x.shape[0]):
        spikes, first = _fire(first, net.first(x[t]))
        out[t] = spikes
    return net.second(out.flatten(0, 1))


def random(net: Any, x: Tensor) -> Tensor:
    """Random numbers are drawn in the order that eager draws them."""
    v: Any = 0.0
    out = []
    for t in range(x.shape[0]):
        spikes, v = _fire(v, F.dropout(net.first(x[t]), 0.5, training=True))
        out.append(net.second(spikes))
    return torch.stack(out)


LOOPS = {"stacked": (stacked, {"conv2d": 2, "linear": 1}), "summed": (summed, {"conv2d": 2}),
         "written": (written, {"conv2d": 2}), "random": (random, {"conv2d": 2, "dropout": T})}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_each_layer_of_a_loop_runs_once_with_the_same_result(name):
    run, calls = LOOPS[name]
    net, x = Loop(run).eval(), images(T, 2, 2, 8, 8)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = net(x)
        torch.manual_seed(0)
        found, report = rewritten(net, x, strict=True)
        assert torch.equal(found, expected) and expected.abs().max() > 0
        assert site(report, RULE).rewritten
        counts = _counts(net, x, disable=["spike_conv", "spike_linear"])
        assert {key: counts[key] for key in calls} == calls


def test_gradients_are_eagers_and_statistics_move_on_step_by_step():
    net = Loop(stacked).train()
    x = images(T, 2, 2, 8, 8).requires_grad_()
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    results = []
    for run in (net, lambda x: rewritten(net, x, strict=True)[0]):
        net.load_state_dict(buffers, strict=False)
        out = run(x)
        of = [x, *net.first.parameters(), *net.norm.parameters()]
        grads = torch.autograd.grad(out.square().sum(), of, allow_unused=True)
        results.append([out, *(grad for grad in grads if grad is not None), *(b.clone() for b in net.buffers())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def feedback(net: Any, x: Tensor) -> Tensor:
    """What the second layer gives reaches the first one at the next step."""
    v: Any = 0.0
    back: Any = 0.0
    out = []
    for t in range(x.shape[0]):
        spikes, v = _fire(v, net.first(x[t] + back))
        out.append(net.second(spikes))
        back = F.interpolate(net.back(out[-1]), size=8)
    return torch.stack(out)


def test_a_layer_that_needs_its_own_earlier_results_stays_a_loop_and_others_do_not():
    net, x = Loop(feedback).eval(), images(T, 2, 2, 8, 8)
    with torch.no_grad():
        found, report = rewritten(net, x, strict=True)
        assert torch.equal(found, net(x))
        assert not site(report, RULE).rewritten
        assert "needs what an earlier one gave" in site(report, RULE).reason


def test_one_layer_twice_in_a_row_stays_two_calls():
    layer = nn.Linear(6, 6)
    found, report = rewritten(lambda x: layer(layer(x)), x := torch.randn(3, 6), strict=True)
    torch.testing.assert_close(found, layer(layer(x)))
    assert not [one for one in report.sites if one.rule == RULE and one.rewritten]


def test_on_a_cpu_a_loop_stays_unless_an_implementation_is_asked_for():
    with torch.no_grad():
        _, report = rewritten(Loop(stacked).eval(), images(T, 2, 2, 8, 8), implementation="auto")
    assert "little gain on a CPU" in site(report, RULE).reason


def test_results_are_cut_to_what_fits(monkeypatch):
    monkeypatch.setattr(fuse_steps, "MOST_BYTES", 2 * 8 * 8 * 8 * 4 * 2)  # two steps of the first layer
    net, x = Loop(stacked).eval(), images(T, 2, 2, 8, 8)
    with torch.no_grad():
        assert torch.equal(rewritten(net, x, strict=True)[0], net(x))
        counts = _counts(net, x, disable=["spike_conv", "spike_linear"])
    assert counts["conv2d"] == 3 + 1  # 2 + 2 + 1 steps, and 5 of the smaller result


def test_a_surrogate_in_training_leaves_the_layers_one_call_each_but_one_that_draws_numbers_stays_in_order():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            return (torch.rand_like(v) < v).to(v.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    def run(net: Any, x: Tensor, fire: Any) -> Tensor:
        return torch.stack([net.second(fire(net.first(x[t]))) for t in range(x.shape[0])])

    x = images(T, 2, 2, 8, 8)
    for fire in (lambda v: Surrogate.apply(v - 0.5), lambda v: Noisy.apply(v)):
        net = Loop(lambda net, x, fire=fire: run(net, x, fire)).train()
        torch.manual_seed(0)
        expected = net(x)
        torch.manual_seed(0)
        found, report = rewritten(net, x, strict=True)
        assert torch.equal(found, expected)
        assert site(report, RULE).rewritten
        mine, theirs = (torch.autograd.grad(out.square().sum(), net.first.weight) for out in (found, expected))
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


# ---- spikingjelly -------------------------------------------------------------------------------------------------


def _sj(name: str) -> Any:
    return pytest.importorskip(f"spikingjelly.activation_based.{name}", reason="spikingjelly is not installed")


class Single(nn.Module):
    """spikingjelly's layers, called step by step."""

    def __init__(self, make: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        layer, neuron = _sj("layer"), _sj("neuron")
        self.neurons = (neuron.BaseNode,)
        self.net = nn.Sequential(
            layer.Conv2d(2, 8, 3, padding=1, bias=False), layer.BatchNorm2d(8), make(neuron), layer.MaxPool2d(2),
            layer.Conv2d(8, 8, 3, padding=1), make(neuron), nn.Flatten(), layer.Linear(8 * 16, 10), make(neuron),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.net(x[t]) for t in range(x.shape[0])])

    def forget(self, model: nn.Module) -> None:
        _sj("functional").reset_net(model)


NEURONS: dict[str, Callable[[Any], nn.Module]] = {
    "LIF": lambda neuron: neuron.LIFNode(tau=2.0),
    "IF soft": lambda neuron: neuron.IFNode(v_reset=None),
    "PLIF": lambda neuron: neuron.ParametricLIFNode(2.0),
}


@pytest.mark.parametrize("steps", [T, pytest.param(70, marks=pytest.mark.slow(reason="traces many steps"))])
@pytest.mark.parametrize("name", NEURONS)
@pytest.mark.slow_cases(4)
def test_a_network_called_step_by_step_becomes_one_of_all_steps(name, steps):
    model = sixteenths(Single(NEURONS[name])).eval()
    calls = [(images(steps, 2, 2, 8, 8, seed=seed),) for seed in range(2)]
    run = run_beside_eager(model, calls, model.neurons, reset=model.forget, rounds=2)
    assert_exact(run)
    parts = 1 if steps == T else 2
    assert run.rewritten(0) == run.rewritten(1) == 2 * parts  # with no state, and with one


def test_a_layer_that_no_spikes_reach_runs_once_if_a_neuron_reads_it():
    model = sixteenths(Single(NEURONS["LIF"])).eval()
    model.net = model.net[:3]
    with torch.no_grad():
        assert _counts(model, images(T, 2, 2, 8, 8))["conv2d"] == 1


def test_with_one_image_in_a_batch():
    model = sixteenths(Single(NEURONS["LIF"])).eval()
    run = run_beside_eager(model, [(images(T, 1, 2, 8, 8),)], model.neurons)
    assert_exact(run)
    assert run.rewritten() == 2


@pytest.mark.parametrize("name", NEURONS)
def test_training_step_by_step_fires_the_same_and_has_the_same_gradients(name):
    model = sixteenths(Single(NEURONS[name])).train()
    expected, found = gradients_beside_eager(model, (images(T, 2, 2, 8, 8),), model.neurons)
    assert found.rewritten == 2
    assert found.flips(expected) == 0
    found.assert_close(expected)


@pytest.mark.slow(reason="traces a whole network twice")
def test_graph_and_neurons_are_those_of_the_multi_step_network():
    model = sixteenths(Single(NEURONS["LIF"])).eval()
    sizes = []
    for steps in (4, 32):
        model.forget(model)
        with torch.no_grad():
            counts = _counts(model, images(steps, 2, 2, 8, 8))
        sizes.append(sum(counts.values()))
        assert counts["lif.default"] == 3
    assert sizes[0] == sizes[1]


# ---- orders -------------------------------------------------------------------------------------------------------


def test_groups_are_brought_together_where_no_circle_would_arise():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a0 = graph.call_function(torch.relu, (x,))
    b0 = graph.call_function(torch.sin, (a0,))
    a1 = graph.call_function(torch.relu, (b0,))
    c0 = graph.call_function(torch.cos, (a0,))
    c1 = graph.call_function(torch.cos, (a1,))
    graph.output((c0, c1))
    assert contractible(graph, [(a0, a1), (c0, c1)], []) == [1]
    order = contracted(graph, [(c0, c1)], [])
    assert [node.name for node in order] == ["x", "relu", "sin", "relu_1", "cos", "cos_1", "output"]
    assert contractible(graph, [(c0, c1)], [[c0, b0]]) == []  # c0 before b0, which comes before c1
    reorder(order)
    graph.lint()
    assert tuple(graph.nodes) == order


def test_nothing_passes_a_fence():
    """Between two fences order is free, and a group on both sides of one does not come together."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    a0, b0 = (graph.call_function(one, (x,)) for one in (torch.relu, torch.sin))
    fence = graph.call_function(torch.cos, (x,))
    b1, a1, b2 = (graph.call_function(one, (x,)) for one in (torch.sin, torch.relu, torch.sin))
    graph.output((a0, b0, fence, b1, a1, b2))
    assert contractible(graph, [(a0, a1), (b1, b2)], [], [fence]) == [1]
    assert contractible(graph, [(b0, b1)], [], [fence]) == [] and contractible(graph, [(b0, b1)], []) == [0]
    order = contracted(graph, [(b1, b2)], [], [fence])
    assert [node.name for node in order] == ["x", "relu", "sin", "cos", "sin_1", "sin_2", "relu_1", "output"]
