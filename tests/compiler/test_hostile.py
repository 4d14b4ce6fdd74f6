"""What a hostile user does: states, modes and inputs that no single part expects. The oracle is the eager model."""

import copy
import pickle
import random

import pytest
import torch
from rewriting import Surrogate, operators_run, rewritten, site
from torch import nn
from torch.nn.utils import prune

import sparsecomp

pytestmark = pytest.mark.quick_cases(2)


def _signal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_gradients_enabled_inside_the_graph_pass_through_scaled_spikes():
    conv = nn.Conv2d(4, 8, 3)

    def model(x):
        with torch.enable_grad():
            return conv(Surrogate.apply(x) * 0.3)

    inputs = [_signal(2, 4, 6, 6).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        found, report = rewritten(model, inputs[0])
        expected = model(inputs[1])
    assert site(report, "spike_conv").rewritten
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


class _Spikes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x > 0).to(x.dtype)


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 16, 4))
    block = nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), _Spikes())
    return nn.Sequential(nn.Conv2d(3, 16, 3), _Spikes(), block, nn.AvgPool2d(1), head).eval()


def _change_stride(model):
    model[2][0].stride = (2, 2)
    model[4][1] = nn.Linear(64, 4)


def _replace_block(model):
    model[2] = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Tanh())


def _override_forward(model):
    conv = model[2][0]
    conv.forward = lambda x: nn.Conv2d.forward(conv, x) * 2


def _add_bias(model):
    model[2][0].bias = nn.Parameter(torch.ones(16))


def _parametrize(model):
    nn.utils.parametrize.register_parametrization(model[2][0], "weight", nn.Tanh())


def _prune(model):
    prune.l1_unstructured(model[2][0], "weight", amount=0.5)
    model[2][0].weight_orig.mul_(3)


def _assign_data(model):
    weight = model[2][0].weight
    weight.data = weight.data.flip(0)
    weight.data.mul_(-2)


def _tie(model):
    model[2][0].weight = nn.Parameter(model[2][0].weight.detach() * 0.5)


