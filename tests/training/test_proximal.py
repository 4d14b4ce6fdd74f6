"""Proximal steps minimise what they say, set weights to 0 exactly, and leave an optimizer's own step alone."""

import math

import pytest
import torch
from torch import nn

import sparsecomp
from sparsecomp.errors import ConfigError
from sparsecomp.formats import CSR
from sparsecomp.nn import SparseLinear
from sparsecomp.runtime import L1, GroupLasso, Hoyer, Proximal

PENALTIES = [
    L1(0.7), GroupLasso(0.7), GroupLasso(0.7, "columns"), GroupLasso(0.7, "columns", 3), GroupLasso(0.9, "rows", 2),
    GroupLasso(0.8, "blocks", (2, 3)),
]  # fmt: skip


def signal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_the_step_minimises_half_the_square_and_the_penalty(penalty):
    weight, rate = signal(4, 6), 0.6

    def objective(other: torch.Tensor) -> float:
        return float((other - weight).square().sum() / 2 + rate * penalty.value(other))

    found = penalty.prox(weight, rate)
    least = objective(found)
    for seed in range(200):
        for size in (1e-3, 1e-1):
            assert objective(found + size * signal(4, 6, seed=seed)) > least
    assert objective(found * 0) > least and objective(weight) > least
    assert torch.equal(penalty.prox(weight, 1e3), torch.zeros_like(weight))
    assert torch.equal(penalty.prox(weight, 0.0), weight)
    assert torch.equal(penalty.prox(torch.zeros(4, 6), rate), torch.zeros(4, 6))


def test_known_numbers():
    weight = torch.tensor([[3.0, -4.0], [0.3, 0.4], [-0.0, 0.0]])
    assert L1(2.0).prox(weight, 0.5).tolist() == [[2, -3], [0, 0], [0, 0]]
    # rows of norm 5 and 0.5, thresholds of sqrt(2): 1 - sqrt(2) / 5
    rows = GroupLasso(2.0).prox(weight, 0.5)
    torch.testing.assert_close(rows[0], weight[0] * (1 - math.sqrt(2) / 5))
    assert not rows[1:].any()
    assert L1(0.1).value(weight).item() == pytest.approx(0.77)
    assert Hoyer(1.0).value(torch.tensor([1.0, 1.0, 0.0])).item() == 2 and Hoyer(1.0).value(torch.zeros(3)).item() == 0
    head = GroupLasso(1.0, "rows", 2).prox(torch.tensor([[3.0], [4.0], [0.1], [0.1]]), 1.0)
    torch.testing.assert_close(head[:2, 0], torch.tensor([3.0, 4.0]) * (1 - math.sqrt(2) / 5))
    assert not head[2:].any()


def test_hoyer_takes_a_gradient_step_that_stops_at_zero():
    weight = signal(3, 5).requires_grad_()
    penalty = Hoyer(0.01)
    penalty.value(weight).backward()
    torch.testing.assert_close(penalty.prox(weight.detach(), 0.1), weight.detach() - 0.1 * weight.grad)
    tiny = torch.tensor([1e-4, -1e-4, 1.0])
    assert Hoyer(1.0).prox(tiny, 0.1)[:2].tolist() == [0, 0] and Hoyer(1.0).prox(tiny, 0.1)[2] > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_steps_keep_the_dtype(dtype):
    for penalty in (*PENALTIES, Hoyer(0.1)):
        found = penalty.prox(signal(4, 6).to(dtype), torch.tensor(0.1))
        assert found.dtype is dtype and found.shape == (4, 6)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizers_step_is_followed_by_the_penaltys(kind):
    plain, model = nn.Linear(5, 4), nn.Linear(5, 4)
    model.load_state_dict(plain.state_dict())
    optimizers = [kind(one.parameters(), lr=0.1) for one in (plain, model)]
    proximal = Proximal(optimizers[1], model, L1(0.5))
    x = signal(8, 5).float()
    for one, optimizer in zip((plain, model), optimizers, strict=True):
        one(x).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, L1(0.5).prox(plain.weight, 0.1), rtol=0, atol=0)
    assert torch.equal(model.bias, plain.bias) and proximal.value() == 0.5 * model.weight.abs().sum()
    before = model.weight.clone()
    model.weight.grad = None
    optimizers[1].step()  # no gradient, no step
    assert torch.equal(model.weight, before)
    proximal.remove()
    model(x).sum().backward()
    for group in optimizers[1].param_groups:
        group["lr"] = 0.0
    optimizers[1].step()
    assert torch.equal(model.weight, before)


