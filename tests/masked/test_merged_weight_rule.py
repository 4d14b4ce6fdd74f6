"""Effective weights in training: spellings that are merged, exact gradients, changed masks, what is left."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_devices import DEVICES, graph_of
from masked_models import INPUTS, SPELLINGS, Masked
from rewriting import rewritten, site
from torch import Tensor, nn

import sparsecomp
from sparsecomp.ops import frozen_weights
from sparsecomp.ops.masked import merged_weight as merged_ops
from sparsecomp.passes.cost import masked as masked_cost
from sparsecomp.reference.memo import MEMO

pytestmark = pytest.mark.quick_cases(2)

NAMES = ("weight", "theta", "phi", "bias")


def _scattered(m: Any) -> Tensor:
    return torch.zeros_like(m.weight).view(-1).index_copy(0, m.index, m.theta).view_as(m.weight)


def _phi_by_mask(m: Any) -> Tensor:
    phi = torch.zeros_like(m.weight)
    phi[~m.mask] = m.theta
    return phi


def _phi_in_place(m: Any) -> Tensor:
    return torch.zeros_like(m.weight).masked_scatter_(~m.mask, m.theta).add_(m.weight * m.mask)


def _rows(m: Any) -> Tensor:
    flat = m.weight.reshape(-1, 1)
    return flat.scatter(0, m.index[:, None], m.theta[:, None]).reshape(m.weight.shape)


MERGED: dict[str, Callable[[Any], Tensor]] = {
    **{name: SPELLINGS[name] for name in ("masked_scatter", "index_put", "scatter", "index_copy", "setitem")},
    "setitem of a view": SPELLINGS["setitem of a view"],
    "blend of numbers": lambda m: m.numbers * m.weight + (1 - m.numbers) * _scattered(m),
    "blend of a mask": lambda m: m.mask * m.weight + ~m.mask * _scattered(m),
    "sum": lambda m: torch.where(m.mask, m.weight, 0) + _scattered(m),
    "where": lambda m: torch.where(m.mask, m.weight, _phi_by_mask(m)),
    "where of numbers": lambda m: torch.where(m.numbers > 0.5, m.weight, _scattered(m)),
    "difference": lambda m: m.weight - (1 - m.numbers) * (m.weight - _scattered(m)),
    "masked_fill": lambda m: m.weight.masked_fill(~m.mask, 0) + _phi_by_mask(m),
    "in place": _phi_in_place,
    "column": _rows,
    "alias": lambda m: m.weight.clone().view(-1).index_copy_(0, m.index, m.theta).view(m.weight.shape),
}
EXACT = set(MERGED) - {"difference"}
"""Spellings that round nothing themselves."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(masked_cost, "LEAST_MERGED", dict.fromkeys((*masked_cost.LEAST_MERGED, "cpu"), 1))


def trained(call: Callable[[Tensor], Tensor], model: Any, x: Tensor) -> list[Tensor | None]:
    """The result and all gradients."""
    model.zero_grad()
    given = x.clone().requires_grad_()
    out = call(given)
    out.square().mean().backward()
    return [out.detach(), given.grad, *(getattr(model, name).grad for name in NAMES)]


def agree(found: list[Tensor | None], wanted: list[Tensor | None], exact: bool = True) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            rtol, atol = (0.0, 0.0) if exact else (1e-4, 1e-6)
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def judged(model: Any, x: Tensor, **options: Any) -> Any:
    """The site of a model's last layer, whose results and gradients have been compared with eager ones."""
    reports = []

    def call(x: Tensor) -> Tensor:
        out, report = rewritten(model, x, **{"implementation": "auto", "frozen": "buffers", "strict": True, **options})
        reports.append(report)
        return out

    agree(trained(call, model, x), trained(model, model, x))
    found = site(reports[0], "masked_weight")
    if found.rewritten:
        assert "sparsecomp.merged_weight.default(" in reports[0].graph_after
    return found


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("layer", ["linear", "conv2d"])
@pytest.mark.parametrize("spelling", MERGED)
def test_spellings_are_merged_with_eager_gradients(spelling, layer):
    model = Masked(MERGED[spelling], layer)
    x = torch.randn(INPUTS[layer], generator=torch.Generator().manual_seed(2))
    if spelling in EXACT:
        found = judged(model, x)
        assert found.rewritten and found.implementation == "merged"
        size = "x".join(map(str, model.weight.shape))
        assert f"with gradients the {size} " in found.reason and "for finite values" in found.reason
    else:
        assert not judged(model, x).rewritten


X = torch.randn(INPUTS["linear"], generator=torch.Generator().manual_seed(3))