CHANGES = [
    _change_stride, _replace_block, _override_forward, _add_bias, _parametrize, _prune, _assign_data, _tie,
    nn.Module.double, nn.Module.train,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_an_optimized_model_follows_later_changes_of_its_original(change):
    model, x = _network(), _signal(2, 3, 8, 8)
    model[2][0].register_parameter("bias", None)
    optimized = sparsecomp.optimize(model, x, implementation="binary")
    assert optimized.report.capture.startswith("symbolic trace")
    with torch.no_grad():
        change(model)
        x = x.to(model[0].weight.dtype)
        found, expected = optimized(x), model(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(copy.deepcopy(optimized)(x), expected)


def _hook(model: nn.Module, where: str, kind: str) -> list[str]:
    """The calls of a hook that counts its calls."""
    calls: list[str] = []
    getattr(model.get_submodule(where), f"register_{kind}_hook")(lambda *_: calls.append(where))
    return calls


@pytest.mark.slow(reason="compiles with gradients")
@pytest.mark.parametrize("where", ["2", "2.0", "2.1", "2.2"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_are_called_as_often_as_in_eager(where, when, kind):
    eager, model, x = _network(), _network(), _signal(2, 3, 8, 8).requires_grad_()
    expected = _hook(eager, where, kind)
    found = _hook(model, where, kind) if when == "before" else None
    optimized = sparsecomp.optimize(model, x.detach(), implementation="binary")
    found = _hook(model, where, kind) if found is None else found
    found.clear()
    for _ in range(2):
        for network in (eager, optimized):
            (network(x) + network(x)).sum().backward()
        assert len(found) == len(expected)


class _FrozenEncoder(nn.Module):
    def __init__(self, context) -> None:
        super().__init__()
        self.context, self.encoder, self.head = context, nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.context():
            x = (self.encoder(x) > 0).float()
        return self.head(x) + self._shift(x)

    def _shift(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.encoder.weight.mean() * x.mean()


@pytest.mark.slow(reason="compiles many graphs")
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_contexts_inside_forward_are_kept(context):
    model, x = _FrozenEncoder(context), _signal(2, 3, 8, 8)
    optimized = sparsecomp.optimize(model, x, implementation="binary")
    expected, found = model(x), optimized(x)
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad(expected.sum(), list(model.parameters()), allow_unused=True)
    ours = torch.autograd.grad(found.sum(), list(model.parameters()), allow_unused=True)
    assert [grad is None for grad in ours] == [grad is None for grad in grads] == [True, True, False, False]


class _Careless(nn.Module):
    """Writes wherever it can: through `.data`, to its weight, to its input, and draws from every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.generator = nn.Conv2d(4, 4, 3), torch.Generator().manual_seed(0)
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("moved", torch.tensor([0.0, float("nan")]))
        self.register_buffer("sparse", torch.eye(3).to_sparse_csr())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.written.data.add_(1)
        self.moved.data = torch.ones(5)
        with torch.no_grad():
            self.conv.weight.mul_(0.5)
        x.mul_(2)
        noise = torch.rand(1, generator=self.generator) + random.random()
        return self.conv((x > 0).to(x.dtype)) + noise


@pytest.mark.parametrize("look", [sparsecomp.explain, sparsecomp.profile, sparsecomp.optimize])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_looking_at_a_model_leaves_no_mark(look):
    model, x = _Careless(), _signal(1, 4, 6, 6)
    moved, memory = model.moved, model.moved.data_ptr()

    def marks():
        tensors = [model.written, model.moved, model.conv.weight.detach(), x, model.generator.get_state()]
        return [tensor.clone() for tensor in tensors], random.getstate(), torch.get_rng_state()

    tensors, numbers, torch_numbers = marks()
    look(model, x)
    found, found_numbers, found_torch_numbers = marks()
    torch.testing.assert_close(found, tensors, rtol=0, atol=0, equal_nan=True)
    assert found_numbers == numbers and torch.equal(found_torch_numbers, torch_numbers)
    assert model.moved is moved and moved.data_ptr() == memory


def test_a_lazy_model_can_be_explained():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), _Spikes(), nn.LazyConv2d(4, 1))
    report = sparsecomp.explain(model, _signal(1, 4, 5, 5))
    assert [site.rule for site in report.sites].count("spike_conv") == 2


def test_transforms_of_an_optimized_model_equal_those_of_the_original():
    model, x = _network(), _signal(5, 3, 8, 8)
    optimized = sparsecomp.optimize(model, x, implementation="binary")
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def per_sample(network):
        def loss(values, sample):
            return torch.func.functional_call(network, values, (sample[None],)).square().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)

    found, expected = per_sample(optimized), per_sample(model)
    assert expected["4.1.weight"].abs().sum() > 0
    torch.testing.assert_close(found, expected)


class _Scaled(nn.Module):
    """Every form of input that a rule must turn into whole numbers: scaled, and scaled by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.first, self.second = nn.Parameter(torch.tensor(0.3)), nn.Conv2d(4, 8, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spikes = (x > 0).to(x.dtype)
        return self.first(spikes * self.factor), self.second(spikes.flatten(2).transpose(1, 2) * 0.7)


@pytest.mark.parametrize("copied", [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy])
def test_optimized_models_with_scales_are_copied(copied):
    model, x = _Scaled(), _signal(2, 4, 6, 6)
    optimized = sparsecomp.optimize(model, x, implementation="binary")
    assert optimized.report.capture.startswith("symbolic trace") and len(optimized.report.rewritten) == 2
    found = copied(optimized)
    for ours, eager in zip(found(x), model(x), strict=True):
        torch.testing.assert_close(ours, eager)
    assert {"sparsecomp::spike_conv", "sparsecomp::spike_linear"} <= operators_run(found, x)


def test_an_optimized_multi_step_model_is_pickled():
    layer = pytest.importorskip("spikingjelly.activation_based.layer")
    model = nn.Sequential(layer.Conv2d(3, 8, 3, step_mode="m"), _Spikes(), layer.Conv2d(8, 4, 3, step_mode="m"))
    x = _signal(4, 2, 3, 8, 8)
    optimized = sparsecomp.optimize(model, x, implementation="binary")
    assert optimized.report.capture.startswith("symbolic trace")
    torch.testing.assert_close(pickle.loads(pickle.dumps(optimized))(x), model(x))
