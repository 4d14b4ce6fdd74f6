"""Weights that the option `frozen` makes constants of a graph: other tensors and seen writes give what eager gives."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import sparsecomp
from sparsecomp.nn import SparseLinear

X = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
FROZEN = {"frozen": True}


class Masked(nn.Module):
    """A linear layer on weight * mask."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(48, 48)
        self.register_buffer("mask", (torch.rand(48, 48) > 0.7).float())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.linear.weight * self.mask, self.linear.bias)


def sparse(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return SparseLinear.from_linear(nn.Linear(48, 48), sparsity=0.8)


LAYERS: dict[str, Callable[[int], nn.Module]] = {"sparse": sparse, "masked": Masked}


def weight_of(layer: Any) -> tuple[nn.Module, str]:
    return (layer.linear, "weight") if isinstance(layer, Masked) else (layer, "values")


def agrees(run: Callable[[Tensor], Tensor], layer: nn.Module) -> None:
    with torch.no_grad():
        torch.testing.assert_close(run(X), layer(X), rtol=1e-5, atol=1e-5)


def made_anew() -> list[str]:
    report = sparsecomp.last_report()
    assert report is not None
    return [note for note in report.notes if "made anew" in note]


def _swap(owner: Any, name: str) -> None:
    torch.utils.swap_tensors(getattr(owner, name), nn.Parameter(getattr(owner, name).detach() * 3))


def _data_twice(owner: Any, name: str) -> None:
    for _ in range(2):
        getattr(owner, name).data = getattr(owner, name).data * 2


CHANGES: dict[str, Callable[[Any, str], Any]] = {
    "in place": lambda owner, name: getattr(owner, name).detach().mul_(2),
    "replaced": lambda owner, name: setattr(owner, name, nn.Parameter(getattr(owner, name).detach() * 2)),
    "data": lambda owner, name: setattr(getattr(owner, name), "data", getattr(owner, name).data * 2),
    "data twice": _data_twice,
    "swapped": _swap,
    "loaded": lambda owner, name: owner.load_state_dict({**owner.state_dict(), name: getattr(owner, name) * 2}),
    "assigned": lambda owner, name: owner.load_state_dict(
        {**owner.state_dict(), name: getattr(owner, name).detach() * 2}, assign=True
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_change_that_can_be_seen_is_followed_and_said(kind, change):
    layer = LAYERS[kind](0)
    run = torch.compile(copy.deepcopy(layer), backend="sparsecomp", options=FROZEN)
    layer = run._orig_mod
    agrees(run, layer)
    assert not made_anew()
    for _ in range(2):
        CHANGES[change](*weight_of(layer))
        agrees(run, layer)
        agrees(run, layer)
    assert len(made_anew()) == 1


@pytest.mark.parametrize("kind", LAYERS)
def test_a_graph_serves_one_module_however_many_share_its_code(kind):
    """More than Dynamo's limit of recompilations."""
    torch._dynamo.reset()
    layers = [LAYERS[kind](seed) for seed in range(10)]
    run = torch.compile(lambda layer, x: layer(x), backend="sparsecomp", options=FROZEN)
    before = counters["stats"]["unique_graphs"]
    for _ in range(2):
        for layer in layers:
            agrees(lambda x, layer=layer: run(layer, x), layer)
    assert counters["stats"]["unique_graphs"] == before + len(layers)
    assert not made_anew()


def test_blocks_that_are_compiled_by_themselves_have_their_own_weights():
    torch._dynamo.reset()
    blocks = nn.Sequential(*(nn.Sequential(sparse(seed), nn.ReLU()) for seed in range(4)))
    with torch.no_grad():
        wanted = blocks(X)
    for block in blocks:
        block.compile(backend="sparsecomp", options=FROZEN)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(blocks(X), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_other_tensors_by_functional_call(kind):
    layer = LAYERS[kind](0)
    ensemble = [{name: nn.Parameter(value * factor) for name, value in layer.named_parameters()} for factor in (1, 2)]
    call = lambda parameters, x: torch.func.functional_call(layer, parameters, (x,))  # noqa: E731
    run = torch.compile(call, backend="sparsecomp", options=FROZEN)
    with torch.no_grad():
        for parameters in ensemble * 2:
            torch.testing.assert_close(run(parameters, X), call(parameters, X), rtol=1e-5, atol=1e-5)


def test_a_layer_that_was_made_and_compiled_in_inference_mode():
    torch._dynamo.reset()
    with torch.inference_mode():
        layer = Masked(0)
        run = torch.compile(layer, backend="sparsecomp", options=FROZEN)
        for _ in range(2):
            torch.testing.assert_close(run(X), layer(X), rtol=1e-5, atol=1e-5)
            layer.linear = Masked(1).linear


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("kind", LAYERS)
def test_replayed_graphs_follow_too(kind, mode):
    torch._dynamo.reset()
    layer, x = LAYERS[kind](0).cuda(), X.cuda()
    run = torch.compile(layer, backend="sparsecomp", options={**FROZEN, "mode": mode})
    with torch.no_grad():
        for _ in range(3):
            for _ in range(4):
                torch.testing.assert_close(run(x), layer(x), rtol=1e-4, atol=1e-4)
            CHANGES["in place"](*weight_of(layer))
