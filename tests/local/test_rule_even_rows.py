"""Sparse weights whose rows store k elements, and masked ones whose rows keep k, as layers of fixed fan-in."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import rewritten, site, spikes
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils import parametrize, prune

import sparsecomp
from sparsecomp.errors import FrozenWeightError
from sparsecomp.formats import COO, CSC, CSR, NM, Pattern
from sparsecomp.nn import SparseLinear
from sparsecomp.ops import frozen_weights
from sparsecomp.passes.cost import local as cost
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.local import operator
from sparsecomp.passes.sparse import chain
from sparsecomp.training.dynamic.manager import PatternManager

pytestmark = [
    pytest.mark.quick_cases(1),
    pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 does not ask in each call"),
]

N, M, K = 6, 8, 4


@pytest.fixture(autouse=True)
def always_pays(monkeypatch):
    """What is tested here has a few numbers; tests of when it pays say so themselves."""
    seconds = {"gather_dot": 1e-9, "dense": 1.0}
    monkeypatch.setattr(operator, "decide", lambda layer: Decision("gather_dot", "it pays", seconds))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def even_mask(seed: int = 0, kept: int = K) -> Tensor:
    """Keeps as many elements of each row."""
    best = drawn(N, M, seed=seed).topk(kept, 1).indices
    return torch.zeros(N, M, dtype=torch.bool).scatter(1, best, True)


def uneven_mask() -> Tensor:
    """As many elements in all."""
    mask = even_mask()
    first, second = mask[0].nonzero()[0, 0], (~mask[1]).nonzero()[0, 0]
    mask[0, first], mask[1, second] = False, True
    return mask


X, W, B = drawn(2, 3, M), drawn(N, M, seed=1), drawn(N, seed=2)


def linear() -> nn.Linear:
    layer = nn.Linear(M, N)
    with torch.no_grad():
        layer.weight.copy_(W)
        layer.bias.copy_(B)
    return layer


def sparse(mask: Tensor | None = None, format: Any = CSR) -> SparseLinear:
    return SparseLinear.from_linear(linear(), format, mask=even_mask() if mask is None else mask)


def dense_of(layer: SparseLinear) -> Tensor:
    return layer.weight.detach().to_dense()


class Follows(nn.Module):
    """A layer with something behind it."""

    def __init__(self, layer: nn.Module, behind: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.behind = layer, behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.layer(x), x)


BEHIND: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "nothing": (lambda y, x: y, "bias"),
    "relu": (lambda y, x: y.relu_(), "bias, relu"),
    "residual and gelu": (lambda y, x: F.gelu(x[..., :N] + y, approximate="tanh"), "bias, residual, gelu_tanh"),
    "read twice": (lambda y, x: F.relu(y) + y.sum(), "bias"),
}


@pytest.mark.quick_cases(len(BEHIND))
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("frozen", [True, "buffers"])
@pytest.mark.parametrize("format", [CSR, COO])
def test_a_sparse_layer_of_even_rows(format, frozen, behind):
    follow, fused = BEHIND[behind]
    model = Follows(sparse(format=format), follow)
    with torch.no_grad():
        out, report = rewritten(model, X, implementation="auto", strict=True, frozen=frozen)
    wanted = follow(X.double() @ (W * even_mask()).double().mT + B.double(), X.double())
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    (found,) = report.sites
    assert found.rule == "gather_dot" and found.implementation == "gather_dot" and found.rewritten
    assert found.reason.startswith(f"CSR 6x8 at 50.0% sparsity, 4 in each row, fused with {fused}, under")
    code = re.sub("#.*", "", report.graph_after)
    assert code.count("gather_dot.default") == 1 and "sparse_linear" not in code and "clone" not in code


def wide_indices() -> SparseLinear:
    layer = sparse()
    layer.indices = layer.indices.long()
    return layer


def with_spare_capacity() -> SparseLinear:
    layer = sparse()
    layer.reserve(2 * N * K)
    return layer


OF_SPARSE_LINEAR: dict[str, tuple[Callable[[], SparseLinear], Any]] = {
    "uneven rows": (lambda: sparse(uneven_mask()), "buffers"),
    "no promise": (sparse, False),
    "by columns": (lambda: sparse(format=CSC), "buffers"),
    "groups": (lambda: SparseLinear.from_linear(linear(), NM, n=2, m=4), "buffers"),
    "spare capacity": (with_spare_capacity, "buffers"),
    "indices of int64": (wide_indices, "buffers"),
    "nothing stored": (lambda: sparse(torch.zeros(N, M, dtype=torch.bool)), "buffers"),
}


@pytest.mark.quick_cases(len(OF_SPARSE_LINEAR))
@pytest.mark.parametrize("what", OF_SPARSE_LINEAR)
def test_what_stays_a_sparse_layer(what):
    make, frozen = OF_SPARSE_LINEAR[what]
    layer = make()
    out, report = rewritten(layer, X, implementation="auto", strict=True, frozen=frozen)
    torch.testing.assert_close(out, layer(X))
    (found,) = report.sites
    assert found.rule == "sparse_linear" and "us against" in found.reason


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="sparsecomp", fullgraph=True, options={"strict": True, **options})


def last_site() -> Any:
    report = sparsecomp.last_report()
    assert report is not None
    return report.sites[-1]


def gradients(call: Callable[[Tensor], Tensor], wanted: list[nn.Parameter]) -> list[Tensor]:
    x = X.clone().requires_grad_()
    return list(torch.autograd.grad(call(x).square().sum(), [x, *wanted]))


def exact_gradients(mask: Tensor, behind: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """By the input, the dense weight and the bias, in float64."""
    x, weight, bias = (one.double().requires_grad_() for one in (X, W, B))
    out = behind(x @ (weight * mask).mT + bias)
    return list(torch.autograd.grad(out.square().sum(), (x, weight, bias)))


def test_a_sparse_layer_is_trained():
    layer = sparse()
    model = Follows(layer, lambda y, x: torch.relu(y))
    found = gradients(compiled(model, frozen="buffers"), [layer.values, layer.bias])
    assert last_site().implementation == "gather_dot"
    by_x, by_weight, by_bias = exact_gradients(even_mask(), torch.relu)
    for one, wanted in zip(found, (by_x, by_weight[even_mask()], by_bias), strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-5, atol=1e-5)
    assert found[1].shape == layer.values.shape


def test_frozen_values_pass_a_gradient_on():
    layer = sparse().requires_grad_(False)
    found = gradients(compiled(layer, frozen=True), [])
    assert last_site().implementation == "gather_dot"
    torch.testing.assert_close(found[0].double(), exact_gradients(even_mask(), lambda y: y)[0], rtol=1e-5, atol=1e-5)


def state_of(mask: Tensor) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in sparse(mask).state_dict().items()}


def by_store(layer: SparseLinear, mask: Tensor) -> None:
    state = state_of(mask)
    layer.store(state["values"], state["pointers"], state["indices"])


def by_writes(layer: SparseLinear, mask: Tensor) -> None:
    for name, one in state_of(mask).items():
        getattr(layer, name).detach().copy_(one)
    layer(X)  # a layer looks at what it keeps of the transpose in eager calls


def by_new_buffers(layer: SparseLinear, mask: Tensor) -> None:
    layer.load_state_dict(state_of(mask), assign=True)


CHANGES: dict[str, Callable[[SparseLinear, Tensor], Any]] = {
    "load_state_dict": lambda layer, mask: layer.load_state_dict(state_of(mask)),
    "assigned": by_new_buffers,
    "PatternManager": lambda layer, mask: PatternManager(layer).become(Pattern.of(mask.float())),
    "store": by_store,
    "in place": by_writes,
}


@pytest.mark.quick_cases(len(CHANGES))
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("op_by_op")
def test_a_change_of_the_pattern_is_followed(change):
    """By the same graph while rows are even, by one of the sparse layer while they are not."""
    layer = sparse()
    call = compiled(layer, frozen="buffers")

    def agree() -> int:
        wanted = F.linear(X, dense_of(layer), layer.bias)
        torch.testing.assert_close(call(X), wanted, rtol=1e-5, atol=1e-5)
        eager, found = (gradients(run, [layer.values]) for run in (layer, call))
        torch.testing.assert_close(found, eager)
        return counters["stats"]["unique_graphs"]

    first = agree()
    assert last_site().implementation == "gather_dot"
    CHANGES[change](layer, even_mask(3))
    assert agree() == first or change == "assigned"
    CHANGES[change](layer, uneven_mask())
    second = agree()
    assert second > first and last_site().rule == "sparse_linear"
    CHANGES[change](layer, even_mask())
    assert agree() == second or change == "assigned"


@pytest.mark.usefixtures("op_by_op")
def test_a_pattern_that_holds_more_in_each_row_gets_another_graph():
    layer = sparse()
    call = compiled(layer, frozen="buffers")
    for mask in (even_mask(), even_mask(5, kept=3)):
        layer.load_state_dict(state_of(mask))
        torch.testing.assert_close(call(X), F.linear(X, dense_of(layer), layer.bias))
        assert f"{int(mask[0].sum())} in each row" in last_site().reason


@pytest.mark.usefixtures("op_by_op")
def test_buffers_of_another_kind_get_another_graph():
    layer, model = sparse(), Masked(lambda m: m.weight * m.mask)
    call = compiled(layer, frozen="buffers")
    torch.testing.assert_close(call(X), layer(X))
    layer.pointers, layer.indices = layer.pointers.long(), layer.indices.long()
    torch.testing.assert_close(call(X), layer(X))
    assert last_site().rule == "sparse_linear"
    call = compiled(model, frozen="buffers")
    for mask in (even_mask(), even_mask().float(), even_mask()[:1], torch.tensor(True)):
        model.mask = mask
        torch.testing.assert_close(call(X), model(X), check_dtype=False)


@pytest.mark.usefixtures("op_by_op")
def test_each_layer_is_asked_for_its_own_rows():
    layers = [sparse(), sparse(uneven_mask()), sparse(even_mask(7))]
    call = torch.compile(lambda layer, x: layer(x), backend="sparsecomp", options={"frozen": "buffers"})
    for layer in layers * 2:
        torch.testing.assert_close(call(layer, X), layer(X))


@pytest.mark.usefixtures("op_by_op")
def test_hidden_writes_are_found_out_in_debugging(monkeypatch):
    monkeypatch.setenv("SPARSECOMP_DEBUG", "1")
    layer, masked = sparse(), Masked(lambda m: m.weight * m.mask)
    for model, array in ((layer, layer.pointers), (masked, masked.mask)):
        call = compiled(model, frozen="buffers")
        with torch.no_grad():
            torch.testing.assert_close(call(X), model(X))
            assert last_site().implementation == "gather_dot"
            array.numpy()[1] = 0
            with pytest.raises(FrozenWeightError, match="was promised to stay"):
                call(X)


@pytest.mark.parametrize("kind", ["sparse", "masked"])
@pytest.mark.usefixtures("op_by_op")
def test_a_dynamic_batch_has_one_graph(kind):
    model = sparse() if kind == "sparse" else Masked(lambda m: m.weight * m.mask)
    torch._dynamo.reset()
    call = torch.compile(model, backend="sparsecomp", fullgraph=True, dynamic=True, options={"frozen": "buffers"})
    with torch.no_grad():
        for rows in (4, 7, 2):
            x = drawn(rows, M)
            with torch._dynamo.config.patch(error_on_recompile=rows != 4):
                torch.testing.assert_close(call(x), model(x))
    assert last_site().implementation == "gather_dot"


@pytest.mark.parametrize("kind", ["sparse", "masked"])
def test_autocast_rounds_the_operands(kind, monkeypatch):
    monkeypatch.setattr(chain, "decide", lambda product: Decision("spmm_csr", "sparse", {"spmm_csr": 1.0}))
    model = sparse() if kind == "sparse" else Masked(lambda m: m.weight * m.mask)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.relu(model(x))

    with torch.no_grad():
        out, report = rewritten(forward, X, implementation="auto", strict=True, frozen=True)
    assert site(report, "gather_dot").rewritten and out.dtype is torch.bfloat16
    rounded = [one.bfloat16().double() for one in (X, W * even_mask())]
    wanted = torch.relu(rounded[0] @ rounded[1].mT + B.double())
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)


class Masked(nn.Module):
    """A linear layer whose weight a test gives."""

    def __init__(self, weight: Callable[[Any], Tensor], mask: Tensor | None = None) -> None:
        super().__init__()
        mask = even_mask() if mask is None else mask
        self.weight, self.bias, self.computed = nn.Parameter(W.clone()), nn.Parameter(B.clone()), weight
        self.register_buffer("mask", mask)
        self.register_buffer("numbers", mask.float())

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(F.linear(x, self.computed(self), self.bias))


def by_setitem(m: Any) -> Tensor:
    weight = m.weight.clone()
    weight[~m.mask] = 0
    return weight


SPELLINGS: dict[str, Callable[[Any], Tensor]] = {
    "weight * mask": lambda m: m.weight * m.mask,
    "numbers * weight": lambda m: m.numbers * m.weight,
    "to dtype": lambda m: m.weight.mul(m.mask.to(m.weight.dtype)),
    "where": lambda m: torch.where(m.mask, m.weight, 0),
    "where not": lambda m: torch.where(~m.mask, 0.0, m.weight),
    "where of numbers": lambda m: torch.where(m.numbers > 0.5, m.weight, 0),
    "masked_fill": lambda m: m.weight.masked_fill(~m.mask, 0),
    "in place": lambda m: m.weight.clone().mul_(m.mask),
    "setitem": by_setitem,
    "transposed": lambda m: (m.weight.t() * m.mask.t()).t(),
}


@pytest.mark.quick_cases(len(SPELLINGS))
@pytest.mark.parametrize("form", SPELLINGS)
@pytest.mark.parametrize("frozen", [True, "buffers"])
def test_every_spelling_of_a_mask_of_even_rows(form, frozen):
    model = Masked(SPELLINGS[form])
    exact = torch.relu(X.double() @ (W * even_mask()).double().mT + B.double())
    with torch.no_grad():
        out, report = rewritten(model, X, implementation="auto", strict=True, frozen=frozen)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    found = site(report, "gather_dot")
    assert found.rewritten and "keeps 4 of 8 elements in each of 6 rows, gathered" in found.reason
    assert ("gathered once, " in found.reason) == (frozen is True)
    assert "fused with bias, relu, under the promise that its mask stays" in found.reason
    assert found.reason.endswith("for finite inputs")
    assert not [one for one in report.sites if one.rule == "masked_weight"]
    assert ("torch.gather" in report.graph_after) == (frozen != True)  # noqa: E712


@pytest.mark.parametrize("form", ["weight * mask", "where", "setitem"])
def test_a_masked_weight_is_trained(form):
    model = Masked(SPELLINGS[form])
    found = gradients(compiled(model, frozen="buffers"), list(model.parameters()))
    assert last_site().implementation == "gather_dot" and "gathered in each call" in last_site().reason
    for one, wanted in zip(found, exact_gradients(even_mask(), torch.relu), strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-5, atol=1e-5)
    assert not found[1][~even_mask()].any()


class ByMask(nn.Module):
    """A parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", even_mask())

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


