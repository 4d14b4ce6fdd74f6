"""Patterns that grow and shrink within a capacity: nothing is compiled again, and nothing sees what is spare."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import sparsecomp
from sparsecomp.errors import FormatError
from sparsecomp.formats import BSR, CSC, CSR, Pattern
from sparsecomp.nn import SparseEmbedding, SparseLinear
from sparsecomp.runtime import PatternManager

FORMATS = pytest.mark.parametrize("format", [CSR, CSC], ids=["CSR", "CSC"])


def signal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pattern(count: int, seed: int) -> Pattern:
    keys = torch.randperm(12 * 9, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    return Pattern(keys.int(), (12, 9))


def layer_of(format=CSR, count: int = 40) -> SparseLinear:
    return SparseLinear(format.from_dense(signal(12, 9) * pattern(count, 3).mask()), signal(12, seed=5))


def spoil(layer: SparseLinear) -> None:
    """What a kernel leaves in spare capacity may be anything."""
    with torch.no_grad():
        layer.values[layer.weight.matrix.values.numel() :] = float("nan")


class Dense:
    """The same layer as a masked dense one, with the optimizer's state of new elements at 0."""

    def __init__(self, layer: SparseLinear) -> None:
        self.weight = layer.weight.matrix.to_dense().detach().clone().requires_grad_()
        self.bias = layer.bias.detach().clone().requires_grad_()
        self.mask = self.weight.detach() != 0
        self.optimizer = torch.optim.AdamW([self.weight, self.bias], lr=0.05)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        self.optimizer.zero_grad()
        F.linear(x, self.weight * self.mask, self.bias).square().sum().backward()
        self.optimizer.step()
        return x.grad

    def become(self, new: Pattern) -> None:
        self.mask, both = new.mask(), self.mask & new.mask()
        with torch.no_grad():
            for one in (self.weight, *(self.optimizer.state[self.weight][slot] for slot in ("exp_avg", "exp_avg_sq"))):
                one.mul_(both)


@FORMATS
@pytest.mark.parametrize("backend", ["eager", pytest.param("sparsecomp", marks=pytest.mark.slow(reason="Inductor"))])
def test_counts_change_as_in_the_dense_layer_and_nothing_is_compiled_again(format, backend):
    torch._dynamo.reset()
    counters.clear()
    layer = layer_of(format)
    dense, optimizer = Dense(layer), torch.optim.AdamW(layer.parameters(), lr=0.05)
    manager, forward = PatternManager(layer, [optimizer]), torch.compile(layer, backend=backend)
    manager.reserve(60)
    arrays = [layer.values, layer.indices, layer.transposed_indices]
    for step, count in enumerate((40, 60, 60, 13, 0, 1, 59, 40)):
        if step:
            manager.become(pattern(count, step))
            dense.become(pattern(count, step))
        for seed in (step, step + 20):
            x = signal(6, 9, seed=seed).requires_grad_()
            optimizer.zero_grad()
            forward(x).square().sum().backward()
            spare = layer.values.grad[count:]
            assert layer.values.grad.numel() == 60 and not spare.any()
            optimizer.step()
            torch.testing.assert_close(x.grad, dense.step(x.detach()), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                layer.weight.matrix.to_dense(), dense.weight.detach() * dense.mask, rtol=1e-4, atol=1e-5
            )
        assert not layer.values[count:].any() and layer.weight.matrix.nnz == count
        assert all(not slot[count:].any() for slot in optimizer.state[layer.values].values() if slot.dim())
    assert counters["stats"]["unique_graphs"] == 1
    assert all(one is other for one, other in zip(arrays, [layer.values, layer.indices, layer.transposed_indices],
                                                  strict=True))  # fmt: skip
    torch._dynamo.reset()


@pytest.mark.slow(reason="compiled by Inductor")
@pytest.mark.parametrize("count", [40, 30])
def test_a_compiled_step_behind_a_change_is_the_eager_one(count):
    """In the default mode: the transpose that a layer keeps follows the pattern, in memory that the graph reads."""
    torch._dynamo.reset()
    counters.clear()
    layer = layer_of()
    if count != 40:
        layer.reserve(40)
    compiled, manager = torch.compile(layer, backend="sparsecomp"), PatternManager(layer)
    for seed in range(3):
        if seed:
            manager.become(pattern(count, seed), lambda new: signal(new, seed=9))
        x, found = signal(4, 9, seed=seed), []
        for forward in (compiled, layer):
            given = x.clone().requires_grad_()
            layer.zero_grad()
            out = forward(given)
            out.square().sum().backward()
            found.append((out, given.grad, layer.values.grad, layer.bias.grad))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
        dense = layer.weight.matrix.to_dense()
        torch.testing.assert_close(found[0][1], 2 * (x @ dense.mT + layer.bias) @ dense)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@FORMATS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_only_rows_that_store_something_there(format, bad):
    layer, plain = layer_of(format), layer_of(format)
    layer.reserve(70)
    spoil(layer)
    x = signal(5, 9)
    x[1, 0], x[2, 8] = bad, bad
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    assert torch.equal(layer(one).nan_to_num(nan=7), plain(other).nan_to_num(nan=7))
    for out in (layer(one), plain(other)):
        out.sum().backward()
    torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(layer.values.grad[:40], plain.values.grad, equal_nan=True)
    assert not layer.values.grad[40:].any()
    nn.utils.clip_grad_norm_(layer.parameters(), 1.0)  # its norm is that of the entries
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.testing.assert_close(layer.values.grad[:40], plain.values.grad, equal_nan=True)


