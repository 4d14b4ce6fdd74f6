"""Selective steps on theta and the phase-aware AdamW: against closed forms, torch's AdamW, and across interruptions."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsecomp.errors import MaskError
from sparsecomp.nn import masked_weights, wrap_module
from sparsecomp.runtime import RESUAdamW, RESUSelective, RESUUpdater


def test_warm_up_consistency_and_noise():
    g = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    weight, pruned = torch.zeros(20000), torch.arange(20000, dtype=torch.int32)
    selective = RESUSelective(pruned, lr=0.1)
    selective.step(weight, g)
    torch.testing.assert_close(selective.consistency(), torch.ones(20000))  # whatever the gradient
    assert not weight.any()
    for step in range(1, 200):
        selective.step(weight, torch.randn(20000, generator=torch.Generator().manual_seed(step)))
        assert bool(weight.any()) is (step >= selective.warm_up) or step > 10
    assert 0.21 < selective.consistency().mean() < 0.25
    assert 0.03 < (selective.consistency() > 0.5).float().mean() < 0.09


def adamw_reference(theta, gradients, selected_from, lr, beta1, beta2, eps, decay):
    m = v = 0.0
    for step, g in enumerate(gradients, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        if step > selected_from:
            theta = theta * (1 - lr * decay) - lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)) ** 0.5 + eps)
    return theta


def test_a_consistent_element_moves_by_adamw_and_another_not_at_all():
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    selective = RESUSelective(torch.tensor([1, 2], dtype=torch.int32), lr=0.05, weight_decay=0.3)
    gradients = [torch.tensor([[9.0, 1.0 + 0.1 * i], [(-1.0) ** i, 9.0]]) for i in range(15)]
    for gradient in gradients:
        selective.step(weight, gradient)
    expected = adamw_reference(2.0, [float(g[0, 1]) for g in gradients], 10, 0.05, 0.9, 0.999, 1e-8, 0.3)
    assert weight[0, 1].item() == pytest.approx(expected, rel=1e-5)
    assert weight[1, 0] == 3.0 and weight[0, 0] == 1.0 and weight[1, 1] == 4.0  # neither decay nor momentum


@pytest.mark.parametrize(
    ("size", "amount", "moved"), [(3, 0.1, 1), (10, 0.25, 3), (4, 1.0, 4), (5, 0.0, 0), (0, 0.5, 0)]
)
def test_top_selection_counts(size, amount, moved):
    weight = torch.zeros(size)
    selective = RESUSelective(
        torch.arange(size, dtype=torch.int32), lr=0.1, select="top", amount=amount, betas=(0.0, 0.9)
    )
    for _ in range(3):
        selective.step(weight, torch.ones(size))
    assert int((weight != 0).sum()) == moved
    assert weight[:moved].all()  # ties go to the lowest positions


def test_settings_outside_their_domain_and_states_of_another_mask():
    pruned = torch.arange(3, dtype=torch.int32)
    for setting in (
        {"lr": -1.0},
        {"tau": 2.0},
        {"betas": (1.0, 0.9)},
        {"select": "best"},
        {"amount": 1.5},
        {"delta": 0.0},
    ):
        with pytest.raises(MaskError):
            RESUSelective(pruned, **setting)
    with pytest.raises(MaskError, match="another mask"):
        RESUSelective(pruned).load_state_dict(RESUSelective(pruned[:2]).state_dict())
    updater, other = (RESUUpdater(torch.zeros(4), 0.1) for _ in range(2))
    for step in range(30):
        updater.step(torch.ones(4) + step)
        if step == 14:
            other.theta.copy_(updater.theta)
            other.load_state_dict(copy.deepcopy(updater.state_dict()))
        elif step > 14:
            other.step(torch.ones(4) + step)
    assert torch.equal(other.theta, updater.theta)
    with pytest.raises(MaskError, match="another mask"):
        other.load_state_dict(RESUUpdater(torch.zeros(3), 0.1).state_dict())


def model_of(seed=0):
    torch.manual_seed(seed)
    return wrap_module(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))


X, Y = torch.randn(32, 6, generator=torch.Generator().manual_seed(5)), torch.randint(3, (32,))


def step(model, optimizer, scale=1.0):
    optimizer.zero_grad()
    F.cross_entropy(model(X) * scale, Y).backward()
    optimizer.step()


def prune(model, seed=1):
    for weight, masked in masked_weights(model).values():
        masked.prune_(weight, torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) < 0.4)


def test_dense_is_torch_s_adamw_bit_for_bit():
    ours, theirs = model_of(), model_of()
    first, second = (
        RESUAdamW(ours, lr=0.01, weight_decay=0.1),
        torch.optim.AdamW(theirs.parameters(), 0.01, weight_decay=0.1),
    )
    for _ in range(5):
        step(ours, first), step(theirs, second)
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("reset", [True, False])
def test_no_stale_momentum_or_decay_moves_a_pruned_weight(reset):
    model = model_of()
    optimizer = RESUAdamW(model, lr=0.05, weight_decay=0.1)
    for _ in range(4):
        step(model, optimizer)
    prune(model)
    for weight, masked in masked_weights(model).values():
        if reset:
            optimizer.reset(weight, masked.mask.pruned)
    for _ in range(4):
        step(model, optimizer)
        for weight, masked in masked_weights(model).values():
            dead = ~masked.mask.mask
            assert not weight[dead].any() and not optimizer.state[weight]["exp_avg"][dead].any()
    before = [weight.detach().clone() for weight, _ in masked_weights(model).values()]
    step(model, optimizer)
    assert all(
        not torch.equal(weight, old) for (weight, _), old in zip(masked_weights(model).values(), before, strict=True)
    )


@pytest.mark.parametrize("train_active", [True, False])
def test_theta_moves_after_its_warm_up_and_only_where_it_is_selected(train_active):
    model = model_of()
    optimizer = RESUAdamW(model, lr=0.02, weight_decay=0.5, train_active=train_active)
    step(model, optimizer)
    prune(model)
    for weight, masked in masked_weights(model).values():
        masked.enter_resu_(weight)
    frozen = [masked.mask.apply_(weight.detach().clone()) for weight, masked in masked_weights(model).values()]
    for number in range(14):
        thetas = [masked.theta(weight) for weight, masked in masked_weights(model).values()]
        step(model, optimizer)
        for (weight, masked), old in zip(masked_weights(model).values(), thetas, strict=True):
            selective = optimizer._selective[weight]
            chosen = (selective.consistency() > 0.5) & (number + 1 > selective.warm_up)
            assert torch.equal(masked.theta(weight)[~chosen], old[~chosen])
            assert (masked.theta(weight) != old)[chosen].all()
    assert any(masked.theta(weight).any() for weight, masked in masked_weights(model).values())
    for (weight, masked), old in zip(masked_weights(model).values(), frozen, strict=True):
        assert torch.equal(masked.mask.apply_(weight.detach().clone()), old) is not train_active


def test_a_frozen_weight_in_its_resu_phase_is_an_error():
    model = model_of()
    optimizer = RESUAdamW(model)
    prune(model)
    weight, masked = next(iter(masked_weights(model).values()))
    masked.enter_resu_(weight)
    step(model, optimizer)
    weight.requires_grad_(False)
    with pytest.raises(MaskError, match="theta would never move"):
        step(model, optimizer)


@pytest.mark.parametrize("phase", ["dense", "sparse", "resu"])
def test_a_saved_state_goes_on_with_the_same_bits(phase, tmp_path):
    model = model_of()
    optimizer = RESUAdamW(model, lr=0.02)
    step(model, optimizer)
    if phase != "dense":
        prune(model)
    if phase == "resu":
        for weight, masked in masked_weights(model).values():
            masked.enter_resu_(weight)
    for _ in range(12):
        step(model, optimizer)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "run.pt")
    other = model_of(3)
    again = RESUAdamW(other, lr=0.02)
    weights, state = torch.load(tmp_path / "run.pt", weights_only=True)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for _ in range(3):
        step(model, optimizer), step(other, again)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_schedulers_and_loss_scaling_reach_theta():
    model = model_of()
    optimizer = RESUAdamW(model, lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    prune(model)
    for weight, masked in masked_weights(model).values():
        masked.enter_resu_(weight)
    for _ in range(12):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(X), Y)).backward()
        scaler.step(optimizer)
        scaler.update()
    weight, masked = masked_weights(model)["0.weight"]
    assert optimizer._selective[weight].lr == 0.02 and masked.theta(weight).any()
    scheduler.step()
    step(model, optimizer)
    assert optimizer._selective[weight].lr == 0.01