@pytest.mark.parametrize("kind", ["parametrization", "prune"])
def test_what_masks_a_layer_of_torchs(kind):
    layer = linear()
    if kind == "prune":
        prune.custom_from_mask(layer, "weight", even_mask())
    else:
        parametrize.register_parametrization(layer, "weight", ByMask())
    out, report = rewritten(layer, X, implementation="auto", strict=True, frozen="buffers")
    assert site(report, "gather_dot").rewritten
    torch.testing.assert_close(out, F.linear(X, W * even_mask(), B))


OF_MASKED_WEIGHT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "uneven rows": (lambda: Masked(SPELLINGS["where"], uneven_mask()), {"frozen": "buffers"}, "gradients are on"),
    "no promise": (lambda: Masked(SPELLINGS["where"]), {}, "gradients are on"),
    "exact": (lambda: Masked(SPELLINGS["where"]), {"frozen": "buffers", "precision": "exact"}, "gradients are on"),
    "twice": (lambda: Masked(lambda m: m.mask * m.weight * 2), {"frozen": "buffers"}, "gradients are on"),
    "other values": (lambda: Masked(lambda m: torch.where(m.mask, m.weight, 1)), {"frozen": "buffers"}, "gradients"),
    "detached": (lambda: Masked(lambda m: m.weight.detach() * m.mask), {"frozen": "buffers"}, ""),
    "flipped": (lambda: Masked(lambda m: m.weight.flip(0) * m.mask), {"frozen": "buffers"}, ""),
    "squared": (lambda: Masked(lambda m: m.weight * m.weight * m.mask), {"frozen": "buffers"}, "gradients are on"),
    "two masks": (lambda: Masked(lambda m: m.weight * m.mask * m.numbers), {"frozen": "buffers"}, "gradients are on"),
    "nothing kept": (lambda: Masked(SPELLINGS["where"], even_mask() & False), {"frozen": "buffers"}, "gradients"),
}  # fmt: skip


