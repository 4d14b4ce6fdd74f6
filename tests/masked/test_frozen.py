"""The promise that weights are not written to: who gives it, what it lets be kept, what finds that it was broken."""

import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kept_models import FORMS, Trained, X, shrink
from kernel_devices import DEVICES, graph_of
from rewriting import rewritten, site
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

import sparsecomp
from sparsecomp.errors import FrozenWeightError
from sparsecomp.ops import effective_weight, frozen_weights, split_pruned
from sparsecomp.ops.masked.folded_weight import Folded, Recipe, named_formula, weight_of
from sparsecomp.options import Options
from sparsecomp.passes.engine.rule import Context
from sparsecomp.passes.facts.analysis import Analysis
from sparsecomp.reference.frozen import are_frozen, promise_here
from sparsecomp.reference.memo import Memo
from sparsecomp.report import Report


def product(mask: Tensor, weight: Tensor) -> Tensor:
    """What the memo is asked for here."""
    return mask * weight


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shrink(monkeypatch.setattr)


def judged(model: nn.Module, **options: Any) -> Any:
    _, report = rewritten(model, X, **{"implementation": "auto", "strict": True, **options})
    return site(report, "masked_weight")


# ---- who gives it -----------------------------------------------------------------------------------------------


def test_without_a_promise_everything_stays_and_the_report_names_the_option():
    with torch.no_grad():
        for spelling in FORMS:
            left = judged(Trained(spelling))
            assert not left.rewritten and "frozen=True promises that it is not" in left.reason
            assert judged(Trained(spelling), frozen=True).rewritten
    left = judged(Trained("masked_scatter"))
    assert not left.rewritten and "frozen='buffers' promises that it is not" in left.reason


def test_buffers_that_stay_are_enough_for_masks_and_not_for_weights():
    assert judged(Trained("masked_scatter"), frozen="buffers").implementation == "merged"
    with torch.no_grad():
        assert not judged(Trained("where"), frozen="buffers").rewritten
        model = Trained("where")
        model.register_buffer("weight", model._parameters.pop("weight").detach())
        assert judged(model, frozen="buffers").rewritten


def test_the_context_promises_as_long_as_it_is_open():
    assert promise_here() is None and not are_frozen()
    with frozen_weights():
        first = promise_here()
        with frozen_weights():
            assert promise_here() is first
        assert promise_here() is first and are_frozen()
        assert _seen_elsewhere() is None
    assert promise_here() is None
    with frozen_weights():
        assert promise_here() not in (None, first)


def _seen_elsewhere() -> object | None:
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(promise_here()))
    thread.start()
    thread.join()
    return seen[0]


def test_a_backward_pass_takes_the_one_promise_that_is_open(monkeypatch):
    from sparsecomp import _compat

    seen: list[object] = []
    thread = lambda: threading.Thread(target=lambda: seen.append(promise_here()))  # noqa: E731
    monkeypatch.setattr(_compat, "in_backward", lambda: True)
    with frozen_weights():
        here = promise_here()
        for others in range(2):  # of two, it cannot tell which it runs for
            opened, done = threading.Event(), threading.Event()

            def other(opened: threading.Event = opened, done: threading.Event = done) -> None:
                with frozen_weights():
                    opened.set()
                    done.wait()

            beside = [threading.Thread(target=other) for _ in range(others)]
            for one in beside:
                one.start()
                opened.wait()
            asked = thread()
            asked.start()
            asked.join()
            done.set()
            for one in beside:
                one.join()
    assert seen == [here, None]


def test_when_an_operator_may_keep():
    graph = fx.symbolic_trace(nn.Identity())

    def keep(frozen: Any, device: str, mode: str = "default") -> str | None:
        context = Context(graph, Options(frozen=frozen, mode=mode), Report(), Analysis(graph.graph, {}, {}, {}))
        with FakeTensorMode(allow_non_fake_inputs=True):
            return context.keep(torch.empty(2, device=device))

    for mode in ("default", "reduce-overhead"):
        assert keep(False, "cuda", mode) is None and keep(False, "cpu", mode) is None
        assert keep(True, "cpu", mode) == keep("buffers", "cpu", mode) == "always"
    assert keep(True, "cuda") == "always" and keep(True, "cuda", "reduce-overhead") == "prepared"
    with frozen_weights():
        assert keep(False, "cuda") == keep(False, "cpu", "reduce-overhead") == "asked"
        assert keep(False, "cuda", "reduce-overhead") is None  # its replays could not ask


