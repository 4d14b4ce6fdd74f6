"""Gradual pruning: budgets at every step by the published formula, and what is pruned stays pruned."""

import copy
import math

import pytest
import torch
from torch import nn

import sparsecomp
from sparsecomp.errors import ConfigError, MaskError, ScheduleError
from sparsecomp.nn import SparseLinear, wrap_module
from sparsecomp.runtime import GradualPruning, sparsity_at


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return wrap_module(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10)))


def train(model: nn.Module, pruning: GradualPruning, optimizer: torch.optim.Optimizer, count: int) -> list[list[int]]:
    """Zeros of each weight behind each step."""
    zeros = []
    for _ in range(count):
        optimizer.zero_grad()
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(pruning.steps))
        model(x).square().sum().backward()
        optimizer.step()
        pruning.update()
        zeros.append([int((one.masked.effective(one.weight) == 0).sum()) for one in model if hasattr(one, "masked")])
    return zeros


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_each_layer_has_the_published_sparsity_at_each_step(kind):
    model = network()
    optimizer = kind(model.parameters(), lr=1e-3, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    pruning = GradualPruning(model, sparsity=0.9, start=3, end=11, every=2)
    found = train(model, pruning, optimizer, 16)
    for step, zeros in enumerate(found):
        last = min(step - (step - 3) % 2, 11)
        wanted = 0.9 - 0.9 * (1 - (last - 3) / 8) ** 3 if step >= 3 else 0.0
        assert zeros == [math.floor(wanted * size + 1e-9) for size in (600, 300)], step
    before = {name: mask.clone() for name, mask in model.state_dict().items() if name.endswith("mask.mask")}
    train(model, pruning, optimizer, 5)
    assert all(torch.equal(model.state_dict()[name], mask) for name, mask in before.items())
    sparse = sparsecomp.sparsify(copy.deepcopy(model), sparsecomp.FromMask())
    assert [one.values.numel() for one in sparse if isinstance(one, SparseLinear)] == [60, 30]


@pytest.mark.parametrize("budget", ["erk", "global"])
def test_whole_networks_share_one_sparsity(budget):
    model = network()
    with torch.no_grad():
        model[2].weight.mul_(10)  # a larger scale, so that magnitudes take from the other layer
    pruning = GradualPruning(model, sparsity=0.8, start=0, end=0, budget=budget)
    zeros = train(model, pruning, torch.optim.SGD(model.parameters(), lr=0.0), 2)[-1]
    assert sum(zeros) == 720 and pruning.sparsity == 0.8
    if budget == "global":
        assert zeros == [600, 120]  # 180 stay, all of them larger than any of the first layer's
    else:  # density in proportion to (rows + columns) / (rows · columns): 50 / 600 and 40 / 300, sum 180
        assert [600 - zeros[0], 300 - zeros[1]] == [100, 80]


def test_a_filter_a_resumed_run_and_shapes():
    model = network()
    pruning = GradualPruning(
        model, sparsity=0.5, start=0, end=4, every=2, shape="linear", filter=lambda name: name[0] == "2"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert train(model, pruning, optimizer, 3) == [[0, 0], [0, 0], [0, 75]]
    other = GradualPruning(
        model, sparsity=0.5, start=0, end=4, every=2, shape="linear", filter=lambda name: name[0] == "2"
    )
    other.load_state_dict(pruning.state_dict())
    assert train(model, other, optimizer, 3) == [[0, 75], [0, 150], [0, 150]]


def test_layers_have_sparsities_of_their_own():
    model = network()
    pruning = GradualPruning(
        model, sparsity=0.5, start=1, end=5, every=2, shape="linear", initial=0.1, budget={"2.weight": 0.9}
    )
    found = train(model, pruning, torch.optim.SGD(model.parameters(), lr=0.0), 8)
    ways = [0.0, 0.1, 0.1, 0.3, 0.3, 0.5, 0.5, 0.5], [0.0, 0.1, 0.1, 0.5, 0.5, 0.9, 0.9, 0.9]
    assert found == [[round(600 * one), round(300 * other)] for one, other in zip(*ways, strict=True)]
    for budget, message in (
        ({"0.weight": 0.05}, "above"), ({"3.weight": 0.9}, "names 3.weight"), ({"0.weight": 1.0}, "lies in"),
        ("layers", "sparsities by name"),
    ):  # fmt: skip
        with pytest.raises((ConfigError, ScheduleError), match=message):
            GradualPruning(network(), sparsity=0.5, start=0, end=4, every=2, initial=0.1, budget=budget)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ("step", [0.0, 0.0, 0.2, 0.2, 0.4, 0.4, 0.6, 0.6, 0.8]),
        # each takes the same share of what is left: 0.2 ** (1 / 8) of it stays
        ("iterative", [1 - 0.2 ** (step / 8) for step in range(8)] + [0.8]),
    ],
)
def test_shapes_of_jumps_and_of_equal_shares(shape, wanted):
    found = [sparsity_at(step, 9, 0.0, 0.8, shape) for step in range(9)]
    assert found == pytest.approx(wanted, abs=1e-12) and found[-1] == 0.8
    assert sparsity_at(2, 5, 0.5, 0.875, "iterative") == pytest.approx(0.75)  # halved twice, half of the way


@pytest.mark.parametrize("budget", ["uniform", "global"])
def test_what_is_pruned_stays_pruned_beside_weights_that_are_zero(budget):
    model = network()
    pruning = GradualPruning(model, sparsity=0.6, start=0, end=2, every=1, initial=0.5, budget=budget)
    pruning.update()
    layers = [one for one in model if hasattr(one, "masked")]
    pruned = [~one.masked.mask.mask for one in layers]
    with torch.no_grad():  # as by momentum, and by a penalty
        for layer, gone in zip(layers, pruned, strict=True):
            layer.weight.copy_(gone)
    pruning.update()
    assert all((gone & layer.masked.mask.mask).sum() == 0 for layer, gone in zip(layers, pruned, strict=True))


def test_a_weight_in_its_resu_phase_is_refused_before_another_is_pruned():
    model = network()
    with torch.no_grad():
        model[2].masked.prune_(model[2].weight, model[2].weight > 0)
        model[2].masked.enter_resu_(model[2].weight)
    with pytest.raises(MaskError, match="2.weight is in its RESU phase"):
        GradualPruning(model, sparsity=0.5, start=0, end=0).update()
    assert bool(model[0].masked.mask.mask.all())
    with pytest.raises(ConfigError, match="initial 0.7 is above sparsity 0.5"):
        GradualPruning(model, sparsity=0.5, start=0, end=0, initial=0.7)


def test_bad_settings_and_weights_change_nothing():
    model = network()
    good = {"sparsity": 0.5, "start": 0, "end": 4, "every": 2}
    for wrong, kind, message in (
        ({"every": 3}, ConfigError, "a multiple of every"), ({"start": 6}, ConfigError, "is 6, end 4"),
        ({"every": 0}, ConfigError, "every 0"), ({"budget": "best"}, ConfigError, "uniform, erk, global"),
        ({"sparsity": 1.0}, ScheduleError, "lies in"), ({"shape": "steps"}, ScheduleError, "unknown"),
        ({"filter": lambda name: False}, ConfigError, "no masked weight"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            GradualPruning(model, **{**good, **wrong})
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    with pytest.raises(MaskError, match="NaN"):
        GradualPruning(model, **{**good, "initial": 0.2}).update()
    assert all(bool(mask.all()) for name, mask in model.state_dict().items() if name.endswith("mask.mask"))