@pytest.mark.quick_cases(len(OF_MASKED_WEIGHT))
@pytest.mark.parametrize("what", OF_MASKED_WEIGHT)
def test_what_stays_a_masked_weight(what):
    make, options, reason = OF_MASKED_WEIGHT[what]
    model = make()
    out, report = rewritten(model, X, implementation="auto", strict=True, **options)
    torch.testing.assert_close(out, model(X))
    assert not report.rewritten and not [one for one in report.sites if one.rule == "gather_dot"]
    sites = [one for one in report.sites if one.rule == "masked_weight"]
    assert all(reason in one.reason for one in sites) and (sites or not reason)


def test_without_a_promise_the_reason_is_the_promise():
    with torch.no_grad():
        _, report = rewritten(Masked(SPELLINGS["where"]), X, implementation="auto", strict=True)
        assert site(report, "masked_weight").why == "NOT_FROZEN" and not report.rewritten
        with frozen_weights():
            model = Masked(SPELLINGS["where"])
            out, report = rewritten(model, X, implementation="auto", strict=True)
            torch.testing.assert_close(out, model(X))
    assert not [one for one in report.sites if one.rule == "gather_dot"]


def no_gradient_on_the_way(m: Any) -> Tensor:
    with torch.no_grad():
        return m.weight * m.mask