def test_zeros_of_a_whole_run_are_exact_and_become_a_sparse_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    Proximal(optimizer, model, L1(0.02), filter=lambda layer, name: name == "0")
    x = signal(256, 20).float()
    y = x[:, :2].sum(1, keepdim=True)  # of twenty inputs two matter
    for _ in range(300):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    weight = model[0].weight.detach()
    assert (weight == 0).float().mean() > 0.7 and weight[:, :2].count_nonzero() and loss < 0.1
    expected = model(x)
    sparse = sparsecomp.sparsify(model, sparsecomp.FromMask(), filter=lambda layer, name: name == "0")
    assert sparse[0].values.numel() == weight.count_nonzero()
    torch.testing.assert_close(sparse(x), expected)


def test_values_of_sparse_layers_pay_too():
    layer = SparseLinear(CSR.from_dense(torch.tensor([[0.2, 0, 3], [0, -4, 0]])))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    Proximal(optimizer, layer, L1(0.5))
    layer.values.grad = torch.zeros(3)
    optimizer.step()
    assert layer.values.tolist() == [0, 2.5, -3.5]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_gradient_scaler_leaves_out_is_none(fused):
    model = nn.Linear(4, 3)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused), torch.amp.GradScaler("cpu")
    Proximal(optimizer, model, L1(1.0))
    before = model.weight.detach().clone()
    scaler.scale(model(torch.full((1, 4), math.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    scaler.scale(0 * model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    decayed = before * (1 - 0.1 * 0.01)
    torch.testing.assert_close(model.weight.detach(), decayed - decayed.clamp(-0.1, 0.1))


def test_tied_weights_pay_once_and_compiled_models_have_their_own_names():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    proximal = Proximal(torch.optim.SGD(model.parameters()), torch.compile(model), L1(2.0))
    assert set(proximal.weights) == {"0", "1"}
    torch.testing.assert_close(proximal.value(), 2 * model[0].weight.abs().sum())


@pytest.mark.parametrize("penalty", [L1(0.5), GroupLasso(0.5), Hoyer(0.5)], ids=str)
def test_sums_of_halves_do_not_overflow(penalty):
    weight = signal(400, 500).half()
    torch.testing.assert_close(penalty.value(weight).double(), penalty.value(weight.double()), rtol=1e-5, atol=0)
    exact = penalty.prox(weight.double(), 0.1)
    torch.testing.assert_close(penalty.prox(weight, 0.1).double(), exact, rtol=0, atol=2e-3)
    for shape in ((0, 4), (4, 0)):
        assert penalty.prox(torch.empty(shape), 0.1).shape == shape and penalty.value(torch.empty(shape)) == 0


def test_bad_settings_are_refused():
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters())
    for make in (L1, Hoyer, GroupLasso):
        for wrong in (-1.0, math.nan, math.inf, "1", True):
            with pytest.raises(ConfigError, match="strength is"):
                make(wrong)
    for settings, message in (
        ({"groups": "heads"}, "groups is 'heads'"), ({"size": 0}, "size is 0"),
        ({"size": (2, 2)}, "rows have one number"),
        ({"groups": "blocks", "size": (2, 2, 2)}, "size is"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            GroupLasso(0.1, **settings)
    with pytest.raises(ConfigError, match=r"^0: a weight \(4, 5\) has no rows of size 3; a filter"):
        Proximal(optimizer, model, GroupLasso(0.1, "rows", 3))
    with pytest.raises(ConfigError, match="penalty is"):
        Proximal(optimizer, model, L1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="trains no weight"):
        Proximal(optimizer, model, L1(0.1), filter=lambda layer, name: False)
    with pytest.raises(ConfigError, match="has no columns"):
        GroupLasso(0.1, "columns").prox(torch.ones(3), 0.1)