@FORMATS
def test_only_entries_are_shown_and_saved(format, tmp_path):
    layer, plain = layer_of(format), layer_of(format)
    layer.reserve(70)
    spoil(layer)
    assert layer.weight.matrix.nnz == 40 and PatternManager(layer).pattern.density == 40 / 108
    assert torch.equal(layer.weight.matrix.to_dense(), plain.weight.matrix.to_dense())
    assert torch.equal(layer.weight.matrix.to(CSR).values, plain.weight.matrix.to(CSR).values)
    assert PatternManager(layer).pattern == PatternManager(plain).pattern
    saved = layer.state_dict()
    assert saved.keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(saved[name], tensor), name
    torch.testing.assert_close(sparsecomp.densify(copy.deepcopy(layer))(signal(3, 9)), plain(signal(3, 9)))
    x, other = signal(3, 9), layer_of(format, 25)
    for into in (layer_of(format, 10), layer_of(format, 10)):
        into.reserve(60)
        into.load_state_dict(other.state_dict())
        assert into.values.numel() == 60 and torch.equal(into(x), other(x)) and into.weight.matrix.nnz == 25
        sparsecomp.load_state_dict(into, saved)
        assert into.values.numel() == 60 and torch.equal(into(x), plain(x))
    small = layer_of(format, 10)
    small.reserve(12)
    small.load_state_dict(saved)  # more than there is room for
    assert small.values.numel() == 40 and torch.equal(small(x), plain(x))
    torch.save(saved, tmp_path / "layer.pt")
    fresh = layer_of(format, 3)
    fresh.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(fresh(x), plain(x))


def test_a_run_that_goes_on_has_the_same_bits():
    def start() -> tuple[SparseLinear, torch.optim.Optimizer, PatternManager]:
        layer = layer_of()
        layer.reserve(60)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
        return layer, optimizer, PatternManager(layer, [optimizer])

    def train(layer, optimizer, manager, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            layer(signal(4, 9, seed=step)).square().sum().backward()
            optimizer.step()
            manager.become(pattern(20 + 4 * step, step))

    whole, first, second = start(), start(), start()
    train(*whole, range(8))
    train(*first, range(5))
    second[0].load_state_dict(copy.deepcopy(first[0].state_dict()))
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    train(*second, range(5, 8))
    for name, tensor in whole[0].state_dict().items():
        assert torch.equal(second[0].state_dict()[name], tensor), name


def test_an_undo_beyond_the_capacity_and_copies():
    layer = layer_of()
    layer(signal(4, 9)).sum().backward()
    manager = PatternManager(layer, [torch.optim.SGD(layer.parameters(), lr=0.1)])
    before, gradient = layer.weight.matrix.to_dense(), layer.values.grad.clone()
    manager.reserve(50)
    assert torch.equal(layer.values.grad[:40], gradient) and not layer.values.grad[40:].any()
    manager.become(pattern(80, 1))
    assert layer.values.numel() == 80
    manager.undo()
    assert layer.values.numel() == 50 and torch.equal(layer.weight.matrix.to_dense(), before)
    manager.reserve(0)
    assert layer.values.shape == layer.values.grad.shape == (40,) and layer.capacity == 0
    assert torch.equal(layer.weight.matrix.to_dense(), before) and layer(signal(4, 9)).grad_fn is not None
    manager.reserve(50)
    twin = copy.deepcopy(layer).double()
    x = signal(4, 9).double()
    torch.testing.assert_close(twin(x), F.linear(x, before.double(), twin.bias))
    PatternManager(twin).become(pattern(5, 2))
    assert twin.weight.matrix.nnz == 5 and layer.weight.matrix.nnz == 40


def test_an_embedding_has_room_too():
    table = signal(12, 9) * pattern(40, 3).mask()
    layer = SparseEmbedding(CSR.from_dense(table))
    layer.reserve(60)
    manager = PatternManager(layer)
    manager.become(pattern(55, 1), lambda new: torch.ones(new))
    index = torch.tensor([3, 11, 0, 3])
    layer(index).sum().backward()
    expected = table * pattern(55, 1).mask() + (pattern(55, 1) - pattern(40, 3)).mask()
    assert torch.equal(layer(index), expected[index])
    assert layer.values.numel() == 60 and not layer.values.grad[55:].any()


def test_what_has_no_capacity():
    with pytest.raises(FormatError, match="capacity is 39, needs a whole number of 40 or more"):
        layer_of().reserve(39)
    with pytest.raises(FormatError, match="in BSR"):
        SparseLinear(BSR.from_dense(torch.ones(4, 4), block=(2, 2))).reserve(99)
    layer = layer_of()
    nn.utils.parametrize.register_parametrization(layer, "values", nn.Tanh())
    with pytest.raises(FormatError, match="values are computed"):
        layer.reserve(99)
