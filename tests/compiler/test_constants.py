"""Weights that the option `frozen` makes constants of a graph: other tensors and seen writes give what eager gives."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import sparsecomp
from sparsecomp.errors import FrozenWeightError
from sparsecomp.nn import SparseLinear
from sparsecomp.ops import frozen_weights

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


def _wrapped_again(owner: Any, name: str) -> None:
    """Another parameter on the same memory begins to count its writes anew."""
    getattr(owner, name).detach().mul_(2)
    setattr(owner, name, nn.Parameter(getattr(owner, name).data))


def _data_twice(owner: Any, name: str) -> None:
    for _ in range(2):
        getattr(owner, name).data = getattr(owner, name).data * 2


CHANGES: dict[str, Callable[[Any, str], Any]] = {
    "in place": lambda owner, name: getattr(owner, name).detach().mul_(2),
    "replaced": lambda owner, name: setattr(owner, name, nn.Parameter(getattr(owner, name).detach() * 2)),
    "data": lambda owner, name: setattr(getattr(owner, name), "data", getattr(owner, name).data * 2),
    "data twice": _data_twice,
    "wrapped again": _wrapped_again,
    "swapped": _swap,
    "loaded": lambda owner, name: owner.load_state_dict({**owner.state_dict(), name: getattr(owner, name) * 2}),
    "assigned": lambda owner, name: owner.load_state_dict(
        {**owner.state_dict(), name: getattr(owner, name).detach() * 2}, assign=True
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_change_that_can_be_seen_is_followed_and_said(kind, change):
    torch._dynamo.reset()  # other tests compile the same code, up to its limit
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
    layers = [LAYERS[kind](seed) for seed in range(10)]
    run = torch.compile(lambda layer, x: layer(x), backend="sparsecomp", options=FROZEN)
    before = counters["stats"]["unique_graphs"]
    for _ in range(2):
        for layer in layers:
            agrees(lambda x, layer=layer: run(layer, x), layer)
    assert counters["stats"]["unique_graphs"] == before + len(layers)
    assert not made_anew()


def test_blocks_that_are_compiled_by_themselves_have_their_own_weights():
    blocks = nn.Sequential(*(nn.Sequential(sparse(seed), nn.ReLU()) for seed in range(4)))
    with torch.no_grad():
        wanted = blocks(X)
    for block in blocks:
        block.compile(backend="sparsecomp", options=FROZEN)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(blocks(X), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.usefixtures("op_by_op")
def test_other_tensors_by_functional_call(kind):
    layer = LAYERS[kind](0)
    ensemble = [{name: nn.Parameter(value * factor) for name, value in layer.named_parameters()} for factor in (1, 2)]
    call = lambda parameters, x: torch.func.functional_call(layer, parameters, (x,))  # noqa: E731
    run = torch.compile(call, backend="sparsecomp", options=FROZEN)
    with torch.no_grad():
        for parameters in ensemble * 2:
            torch.testing.assert_close(run(parameters, X), call(parameters, X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_parts_of_one_memory(kind):
    """Torch counts no write where a parameter moves to another part of a flat buffer."""
    layer = LAYERS[kind](0)
    parameters = list(layer.parameters())
    flat = nn.utils.parameters_to_vector(parameters).detach()
    flat = torch.cat([flat, flat * 3])
    run = torch.compile(layer, backend="sparsecomp", options=FROZEN)
    for part in flat.chunk(2) * 2:
        nn.utils.vector_to_parameters(part, parameters)
        agrees(run, layer)


class Holder:
    """A plain object with a model, whose method is compiled."""

    def __init__(self, seed: int) -> None:
        self.model = Masked(seed)

    @torch.compile(backend="sparsecomp", options=FROZEN)
    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x)


def test_models_of_plain_objects_share_no_constants():
    """So that two threads may call them at once."""
    before, holders = counters["stats"]["unique_graphs"], [Holder(seed) for seed in range(3)]
    for holder in holders * 2:
        agrees(holder, holder.model)
    assert counters["stats"]["unique_graphs"] == before + 3 and not made_anew()


def test_tensors_that_are_arguments_are_no_constants():
    layer = Masked(0)
    weights = [nn.Parameter(layer.linear.weight * factor) for factor in (1, 2)]
    call = lambda weight, x: nn.functional.linear(x, weight * layer.mask)  # noqa: E731
    run = torch.compile(call, backend="sparsecomp", options=FROZEN)
    with torch.no_grad():
        for weight in weights * 2:
            torch.testing.assert_close(run(weight, X), call(weight, X), rtol=1e-5, atol=1e-5)


class Writing(nn.Module):
    """Writes to its layer's numbers, or into the masked weight itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, sparse(0) if how == "stored" else Masked(0)

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        if self.how == "stored":
            layer.values.mul_(1.5)
            return layer(x)
        masked = layer.linear.weight * layer.mask
        if self.how == "addmm_":
            return masked.addmm_(x.mT, x)
        whole = masked[None]
        whole.baddbmm_(x.mT[None], x[None])
        return whole


@pytest.mark.parametrize("promise", ["option", "context"])
@pytest.mark.parametrize("how", ["stored", "addmm_", "baddbmm_"])
@pytest.mark.usefixtures("op_by_op")
def test_what_the_graph_writes_to_is_no_constant(how, promise):
    model = Writing(how)
    twin = copy.deepcopy(model)
    run = torch.compile(model, backend="sparsecomp", options={"frozen": promise == "option"})
    with torch.no_grad(), frozen_weights() if promise == "context" else nullcontext():
        for _ in range(3):
            torch.testing.assert_close(run(X), twin(X), rtol=1e-4, atol=1e-5)