# ---- what is kept -----------------------------------------------------------------------------------------------


def inputs(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_each_promise_begins_with_nothing_kept():
    memo, mask, weight = Memo(), inputs(6, 5) > 0, inputs(6, 5)
    of = lambda: memo.of(product, [mask, weight])  # noqa: E731
    for made in (1, 2):
        with frozen_weights():
            assert of() is of() and torch.equal(of(), mask * weight)
        assert memo.made == made
        weight.data.neg_()
        assert torch.equal(of(), mask * weight) and memo.made == made


def test_what_is_always_kept_is_read_within_other_promises_too():
    memo, sources = Memo(), [inputs(6, 5) > 0, inputs(6, 5)]
    kept = memo.prepare(product, sources, "always")
    for keep in ("always", "prepared", "guarded"):
        assert memo.kept(product, sources, keep) is kept
    assert memo.kept(product, sources) is None
    with frozen_weights():
        assert memo.kept(product, sources) is kept
    # a promise that is given later says nothing of what was written before it
    sources[1].data.neg_()
    assert torch.equal(memo.prepare(product, sources, "always"), sources[0] * sources[1])


def test_what_is_guarded_is_kept_without_a_promise_and_made_anew_for_each():
    memo, sources = Memo(), [inputs(6, 5) > 0, inputs(6, 5)]
    of = lambda: memo.of(product, sources, "guarded")  # noqa: E731
    first = of()
    sources[1].data.neg_()  # which its reader would see
    assert of() is first
    with frozen_weights():
        trusted = of()
        assert torch.equal(trusted, sources[0] * sources[1]) and of() is trusted
    assert of() is trusted and memo.made == 2
    sources[1].neg_()
    assert torch.equal(of(), sources[0] * sources[1]) and memo.made == 3


def test_what_is_prepared_is_not_made_in_a_call():
    memo, sources = Memo(), [inputs(6, 5) > 0, inputs(6, 5)]
    assert memo.kept(product, sources, "prepared") is None
    assert torch.equal(memo.of(product, sources, "prepared"), sources[0] * sources[1])
    kept = memo.prepare(product, sources, "prepared")
    assert memo.kept(product, sources, "prepared") is kept
    sources[1].neg_()
    assert memo.kept(product, sources, "prepared") is None


@pytest.mark.parametrize("other", ["shape", "strides", "dtype", "offset", "memory"])
def test_other_sources_have_a_result_of_their_own(other):
    memo, mask, weight = Memo(), inputs(6, 6) > 0, inputs(6, 6)
    of = lambda *sources: memo.of(product, sources, "always")  # noqa: E731
    assert torch.equal(of(mask, weight), mask * weight)
    change = {
        "shape": (mask[:3], weight[:3]), "strides": (mask, weight.t()), "dtype": (mask, weight.view(torch.int32)),
        "offset": (mask[1:], weight[1:]), "memory": (mask, weight.clone().neg_()),
    }  # fmt: skip
    assert torch.equal(of(*change[other]), change[other][0] * change[other][1])
    assert torch.equal(of(mask, weight), mask * weight)


def test_versions_are_those_of_the_same_memory():
    memo, mask, array = Memo(), inputs(6, 6) > 0, inputs(6, 6).numpy()
    one, other = torch.from_numpy(array), torch.from_numpy(array)
    of = lambda weight: memo.of(product, [mask, weight], "always")  # noqa: E731
    assert torch.equal(of(one), mask * one)
    one.neg_()
    assert other._version == 0 and torch.equal(of(other), mask * other)


def test_a_tensor_of_inference_mode_has_no_version_to_ask_for():
    memo, mask = Memo(), inputs(4, 4) > 0
    with torch.inference_mode():
        weight = inputs(4, 4)
    first = memo.of(product, [mask, weight], "always")
    assert memo.of(product, [mask, weight], "always") is first
    mask.logical_not_()
    assert torch.equal(memo.of(product, [mask, weight], "always"), mask * weight)


@pytest.mark.parametrize("keep", ["always", "asked", "guarded"])
def test_a_capture_takes_what_is_kept_only_where_that_is_right(keep, monkeypatch):
    """The capture is feigned: what it holds must be computed from the sources, promised to stay, or guarded."""

    class OnCuda(Tensor):
        is_cuda = True

    sources, memo = [inputs(9, 6, seed=4).as_subclass(OnCuda), inputs(9, 6, seed=5)], Memo()
    kept = memo.prepare(product, sources, "always")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert (memo.of(product, sources, keep) is kept) == (keep != "asked")
    if keep == "asked":
        return
    # what is no longer current is not made in a graph, and what a graph reads lives on
    sources[1].neg_()
    assert memo.kept(product, sources, keep) is None and torch.equal(memo.of(product, sources, keep), product(*sources))
    alive = weakref.ref(kept)
    del kept
    assert memo.prepare(product, sources, "always") is not alive() and alive() is not None


def test_a_recipe_is_read_as_it_was_written():
    recipe = Recipe(Folded("proof of a name", "bsr", (16, 32)), "prepared")
    assert Recipe.read(recipe.written()) == recipe


def test_a_weight_that_may_not_be_kept_is_dense():
    name, sources = named_formula("a product of the test's", product), [inputs(6, 5) > 0, inputs(6, 5)]
    recipe = Recipe(Folded(name, "csr"), "asked").written()
    assert torch.equal(weight_of(sources, recipe).values, sources[0] * sources[1])
    with frozen_weights():
        assert weight_of(sources, recipe).layout.format == "csr"


def test_the_pruned_of_a_mask_are_worked_out_again_without_a_promise():
    mask, weight, theta = inputs(6, 5) > 0, inputs(6, 5), inputs(int((inputs(6, 5) <= 0).sum()), seed=3)
    for promise in (False, True, False):
        with frozen_weights() if promise else torch.no_grad():
            for _ in range(2):
                wanted = weight.double().masked_scatter(~mask, theta.double()).float()
                found = effective_weight(weight, theta, mask)
                assert torch.equal(found, wanted)
                active, rest = split_pruned(found, mask, theta.numel())
                assert torch.equal(active, torch.where(mask, weight, 0)) and torch.equal(rest, theta)
        mask.data.copy_(mask.flip(0))


# ---- what finds that it was broken ------------------------------------------------------------------------------


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("SPARSECOMP_DEBUG", "1")
    torch._dynamo.reset()


@pytest.mark.parametrize("promise", ["option", "context"])
@pytest.mark.parametrize("written", ["weight", "mask"])
def test_a_broken_promise_is_found(debug, promise, written):
    model = Trained("where")
    run = torch.compile(model, backend="sparsecomp", options={"frozen": promise == "option"})
    with torch.no_grad(), frozen_weights() if promise == "context" else torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(X), model(X))
        if promise == "context":
            model.weight.mul_(2)  # a version counter tells, so it is followed
            torch.testing.assert_close(run(X), model(X))
        getattr(model, written).data[0] = 0
        with pytest.raises(FrozenWeightError, match=rf"{written}_?` \(torch\.\w+, 12x10\) was promised to stay"):
            run(X)


