"""SR-STE and Top-KAST beside dense references written from the papers, for linear layers and convolutions."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import sparsecomp
from sparsecomp import NM, Unstructured
from sparsecomp.errors import ConfigError, MaskError
from sparsecomp.nn import SparseLinear
from sparsecomp.runtime import sr_ste, top_kast


def signal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 6)).double()


def out(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
    return F.linear(F.conv2d(x, weights[0], biases[0]).tanh().flatten(1), weights[1], biases[1])


def two_of_four(weight: torch.Tensor) -> torch.Tensor:
    """Along the inputs or the input channels, element by element."""
    rows = weight.movedim(1, -1)
    mask = torch.zeros(rows.shape, dtype=torch.bool)
    flat, marks = rows.reshape(-1, 4), mask.view(-1, 4)
    for group, mark in zip(flat.tolist(), marks, strict=True):
        for place in sorted(range(4), key=lambda at: (-abs(group[at]), at))[:2]:
            mark[place] = True
    return mask.movedim(-1, 1)


def top(weight: torch.Tensor, count: int) -> torch.Tensor:
    flat = weight.flatten().tolist()
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[sorted(range(len(flat)), key=lambda at: (-abs(flat[at]), at))[:count]] = True
    return mask.view_as(weight)


def dense_run(model: nn.Sequential, sets, pull: tuple[float, float], steps: int, lr: float) -> list[torch.Tensor]:
    """w -= lr · (the gradient by the masked weight within B + pull · w): section 3.2 of Zhou et al., 2 of Jayakumar."""
    layers = [model[0], model[3]]
    weights = [one.weight.detach().clone() for one in layers]
    biases = [one.bias.detach().clone() for one in layers]
    for step in range(steps):
        masks = [sets(one) for one in weights]
        masked = [(one * kept).requires_grad_() for one, (kept, _) in zip(weights, masks, strict=True)]
        for bias in biases:
            bias.requires_grad_()
        out(signal(5, 4, 4, 4, seed=step), masked, biases).square().mean().backward()
        for place, (kept, trained) in enumerate(masks):
            decay = kept * pull[0] + (trained & ~kept) * pull[1]
            weights[place] = weights[place] - lr * (masked[place].grad * trained + decay * weights[place])
            biases[place] = (biases[place] - lr * biases[place].grad).detach()
    return weights


def run(model: nn.Module, steps: int, lr: float, forward=None) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        (forward or model)(signal(5, 4, 4, 4, seed=step)).square().mean().backward()
        optimizer.step()
    return [model[place].parametrizations.weight.original.detach() for place in (0, 3)]


@pytest.mark.parametrize("decay", [0.0, 2e-1])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_sr_ste_trains_as_its_dense_reference(decay, backend):
    model = network()
    expected = dense_run(model, lambda w: (two_of_four(w), torch.ones_like(w, dtype=torch.bool)), (0, decay), 12, 0.3)
    assert sr_ste(model, NM(2, 4), decay=decay) == ["0", "3"]
    forward = None if backend == "eager" else torch.compile(model, backend=backend, fullgraph=True)
    found = run(model, 12, 0.3, forward)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    # another two of four than at first, in places
    assert all(bool((two_of_four(one) != two_of_four(start.weight)).any())
               for one, start in zip(found, (network()[0], network()[3]), strict=True))  # fmt: skip


@pytest.mark.parametrize("config", [Unstructured(0.9), Unstructured(0.75, budget="erk")])
def test_one_budget_of_a_layer(config):
    model = network()
    sr_ste(model, config)
    kept = [int(model[place].weight.count_nonzero()) for place in (0, 3)]
    if config.budget == "uniform":
        assert kept == [29, 19]  # a tenth of 288 and 192
    else:  # a quarter of 480 by 8 + 4 + 3 + 3 and 32 + 6, of 288 and 192
        assert kept == [round(120 * 18 / 56), round(120 * 38 / 56)]


def test_top_kast_trains_as_its_dense_reference():
    model = network()

    def sets(weight: torch.Tensor):
        return top(weight, weight.numel() // 8), top(weight, weight.numel() // 2)

    expected = dense_run(model, sets, (0.05, 0.05 * 8), 12, 0.3)
    assert top_kast(model, Unstructured(7 / 8), Unstructured(1 / 2), decay=0.05) == ["0", "3"]
    before = [model[place].parametrizations.weight.original.detach().clone() for place in (0, 3)]
    for one, other, start in zip(run(model, 12, 0.3), expected, before, strict=True):
        torch.testing.assert_close(one, other)
        assert one.count_nonzero() == start.count_nonzero() and bool((one == start).any())  # set C has not moved
    assert [int(model[place].weight.count_nonzero()) for place in (0, 3)] == [36, 24]


def test_a_run_that_goes_on_has_the_same_bits_and_ends_sparse():
    def masked() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network()
        sr_ste(model, NM(2, 4))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(signal(5, 4, 4, 4, seed=step)).square().mean().backward()
            optimizer.step()

    whole, first, second = masked(), masked(), masked()
    train(*whole, range(8))
    train(*first, range(5))
    for one, other in zip(second, first, strict=True):
        one.load_state_dict(copy.deepcopy(other.state_dict()))
    train(*second, range(5, 8))
    for one, other in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)
    x, model = signal(3, 4, 4, 4), whole[0]
    expected = model(x)
    sparsecomp.sparsify(model, NM(2, 4))
    assert isinstance(model[3], SparseLinear) and model[3].format == "NM"
    parametrize.remove_parametrizations(model[0], "weight")
    torch.testing.assert_close(model(x), expected)
    assert torch.equal(model[0].weight != 0, two_of_four(model[0].weight))


def test_ties_go_to_the_lowest_index_nan_stays_and_budgets_may_be_all():
    layer = nn.Linear(8, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -1, 1, -1, 0, 0, 0, 2], [math.nan, 1, 1, 3, 4, 4, 4, 4]]))
    model = nn.Sequential(layer)
    sr_ste(model, NM(2, 4))
    assert torch.equal(layer.weight.nan_to_num(nan=7), torch.tensor(
        [[1.0, -1, 0, 0, 0, 0, 0, 2], [7, 0, 0, 3, 4, 4, 0, 0]]))  # fmt: skip
    full = nn.Sequential(nn.Linear(4, 3))
    sr_ste(full, Unstructured(0.0))
    assert torch.equal(full[0].weight, full[0].parametrizations.weight.original)
    none = nn.Sequential(nn.Linear(4, 3))
    sr_ste(none, Unstructured(0.99), decay=0.5)
    assert not none[0].weight.any()
    none(torch.zeros(1, 4)).sum().backward()
    original = none[0].parametrizations.weight.original
    torch.testing.assert_close(original.grad, original / 2)
    empty = nn.Sequential(nn.Linear(0, 3))
    sr_ste(empty, Unstructured(0.5))
    assert empty[0].weight.shape == (3, 0)


def test_what_does_not_fit_changes_nothing():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    for call, kind, message in (
        (lambda: sr_ste(model, NM(2, 4)), MaskError, "0: groups of 4 do not divide 6"),
        (lambda: sr_ste(model, NM(2, 4, by="wanda")), ConfigError, "which rank by magnitude"),
        (lambda: sr_ste(model, 0.9), ConfigError, r"give NM\(2, 4\)"),
        (lambda: sr_ste(model, Unstructured(0.5), decay=-1.0), ConfigError, "decay is -1"),
        (lambda: sr_ste(nn.ReLU(), NM(2, 4)), ConfigError, "no plain linear or convolution"),
        (lambda: top_kast(model, Unstructured(0.5), Unstructured(0.9)), ConfigError, "fewer than the"),
        (lambda: top_kast(model, NM(2, 4), Unstructured(0.9)), ConfigError, "no set of weights"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            call()
    assert not any(parametrize.is_parametrized(layer) for layer in model)
    assert sr_ste(model, NM(2, 4), filter=lambda layer, name: name == "1") == ["1"]


@pytest.mark.parametrize("mask", [
    lambda model: sr_ste(model, NM(2, 4), decay=0.1),
    lambda model: top_kast(model, Unstructured(0.8), Unstructured(0.5)),
], ids=["sr_ste", "top_kast"])  # fmt: skip
def test_gradients_of_each_sample(mask):
    """By vmap over samples, as for differential privacy, and over models of their own weights."""
    model = network()
    mask(model)
    weights = {name: one.detach() for name, one in model.named_parameters()}
    x = signal(3, 1, 4, 4, 4)

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    several = {name: torch.stack([one, -2 * one, one.flip(0)]) for name, one in weights.items()}
    ensemble = torch.func.vmap(torch.func.grad(loss))(several, x)
    for sample in range(3):
        for grads, given in ((found, weights), (ensemble, {name: one[sample] for name, one in several.items()})):
            for name, expected in torch.func.grad(loss)(given, x[sample]).items():
                torch.testing.assert_close(grads[name][sample], expected)