@pytest.fixture
def compiled():
    """A model that is trained through the backend, and how often its proof was made in a step."""
    torch._dynamo.reset()
    model = Masked(MERGED["blend of numbers"])
    run = torch.compile(model, backend="sparsecomp", options={"frozen": "buffers"}, fullgraph=True)

    def proofs() -> int:
        before = MEMO.made
        agree(trained(run, model, X), trained(model, model, X), exact=False)
        assert site(sparsecomp.last_report(), "masked_weight").implementation == "merged"
        return MEMO.made - before

    proofs()
    assert proofs() == 0
    return model, proofs


def _prune(model: Any, mask: Tensor) -> None:
    """Other elements, as many of them."""
    with torch.no_grad():
        model.mask.copy_(mask)
        model.numbers.copy_(mask.float())
        model.index.copy_((~mask).flatten().nonzero()[:, 0])


@pytest.mark.usefixtures("op_by_op")
def test_weights_may_change_without_another_proof(compiled):
    model, proofs = compiled
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        assert proofs() == 0
        optimizer.step()


def test_another_mask_is_proved_once(compiled):
    model, proofs = compiled
    _prune(model, model.mask.flip(0))
    assert proofs() == 1
    assert proofs() == 0


@pytest.mark.parametrize("break_it", ["order", "mask", "half", "twice"])
def test_a_formula_that_becomes_another_is_computed_as_written(compiled, break_it):
    model, proofs = compiled
    with torch.no_grad():
        if break_it == "order":
            model.index.copy_(model.index.flip(0))
        elif break_it == "mask":
            model.numbers.copy_(1 - model.numbers)
        elif break_it == "half":
            model.numbers.mul_(0.5)
        else:
            model.index[1] = model.index[0]
            model.theta[1] = model.theta[0]
    assert proofs() == 1
    assert proofs() == 0
    model.numbers.copy_(model.mask.float())
    model.index.copy_((~model.mask).flatten().nonzero()[:, 0])
    assert proofs() == 1
    assert proofs() == 0


def test_what_no_longer_fits_is_told_once(compiled, caplog):
    model, proofs = compiled
    merged_ops.tell_once.cache_clear()
    with torch.no_grad():
        model.numbers.mul_(0.5)
    with caplog.at_level("WARNING", "sparsecomp"):
        proofs()
        proofs()
    told = [record.message for record in caplog.records if "do not fit together" in record.message]
    assert len(told) == 1


@pytest.mark.fails_inside  # the formula itself raises at last, in eager too
@pytest.mark.usefixtures("op_by_op")
def test_a_mask_that_prunes_fewer_is_followed():
    model = Masked(MERGED["masked_scatter"])
    run = torch.compile(model, backend="sparsecomp", options={"frozen": "buffers"})
    agree(trained(run, model, X), trained(model, model, X), exact=False)
    model.mask[:10] = True
    agree(trained(run, model, X), trained(model, model, X), exact=False)
    model.mask[:10] = False
    with pytest.raises(RuntimeError):
        run(X)


@pytest.mark.parametrize("frozen", ["weight", "theta"])
def test_one_of_the_two_may_be_frozen(frozen):
    model = Masked(MERGED["blend of a mask"])
    getattr(model, frozen).requires_grad_(False)
    assert judged(model, X).rewritten


def test_in_half_precision():
    model = Masked(MERGED["index_copy"]).bfloat16()
    assert judged(model, X.bfloat16()).rewritten


@pytest.mark.slow(reason="compiles training")
def test_under_autocast():
    model = Masked(MERGED["masked_scatter"])

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x).float()

    run = torch.compile(Cast(), backend="sparsecomp", options={"frozen": "buffers"})
    torch._dynamo.reset()
    agree(trained(run, model, X), trained(Cast(), model, X), exact=False)
    assert site(sparsecomp.last_report(), "masked_weight").implementation == "merged"


class Other(nn.Module):
    """A layer that reads its effective weight in a way of the test's."""

    def __init__(self, forward: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        inner = Masked(MERGED["setitem"])
        self.weight, self.theta, self.phi, self.bias = inner.weight, inner.theta, inner.phi, inner.bias
        self.register_buffer("mask", inner.mask)
        self.register_buffer("index", inner.index)
        self.register_buffer("numbers", inner.numbers)
        self.call = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x, self.weight.masked_scatter(~self.mask, self.theta))


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x, w: x @ w.t(),
        lambda m, x, w: x.double() @ w.double().mT,
        lambda m, x, w: torch.addmm(m.bias, x.flatten(0, 1), w.t()),
        lambda m, x, w: F.linear(x, w, m.bias) + F.linear(x.neg(), w),
        lambda m, x, w: F.linear(x, w[:128]),
        lambda m, x, w: F.embedding(torch.arange(15).view(3, 5), w) * x,
        lambda m, x, w: F.multi_head_attention_forward(
            *[x[..., :128]] * 3, 128, 4, w[:, :128], None, None, None, False, 0.0, m.phi[:128, :128], None
        )[0],
    ],
)
def test_other_layers_and_views_of_the_weight(call):
    assert judged(Other(call), X).rewritten


