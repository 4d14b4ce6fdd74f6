"""Selective steps on theta and the phase-aware AdamW: against closed forms, torch's AdamW, and across interruptions."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparsecomp.errors import MaskError
from sparsecomp.nn import masked_weights, wrap_module
from sparsecomp.runtime import RESUAdamW, RESUSelective, RESUUpdater

pytestmark = pytest.mark.quick_cases(3)


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
        {"lr": -1.0}, {"tau": 2.0}, {"tau": -0.1}, {"betas": (1.0, 0.9)}, {"betas": (-0.1, 0.9)}, {"betas": (0.9, 1.0)},
        {"betas": (0.9, -0.1)}, {"select": "best"}, {"amount": 1.5}, {"amount": -0.1}, {"delta": 0.0}, {"eps": -1e-9},
        {"weight_decay": -1e-9}, {"eps": float("nan")},
    ):  # fmt: skip
        with pytest.raises(MaskError, match="lr|select|eps"):
            RESUSelective(pruned, **setting)
    for setting in (
        {"lr": 0.0}, {"tau": 0.0}, {"tau": 1.0}, {"betas": (0.0, 0.0)}, {"amount": 0.0}, {"amount": 1.0}, {"eps": 0.0},
        {"weight_decay": 0.0},
    ):  # fmt: skip
        RESUSelective(pruned, **setting)
    with pytest.raises(MaskError, match="another mask"):
        RESUSelective(pruned).load_state_dict(RESUSelective(pruned[:2]).state_dict())
    for missing, said in ((None, "NoneType"), (3, "int")):
        state = RESUSelective(pruned).state_dict() | {"size": missing}
        with pytest.raises(MaskError, match=f"size of the state is {said}, theta's"):
            RESUSelective(pruned).load_state_dict(state)
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


X = torch.randn(32, 6, generator=torch.Generator().manual_seed(5))
Y = torch.randint(3, (32,), generator=torch.Generator().manual_seed(6))


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
            selective = optimizer.selective[weight]
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
    assert optimizer.selective[weight].lr == 0.02 and masked.theta(weight).any()
    scheduler.step()
    step(model, optimizer)
    assert optimizer.selective[weight].lr == 0.01


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_step_sees_unscaled_gradients_too(fused):
    models = [model_of(), model_of()]
    for model, scale in zip(models, (1.0, 1024.0), strict=True):
        prune(model)
        for weight, masked in masked_weights(model).values():
            masked.enter_resu_(weight)
        optimizer, scaler = RESUAdamW(model, lr=0.02, fused=fused), torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(13):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(X), Y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert any(masked.theta(weight).any() for weight, masked in masked_weights(models[0]).values())
    # powers of two scale exactly
    assert all(torch.equal(one, other) for one, other in zip(*(m.parameters() for m in models), strict=True))


@pytest.mark.parametrize("select", ["threshold", "top"])
def test_other_memory_formats_take_the_same_steps(select):
    images = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    ends = []
    for memory in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = wrap_module(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh())).to(memory_format=memory)
        optimizer = RESUAdamW(model, lr=0.02, select=select, amount=0.5)
        for number in range(16):
            if number == 2:
                prune(model)
            if number == 4:
                model[0].masked.enter_resu_(model[0].weight)
            optimizer.zero_grad()
            model(images).square().sum().backward()
            optimizer.step()
        ends.append(model[0].weight)
        assert model[0].masked.theta(model[0].weight).any()
    assert not ends[1].is_contiguous()
    torch.testing.assert_close(ends[0], ends[1])


@pytest.mark.parametrize("kinds", [("float32", "channels_last"), ("channels_last", "float32"), ("float64", "float32")])
def test_a_saved_theta_goes_on_in_another_memory_format_and_dtype(kinds):
    images = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(0))

    def converted(model, kind):
        memory = torch.channels_last if kind == "channels_last" else torch.contiguous_format
        return model.to(torch.float64 if kind == "float64" else torch.float32, memory_format=memory)

    def steps(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            model(images.to(model[0].weight.dtype)).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    model = converted(wrap_module(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh())), kinds[0])
    optimizer = RESUAdamW(model, lr=0.02)
    prune(model)
    model[0].masked.enter_resu_(model[0].weight)
    steps(model, optimizer, 14)
    other = converted(copy.deepcopy(model), kinds[1])
    again = RESUAdamW(other, lr=0.02)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = model[0].masked.theta(model[0].weight)
    steps(model, optimizer, 4), steps(other, again, 4)
    assert (model[0].masked.theta(model[0].weight) - before).abs().max() > 0.01
    torch.testing.assert_close(model[0].weight, other[0].weight, check_dtype=False, atol=1e-5, rtol=1e-4)
    lost = optimizer.state_dict()
    del lost["state"][0]["exp_avg"]
    lost["state"][0]["theta"].pop("mean", None)
    with pytest.raises(MaskError, match="no averages|is of another mask"):
        RESUAdamW(other, lr=0.02).load_state_dict(lost)


def test_a_state_of_0_1_goes_on_with_the_same_bits():
    """There, thetas stood beside the parameters' states, with the pruned positions alone."""
    model = model_of()
    optimizer = RESUAdamW(model, lr=0.02)
    prune(model)
    for weight, masked in masked_weights(model).values():
        masked.enter_resu_(weight)
    for _ in range(12):
        step(model, optimizer)
    other, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    thetas = {str(number): one.pop("theta") for number, one in state["state"].items() if "theta" in one}
    for theta in thetas.values():
        pruned = theta["pruned"]
        theta |= {name: one[pruned] for name, one in theta.items() if name not in ("pruned", "steps")}
        theta["pruned"] = pruned.flatten().nonzero().flatten().int()
    again = RESUAdamW(other, lr=0.02)
    again.load_state_dict({**state, "theta": thetas})
    for one, its in ((model, optimizer), (other, again)):
        step(one, its), step(one, its)
    for one, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, its)
    thetas["0"]["pruned"] = thetas["0"]["pruned"].flip(0)
    with pytest.raises(MaskError, match="another mask"):
        again.load_state_dict({**state, "theta": thetas})