@pytest.mark.usefixtures("op_by_op")
def test_a_broken_promise_about_masks_is_found_in_training(debug):
    model = Trained("masked_scatter")
    run = torch.compile(model, backend="sparsecomp", options={"frozen": "buffers"})
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for _ in range(3):
        torch.testing.assert_close(run(X), model(X))
        run(X).square().mean().backward()
        optimizer.step()
    loss = run(X).sum()
    model.mask.data.copy_(model.mask.flip(0))
    with pytest.raises(FrozenWeightError, match="mask"):
        loss.backward()
    with pytest.raises(FrozenWeightError, match="mask"):
        run(X)


def test_nan_that_stays_is_no_write(debug):
    model = Trained("where")
    model.weight.data[0, 0] = float("nan")
    with torch.no_grad():
        run = torch.compile(model, backend="sparsecomp", options={"frozen": True})
        for _ in range(2):
            torch.testing.assert_close(run(X), model(X), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("keeper", ["constant of a graph", "memo"])
def test_a_write_is_a_change_of_bits(keeper, dtype):
    """NaN equals itself, zeros of both signs and NaN of another payload differ: as bits in numpy or struct do."""
    source = torch.tensor([[1.0, float("nan")], [0.0, float("inf")]], dtype=dtype)
    seen = source.clone()
    if keeper == "memo":
        memo = Memo()
        look = lambda: memo.kept(torch.neg, [source], "always")  # noqa: E731
    else:
        look = lambda: torch.ops.sparsecomp.promised(seen, [source], [seen], ["values"])  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSECOMP_DEBUG", "1")
        for _ in range(2):
            look()
        source.data[1, 0] = -0.0
        with pytest.raises(FrozenWeightError, match=rf"{dtype}, 2x2\) was promised to stay"):
            look()
        source.data[1, 0] = 0.0
        look()
        source.data.view(torch.uint8).reshape(-1)[source.itemsize] ^= 1  # of the NaN
        with pytest.raises(FrozenWeightError):
            look()


@pytest.mark.parametrize("other", [torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(6)])
def test_the_same_bits_in_another_form_are_a_write(other):
    with pytest.raises(FrozenWeightError, match="values"):
        torch.ops.sparsecomp.promised(torch.zeros(1), [other], [torch.zeros(3, 2)], ["values"])


# ---- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "by hand"])
@pytest.mark.parametrize("frozen", [False, True])
def test_graphs_read_a_kept_weight_and_follow_every_write_without_one(frozen, mode, device):
    model, x = Trained("where").to(device), X.to(device)
    chosen = {"mode": mode} if mode == "reduce-overhead" else {}
    run = torch.compile(model, backend="sparsecomp", options={"frozen": frozen, **chosen})
    with torch.no_grad():
        replay = graph_of(lambda: run(x)) if mode == "by hand" else None

        def call() -> Tensor:
            if replay is None:
                return run(x).clone()
            replay[0].replay()
            return replay[1].clone()

        for _ in range(3):
            torch.testing.assert_close(call(), model(x), rtol=1e-3, atol=1e-3)
        assert ("folded" in str(sparsecomp.last_report())) == frozen
        before = call()
        model.weight.data.neg_()
        torch.testing.assert_close(call(), before if frozen else model(x), rtol=1e-3, atol=1e-3)
        if mode == "reduce-overhead":  # other tensors in the same graphs
            named = {f"_orig_mod.{name}": value.detach() * 3 for name, value in model.named_parameters()}
            for _ in range(3):
                found = torch.func.functional_call(run, named, x).clone()
                wanted = F.linear(x, torch.where(model.mask, named["_orig_mod.weight"], 0), named["_orig_mod.bias"])
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_training_step_is_replayed(device):
    """Under the promise; the gradient of torch's own masked_scatter cannot be captured."""
    model, x = Trained("masked_scatter").to(device), X.to(device)
    run = torch.compile(model, backend="sparsecomp", options={"frozen": "buffers"})
    parameters = list(model.parameters())

    def step(call: Any) -> list[Tensor]:
        return [out := call(x), *torch.autograd.grad(out.square().mean(), parameters)]

    graph, found = graph_of(lambda: step(run))
    assert "merged" in str(sparsecomp.last_report())
    for scale in (-1.0, 0.5):
        for parameter in parameters:
            parameter.data.mul_(scale)
        graph.replay()
        torch.testing.assert_close(found, step(model), rtol=1e-3, atol=1e-3)