@pytest.mark.usefixtures("op_by_op")
def test_gradients_that_were_switched_off_stay_off():
    model = Masked(no_gradient_on_the_way)
    x = X.clone().requires_grad_()
    out = compiled(model, frozen="buffers")(x)
    assert torch.autograd.grad(out.sum(), [model.weight], allow_unused=True) == (None,)


def test_spikes_and_dense_are_left_to_other_rules():
    model = Masked(SPELLINGS["where"])
    call = lambda x: model(spikes(x))  # noqa: E731
    for options in ({"implementation": "auto"}, {"implementation": "dense"}):
        out, report = rewritten(call, X, strict=True, frozen="buffers", **options)
        torch.testing.assert_close(out, call(X))
        assert not [one for one in report.sites if one.rule == "gather_dot"]


@pytest.mark.parametrize("frozen", [True, "buffers"])
@pytest.mark.usefixtures("op_by_op")
def test_a_change_of_a_mask_is_followed(frozen):
    model = Masked(SPELLINGS["weight * mask"])
    call = compiled(model, frozen=frozen)

    @torch.no_grad()
    def agree() -> int:
        torch.testing.assert_close(call(X), model(X))
        return counters["stats"]["unique_graphs"]

    first = agree()
    assert last_site().rule == "gather_dot"
    model.mask.copy_(even_mask(4))
    assert agree() == first
    model.mask = even_mask(5)
    assert agree() == first
    model.mask.copy_(uneven_mask())
    second = agree()
    assert second == first + 1 and last_site().rule == "masked_weight"
    model.mask.copy_(even_mask())
    assert agree() == second
    model.weight.detach().mul_(3)
    assert agree() == second


