"""The rule for layers of fixed fan-in: which spellings it knows, when they stay as written, and that results stay."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import rewritten, site
from torch import Tensor, fx, nn

import sparsecomp
from sparsecomp.compiler.capture import Graph
from sparsecomp.errors import FrozenWeightError
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.nn import GeoSparseLinear, build_geo_connectivity
from sparsecomp.options import Options
from sparsecomp.passes.cost import local as cost
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.local import gather_dot as rule
from sparsecomp.passes.local import own_layer as own
from sparsecomp.report import Report

pytestmark = pytest.mark.quick_cases(3)

N, K, INPUTS = 6, 3, 5


@pytest.fixture(autouse=True)
def always_pays(monkeypatch):
    """What is tested here has a few numbers; tests of when it pays say so themselves."""
    monkeypatch.setattr(rule, "decide", lambda layer: Decision("gather_dot", "it pays"))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


INDEX = torch.randint(0, INPUTS, (N, K), generator=torch.Generator().manual_seed(1))
X, W, B = drawn(4, INPUTS), drawn(N, K, seed=2), drawn(N, seed=3)


def exactly(x: Tensor, w: Tensor = W, index: Tensor = INDEX) -> Tensor:
    """In float64, by a dense weight that the sparse one is scattered to."""
    dense = torch.zeros(index.shape[0], x.shape[-1], dtype=torch.float64)
    rows = torch.arange(index.shape[0])[:, None].expand(index.shape)
    dense.index_put_((rows, index.remainder(x.shape[-1])), w.detach().double(), accumulate=True)
    return x.detach().double() @ dense.mT


Form = Callable[[Tensor, Tensor, Tensor], Tensor]
SPELLINGS: dict[str, Form] = {
    "index_select": lambda x, w, i: (x.index_select(-1, i.flatten()).view(*x.shape[:-1], N, K) * w).sum(-1),
    "index_select by place": lambda x, w, i: (x.index_select(1, i.view(-1)).unflatten(1, (N, K)) * w).sum(2),
    "slice": lambda x, w, i: (x[:, i] * w).sum(-1),
    "ellipsis": lambda x, w, i: (w * x[..., i]).sum(dim=-1),
    "flat index": lambda x, w, i: torch.sum(x[:, i.flatten()].reshape(-1, N, K).mul(w), dim=(-1,)),
    "weight with a one in front": lambda x, w, i: (x[:, i] * w.unsqueeze(0)).sum(-1),
    "index of int32": lambda x, w, i: torch.mul(w, x[:, i.int()]).sum([2]),
    "take_along_dim": lambda x, w, i: (torch.take_along_dim(x.unsqueeze(1), i[None], -1) * w).sum(-1),
    "take_along_dim, flat": lambda x, w, i: (
        (torch.take_along_dim(x, i.flatten()[None], dim=1).view(-1, N, K) * w).sum(2)
    ),
    "gather": lambda x, w, i: (x.gather(1, i.view(1, -1).expand(x.shape[0], -1)).view(-1, N, K) * w).sum(2),
    "gather, stacked": lambda x, w, i: (
        (torch.gather(x[:, None].expand(-1, N, -1), 2, i.expand(x.shape[0], -1, -1)) * w).sum(2)
    ),
    "gather, repeated": lambda x, w, i: (
        (x.unsqueeze(1).repeat(1, N, 1).gather(-1, i.repeat(x.shape[0], 1, 1)) * w).sum(2)
    ),
    "einsum": lambda x, w, i: torch.einsum("bnk,nk->bn", x[:, i], w),
    "einsum, reversed": lambda x, w, i: torch.einsum("nk, ...nk -> ...n", w, x[..., i]),
    "conversions to the same dtype": lambda x, w, i: (x[:, i].float() * w.float()).to(torch.float32).sum(-1),
}  # fmt: skip


def ours(forward: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, Any]:
    return rewritten(forward, *inputs, implementation="auto", strict=True, **options)


@pytest.mark.quick_cases(len(SPELLINGS))
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("form", SPELLINGS)
def test_every_spelling(form, frozen):
    model = Net(SPELLINGS[form])
    with torch.no_grad():
        out, report = ours(model, X, frozen=frozen)
    torch.testing.assert_close(out.double(), exactly(X, model.weight), rtol=1e-5, atol=1e-6)
    found = site(report, "gather_dot")
    by = next((word for word in ("index_select", "take_along_dim", "gather") if form.startswith(word)), "getitem")
    assert found.rewritten and found.reason.startswith(f"{by} of {K} inputs for each of {N} outputs")
    assert ("read once, under the promise" if frozen else "read in each call") in found.reason
    code = re.sub("#.*", "", report.graph_after)
    assert code.count("gather_dot.default") == 1 and ("arange" in code) != frozen
    assert not re.search(r"\bsum|einsum|index_select\(l_x", code)


class Net(nn.Module):
    """A layer of a spelling, with its index in a buffer."""

    def __init__(self, form: Form, index: Tensor = INDEX) -> None:
        super().__init__()
        self.form, self.weight, self.bias = form, nn.Parameter(W.clone()), nn.Parameter(B.clone())
        self.register_buffer("index", index.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.weight, self.index)


LEADING: dict[str, tuple[Form, tuple[int, ...]]] = {
    "none": (lambda x, w, i: (x[i] * w).sum(-1), ()),
    "two": (lambda x, w, i: (x[:, :, i] * w).sum(-1), (2, 3)),
    "two by index_select": (SPELLINGS["index_select"], (2, 3)),
    "no rows": (SPELLINGS["slice"], (0,)),
}


@pytest.mark.parametrize("leading", LEADING)
def test_other_leading_dimensions(leading):
    form, shape = LEADING[leading]
    x = drawn(*shape, INPUTS)
    out, report = ours(form, x, W, INDEX)
    torch.testing.assert_close(out.double(), exactly(x), rtol=1e-5, atol=1e-6)
    assert site(report, "gather_dot").rewritten


def beside(x: Tensor) -> Tensor:
    return x[:, :1].expand(-1, N)


BEHIND: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "bias": (lambda y, x: y + B, "bias"),
    "bias in place, residual, relu": (lambda y, x: F.relu(y.add_(B) + beside(x)), "bias, residual, relu"),
    "residual and gelu": (lambda y, x: F.gelu(beside(x) + y, approximate="tanh"), "residual, gelu_tanh"),
    "tanh": (lambda y, x: torch.tanh(y + B), "bias, tanh"),
    "elu": (lambda y, x: F.elu(y + B), "bias"),
    "read twice": (lambda y, x: F.relu(y) + y.sum(), ""),
}  # fmt: skip


@pytest.mark.parametrize("behind", BEHIND)
def test_what_follows_is_fused_where_nobody_else_reads_it(behind):
    follow, fused = BEHIND[behind]
    with torch.no_grad():
        out, report = ours(lambda x: follow((x[:, INDEX] * W).sum(-1), x), X)
    torch.testing.assert_close(out.double(), follow(exactly(X), X.double()).double(), rtol=1e-5, atol=1e-6)
    assert f"of {N} outputs{fused and ', fused with '}{fused}, its index" in site(report, "gather_dot").reason


OTHER = torch.randint(0, INPUTS, (4, N, K), generator=torch.Generator().manual_seed(4))


def writes_between(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    x = x.clone()
    gathered = x[:, i]
    x.zero_()
    return (gathered * w).sum(-1)


def writes_the_index(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    i = i.clone()
    gathered = x[:, i]
    i.zero_()
    return (gathered * w).sum(-1)


def reads_twice(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    gathered = x[:, i]
    return (gathered * w).sum(-1) + gathered.amax()


def without_gradients_between(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    gathered = x[:, i]
    with torch.no_grad():
        gathered = gathered.view(-1, N, K)
    return (gathered * w).sum(-1)


REFUSED: dict[str, tuple[Form, str]] = {
    "gradients are switched": (without_gradients_between, "gradients are switched on or off on the way"),
    "x is written to": (writes_between, "an operand is written to before the result is complete"),
    "the index is written to": (writes_the_index, "an operand is written to before the result is complete"),
    "read elsewhere": (reads_twice, "`amax` reads `gathered` too"),
    "other dimension": (lambda x, w, i: (x[:, i] * w).sum(1), "not over the last dimension alone"),
    "all dimensions": (lambda x, w, i: (x[:, i] * w).sum(), "not over the last dimension alone"),
    "kept": (lambda x, w, i: (x[:, i] * w).sum(-1, keepdim=True), "keeps the dimension"),
    "product in place": (lambda x, w, i: x[:, i].mul_(w).sum(-1), "the product is written to another tensor"),
    "a weight a row": (lambda x, w, i: (x[:, i] * torch.ones(4, N, K)).sum(-1), "its weight is (4, 6, 3), not one"),
    "a weight for all": (lambda x, w, i: (x[:, i] * w[0]).sum(-1), "its weight is (3,), not one (6, 3)"),
    "another einsum": (lambda x, w, i: torch.einsum("bnk,nk->b", x[:, i], w), "is no sum over the last dimension"),
    "a sum in float64": (lambda x, w, i: (x[:, i] * w).sum(-1, dtype=torch.float64), "its dtype changes on the way"),
    "float64 behind": (lambda x, w, i: (x[:, i] * w).double().sum(-1), "its dtype changes on the way"),
    "float64 between": (lambda x, w, i: (x[:, i].double() * w).sum(-1), "its dtype changes on the way"),
    "float64 weight": (lambda x, w, i: (x[:, i] * w.double()).sum(-1), "its dtype changes on the way"),
    "half between": (lambda x, w, i: (x[:, i].half().float() * w).sum(-1), "its dtype changes on the way"),
    "integers": (lambda x, w, i: (x.long()[:, i] * w.long()).sum(-1), "dtype torch.int64 stays dense"),
    "not all of them": (lambda x, w, i: (x.index_select(-1, i.flatten())[:, :15].view(4, 5, 3) * w[:5]).sum(-1), ""),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_stays_as_written(what):
    form, reason = REFUSED[what]
    out, report = ours(form, X, W, INDEX)
    torch.testing.assert_close(out, form(X, W, INDEX))
    sites = [found for found in report.sites if found.rule == "gather_dot"]
    assert not report.rewritten and [reason in found.reason for found in sites] == ([True] if reason else [])


NONE_OF_ITS_BUSINESS: dict[str, Form] = {
    "an index a row": lambda x, w, i: (torch.gather(x[:, None].expand(-1, N, -1), 2, OTHER) * w).sum(-1),
    "rows of x": lambda x, w, i: (x[i.remainder(4)][..., 0] * w).sum(-1),
    "detached": lambda x, w, i: (x[:, i].detach() * w).sum(-1),
    "another shape in place": lambda x, w, i: (x[:, i].unsqueeze_(0).squeeze_(0) * w).sum(-1),
    "a view of another shape in place": lambda x, w, i: (x[:, i.flatten()].unsqueeze_(0).view(-1, N, K) * w).sum(-1),
    "a mean": lambda x, w, i: (x[:, i] * w).mean(-1),
    "a number": lambda x, w, i: (x[:, i] * 2).sum(-1),
}


@pytest.mark.parametrize("what", NONE_OF_ITS_BUSINESS)
def test_what_is_no_such_layer(what):
    form = NONE_OF_ITS_BUSINESS[what]
    out, report = ours(form, X, W, INDEX)
    torch.testing.assert_close(out, form(X, W, INDEX))
    assert not [found for found in report.sites if found.rule == "gather_dot"]


def test_dense_when_asked_and_under_transforms():
    form = SPELLINGS["slice"]
    _, report = rewritten(form, X, W, INDEX, implementation="dense", strict=True)
    assert site(report, "gather_dot").why == "FORCED_DENSE"
    mapped = lambda x: torch.vmap(lambda one: form(one, W, INDEX))(x)  # noqa: E731
    out, report = ours(mapped, X.expand(2, 4, INPUTS))
    torch.testing.assert_close(out, mapped(X.expand(2, 4, INPUTS)))
    assert site(report, "gather_dot").why == "TRANSFORMED" and not report.rewritten


@pytest.mark.parametrize("form", ["slice", "index_select", "gather", "take_along_dim, flat"])
@pytest.mark.parametrize("entry", [-1, -INPUTS, INPUTS, -INPUTS - 1])
@pytest.mark.parametrize("frozen", [False, True])
def test_negative_and_out_of_range_entries_are_as_eager(form, entry, frozen):
    index = INDEX.clone()
    index[2, 1] = entry
    model = Net(SPELLINGS[form], index)
    try:
        wanted = model(X)
    except (IndexError, RuntimeError):
        with pytest.raises((IndexError, RuntimeError)):
            ours(model, X, frozen=frozen)
    else:
        out, report = ours(model, X, frozen=frozen)
        torch.testing.assert_close(out, wanted)
        assert site(report, "gather_dot").rewritten


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="sparsecomp", fullgraph=True, options={"strict": True, **options})


@pytest.mark.usefixtures("op_by_op")
def test_a_written_index_is_seen_however_it_is_written():
    model = Net(SPELLINGS["slice"])
    call = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(call(X), model(X))
        index = (INDEX + 1) % INPUTS
        model.index.data.numpy()[:] = index.numpy()  # no version counter tells of it
        torch.testing.assert_close(call(X).double(), exactly(X, model.weight, index), rtol=1e-5, atol=1e-6)
        model.index.fill_(-1)
        torch.testing.assert_close(call(X), model(X))
        model.index.fill_(INPUTS)
        with pytest.raises((IndexError, RuntimeError)):
            call(X)
    x = X.clone().requires_grad_()
    model.index.copy_((INDEX + 2) % INPUTS)
    torch.testing.assert_close(gradients(compiled(model), x, model), gradients(model, x, model))
    assert site(sparsecomp.last_report(), "gather_dot").rewritten


def gradients(call: Callable[..., Tensor], x: Tensor, model: nn.Module) -> list[Tensor]:
    torch._dynamo.reset()
    wanted = [x, *model.parameters()]
    found = torch.autograd.grad(call(x).square().sum(), wanted, allow_unused=True)
    return [torch.zeros_like(one) if grad is None else grad for one, grad in zip(wanted, found, strict=True)]


def with_bias_and_relu(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    return torch.relu((x[:, i] * w).sum(-1) + x.new_ones(N)) + x[:, :1]


@pytest.mark.slow(reason="Inductor compiles")
@pytest.mark.parametrize("frozen", [False, "buffers"])
def test_gradients(frozen):
    model = Net(with_bias_and_relu)
    x = X.clone().requires_grad_()
    found = gradients(compiled(model, frozen=frozen), x, model)
    assert site(sparsecomp.last_report(), "gather_dot").rewritten
    dense = torch.zeros(N, INPUTS, dtype=torch.float64).requires_grad_()
    exact = x.detach().double().requires_grad_()
    rows = torch.arange(N)[:, None].expand(N, K)
    weight = dense.index_put((rows, INDEX), model.weight.detach().double(), accumulate=True)
    by_x, by_dense = torch.autograd.grad(
        (torch.relu(exact @ weight.mT + 1) + exact[:, :1]).square().sum(), (exact, dense)
    )
    torch.testing.assert_close(found[0].double(), by_x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double(), by_dense[rows, INDEX], rtol=1e-5, atol=1e-5)


def test_higher_derivatives():
    def twice(x: Tensor, w: Tensor) -> list[Tensor]:
        first = torch.autograd.grad((call(x, w).square()).sum(), (x, w), create_graph=True)
        return list(torch.autograd.grad(first[0].square().sum() + first[1].sum(), (x, w)))

    x, w = X.double().requires_grad_(), W.double().requires_grad_()
    form = lambda x, w: (x[:, INDEX] * w).sum(-1)  # noqa: E731
    call = form
    wanted = twice(x, w)
    reports: list[Report] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        options = Options.parse(None, {"strict": True})
        reports.append(Graph.of_dynamo(gm, example_inputs, {}, options).rewrite(options))
        return gm.forward

    call = torch.compile(form, backend=backend)
    torch.testing.assert_close(twice(x, w), wanted)
    assert site(reports[0], "gather_dot").rewritten


@pytest.mark.usefixtures("op_by_op")
def test_a_dynamic_batch_has_one_graph():
    model = Net(SPELLINGS["index_select"])
    call = torch.compile(model, backend="sparsecomp", fullgraph=True, dynamic=True, options={"strict": True})
    with torch.no_grad():
        for rows in (4, 7, 2):
            x = drawn(rows, INPUTS)
            with torch._dynamo.config.patch(error_on_recompile=rows != 4):
                torch.testing.assert_close(call(x).double(), exactly(x, model.weight), rtol=1e-5, atol=1e-6)
    assert site(sparsecomp.last_report(), "gather_dot").rewritten


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    x, w = X.to(dtype), W.to(dtype)
    out, report = ours(SPELLINGS["slice"], x, w, INDEX)
    assert out.dtype is dtype and site(report, "gather_dot").rewritten
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-12}[dtype]
    wanted = exactly(x, w)
    assert (out.double() - wanted).norm() <= tolerance * wanted.norm()


def test_autocast():
    def forward(x: Tensor, form: str) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return SPELLINGS[form](x, W, INDEX)

    out, report = ours(lambda x: forward(x, "slice"), X)
    assert out.dtype is torch.float32 and site(report, "gather_dot").rewritten
    torch.testing.assert_close(out.double(), exactly(X), rtol=1e-5, atol=1e-6)
    out, report = ours(lambda x: forward(x, "einsum"), X)
    assert out.dtype is torch.bfloat16 and "its dtype changes on the way" in site(report, "gather_dot").reason


def test_the_promise_makes_constants_which_follow_another_index(monkeypatch):
    model = Net(SPELLINGS["slice"])
    call, x = compiled(model, frozen="buffers"), X.clone().requires_grad_()
    torch.testing.assert_close(gradients(call, x, model), gradients(model, x, model))
    assert "read once, under the promise" in site(sparsecomp.last_report(), "gather_dot").reason
    model.index.copy_((INDEX + 1) % INPUTS)  # a broken promise that a version counter tells of
    torch.testing.assert_close(gradients(call, x, model), gradients(model, x, model))
    monkeypatch.setenv("SPARSECOMP_DEBUG", "1")
    call = compiled(model, frozen="buffers")
    with torch.no_grad():
        call(X)
        model.index.data.numpy()[:] = INDEX.numpy()
        with pytest.raises(FrozenWeightError, match="the index `"):
            call(X)


@pytest.mark.parametrize(
    ("n", "k", "rows", "trained", "kept", "pays"),
    [
        (256, 8, 1, False, False, False), (256, 8, 256, False, False, True), (4096, 8, 1, False, True, True),
        (4096, 8, 1, False, False, False), (4096, 8, 2, False, False, True), (4096, 8, 256, False, False, True),
        (256, 8, 16, True, False, False), (1024, 8, 64, True, False, True),
        (4096, 8, 256, True, True, True),
    ],
)  # fmt: skip
def test_when_it_pays_on_one_core(n, k, rows, trained, kept, pays, one_thread, monkeypatch):
    monkeypatch.setattr(rule, "decide", cost.decide)
    model = GeoSparseLinear(n, n, torch.randint(0, n, (n, k)), compute_mode="gather")
    with torch.set_grad_enabled(trained):
        x = torch.randn(rows, n, requires_grad=trained)
        out, report = ours(model, x, frozen="buffers" if kept else False)
    found = site(report, "gather_dot")
    assert found.rewritten == pays and "us against" in found.reason
    assert pays or found.why == "GATE"
    torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("n", "k", "rows", "spread", "measured", "pays"),
    [
        (4096, 8, 1024, "far", 0.144e-3, True), (16384, 8, 1024, "far", 0.647e-3, True),
        (16384, 8, 1024, "near", 0.351e-3, True), (65536, 16, 256, "far", 1.65e-3, True),
        (256, 8, 1, "near", None, False), (4096, 8, 64, "near", None, False),
    ],
)  # fmt: skip
def test_when_it_pays_on_a_card(n, k, rows, spread, measured, pays):
    """As called in the default mode; times as measured of Inductor's kernels on an H200, which an H100's processors and
    caches are those of."""
    pytest.importorskip("triton")
    layer = cost.FixedFanIn(
        torch.device("cuda"), rows, n, n, k, torch.float32, True, False, "none", spread, False, False, False, 1
    )
    decision = cost.compare(layer, Device("H100", "9.0", "3.6.0"), H100)
    assert decision.dense != pays
    if measured is not None:
        replayed = cost.compare(layer._replace(replayed=True), Device("H100", "9.0", "3.6.0"), H100)
        assert not replayed.dense and 0.6 < replayed.seconds["dense"] / measured < 1.3
    trained = cost.compare(layer._replace(trained=True), Device("H100", "9.0", "3.6.0"), H100)
    assert pays or trained.dense


def test_a_backward_that_looks_at_the_index_takes_a_launch_more():
    pytest.importorskip("triton")
    n, k, device = 4096, 8, Device("H100", "9.0", "3.6.0")
    layer = cost.FixedFanIn(
        torch.device("cuda"), 64, n, n, k, torch.float32, True, False, "none", "far", True, True, True, 1
    )
    fixed, followed = (
        cost.compare(layer._replace(followed=one), device, H100).seconds["gather_dot"] for one in (False, True)
    )
    assert followed - fixed == pytest.approx(H100.launch + 8 * n * k / H100.bandwidth)  # the index, and its copy
    untrained = layer._replace(trained=False)
    assert cost.compare(untrained, device, H100) == cost.compare(untrained._replace(followed=True), device, H100)


@pytest.mark.parametrize(("step", "spread"), [(0, "near"), (16, "mixed"), (37, "far")])
def test_the_operator_is_told_how_far_apart_outputs_read(step, spread):
    index = torch.arange(64)[:, None] * step + torch.arange(K)
    model = Net(lambda x, w, i: (x[:, i] * w).sum(-1), index)
    model.weight = nn.Parameter(drawn(64, K))
    with torch.no_grad():
        _, report = ours(model, drawn(2, 4096))
    assert f"'none', '{spread}')" in report.graph_after


def test_our_own_layer_in_plain_torch():
    layer = GeoSparseLinear(N, N, build_geo_connectivity((2, 3), k=K), compute_mode="gather")
    x = drawn(2, 4, N)
    out, report = ours(layer, x)
    wanted = exactly(x, layer.weight, layer.in_index_per_out.long()) + layer.bias.double()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    assert ", fused with bias" in site(report, "gather_dot").reason


ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh}


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_our_own_layer_takes_in_what_follows_or_is_written_out(activation, dtype, pays, monkeypatch):
    monkeypatch.setattr(own, "decide", lambda layer: Decision("gather_dot" if pays else "dense", "said so"))
    layer = GeoSparseLinear(INPUTS, N, INDEX).to(dtype)
    x, residual = drawn(2, 4, INPUTS).to(dtype), drawn(2, 4, N).to(dtype)
    with torch.no_grad():
        out, report = ours(lambda x, y: ACTIVATIONS[activation](layer(x) + y), x, residual)
    found, code = site(report, "gather_dot"), report.graph_after
    assert found.rewritten and found.implementation == ("gather_dot" if pays else "dense") and "said so" in found.reason
    assert (f", fused with bias, residual, {activation}" in found.reason) == pays
    assert ("gather_dot.default" in code) == pays and ("sum" in code) != pays
    wanted = ACTIVATIONS[activation](exactly(x, layer.weight) + layer.bias.double() + residual.double())
    tolerance = 4 * torch.finfo(dtype).eps
    assert (out.double() - wanted).norm() <= tolerance * wanted.norm() and out.dtype is dtype


@pytest.mark.slow(reason="Inductor compiles")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pays", [True, False])
def test_gradients_of_our_own_layer(pays, bias, monkeypatch):
    monkeypatch.setattr(own, "decide", lambda layer: Decision("gather_dot" if pays else "dense", "said so"))
    layer, x = GeoSparseLinear(INPUTS, N, INDEX, bias=bias), drawn(2, 4, INPUTS).requires_grad_()
    call = compiled(layer)
    torch.testing.assert_close(gradients(call, x, layer), gradients(layer, x, layer))
    torch.testing.assert_close(call(x), layer(x))
    layer.in_index_per_out.copy_(INDEX.flip(0))
    torch.testing.assert_close(gradients(call, x, layer), gradients(layer, x, layer))


def test_our_own_layer_stays_where_an_operand_is_written_to():
    layer = GeoSparseLinear(INPUTS, N, INDEX)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        out = layer(x)
        y.mul_(2)
        return out + y

    with torch.no_grad():
        out, report = ours(forward, X, drawn(4, N))
        torch.testing.assert_close(out, forward(X, drawn(4, N)))
    found = site(report, "gather_dot")
    assert not found.rewritten and "an operand is written to" in found.reason


def test_our_own_layer_is_rewritten_beside_a_cache_that_is_written_to():
    layer, cache = GeoSparseLinear(INPUTS, N, INDEX), torch.zeros(N)

    def forward(x: Tensor) -> Tensor:
        out = layer(x)
        cache.add_(1)
        return out

    with torch.no_grad():
        out, report = ours(forward, X)
        torch.testing.assert_close(out, forward(X))
    assert site(report, "gather_dot").rewritten and cache.unique().tolist() == [2]


@pytest.mark.parametrize(("n", "rows", "written"), [(256, 1, True), (4096, 64, False)])
def test_our_own_layer_by_the_estimate(n, rows, written, one_thread):
    layer = GeoSparseLinear(n, n, torch.randint(n, (n, 8)))
    x = torch.randn(rows, n)
    with torch.no_grad():
        out, report = ours(layer, x)
    assert (site(report, "gather_dot").implementation == "dense") == written
    torch.testing.assert_close(out, layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("leading", [(4,), (2, 3)])
def test_psanns_layer(leading):
    geo_sparse = pytest.importorskip("psann.layers.geo_sparse", reason="psann is not installed")
    index = build_geo_connectivity((2, 3), k=K)
    layer = geo_sparse.GeoSparseLinear(N, N, index.long(), compute_mode="gather")
    x = drawn(*leading, N).requires_grad_()
    found = gradients(compiled(layer), x, layer)
    assert ", fused with bias" in site(sparsecomp.last_report(), "gather_dot").reason
    torch.testing.assert_close(found, gradients(layer, x, layer))
    with torch.no_grad():
        wanted = exactly(x, layer.weight, index.long()) + layer.bias.double()
        torch.testing.assert_close(compiled(layer)(x).double(), wanted, rtol=1e-5, atol=1e-6)


def test_optimize_gives_a_module_with_the_operator():
    model = sparsecomp.optimize(Net(SPELLINGS["slice"]), X)
    torch.testing.assert_close(model(X).double(), exactly(X), rtol=1e-5, atol=1e-6)
    assert site(model.report, "gather_dot").rewritten
    assert set(model.state_dict()) == {"weight", "bias", "index"}
