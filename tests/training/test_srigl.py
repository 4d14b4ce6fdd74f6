"""SRigL beside a dense reference written from the paper: one fan-in for all neurons, and neurons that are ablated."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from interrupted import gone_on
from torch import nn
from torch._dynamo.utils import counters

import sparsecomp
from sparsecomp import ConstantFanIn
from sparsecomp.errors import ConfigError
from sparsecomp.formats import CSC, CSR
from sparsecomp.nn import SparseLinear
from sparsecomp.runtime import SRigL


def signal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(format=CSR, fan_in: int = 3) -> nn.Sequential:
    def layer(rows: int, cols: int, seed: int) -> SparseLinear:
        weight = signal(rows, cols, seed=seed)
        kept = torch.zeros(rows, cols).scatter_(1, signal(rows, cols, seed=seed + 9).argsort(1)[:, :fan_in], 1)
        return SparseLinear(format.from_dense(weight * kept), signal(rows, seed=seed + 90)).double()

    torch.manual_seed(4)
    return nn.Sequential(layer(12, 9, 1), nn.Tanh(), layer(5, 12, 2), nn.Tanh(), nn.Linear(5, 3).double())


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [layer.weight.matrix.to_dense().detach() for layer in model.modules() if isinstance(layer, SparseLinear)]


def fan_ins(layer: SparseLinear) -> list[int]:
    return (layer.weight.matrix.to_dense() != 0).sum(1).tolist()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return signal(16, 9, seed=step).double(), signal(16, 3, seed=step + 700).double()


def train(model: nn.Module, rule: SRigL, optimizer: torch.optim.Optimizer, count: int, forward=None) -> None:
    for step in range(rule.steps, rule.steps + count):
        x, y = batch(step)
        optimizer.zero_grad()
        with rule.watch():
            F.mse_loss((forward or model)(x), y).backward()
        if not rule.update():
            optimizer.step()


@torch.no_grad()
def changed(weight, gradient, mask, budget: int, share: float, gamma: float, ablates: bool):
    """Steps 1 to 7 of section 3.1, row by row, on plain lists of scores."""
    k = int(share * int(mask.sum()))
    order = sorted(mask.nonzero().tolist(), key=lambda at: (-abs(float(weight[*at])), at))
    kept = torch.zeros_like(mask)
    for row, col in order[: len(order) - k]:
        kept[row, col] = True
    alive = mask.any(1)
    free = [at for at in (~kept).nonzero().tolist() if alive[at[0]]]
    by_gradient = sorted(free, key=lambda at: (-abs(float(gradient[*at])), at))
    if ablates and k:
        salient = kept.sum(1)
        for row, _ in by_gradient[:k]:
            salient[row] += 1
        gone = alive & (salient < gamma * mask.sum(1).max())
        alive &= ~gone
        kept[gone] = False
    fan_in = min(budget // int(alive.sum()), mask.shape[1])
    for row, col in by_gradient:
        if alive[row] and kept[row].sum() < fan_in:
            kept[row, col] = True
    return kept


@pytest.mark.parametrize("format", [CSR, CSC], ids=["CSR", "CSC"])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.95])
def test_it_trains_as_its_dense_reference(format, gamma):
    model = network(format)
    dense, masks = copy.deepcopy(model), {}
    for place in (0, 2):
        weight = model[place].weight.matrix.to_dense().detach()
        dense[place] = nn.Linear(*weight.shape[::-1]).double()
        dense[place].weight.data, dense[place].bias.data = weight.clone(), model[place].bias.data.clone()
        masks[place] = weight != 0
    budgets = {place: int(mask.sum()) for place, mask in masks.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    other = torch.optim.SGD(dense.parameters(), lr=0.05, momentum=0.9)
    rule = SRigL(model, optimizer, every=3, end=15, fraction=0.8, gamma=gamma)
    for step in range(17):
        train(model, rule, optimizer, 1)
        x, y = batch(step)
        other.zero_grad()
        F.mse_loss(dense(x), y).backward()
        if 0 < step < 15 and step % 3 == 0:
            share = 0.4 * (1 + math.cos(math.pi * step / 15))
            for place, mask in masks.items():
                layer = dense[place]
                new = changed(layer.weight, layer.weight.grad, mask, budgets[place], share, gamma, place == 0)
                layer.weight.data *= new
                other.state[layer.weight]["momentum_buffer"] *= new & mask
                masks[place] = new
        else:
            for place, mask in masks.items():
                dense[place].weight.grad *= mask
            other.step()
        for place, mask in masks.items():
            torch.testing.assert_close(model[place].weight.matrix.to_dense(), dense[place].weight)
            assert rule.managers[str(place)].pattern.mask().equal(mask)
    alive = masks[0].any(1)
    fan_in = min(36 // int(alive.sum()), 9)
    assert masks[0].sum(1).tolist() == [fan_in * bool(one) for one in alive] and masks[2].sum(1).tolist() == [3] * 5
    assert (gamma == 0) == (int(alive.sum()) == 12)


def test_a_run_that_goes_on_has_the_same_bits_and_the_same_budget():
    def run(interrupted: bool) -> list[torch.Tensor]:
        model, rule_of = network(), partial(SRigL, every=2, end=20, fraction=0.8, gamma=0.95)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        rule = rule_of(model, optimizer)
        train(model, rule, optimizer, 7)
        if interrupted:
            model, optimizer, rule = gone_on(model, optimizer, rule, network(fan_in=4), rule_of)
        train(model, rule, optimizer, 6)
        return weights(model)

    for one, other in zip(run(False), run(True), strict=True):
        assert torch.equal(one, other)


def test_a_neuron_that_dies_compiles_nothing_again():
    torch._dynamo.reset()
    counters.clear()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    rule = SRigL(model, optimizer, every=2, end=40, fraction=0.8, gamma=0.95)
    compiled, stored = torch.compile(model, backend="eager"), []
    for _ in range(8):
        train(model, rule, optimizer, 1, compiled)
        stored.append(rule.managers["0"].pattern.nnz)
    assert set(stored) == {36, 35} and counters["stats"]["unique_graphs"] == 1  # 12 · 3, 7 · 5, and 4 · 9
    torch._dynamo.reset()


def one_layer(weight: list[list[float]], **settings) -> tuple[SparseLinear, SRigL]:
    layer = SparseLinear(CSR.from_dense(torch.tensor(weight)), torch.zeros(len(weight)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    rule = SRigL(layer, optimizer, every=1, end=2, ablate=lambda layer, name: True, **settings)
    rule.steps = 1  # half of the way: the share is half of the fraction
    return layer, rule


def update(layer: SparseLinear, rule: SRigL, gradient: list[list[float]]) -> None:
    """Give it this gradient of the whole weight."""
    with rule.watch():
        (layer(torch.eye(layer.in_features)).mT * torch.tensor(gradient)).sum().backward()
    rule.update()


def test_a_neuron_without_salient_weights_gives_its_weights_to_the_others():
    layer, rule = one_layer([[5, 4, 0, 0, 0], [0, 3, 2.5, 0, 0], [0, 0, 0, 0.1, 0.2]], gamma=0.6, fraction=2 / 3)
    # K = 2: row 2 loses both, and the two largest gradients are those of other rows
    update(layer, rule, [[0, 0, 9, 1, 2], [0, 0, 0, 8, 7], [3, 3, 3, 0, 0]])
    found = rule.managers[""].pattern.mask()
    assert found.tolist() == [[True, True, True, False, False], [False, True, True, True, False], [False] * 5]
    assert layer.weight.matrix.to_dense()[0].tolist() == [5, 4, 0, 0, 0]


def test_one_neuron_stays_and_stores_no_more_than_there_is():
    layer, rule = one_layer([[1.0, 2, 0], [3, 4, 0], [0, 5, 6]], gamma=1.0, fraction=1.0)
    # K = 3: row 0 keeps none, row 1 one, row 2 two; the gradients are row 0's, so that 2, 1 and 2 are salient
    update(layer, rule, [[9, 9, 0], [0, 0, 0], [0, 0, 8]])
    assert fan_ins(layer)[1] == 0 and rule.managers[""].pattern.mask().sum(1).tolist() == [3, 0, 3]
    layer, rule = one_layer([[1.0, 2, 0], [3, 4, 0], [0, 5, 6]], gamma=1.0, fraction=2.0 / 3)
    rule.gamma = 1.5  # none has so many
    update(layer, rule, [[0, 0, 0], [0, 0, 0], [9, 0, 0]])
    assert rule.managers[""].pattern.mask().sum(1).tolist() == [0, 0, 3]


def test_ties_nan_and_layers_that_store_nothing_or_all():
    layer, rule = one_layer([[1.0, 1, 0, 0], [0, 0, 1, 1]], gamma=0.0, fraction=1.0)
    update(layer, rule, [[2, 2, 2, 2], [3, 1, 1, 1]])  # drops (1, 2) and (1, 3)
    assert rule.managers[""].pattern.mask().tolist() == [[True, True, False, False], [True, True, False, False]]
    rule.steps = 1
    update(layer, rule, [[2, 2, 2, 2], [math.nan, 1, 1, 1]])  # drops (1, 0) and (1, 1); the row's are all NaN
    assert rule.managers[""].pattern.mask().tolist() == [[True, True, False, False], [True, True, False, False]]
    layer, rule = one_layer([[math.nan, 1.0, 0], [0, 2, 3]], gamma=0.0, fraction=1.0)
    update(layer, rule, [[0, 0, 1], [1, 0, 0]])
    assert layer.weight.matrix.to_dense()[0].isnan().any()
    for weight in (torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(0, 3)):
        layer = SparseLinear(CSR.from_dense(weight), torch.zeros(len(weight)))
        rule = SRigL(layer, torch.optim.SGD(layer.parameters()), every=1, end=9, fraction=1.0)
        for _ in range(2):
            with rule.watch():
                layer(torch.ones(1, 3)).sum().backward()
            rule.update()
        assert layer.values.numel() == weight.count_nonzero()


def test_layers_of_another_fan_in_a_row_are_refused_and_sparsify_makes_fitting_ones():
    model = nn.Sequential(nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters())
    uneven = SparseLinear(CSR.from_dense(torch.ones(3, 3).tril()))
    with pytest.raises(ConfigError, match="store 1 to 3 weights: make the layers by sparsify"):
        SRigL(uneven, torch.optim.SGD(uneven.parameters()), end=9)
    for by in ("random", "magnitude"):
        found = sparsecomp.sparsify(copy.deepcopy(model), ConstantFanIn(0.75, by=by))
        assert fan_ins(found[0]) == [4] * 6 and fan_ins(found[2]) == [2] * 4
        optimizer = torch.optim.SGD(found.parameters())
        assert SRigL(found, optimizer, end=9).gamma == 0.3
    shared = sparsecomp.sparsify(copy.deepcopy(model), ConstantFanIn(0.5, budget="erk"))
    # 60 of 120 by sums of 22 and 10: 41 and 19 of them, 6.9 and 4.7 a row
    assert fan_ins(shared[0]) == [7] * 6 and fan_ins(shared[2]) == [5] * 4
    with pytest.raises(ConfigError, match="gamma is 1.5"):
        SRigL(found, optimizer, end=9, gamma=1.5)