def test_two_layers_share_one_merged_weight():
    model = Other(lambda m, x, w: F.linear(x, w, m.bias) + F.linear(x.neg(), w))
    _, report = rewritten(model, X, implementation="auto", frozen="buffers", strict=True)
    calls = [line for line in report.graph_after.splitlines() if "sparsecomp.merged_weight" in line and "#" not in line]
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda m, x, w: F.linear(x, w) + w.square().mean(), "reads it too"),
        (lambda m, x, w: F.linear(x, w * m.phi), "elementwise"),
        (lambda m, x, w: F.linear(x, w.abs() * m.mask), "elementwise"),
        (lambda m, x, w: F.linear(x, w * 2 * m.mask), "elementwise"),
        (lambda m, x, w: F.linear(x, m.weight * m.mask), "elementwise"),
        (lambda m, x, w: F.linear(x, m.numbers * m.weight + (1 - m.numbers) * m.phi), "elementwise"),
        (lambda m, x, w: F.linear(x, torch.where(m.weight > 0, m.weight, w)), "elementwise"),
        (lambda m, x, w: F.linear(x, m.weight.view(-1).index_copy(0, m.index.sort()[0], m.theta).view_as(w)), "sort"),
        (lambda m, x, w: F.linear(x, torch.where(m.weight != 0, w, 0)), "elementwise"),
        (lambda m, x, w: F.linear(x, m.weight.masked_scatter(~m.mask, m.theta * m.theta)), "elementwise"),
        (lambda m, x, w: F.linear(x, (m.weight * m.mask * 2).masked_fill(~m.mask, 0).abs()), "its mul, masked_fill is"),
    ],
)
def test_what_is_trained_as_it_was_written(call, why):
    found = judged(Other(call), X)
    assert not found.rewritten and why in found.reason


def _theta_without_gradients(m: Any) -> Tensor:
    with torch.no_grad():
        phi = _phi_by_mask(m)
    return m.mask * m.weight + phi


def _theta_in_inference(m: Any) -> Tensor:
    with torch.inference_mode():
        phi = _phi_by_mask(m)
    return m.mask * m.weight + phi


def _written_without_gradients(m: Any) -> Tensor:
    weight = m.weight.clone()
    with torch.no_grad():
        weight[~m.mask] = m.theta
    return weight


def _written_through_detach(m: Any) -> Tensor:
    phi = torch.zeros_like(m.weight)
    phi.detach()[~m.mask] = m.theta
    return m.mask * m.weight + phi


@pytest.mark.parametrize(
    "effective",
    [
        lambda m: m.weight.masked_scatter(~m.mask, m.theta.detach()),
        lambda m: m.weight.masked_scatter(~m.mask, m.theta).detach(),
        lambda m: m.weight.masked_scatter(~m.mask, 2 * m.theta - m.theta.detach()),
        _theta_without_gradients,
        _theta_in_inference,
        _written_without_gradients,
        _written_through_detach,
    ],
)
def test_gradients_that_are_cut_off_stay_so(effective):
    assert not judged(Masked(effective), X).rewritten


