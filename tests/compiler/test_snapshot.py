"""A snapshot names what was changed, and puts all of it back."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparsecomp.compiler.snapshot import Snapshot, undone


class Keeper(nn.Module):
    """State in every place a neuron has been seen to keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("v", torch.zeros(3))
        self.not_a_number = torch.full((2,), torch.nan)
        self.count, self.rate, self.name, self.flag = 2, 0.5, "a", True
        self.history: list[Any] = [torch.zeros(2), "first"]
        self.nested = {"inner": {"trace": torch.ones(1)}, "seen": {1, 2}}
        self.pair = (torch.zeros(1), 3)
        self.sparse = torch.eye(2).to_sparse()
        self.generator = torch.Generator().manual_seed(3)
        self.child = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _data(value: torch.Tensor) -> torch.Tensor:
    return value.data


CHANGES: dict[str, tuple[Callable[[Keeper], Any], list[str]]] = {
    "nothing": (lambda m: None, []),
    "number": (lambda m: setattr(m, "count", 3), ["count"]),
    "an equal number of another type": (lambda m: setattr(m, "count", 2.0), ["count"]),
    "the same number": (lambda m: setattr(m, "rate", float("0.5")), []),
    "text": (lambda m: setattr(m, "name", "b"), ["name"]),
    "flag": (lambda m: setattr(m, "flag", 1), ["flag"]),
    "another tensor": (lambda m: setattr(m, "pair", (torch.zeros(1), 3)), ["pair"]),
    "new attribute": (lambda m: setattr(m, "more", 1), ["more"]),
    "attribute gone": (lambda m: delattr(m, "name"), ["name"]),
    "two": (lambda m: (setattr(m, "name", "b"), setattr(m, "count", 0)), ["count", "name"]),
    "buffer replaced": (lambda m: setattr(m, "v", torch.zeros(3)), ["v"]),
    "child replaced": (lambda m: setattr(m, "child", nn.Linear(2, 2)), ["child"]),
    "child's child": (lambda m: setattr(m.child, "in_features", 7), ["in_features"]),
    "list longer": (lambda m: m.history.append(1), ["an item of a list"]),
    "list shorter": (lambda m: m.history.pop(), ["an item of a list"]),
    "list item": (lambda m: m.history.__setitem__(0, torch.zeros(2)), ["an item of a list"]),
    "an equal list item": (lambda m: m.history.__setitem__(1, "".join(["fir", "st"])), []),
    "set": (lambda m: m.nested["seen"].add(3), ["an item of a set"]),
    "nested": (lambda m: m.nested["inner"].__setitem__("trace", None), ["trace"]),
    "buffer in place": (lambda m: m.v.add_(1), ["a tensor written in place"]),
    "parameter through data": (lambda m: _data(m.weight).add_(1), ["a tensor written in place"]),
    "memory": (lambda m: setattr(m.v, "data", torch.zeros(3)), ["a tensor written in place"]),
    "size": (lambda m: setattr(m.v, "data", torch.zeros(4)), ["a tensor written in place"]),
    "a tensor in a tuple": (lambda m: m.pair[0].add_(1), ["a tensor written in place"]),
    "a tensor in a list": (lambda m: m.history[0].add_(1), ["a tensor written in place"]),
    "a tensor in a dict": (lambda m: m.nested["inner"]["trace"].zero_(), ["a tensor written in place"]),
    "NaN to a number": (lambda m: m.not_a_number.zero_(), ["a tensor written in place"]),
    "a number to NaN": (lambda m: m.v.fill_(torch.nan), ["a tensor written in place"]),
    "NaN for NaN": (lambda m: m.not_a_number.fill_(torch.nan), []),
    "the same values": (lambda m: m.v.add_(0), []),
}


def _values(module: Keeper) -> list[Any]:
    tensors = [module.weight, module.v, module.not_a_number, module.history[0], module.pair[0],
               module.nested["inner"]["trace"], module.child.weight]  # fmt: skip
    plain = [module.count, module.rate, module.name, module.flag, module.history[1], sorted(module.nested["seen"])]
    return [[(tensor.shape, tensor.tolist()) for tensor in tensors], plain, module.child.in_features]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_undone(name: str) -> None:
    change, names = CHANGES[name]
    module = Keeper()
    before, attributes, memory = str(_values(module)), set(module.__dict__), module.v.data_ptr()
    snapshot = Snapshot(module)
    with torch.no_grad():
        change(module)
    assert sorted(snapshot.changed()) == names
    snapshot.restore()
    assert snapshot.changed() == []
    assert str(_values(module)) == before and set(module.__dict__) == attributes
    assert module.v.data_ptr() == memory


def test_of_a_sparse_tensor_only_the_version_is_known() -> None:
    module = Keeper()
    snapshot = Snapshot(module)
    assert snapshot.changed() == []
    module.sparse.mul_(1)
    assert snapshot.changed() == ["a tensor written in place"]


def test_inputs_and_random_numbers_come_back_also_after_an_error() -> None:
    module, x = Keeper(), torch.zeros(2)
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate(), module.generator.get_state()
    with pytest.raises(ZeroDivisionError), undone(module, [x]) as snapshot:
        x.add_(1)
        torch.rand(1), random.random(), torch.rand(1, generator=module.generator)
        assert snapshot.changed() == ["a tensor written in place"]
        raise ZeroDivisionError
    assert x.tolist() == [0, 0]
    after = torch.get_rng_state(), random.getstate(), module.generator.get_state()
    assert torch.equal(before[0], after[0]) and before[1] == after[1] and torch.equal(before[2], after[2])


def test_what_cannot_be_copied_is_left_alone() -> None:
    module = Keeper()
    module.lazy = nn.LazyLinear(2)
    with torch.inference_mode():
        module.inferred = torch.zeros(1)
    assert Snapshot(module).changed() == []