def test_a_state_without_the_theta_of_a_weight_in_its_resu_phase_is_refused():
    model = model_of()
    optimizer = RESUAdamW(model, lr=0.02)
    step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    prune(model)
    for weight, masked in masked_weights(model).values():
        masked.enter_resu_(weight)
    RESUAdamW(model).load_state_dict(optimizer.state_dict())  # before a step on it, it is known to be at its start
    with pytest.raises(MaskError, match="load the model first"):
        optimizer.load_state_dict(before)


def test_theta_of_another_mask_starts_anew_and_moves_no_active_element():
    model = wrap_module(nn.Linear(6, 3))
    optimizer, weight, masked = RESUAdamW(model, lr=0.1, train_active=False), model.weight, model.masked
    left = torch.tensor([1, 1, 1, 0, 0, 0], dtype=torch.bool).expand(3, 6)
    masked.prune_(weight, left)
    for mask in (~left, left):
        masked.enter_resu_(weight)
        kept = weight[masked.mask.mask].clone()
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
        assert torch.equal(weight[masked.mask.mask], kept)
        # gradients of 2, from the 11th step on: -lr each
        torch.testing.assert_close(masked.theta(weight), torch.full((9,), -0.2))
        saved = optimizer.state_dict()
        masked.commit_(weight, mask)
    with pytest.raises(MaskError, match="another mask"):
        RESUAdamW(model).load_state_dict(saved)
    masked.prune_(weight, ~left), masked.enter_resu_(weight)
    RESUAdamW(model).load_state_dict(saved)


def test_a_refused_step_or_state_changes_nothing():
    model = model_of()
    optimizer = RESUAdamW(model, lr=0.05)
    prune(model)
    for weight, masked in masked_weights(model).values():
        masked.enter_resu_(weight)
    step(model, optimizer)
    F.cross_entropy(model(X), Y).backward()
    model[2].weight.requires_grad_(False)
    before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
    with pytest.raises(MaskError, match="never move"):
        optimizer.step()
    late = RESUAdamW(model)
    model[2].weight.requires_grad_(True)
    with pytest.raises(MaskError, match="never move"):
        late.step()
    state = optimizer.state_dict()
    state["state"][9] = state["state"][0]
    with pytest.raises(MaskError, match="theta of parameter 9"):
        optimizer.load_state_dict(state)
    for p, (value, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value) and torch.equal(p.grad, gradient)
    optimizer.step()
    for p, (_, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, gradient), "a step leaves whole gradients"


def test_copies_go_on_by_themselves_and_hooks_run_once_a_step():
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    model, steps = model_of(), []
    optimizer = RESUAdamW(model, lr=0.02)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    prune(model)
    for weight, masked in masked_weights(model).values():
        masked.enter_resu_(weight)
    for _ in range(12):
        step(model, optimizer)
    assert len(steps) == 12
    other, again = copy.deepcopy((model, optimizer))
    step(model, optimizer), step(other, again)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    assert all(one is not two for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_maximize_and_accumulated_gradients_reach_theta():
    ends = []
    for maximize, parts in ((False, 1), (True, 1), (False, 2)):
        model = model_of()
        optimizer = RESUAdamW(model, lr=0.02, maximize=maximize)
        prune(model)
        for weight, masked in masked_weights(model).values():
            masked.enter_resu_(weight)
        for _ in range(13):
            optimizer.zero_grad()
            for x, y in zip(X.chunk(parts), Y.chunk(parts), strict=True):
                (F.cross_entropy(model(x), y) / parts * (-1 if maximize else 1)).backward()
            optimizer.step()
        weight, masked = masked_weights(model)["0.weight"]
        ends.append(masked.theta(weight))
    assert ends[0].any() and torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[2], ends[0], atol=2e-4, rtol=1e-3)