def _first_without_gradients(m: Any, x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        first = F.linear(x, w)
    return first + F.linear(x, w)


def _both_apart(m: Any, x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        first = F.linear(x, m.weight.masked_scatter(~m.mask, m.theta))
    return first + F.linear(x, m.weight.masked_scatter(~m.mask, m.theta))


@pytest.mark.parametrize("call", [_first_without_gradients, _both_apart])
def test_a_layer_without_gradients_takes_none_from_another(call):
    judged(Other(call), X)


def test_a_copy_made_before_a_write_is_no_view():
    def halves(m: Any) -> Tensor:
        weight = (m.weight * 0.5).masked_scatter(~m.mask, m.theta * 0.5)
        copy = weight.double()
        weight.mul_(2)
        return copy.float()

    assert not judged(Masked(halves), X).rewritten


def _written_and_multiplied(m: Any, x: Tensor, w: Tensor) -> Tensor:
    weight = m.weight.clone()
    weight[~m.mask] = m.theta
    return torch.matmul(weight, m.phi.t()).sum() + F.linear(x, weight)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_write_stays_for_who_still_reads_it(gradients):
    model = Other(_written_and_multiplied)
    if gradients:
        assert judged(model, X).rewritten
    with torch.no_grad():
        found, report = rewritten(model, X, implementation="auto", frozen=True, strict=True)
        assert site(report, "masked_weight").rewritten
        torch.testing.assert_close(found, model(X))


def test_a_buffer_may_be_trained():
    model = Masked(MERGED["blend of numbers"])
    model.numbers.requires_grad_()
    assert not judged(model, X).rewritten
    assert model.numbers.grad is not None


def test_another_memory_format_stays():
    model = Masked(MERGED["where"], "conv2d").to(memory_format=torch.channels_last)
    model.mask = model.mask.contiguous(memory_format=torch.channels_last)
    x = torch.randn(INPUTS["conv2d"])
    assert not judged(model, x).rewritten
    assert rewritten(model, x)[0].stride() == model(x).stride()


@pytest.mark.parametrize(
    "effective",
    [
        lambda m: (m.weight + 2**-14 * m.weight * m.weight).masked_scatter(~m.mask, m.theta),
        lambda m: m.weight.half().masked_scatter(~m.mask, m.theta.half()).bfloat16(),
        lambda m: m.weight.div(2**-30, rounding_mode="trunc").mul(2**-30).masked_scatter(~m.mask, m.theta),
        lambda m: torch.where(m.weight.to(torch.bool) == m.weight.to(torch.bool), MERGED["setitem"](m), 0),
    ],
)
def test_what_only_random_numbers_survive_is_left(effective):
    model = Masked(effective).bfloat16()
    assert not judged(model, X.bfloat16()).rewritten


def test_a_square_weight_that_is_transposed_is_left():
    model = Masked(lambda m: m.weight)
    with torch.no_grad():
        model.weight = nn.Parameter(torch.randn(352, 352))
        model.bias = nn.Parameter(torch.randn(352))
        model.mask = torch.rand(352, 352) > 0.5
        model.theta = nn.Parameter(torch.randn(int((~model.mask).sum())))
    model.effective = lambda m: m.weight.t().masked_scatter(~m.mask, m.theta)
    assert not judged(model, X).rewritten
    model.effective = lambda m: m.weight.masked_scatter(~m.mask, m.theta).t()
    assert judged(model, X).rewritten


def test_what_is_small_or_scattered_by_positions_on_a_cpu_is_left(monkeypatch):
    monkeypatch.undo()
    for spelling in ("masked_scatter", "setitem", "masked_fill"):
        assert "as fast (from 4194304 on" in judged(Masked(MERGED[spelling]), X).reason
    for spelling in ("index_copy", "index_put", "setitem of a view"):
        assert "on cpu Inductor scatters by positions as fast" in judged(Masked(MERGED[spelling]), X).reason


@pytest.mark.parametrize("device", DEVICES[1:])
def test_small_weights_are_merged_for_graphs_only(device, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(masked_cost, "LEAST_MERGED", {**masked_cost.LEAST_MERGED, "cuda, replayed": 1})
    model = Masked(MERGED["index_copy"]).to(device)
    assert not judged(model, X.to(device)).rewritten
    with frozen_weights():
        assert judged(model, X.to(device)).rewritten


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", ["blend of numbers", "masked_scatter", "index_copy"])
def test_on_a_gpu(spelling, dtype, device):
    model, x = Masked(MERGED[spelling]).to(device, dtype), X.to(device, dtype)
    run = torch.compile(model, backend="sparsecomp", options={"frozen": "buffers"}, fullgraph=True)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    prune, shuffle = partial(_prune, model, model.mask.flip(0)), partial(model.index.copy_, model.index.flip(0))
    for change in (lambda: None, prune, shuffle):
        change()
        for found, wanted in zip(trained(run, model, x), trained(model, model, x), strict=True):
            assert (found is None) == (wanted is None)
            if found is not None:
                torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance / 10)
    assert site(sparsecomp.last_report(), "masked_weight").implementation == "merged"


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_captured_step_follows_the_mask_unless_it_was_promised_to_stay(frozen, device):
    model, x = Masked(MERGED["blend of numbers"]).to(device), X.to(device)
    run, read = torch.compile(model, backend="sparsecomp", fullgraph=True), (model.weight, model.theta)

    def step(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        out = call(x)
        return [out, *torch.autograd.grad(out.square().mean(), read)]

    with frozen_weights() if frozen else nullcontext():
        graph, found = graph_of(lambda: step(run))
    with torch.no_grad():
        model.weight.mul_(2)
        model.theta.neg_()
    if not frozen:
        _prune(model, model.mask.flip(0))
    graph.replay()
    torch.testing.assert_close(found, step(model), rtol=1e-4, atol=1e-5)
