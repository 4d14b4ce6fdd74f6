"""optimize: the user's module is never damaged, and the result stands in for it."""

import copy
import inspect
import pickle

import pytest
import torch
from rewriting import AttributeLIF, ConvNet, OnSpikes, dyadic, operators_run, site, spikes
from torch import nn

import sparsecomp
from sparsecomp.compiler.snapshot import Snapshot
from sparsecomp.reference import facts
from sparsecomp.snn.registry import register_neuron


@register_neuron(domain=facts.binary())
class Neuron(AttributeLIF):
    """A neuron that stays one node."""


class Hidden(nn.Module):
    """A net with a leaf neuron, a buffer, a direct parameter and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.fire, self.conv, self.norm = Neuron(), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(self.fire(x))) * self.gain + self.offset

    def describe(self) -> str:
        return "hidden"


def _input() -> torch.Tensor:
    return 2 * torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def _optimized(model: nn.Module, **options):
    optimized = sparsecomp.optimize(model, _input(), implementation="binary", **options)
    assert site(optimized.report, "spike_conv").rewritten
    return optimized


@pytest.fixture
def model() -> nn.Module:
    return dyadic(Hidden()).eval()


def _run(module: nn.Module, calls: int = 3) -> list[torch.Tensor]:
    with torch.no_grad():
        return [module(_input()) for _ in range(calls)]


def test_results_and_state_follow_eager(model):
    twin = copy.deepcopy(model)
    optimized = _optimized(model)
    assert "symbolic trace" in optimized.report.capture
    assert site(optimized.report, "spike_conv").density == pytest.approx((_input() >= 1).float().mean().item())
    for found, expected in zip(_run(optimized), _run(twin), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.fire.v, twin.fire.v)


def test_the_model_is_left_as_it_was(model):
    model(_input())
    snapshot, code = Snapshot(model), type(model).forward
    _optimized(model)
    assert snapshot.changed() == []
    assert type(model).forward is code


def test_it_looks_like_the_model(model):
    optimized = _optimized(model)
    assert list(optimized.state_dict()) == list(model.state_dict())
    assert [name for name, _ in optimized.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert dict(optimized.named_buffers()).keys() == dict(model.named_buffers()).keys()
    assert optimized.conv is model.conv and optimized.describe() == "hidden"


def test_hooks_of_the_model_run_once(model):
    calls = []
    model.register_forward_hook(lambda module, args, output: calls.append("after"))
    optimized = _optimized(model)
    calls.clear()
    _run(optimized, 1)
    assert calls == ["after"]


@pytest.mark.slow(reason="compiles many graphs")
def test_a_hook_on_a_layer_keeps_it_dense(model):
    model.conv.register_forward_hook(lambda module, args, output: output + 1)
    twin = copy.deepcopy(model)
    optimized = sparsecomp.optimize(model, _input(), implementation="binary", strict=True)
    torch.testing.assert_close(_run(optimized, 1)[0], _run(twin, 1)[0])


def test_train_and_eval_switch(model):
    twin = copy.deepcopy(model)
    optimized = _optimized(model)
    optimized.train(), twin.train()
    assert model.training and model.norm.training
    torch.testing.assert_close(optimized(_input()), twin(_input()))
    optimized.eval(), twin.eval()
    torch.testing.assert_close(_run(optimized, 1)[0], _run(twin, 1)[0])


def test_moving_and_loading_reach_the_graph(model):
    optimized = _optimized(model)
    other = dyadic(Hidden(), seed=1).eval()
    optimized.load_state_dict(other.state_dict())
    torch.testing.assert_close(_run(optimized, 1)[0], _run(other, 1)[0])
    model.fire.v = other.fire.v = None
    optimized.double(), other.double()
    assert optimized.norm.running_mean.dtype is torch.float64
    with torch.no_grad():
        torch.testing.assert_close(optimized(_input().double()), other(_input().double()))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_independent_and_rewritten(model, how):
    optimized = _optimized(model)
    twin = how(optimized)
    expected = _run(optimized, 2)
    with torch.no_grad():
        model.norm.running_mean.add_(1)
        model.conv.weight.zero_()
    for found, wanted in zip(_run(twin, 2), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        twin.norm.running_mean.add_(1)
    twin.fire.v = None
    assert not torch.allclose(_run(twin, 1)[0], expected[0])
    assert twin.report.rewritten and "sparsecomp::spike_conv" in operators_run(twin, _input())


def test_gradients_flow(model):
    twin = copy.deepcopy(model)
    optimized = _optimized(model)
    optimized(_input()).square().sum().backward()
    twin(_input()).square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


def test_under_autocast_the_original_runs(model):
    twin = copy.deepcopy(model)
    optimized = _optimized(model)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = _run(optimized, 1)[0], _run(twin, 1)[0]
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected)


@pytest.mark.slow(reason="compiles many graphs")
def test_a_hand_written_neuron_is_not_frozen():
    """symbolic_trace "succeeds" here, freezes v at 0 and leaves a Proxy in `v`."""
    model = dyadic(ConvNet()).eval()
    twin = copy.deepcopy(model)
    optimized = sparsecomp.optimize(model, _input(), implementation="binary")
    assert "torch.compile" in optimized.report.capture and "changes its state" in optimized.report.capture
    assert model.fire1.v is None
    for found, expected in zip(_run(optimized), _run(twin), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert site(optimized.report, "spike_conv").density_source == "measured"
    again = copy.deepcopy(optimized)
    again.fire1.v = again.fire2.v = twin.fire1.v = twin.fire2.v = None
    torch.testing.assert_close(_run(again, 1)[0], _run(twin, 1)[0])


def test_a_buffer_written_in_place_is_not_frozen():
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("v", torch.zeros(2, 3, 8, 8))
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.v.mul_(0.5)
            self.v.add_(x)
            return self.conv(spikes(self.v - 1))

    model = dyadic(Buffered())
    model(_input())
    twin, before = copy.deepcopy(model), model.v.clone()
    optimized = sparsecomp.optimize(model, _input(), implementation="binary")
    torch.testing.assert_close(model.v, before, rtol=0, atol=0)
    for found, expected in zip(_run(optimized), _run(twin), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_without_example_inputs_the_model_is_compiled():
    optimized = sparsecomp.optimize(nn.Linear(4, 4))
    assert optimized.report.capture == "torch.compile (no inputs)"
    assert optimized(torch.ones(1, 4)).shape == (1, 4)


def test_if_everything_fails_the_model_runs_as_it_was(monkeypatch):
    monkeypatch.setattr(
        "sparsecomp.compiler.optimize.compile_graph", lambda *_: (_ for _ in ()).throw(RuntimeError("no compiler"))
    )
    model = ConvNet().eval()
    optimized = sparsecomp.optimize(model, _input())
    assert "none" in optimized.report.capture and "no compiler" in optimized.report.notes[0]
    twin = copy.deepcopy(model)
    torch.testing.assert_close(_run(optimized, 1)[0], _run(twin, 1)[0])


def test_norse_with_its_own_state_is_rewritten_at_the_level_of_modules():
    norse = pytest.importorskip("norse.torch")
    torch.manual_seed(0)
    model = norse.SequentialState(nn.Conv2d(3, 8, 3), norse.LIFCell(), nn.Conv2d(8, 4, 3)).eval()
    with torch.no_grad():
        model[0].weight.mul_(10)
    optimized = sparsecomp.optimize(model, _input(), implementation="binary")
    found, expected = optimized(_input()), model(_input())
    torch.testing.assert_close(found[0], expected[0])
    assert site(optimized.report, "spike_conv").rewritten or "torch.compile" in optimized.report.capture


def test_sinabs_is_rewritten_at_the_level_of_modules():
    sinabs = pytest.importorskip("sinabs")
    layers = pytest.importorskip("sinabs.layers")
    torch.manual_seed(0)
    fire = layers.IAFSqueeze(batch_size=2, spike_fn=sinabs.activation.SingleSpike)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), fire, nn.Conv2d(8, 4, 3)).eval()
    x = _input()
    with torch.no_grad():
        model(x)
        model[1].reset_states()
        optimized = _optimized(model)
        assert "symbolic trace" in optimized.report.capture
        model[1].reset_states()
        found = optimized(x)
        model[1].reset_states()
        torch.testing.assert_close(found, model(x))


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout, "spikingjelly"])
def test_dropout_in_evaluation_is_no_operator(kind):
    if kind == "spikingjelly":
        kind = pytest.importorskip("spikingjelly.activation_based.layer").Dropout
    model = nn.Sequential(Neuron(), kind(0.5), nn.Conv2d(3, 16, 3), kind(0.5), nn.BatchNorm2d(16)).eval()
    optimized = _optimized(model)
    assert [found.rule for found in optimized.report.rewritten] == ["spike_conv", "fold_batch_norm"]
    assert "ropout" not in optimized.report.graph_before
    model[0].v = None
    found = optimized(_input())
    model[0].v = None
    torch.testing.assert_close(found, model(_input()))
    torch.manual_seed(0)
    training = optimized.train()(_input())
    assert not torch.equal(training, found)  # it steps aside


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="torch 2.12 and later"
)
@torch._dynamo.config.patch(recompile_limit=2)
@pytest.mark.usefixtures("op_by_op")
def test_models_of_one_class_share_no_limit_of_recompilations():
    torch._dynamo.reset()
    x = torch.randn(2, 16)
    for _ in range(3):
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        with pytest.warns(UserWarning, match="nothing to tune"):
            sparsecomp.tune(model, x)
        optimized = sparsecomp.optimize(model, x)
        assert optimized.report.graphs == 1
        torch.testing.assert_close(optimized(x), model(x))


def test_a_later_pre_hook_with_keywords_runs():
    model = OnSpikes(nn.Conv2d(4, 4, 3))
    x = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    optimized = sparsecomp.optimize(model, x, implementation="binary")
    seen = []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(len(args)), with_kwargs=True)
    torch.testing.assert_close(optimized(x), model(x))
    assert seen == [1, 1]


def test_locations_are_the_users_lines():
    model = OnSpikes(nn.Conv2d(4, 4, 3))
    optimized = sparsecomp.optimize(model, torch.randn(1, 4, 6, 6), implementation="binary")
    location = site(optimized.report, "spike_conv").location
    assert "module_capture" not in location


def test_a_model_with_sparse_layers_is_compiled_and_says_so():
    model = nn.Sequential(sparsecomp.nn.SparseLinear.from_linear(nn.Linear(16, 16), sparsity=0.5), nn.ReLU())
    x = torch.randn(2, 16)
    optimized = sparsecomp.optimize(model, x)
    assert optimized.report.capture == "torch.compile (a model with sparse layers is not traced)"
    torch.testing.assert_close(optimized(x), model(x))