class Waits(TorchDispatchMode):
    """What would wait for a GPU is an error; AdamW's own number of steps lies on a CPU."""

    REFUSED = ("nonzero", "masked_select", "is_nonzero", "unique", "index.Tensor", "bincount")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        assert not name.startswith(self.REFUSED), f"{name} waits for the device"
        if name == "_local_scalar_dense":
            assert args[0].dtype is torch.float32 and args[0] >= 1, "reads more than the number of the step"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"select": "top"}, {"amsgrad": True}, {"train_active": False}])
@pytest.mark.parametrize("phase", ["sparse", "resu"])
def test_a_step_reads_nothing_from_the_device(phase, options):
    model = model_of()
    optimizer = RESUAdamW(model, lr=0.02, foreach=False, **options)
    prune(model)
    for weight, masked in masked_weights(model).values():
        if phase == "resu":
            masked.enter_resu_(weight)
    for number in range(14):
        optimizer.load_state_dict(optimizer.state_dict())  # forgets the masks, as a step on a GPU keeps none
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        if number == 6:
            for _, masked in masked_weights(model).values():
                masked.mask.mask.data.logical_not_()
        with Waits():
            optimizer.step()


def test_a_phase_begins_anew_whatever_an_earlier_one_with_the_same_mask_left():
    """The same two phases of one mask, whose second is another run's first."""
    ends = []
    for phases in (2, 1):
        model = wrap_module(nn.Linear(6, 3))
        optimizer, weight, masked = RESUAdamW(model, lr=0.1, train_active=False), model.weight, model.masked
        left = torch.tensor([1, 1, 1, 0, 0, 0], dtype=torch.bool).expand(3, 6)
        masked.prune_(weight, left)
        for number in range(phases):
            masked.enter_resu_(weight)
            for _ in range(12 - 5 * (phases - 1 - number)):
                optimizer.zero_grad()
                model(torch.ones(2, 6)).sum().backward()
                optimizer.step()
            theta = masked.theta(weight)
            masked.commit_(weight, left)
            optimizer.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            assert not optimizer.state[weight]["exp_avg"][~left].any() and not weight[~left].any()
        ends.append(theta)
    assert torch.equal(*ends)
    torch.testing.assert_close(ends[0], torch.full((9,), -0.2))


def test_a_mask_that_comes_back_after_a_dense_phase_leaves_no_momentum():
    model = model_of()
    optimizer = RESUAdamW(model, lr=0.05)
    for _ in range(2):
        prune(model)
        step(model, optimizer)
        for weight, masked in masked_weights(model).values():
            assert not optimizer.state[weight]["exp_avg"][~masked.mask.mask].any()
            masked.densify_(weight)
        step(model, optimizer)


@pytest.mark.parametrize("write", [
    lambda mask, other: mask.data.copy_(other), lambda mask, other: mask.numpy().__setitem__(..., other.numpy()),
    lambda mask, other: mask.copy_(other),
])  # fmt: skip
@pytest.mark.parametrize("phase", ["sparse", "resu"])
def test_a_step_goes_by_the_mask_that_is_there_whoever_wrote_it(phase, write):
    """Against the same run whose mask is written in plain sight."""
    runs = []
    for how in (write, lambda mask, other: mask.copy_(other)):
        model = model_of()
        optimizer = RESUAdamW(model, lr=0.02, weight_decay=0.1)
        prune(model)
        for weight, masked in masked_weights(model).values():
            if phase == "resu":
                masked.enter_resu_(weight)
        for number in range(26):
            step(model, optimizer)
            if number == 12:
                for weight, masked in masked_weights(model).values():
                    how(masked.mask.mask, torch.rand(weight.shape, generator=torch.Generator().manual_seed(7)) < 0.5)
        runs.append((model, optimizer))
    (model, optimizer), (twin, other) = runs
    for one, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, right)
        assert torch.equal(optimizer.state[one]["exp_avg"], other.state[right]["exp_avg"])
    for weight, masked in masked_weights(model).values():
        assert phase == "resu" or not optimizer.state[weight]["exp_avg"][~masked.mask.mask].any()


@pytest.mark.parametrize("kind", ["positions", "mask", "whole", "whole by mask"])
def test_consistency_is_the_mean_over_the_size_and_delta(kind):
    mask = torch.tensor([[True, False, True], [False, True, True]])
    weight, gradient = torch.zeros(2, 3), torch.tensor([[1.0, 2.0, -4.0], [3.0, 0.5, 0.0]])
    pruned = mask if "mask" in kind else mask.view(-1).nonzero()[:, 0].int()
    whole = (torch.zeros(2, 3), torch.zeros(2, 3)) if "whole" in kind else None
    selective = RESUSelective(pruned, delta=0.25, betas=(0.5, 0.9), whole=whole)
    mean = size = torch.zeros(4)
    for sign in (1, -1, -1):
        selective.step(weight, gradient * sign)
        mean, size = 0.5 * mean + 0.5 * sign * gradient[mask], 0.5 * size + 0.5 * gradient[mask].abs()
    torch.testing.assert_close(selective.consistency().view(-1), mean.abs() / (size + 0.25))
