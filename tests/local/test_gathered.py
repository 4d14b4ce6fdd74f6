"""What counts as gathered inputs of a layer of fixed fan-in: the index, n_out and k, and that they are gathered so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting import Examples
from torch import Tensor, fx

from sparsecomp.passes.engine.rule import Refusal
from sparsecomp.passes.local.gathered import Gathered, gathered_of

X = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
INDEX = torch.tensor([[0, 6], [3, 3], [5, 1], [2, 4]])


def read(function: Callable[[Any, Any], Any], x: Tensor = X, index: Tensor = INDEX) -> Any:
    """What is found of the last node, and what that node gave."""
    gm = fx.symbolic_trace(function)
    result = Examples(gm).run(x, index)
    (last,) = gm.graph.output_node().all_input_nodes
    return gathered_of(last), result


TAKEN: dict[str, Callable[[Any, Any], Any]] = {
    "all before": lambda x, i: x[..., i],
    "slices before": lambda x, i: x[:, :, i],
    "a slice and all": lambda x, i: x[:, ..., i],
    "flat": lambda x, i: x[..., i.view(-1)].view(2, 3, 4, 2),
    "flat, unflattened": lambda x, i: x[..., i.flatten()].unflatten(-1, (4, 2)),
    "index_select": lambda x, i: x.index_select(-1, i.flatten()).view(2, 3, 4, 2),
    "index_select from the front": lambda x, i: torch.index_select(x, 2, i.flatten()).reshape(2, 3, 4, 2),
    "gather": lambda x, i: x.gather(2, i.view(1, 1, 8).expand(2, 3, 8)).view(2, 3, 4, 2),
    "gather of stacked rows": lambda x, i: torch.gather(x.unsqueeze(2).expand(2, 3, 4, 7), 3, i.expand(2, 3, 4, 2)),
    "gather of rows with None": lambda x, i: x[:, :, None].expand(2, 3, 4, 7).gather(-1, i.expand(2, 3, 4, 2)),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i.view(8).expand(2, 3, 8), -1).view(2, 3, 4, 2),
    "cast": lambda x, i: x[..., i].double(),
    "other rows": lambda x, i: x[..., i.view(2, 4)],
}


@pytest.mark.parametrize("function", TAKEN.values(), ids=TAKEN)
def test_inputs_are_those_of_the_index(function):
    found, result = read(function)
    assert isinstance(found, Gathered) and found.x.name == "x"
    assert found.fan == tuple(result.shape[-2:]) and found.fan[0] * found.fan[1] == INDEX.numel()
    torch.testing.assert_close(result, X[..., INDEX.view(found.fan)].to(result.dtype))


LEFT: dict[str, Callable[[Any, Any], Any]] = {
    "the first dimension": lambda x, i: x[i % 2],
    "the middle": lambda x, i: x[:, i % 3],
    "index_select of another": lambda x, i: x.index_select(1, i.flatten() % 3).view(2, 4, 2, 7),
    "gather of another": lambda x, i: x.gather(1, (i % 3).view(1, 8, 1).expand(2, 8, 7)),
    "each row its own": lambda x, i: x.gather(2, i.view(1, 1, 8) + 0 * x[..., :1].long()).view(2, 3, 4, 2),
    "a part": lambda x, i: x[..., 1:, i],
    "turned behind": lambda x, i: x[..., i].transpose(-1, -2),
    "in place": lambda x, i: x[..., i].mul_(2),
    "a dimension more": lambda x, i: x[..., i.view(2, 2, 2)],
    "flat all the same": lambda x, i: x[..., i.flatten()],
    "rows mixed in": lambda x, i: x[..., i].reshape(3, 2, 4, 2),
    "another operator": lambda x, i: x.relu(),
}  # fmt: skip


@pytest.mark.parametrize("function", LEFT.values(), ids=LEFT)
def test_what_gathers_otherwise(function):
    assert read(function)[0] is None


def test_of_no_rows_the_shape_says_nothing():
    assert read(lambda x, i: x[..., i], X[:0])[0].fan == (4, 2)
    assert read(lambda x, i: x[..., i].view(0, 3, 5, 2), X[:0])[0] is None
    assert read(lambda x, i: x[..., i].view(0, 3, 4, 5), X[:0])[0] is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool])
def test_an_index_is_of_int32_or_int64(dtype):
    every = torch.ones(7, dtype=torch.bool) if dtype is torch.bool else torch.arange(7, dtype=dtype)
    found, result = read(lambda x, i: x[..., i].view(2, 3, 7, 1), X, every)
    assert torch.equal(result[..., 0], X)
    if dtype is torch.bool:
        assert isinstance(found, Refusal) and "its index is torch.bool, not int32 or int64" in str(found)
    else:
        assert found.fan == (7, 1)