class Caching(nn.Module):
    """A step that writes what its layer gives to a cache, beside the layer's numbers or in their memory."""

    def __init__(self, kind: str, where: str) -> None:
        super().__init__()
        self.layer, self.where = LAYERS[kind](0).requires_grad_(False), where
        numbers, cache = getattr(*weight_of(self.layer)), torch.zeros(8, 48)
        if where in ("view", "alias"):  # of the kind that torch compiles at all
            cache.set_(numbers.untyped_storage(), 0, (8, 48) if where == "view" else numbers.shape)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        cache: Any = self.cache
        if self.where == "view in the graph":
            cache = getattr(*weight_of(self.layer)).detach().view(-1)[:384].view(8, 48)
        out = self.layer(x)
        cache.view(-1)[:384].view(8, 48).index_copy_(0, at, out.detach())
        return out + cache.sum()


AT = torch.tensor([1, 3, 4, 6])
KEPT = ("dense copy", "folded dense")
WRITTEN_TO = ("view", "alias", "view in the graph")


def caching(kind: str, where: str) -> tuple[list[Tensor], list[Tensor], str]:
    """What three steps give, compiled and eagerly, and as what the layer runs."""
    model = Caching(kind, where)
    twin = Caching(kind, where)
    run = torch.compile(model, backend="sparsecomp", options=FROZEN)
    with torch.no_grad():
        results = [run(X, AT) for _ in range(3)], [twin(X, AT) for _ in range(3)]
    report = sparsecomp.last_report()
    assert report is not None
    (found,) = [one for one in report.sites if one.rule in ("sparse_linear", "masked_weight")]
    return *results, found.implementation


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.usefixtures("op_by_op")
def test_a_step_that_writes_to_a_cache_keeps_its_weights(kind):
    found, wanted, way = caching(kind, "aside")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert way in KEPT and not made_anew()


@pytest.mark.slow(reason="Inductor compiles")
@pytest.mark.parametrize("where", ["aside", *WRITTEN_TO])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_step_that_writes_to_a_cache_gives_what_eager_gives(kind, where):
    found, wanted, way = caching(kind, where)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (way in KEPT) == (where == "aside")


@pytest.mark.parametrize("where", WRITTEN_TO)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.usefixtures("op_by_op")
def test_a_step_that_writes_to_its_weights_memory_keeps_nothing(kind, where):
    found, wanted, way = caching(kind, where)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert way not in KEPT


@pytest.mark.usefixtures("op_by_op")
def test_a_cache_may_be_another_one_but_no_promised_weight():
    layer = sparse(0)

    def step(cache: Tensor, x: Tensor) -> Tensor:
        cache.view(-1)[:48].add_(1)
        return layer(x)

    caches = [torch.zeros(8, 48), torch.zeros(8, 48)]
    run = torch.compile(step, backend="sparsecomp", options=FROZEN)
    with torch.no_grad():
        for cache in caches * 2:
            torch.testing.assert_close(run(cache, X), layer(X), rtol=1e-5, atol=1e-5)
        before = layer.values.detach().clone()
        with pytest.raises(FrozenWeightError, match="`L_cache_`, which lies in the memory of a tensor"):
            run(layer.values.detach()[:384].view(8, 48), X)
        assert torch.equal(layer.values, before)
        torch.testing.assert_close(run(caches[0], X), layer(X), rtol=1e-5, atol=1e-5)
    assert caches[0].sum() == 3 * 48 and not made_anew()


@pytest.mark.usefixtures("op_by_op")
def test_a_weight_that_moves_into_the_cache_is_refused_in_each_call():
    layer, cache = sparse(0), torch.zeros(weight_of(sparse(0))[0].values.numel())

    def step(cache: Tensor, x: Tensor) -> Tensor:
        cache.add_(1)
        return layer(x)

    run = torch.compile(step, backend="sparsecomp", options=FROZEN)
    with torch.no_grad():
        wanted, before = layer(X), layer.values.data
        torch.testing.assert_close(run(cache, X), wanted, rtol=1e-5, atol=1e-5)
        layer.values.data = cache
        for _ in range(3):
            with pytest.raises(FrozenWeightError, match="`L_cache_`, which lies in the memory of a tensor"):
                run(cache, X)
        assert torch.equal(cache, torch.ones_like(cache))
        layer.values.data = before
        torch.testing.assert_close(run(cache, X), wanted, rtol=1e-5, atol=1e-5)
    assert not made_anew()


@pytest.mark.usefixtures("op_by_op")
def test_a_constant_that_cannot_be_made_changes_no_other():
    """Columns out of range: nothing is computed, and what was put back is what it was."""
    first, second = sparse(0), sparse(1)
    run = torch.compile(lambda x: second(first(x)), backend="sparsecomp", options=FROZEN)
    agrees(run, nn.Sequential(first, second))
    before = [first.values.data, second.indices.data]
    first.values.data, second.indices.data = first.values.data * 3, second.indices.data + 99
    with torch.no_grad(), pytest.raises(RuntimeError, match="out of bounds"):
        run(X)
    first.values.data, second.indices.data = before
    agrees(run, nn.Sequential(first, second))


def test_a_layer_that_was_made_and_compiled_in_inference_mode():
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
    layer, x = LAYERS[kind](0).cuda(), X.cuda()
    run = torch.compile(layer, backend="sparsecomp", options={**FROZEN, "mode": mode})
    with torch.no_grad():
        for _ in range(3):
            for _ in range(4):
                torch.testing.assert_close(run(x), layer(x), rtol=1e-4, atol=1e-4)
            CHANGES["in place"](*weight_of(layer))