@pytest.mark.parametrize("kind", ["sparse", "masked"])
def test_infinite_inputs_reach_only_the_rows_that_read_them(kind):
    """As a sparse layer promises; of a masked one the report says that it is for finite inputs."""
    model = sparse() if kind == "sparse" else Masked(SPELLINGS["weight * mask"])
    x = X.clone()
    x[..., 2] = math.inf
    with torch.no_grad():
        out, _ = rewritten(model, x, implementation="auto", strict=True, frozen=True)
    read = even_mask()[:, 2]
    assert out[..., ~read].isfinite().all() and (kind == "masked" or not out[..., read].isfinite().any())


def by_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "decide", cost.decide)


@pytest.mark.parametrize(
    ("kind", "k", "rows", "trained", "pays"),
    [
        ("masked", 8, 1, False, True), ("masked", 8, 64, False, True), ("masked", 256, 64, False, False),
        ("masked", 8, 1, True, False), ("masked", 8, 64, True, True), ("sparse", 8, 64, False, False),
    ],
)  # fmt: skip
def test_the_cheaper_way_is_taken_on_one_core(kind, k, rows, trained, pays, one_thread, monkeypatch):
    """Against a product in CSR, which is the same on a CPU, there is nothing to gain."""
    by_estimate(monkeypatch)
    mask = torch.zeros(1024, 1024, dtype=torch.bool).scatter_(1, torch.rand(1024, 1024).topk(k, 1).indices, True)
    layer = nn.Linear(1024, 1024)
    model: nn.Module = SparseLinear.from_linear(layer, mask=mask)
    if kind == "masked":
        model = prune.custom_from_mask(layer, "weight", mask)
    x = torch.randn(rows, 1024)
    with torch.set_grad_enabled(trained):
        out, report = rewritten(model, x, implementation="auto", strict=True, frozen="buffers" if trained else True)
        torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-4)
    assert ("gather_dot" in [one.implementation for one in report.sites]) == pays


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases(2)
@pytest.mark.parametrize(
    ("kind", "mode", "k", "trained", "pays"),
    [
        ("sparse", "reduce-overhead", 32, True, True), ("sparse", "default", 128, False, False),
        ("sparse", "default", 1024, False, False), ("masked", "default", 32, True, True),
        ("masked", "reduce-overhead", 8, False, True), ("masked", "default", 1024, True, False),
    ],
)  # fmt: skip
def test_the_cheaper_way_is_taken_on_a_card(kind, mode, k, trained, pays, monkeypatch):
    pytest.importorskip("triton")
    by_estimate(monkeypatch)
    order = torch.stack([torch.randperm(4096)[:k] for _ in range(16)])
    mask = torch.zeros(4096, 4096, dtype=torch.bool).scatter_(1, order.repeat(256, 1), True)
    layer = nn.Linear(4096, 4096)
    model: nn.Module = SparseLinear.from_linear(layer, mask=mask)
    if kind == "masked":
        model = prune.custom_from_mask(layer, "weight", mask)
    frozen = "buffers" if trained else True
    with torch.set_grad_enabled(trained):
        report = sparsecomp.explain(model, torch.randn(1024, 4096), device="h100", mode=mode, frozen=frozen)
    assert ("gather_dot" in [one.implementation for one in report.sites]) == pays
