"""Folded weights through the backend: what makes them anew, what is left as written, and other ways to write a mask."""

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked_models import SPELLINGS, Masked
from rewriting import rewritten, site
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils import parametrize, prune

import sparsecomp
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.ops import frozen_weights
from sparsecomp.ops.masked import folded_layer as masked_linear
from sparsecomp.ops.masked import folded_weight
from sparsecomp.ops.masked.folded_weight import Folded, Recipe
from sparsecomp.options import Options
from sparsecomp.passes.cost import masked as masked_cost
from sparsecomp.passes.cost.decision import MIN_GAIN, Decision
from sparsecomp.passes.engine.rule import replays
from sparsecomp.passes.graph.canonicalize import CanonicalOp
from sparsecomp.passes.masked import fold as masked_fold
from sparsecomp.passes.masked import masked_weight
from sparsecomp.passes.masked.fold import FoldedForm, compare_folds
from sparsecomp.reference.memo import MEMO

pytestmark = pytest.mark.quick_cases(2)

CARD = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")


def inputs(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = inputs(4, 352)
FROZEN = {"frozen": True}


@pytest.fixture
def weights(monkeypatch):
    """The formulas by which weights were computed to be kept, one for each time."""
    found: list[str] = []

    def computed(sources: list[Tensor], name: str) -> Tensor:
        found.append(name)
        return folded_weight.computed(sources, name)

    monkeypatch.setattr(masked_weight, "computed", computed)
    return found


@pytest.fixture
def compiled(weights):
    """A model, its compiled form, and how many weights a call makes."""
    torch._dynamo.reset()
    model = Masked(SPELLINGS["blend"])
    run = torch.compile(model, backend="sparsecomp", options=FROZEN, fullgraph=True)

    def made(x: Tensor = X) -> int:
        before = len(weights)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-4)
        return len(weights) - before

    assert made() == 1 and made() == 0
    return model, made


def _optimizer_step(model: Any) -> None:
    optimizer = torch.optim.SGD([model.weight], lr=0.5)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()


def _compiled_write(model: Any) -> None:
    def write() -> None:
        model.weight.mul_(3)

    with torch.no_grad():
        torch.compile(write)()


def _view(model: Any) -> None:
    with torch.no_grad():
        model.numbers.view(-1)[:100] = 1.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "optimizer": _optimizer_step,
    "weight in place": lambda m: m.weight.detach().neg_(),
    "other weight": lambda m: m.phi.detach().neg_(),
    "mask through a view": _view,
    "mask replaced": lambda m: setattr(m, "numbers", 1 - m.numbers),
    "parameter replaced": lambda m: setattr(m, "weight", nn.Parameter(-m.weight.detach())),
    "data replaced": lambda m: setattr(m.weight, "data", -m.weight.data),
    "data replaced twice": lambda m: [setattr(m.weight, "data", m.weight.data * 2) for _ in range(2)],
    "data in another order": lambda m: setattr(m.weight, "data", (-m.weight.data).t().contiguous().t()),
    "state dict": lambda m: m.load_state_dict({**m.state_dict(), "weight": -m.weight}),
    "assigned": lambda m: m.load_state_dict({**m.state_dict(), "weight": -m.weight}, assign=True),
    "compiled write": _compiled_write,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_source_makes_the_weight_anew_once(compiled, change):
    model, made = compiled
    CHANGES[change](model)
    assert made() == 1
    assert made() == 0


def test_nothing_else_makes_it_anew(compiled):
    model, made = compiled
    model.bias.detach().neg_()
    model.theta.detach().neg_()
    assert made() == 0
    assert made(inputs(9, 352)) == 1  # another graph, which the promise is given for once more
    assert made(inputs(17, 352)) == 0


def test_a_copied_model_has_a_weight_of_its_own(compiled):
    model, made = compiled
    other = copy.deepcopy(model)
    other.weight.detach().neg_()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(other, backend="sparsecomp", options=FROZEN)(X), other(X))
    assert made() == 0


def test_a_weight_is_forgotten_with_its_model():
    gc.collect()
    before = len(MEMO)
    model = Masked(SPELLINGS["where"])
    with torch.no_grad(), frozen_weights():
        out, _ = rewritten(model, X, implementation="auto")
    assert len(MEMO) == before + 1
    del model, out
    torch._dynamo.reset()
    gc.collect()
    assert len(MEMO) == before


def test_two_layers_on_one_weight_keep_it_once(weights):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(inputs(384, 384))
            self.register_buffer("mask", inputs(384, 384) > 0)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight * self.mask
            return F.linear(F.linear(x, weight), self.weight * self.mask) + F.linear(-x, weight)

    model = Tied()
    with torch.no_grad():
        out, report = rewritten(model, inputs(4, 384), implementation="auto", frozen=True, strict=True)
        assert torch.equal(out, model(inputs(4, 384)))
    assert len(weights) == 1
    assert [found.rewritten for found in report.sites if found.rule == "masked_weight"] == [True] * 3
    assert not [line for line in report.graph_after.splitlines() if "mul" in line and "#" not in line]


def leave(forward: Callable[[Any, Tensor], Tensor], *more: Tensor, **options: Any) -> str:
    """Why the last site is left, after its result has been compared with eager."""
    model = Masked(lambda m: m.weight)
    expected = copy.deepcopy(model)
    call = lambda m: lambda x, *more: forward(m, x, *more)  # noqa: E731
    with torch.no_grad():
        options = {"implementation": "auto", "frozen": True, "strict": True, **options}
        found, report = rewritten(call(model), X, *more, **options)
        assert torch.equal(found, call(expected)(X, *more))
        for name, value in expected.state_dict().items():
            assert torch.equal(value, model.state_dict()[name])
    left = site(report, "masked_weight")
    assert not left.rewritten
    return left.reason


def _flip_mask(m: Any, x: Tensor) -> Tensor:
    m.mask.logical_not_()
    return F.linear(x, m.mask * m.weight)


def _flip_later(m: Any, x: Tensor) -> Tensor:
    out = F.linear(x, m.mask * m.weight)
    m.mask.logical_not_()
    return out


def _write_through_alias(m: Any, x: Tensor) -> Tensor:
    weight = m.weight.detach()
    weight[~m.mask] = 0
    return F.linear(x, weight)


def _write_between(m: Any, x: Tensor) -> Tensor:
    weight = m.weight.clone()
    weight[0].zero_()
    return F.linear(x, weight.mul_(m.mask))


def _write_by_strides_between(m: Any, x: Tensor) -> Tensor:
    weight = m.weight.clone()
    weight.as_strided((352,), (353,)).add_(1)
    weight[~m.mask] = 0
    return F.linear(x, weight)


def _write_after(m: Any, x: Tensor) -> Tensor:
    weight = m.mask * m.weight
    weight.as_strided((352,), (353,)).add_(1)
    return F.linear(x, weight)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (_write_between, "may be written to in this graph"),
        (_write_by_strides_between, "may be written to in this graph"),
        (_write_after, "may be written to in this graph"),
        (_flip_mask, "may be written to in this graph"),
        (_flip_later, "may be written to in this graph"),
        (_write_through_alias, "may be written to in this graph"),
        (lambda m, x: F.linear(x, m.mask * m.weight * x.mean()), "computed in each call"),
        (lambda m, x: F.linear(x, torch.where(m.weight > x[0], m.weight, 0)), "but an input of the graph"),
        (lambda m, x: F.linear(x, torch.where(torch.rand_like(m.weight) < 2, m.weight, 0)), "computed in each call"),
        (lambda m, x: (lambda w: F.linear(x, w) + w.sum())(m.mask * m.weight), "`sum_1` reads it too"),
        (lambda m, x: F.embedding(torch.arange(9), m.mask * m.weight, max_norm=3.0), "embedding writes to it"),
    ],
)
def test_what_is_left_as_written(forward, why):
    assert why in leave(forward)


def test_a_small_weight_is_not_kept_by_an_operator():
    small = lambda m, x: F.linear(x[:, :32], (m.mask * m.weight)[:8, :32])  # noqa: E731
    with frozen_weights():
        assert "256 elements are masked faster" in leave(small, frozen=False)


@pytest.mark.parametrize("promise", ["option", "context"])
@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: torch.addmm(m.bias, x, (m.mask * m.weight).t()),
        lambda m, x: torch.baddbmm(m.bias, x[None], (m.mask * m.weight).t()[None]),
        lambda m, x: F.embedding(torch.arange(9).view(3, 3), m.mask * m.weight),
        lambda m, x: F.conv_transpose1d(x[..., None], (m.mask * m.weight).t()[..., None]),
        lambda m, x: F.conv1d(x.mT[None], (m.mask * m.weight)[..., None], padding="same"),
    ],
)
def test_whatever_reads_a_masked_weight_gets_the_one_that_is_kept(forward, promise, weights):
    model = Masked(lambda m: m.weight)
    with torch.no_grad(), frozen_weights() if promise == "context" else nullcontext():
        wanted = forward(model, X)
        run = lambda x: forward(model, x)  # noqa: E731
        found, report = rewritten(run, X, implementation="auto", frozen=promise == "option", strict=True)
    assert torch.equal(found, wanted)
    assert site(report, "masked_weight").implementation == "folded dense"
    assert len(weights) == (promise == "option")


def test_a_mask_given_with_each_call_is_left():
    assert "`L_more_0_` is no parameter" in leave(lambda m, x, mask: F.linear(x, mask * m.weight), inputs(384, 352) > 0)


def test_dense_by_option_and_a_rule_that_is_switched_off():
    assert "'dense' was asked for" in leave(lambda m, x: F.linear(x, m.mask * m.weight), implementation="dense")
    model = Masked(SPELLINGS["where"])
    with torch.no_grad():
        _, report = rewritten(model, X, implementation="auto", frozen=True, disable=("masked_weight",))
    assert not report.rewritten


@pytest.mark.parametrize("spelling", ["numbers * weight", "blend"])
def test_a_mask_with_other_numbers_is_left(spelling):
    model = Masked(SPELLINGS[spelling], values=(torch.tensor(1.0), torch.tensor(0.5)))
    with torch.no_grad():
        out, report = rewritten(model, X, implementation="auto", frozen=True, strict=True)
        assert torch.equal(out, model(X))
    assert "`L_self_buffers_numbers_` holds other values than 0 and 1" in site(report, "masked_weight").reason


def test_a_mask_that_comes_to_hold_other_numbers_is_followed(compiled):
    model, made = compiled
    model.numbers.fill_(0.25)
    assert made() == 1


def test_masked_activations_are_no_sites():
    def attention(x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x.masked_fill(mask, 0)

    _, report = rewritten(attention, inputs(4, 5, 8), inputs(5, 8) > 0, implementation="auto", frozen=True, strict=True)
    assert not [found for found in report.sites if found.rule == "masked_weight"]


def test_weights_that_no_mask_touches_are_no_sites():
    norm = nn.utils.parametrizations.weight_norm(nn.Linear(352, 384))
    with torch.no_grad():
        for model in (norm, nn.Linear(352, 384), nn.Sequential(nn.Linear(352, 384))):
            _, report = rewritten(model, X, implementation="auto", frozen=True, strict=True)
            assert not [found for found in report.sites if found.rule == "masked_weight"]


class Mask(nn.Module):
    """A parametrization."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


@pytest.mark.parametrize("layer", [nn.Linear(352, 384), nn.Conv2d(128, 128, 3, 2, 1), nn.Conv1d(256, 256, 3, groups=1)])
def test_a_parametrization_is_folded(layer):
    layer = copy.deepcopy(layer)
    parametrize.register_parametrization(layer, "weight", Mask(inputs(*layer.weight.shape) > 0))
    x = X if isinstance(layer, nn.Linear) else inputs(2, layer.weight.shape[1], *(5,) * (layer.weight.dim() - 2))
    with torch.no_grad():
        found, report = rewritten(layer, x, implementation="auto", frozen=True, strict=True)
        assert torch.equal(found, layer(x)) and found.stride() == layer(x).stride()
    assert site(report, "masked_weight").rewritten


@pytest.mark.slow(reason="compiles attention in training and out of it")
@pytest.mark.parametrize("training", [False, True])
def test_multi_head_attention_with_pruned_projections(training):
    attention = nn.MultiheadAttention(256, 4, batch_first=True).train(training)
    prune.random_unstructured(attention, "in_proj_weight", 0.5)
    x, memory = inputs(2, 5, 256), inputs(2, 7, 256, seed=3)
    run = torch.compile(attention, backend="sparsecomp", options=FROZEN)
    with torch.set_grad_enabled(training):
        found, wanted = run(x, memory, memory)[0], attention(x, memory, memory)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    reason = site(sparsecomp.last_report(), "masked_weight").reason
    assert ("gradients are on" if training else "is folded, since they are promised to stay") in reason


class Attention(nn.Module):
    """Attention written by hand, one weight for three projections."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(inputs(768, 256) / 16), nn.Parameter(inputs(512, 256) / 16)
        self.register_buffer("mask", inputs(768, 256) > 0)
        self.register_buffer("out_mask", inputs(512, 256) > 0)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (F.linear(x, part) for part in (self.weight * self.mask).chunk(3))
        return F.scaled_dot_product_attention(query, key, value) @ (self.out * self.out_mask).t()


def test_attention_projections_are_folded(monkeypatch):
    monkeypatch.setattr(masked_cost, "LEAST_FOLDED", 1)
    model, x = Attention(), inputs(2, 5, 256)
    with torch.no_grad():
        found, report = rewritten(model, x, implementation="auto", frozen=True, strict=True)
        assert torch.equal(found, model(x))
    assert [one.rewritten for one in report.sites if one.rule == "masked_weight"] == [True] * 4
    assert not [line for line in report.graph_after.splitlines() if " * " in line and "#" not in line]


@pytest.mark.parametrize("layer", ["linear", "conv2d"])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside, layer):
    model = Masked(SPELLINGS["blend"], layer)
    x = X if layer == "linear" else inputs(2, 128, 5, 4)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return model(x)

    function = forward if inside else model
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        found, report = rewritten(function, x, implementation="auto", frozen=True, strict=True, verify=not inside)
        wanted = function(x)
    assert site(report, "masked_weight").rewritten
    assert found.dtype is torch.bfloat16 and torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype):
    model = Masked(SPELLINGS["blend"]).to(dtype)
    with torch.no_grad():
        found, report = rewritten(model, X.to(dtype), implementation="auto", frozen=True, strict=True)
        assert torch.equal(found, model(X.to(dtype)))
    assert site(report, "masked_weight").rewritten


def test_a_batch_of_another_size_needs_no_other_graph(weights):
    model = Masked(SPELLINGS["mask * weight"])
    run = torch.compile(model, backend="sparsecomp", options=FROZEN, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (2, 5, 7):
            torch.testing.assert_close(run(inputs(rows, 352)), model(inputs(rows, 352)), rtol=1e-5, atol=1e-4)
    assert len(weights) == 1


def test_the_compiled_model_trains_and_then_folds_again(compiled):
    model, made = compiled
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = torch.compile(model, backend="sparsecomp", options=FROZEN, fullgraph=True)
    for _ in range(2):
        run(X).square().mean().backward()
        assert (model.weight.grad[model.numbers == 0] == 0).all()
        assert (model.phi.grad[model.numbers == 1] == 0).all()
        optimizer.step()
        optimizer.zero_grad()
        assert made() == 1
    assert made() == 0


def test_frozen_layers_in_training_fold_unless_a_gradient_passes_through():
    model = Masked(SPELLINGS["where"]).requires_grad_(False)
    _, report = rewritten(model, X, implementation="auto", frozen=True, strict=True)
    assert site(report, "masked_weight").rewritten
    x = X.clone().requires_grad_()
    out, report = rewritten(model, x, implementation="auto", frozen=True, strict=True)
    assert "gradients are on" in site(report, "masked_weight").reason
    out.sum().backward()
    assert torch.allclose(x.grad, torch.where(model.mask, model.weight, 0).sum(0).expand_as(x), atol=1e-4)


def test_inference_mode(weights):
    model = Masked(SPELLINGS["where"])
    run = torch.compile(model, backend="sparsecomp", options=FROZEN, fullgraph=True)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(run(X), model(X), rtol=1e-5, atol=1e-4)
        assert len(weights) == 1
        model = Masked(SPELLINGS["where"])  # its tensors have no version
        found, report = rewritten(model, X, implementation="auto", frozen=True, strict=True)
        assert torch.equal(found, model(X))
    assert site(report, "masked_weight").rewritten


def test_optimize_folds_under_torch_compile():
    model = Masked(SPELLINGS["blend"]).eval()
    with torch.no_grad():
        better = sparsecomp.optimize(model, X, frozen=True)
        torch.testing.assert_close(better(X), model(X), rtol=1e-5, atol=1e-4)
        assert [one.implementation for one in better.report.rewritten] == ["folded dense"]
        model.weight.mul_(2)
        torch.testing.assert_close(better(X), model(X), rtol=1e-5, atol=1e-4)
    assert "folded dense" in str(sparsecomp.explain(model.requires_grad_(False), X, options=FROZEN))


# ---- sparse formats ---------------------------------------------------------------------------------------------


def block_weight(share: float, size: int, block: int) -> Tensor:
    blocks = inputs(size // block, size // block).abs()
    kept = blocks > blocks.flatten().quantile(share)
    return inputs(size, size) * kept.repeat_interleave(block, 0).repeat_interleave(block, 1)


def two_of_four(rows: int, columns: int) -> Tensor:
    groups = inputs(rows, columns // 4, 4)
    return groups.scatter(-1, groups.abs().topk(2, -1, largest=False).indices, 0.0).flatten(1)


FORMATS = {
    "dense": (inputs(96, 64), (1, 1)),
    "csr": (inputs(96, 64) * (inputs(96, 64, seed=3) > 1), (1, 1)),
    "bsr": (block_weight(0.8, 128, 16)[:96, :64], (16, 16)),
    "nm": (two_of_four(96, 64), (2, 4)),
}


def name_of_product() -> str:
    graph = torch.fx.Graph()
    operands = (graph.placeholder("mask"), graph.placeholder("weight"))
    graph.output(graph.call_function(torch.mul, operands))
    return folded_weight.formula(torch.fx.GraphModule(nn.Module(), graph))


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (0, 64)])
@pytest.mark.parametrize("keep", ["asked", "always", "prepared"])
def test_every_format_of_the_operator(keep, format, shape):
    weight, block = FORMATS[format]
    x, mask, bias, name = inputs(*shape), weight != 0, inputs(96), name_of_product()
    kept = inputs(96, 64, seed=5)
    for _ in range(2):
        arguments = (x, [mask, kept], bias, Recipe(Folded(name, format, block), keep).written())
        found = torch.ops.sparsecomp.folded_linear.default(*arguments)
        wanted = F.linear(x.double(), torch.where(mask, kept, 0).double(), bias.double())
        torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-5)
        assert found.is_contiguous()
        kept.mul_(-1)
    torch.library.opcheck(torch.ops.sparsecomp.folded_linear.default, arguments)


def test_a_weight_that_no_longer_fits_its_format_is_still_right():
    weight, name = two_of_four(96, 64), name_of_product()
    mask, kept, x = weight != 0, inputs(96, 64, seed=5), inputs(4, 64)
    for _ in range(2):
        found = masked_linear.folded_linear(x, [mask, kept], None, Recipe(Folded(name, "nm", (2, 4)), "always"))
        torch.testing.assert_close(found, F.linear(x, mask * kept), rtol=1e-5, atol=1e-5)
        mask[:] = True


def test_an_operand_that_needs_a_gradient_is_refused():
    operator, mask, weight = torch.ops.sparsecomp.folded_linear.default, inputs(96, 64) > 0, inputs(96, 64)
    arguments = (Recipe(Folded(name_of_product()), "asked").written(),)
    operator(inputs(2, 64), [mask, weight], None, *arguments)
    for x, source in ((inputs(2, 64).requires_grad_(), weight), (inputs(2, 64), weight.clone().requires_grad_())):
        with pytest.raises(NotImplementedError, match="no gradient"):
            operator(x, [mask, source], None, *arguments)
        with torch.no_grad():
            operator(x, [mask, source], None, *arguments)


def test_an_unknown_formula_is_an_error_that_says_what_to_do():
    with pytest.raises(sparsecomp.errors.FormatError, match="compile the model here"):
        torch.ops.sparsecomp.folded_linear.default(X, [X], None, "none dense 1x1 asked")


def test_a_sparse_format_through_the_backend(monkeypatch):
    choice = FoldedForm("csr", (1, 1), "a weight", Decision("spmm_csr", "because", {"dense": 2e-5, "spmm_csr": 1e-5}))
    monkeypatch.setattr(masked_weight, "choose_fold", lambda op, weight, ctx: choice)
    layer = prune.random_unstructured(nn.Linear(352, 768), "weight", 0.9)
    with torch.no_grad():
        for _ in range(2):
            found = torch.compile(layer, backend="sparsecomp", options=FROZEN)(X)
            torch.testing.assert_close(found, layer(X), rtol=1e-5, atol=1e-5)
            layer.weight_orig.mul_(2)
    done = site(sparsecomp.last_report(), "masked_weight")
    assert (done.implementation, done.expected_gain) == ("folded csr", 2.0)
    assert "a weight by spmm_csr: because" in done.reason


# dense by cuBLAS and 64 x 64 blocks at 90 % by torch's kernel took 0.204 and 0.065 ms there
PICKED = {
    "dense": (lambda: inputs(2048, 2048) * (inputs(2048, 2048, seed=3) > 0), 2048, torch.float16),
    "dense, 90 %": (lambda: inputs(2048, 2048) * (inputs(2048, 2048, seed=3) > 1.28), 2048, torch.float16),
    "csr": (lambda: inputs(2048, 2048) * (inputs(2048, 2048, seed=3) > 2.3), 256, torch.float32),
    "bsr": (lambda: block_weight(0.9, 4096, 64), 4096, torch.float16),
}


@pytest.mark.parametrize("what", PICKED)
def test_the_estimate_picks_the_format_on_an_h100(what):
    pytest.importorskip("triton")
    make, rows, dtype = PICKED[what]
    choice = compare_folds(make().to(dtype), rows, True, CARD, H100)
    assert choice.format == what.split(",")[0]
    dense, reason = choice.format == "dense", choice.decision.reason
    assert "us against" in reason and "us dense" in reason and reason.startswith("estimated") != dense
    assert (choice.decision.gain < MIN_GAIN) == dense
    assert ("for finite inputs" in reason) != dense


def test_a_fold_counts_the_host_and_the_products_that_share_a_call(monkeypatch):
    """A product in halves takes the device half as long as dense, but needs more launches: see the rule of products."""
    pytest.importorskip("triton")
    weight = inputs(1280, 1280) * (inputs(1280, 1280, seed=3) > 0)
    found = {n: compare_folds(weight, 1024, True, CARD, H100, replayed=False, products=n).format for n in (1, 64)}
    assert found == {1: "dense", 64: "csr"}
    assert compare_folds(weight, 1024, True, CARD, H100, replayed=True).format == "csr"
    passed: dict[str, Any] = {}
    monkeypatch.setattr(masked_fold, "compare_folds", lambda *rest, **how: passed.update(how))
    monkeypatch.setattr(masked_fold, "target_of", lambda device: (CARD, H100))
    x = torch.fx.Graph().placeholder("x")
    x.meta["example_value"] = X
    op, there = CanonicalOp("linear", {"input": x}, x), SimpleNamespace(device=torch.device("cuda"))
    context = SimpleNamespace(options=Options(), products=7, target=None, device=lambda device: device)
    masked_fold.choose_fold(op, there, context)
    assert passed == {"replayed": False, "products": 7}


def test_forms_are_those_that_hold_the_weight():
    def forms(weight: Tensor) -> list[tuple[Any, ...]]:
        return [(form.format.OPERAND, form.block, int(form.counts.sum())) for form in masked_fold.forms_of(weight)]

    assert forms(two_of_four(64, 64)) == [("csr", (1, 1), 2048), ("nm", (2, 4), 2048)]
    kept = torch.zeros(128, 128)
    kept[:32, :64] = 1
    assert forms(kept) == [("csr", (1, 1), 2048), *(("bsr", (b, b), 2048 // b**2) for b in (16, 32)),]
    assert forms(torch.ones(6, 10)) == [("csr", (1, 1), 60)]


def test_where_cuda_graphs_are_replayed():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    replayed = {mode for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
                if replays(Options(mode=mode), cuda)}  # fmt: skip
    assert replayed == {"reduce-overhead", "max-autotune"}
    assert replays(Options(inductor={"triton.cudagraphs": True}), cuda)
    assert not replays(Options(mode="reduce-overhead"), cpu)


@pytest.mark.skipif(
    torch.__version__.startswith("2.12."), reason="Inductor of torch 2.12 keeps no graph with decompositions of its own"
)
def test_a_cached_graph_folds_the_weight_of_the_model_it_runs_for():
    from torch._inductor.utils import fresh_cache

    with torch.no_grad(), fresh_cache():
        for kind in ("miss", "hit"):
            torch._dynamo.reset()
            counters.clear()
            model = Masked(SPELLINGS["blend"])
            model.weight.mul_(2 if kind == "hit" else 1)
            found = torch.compile(model, backend="sparsecomp", options=FROZEN, fullgraph=True)(X)
            torch.testing.assert_close(found, model(X), rtol=1e-5, atol=1e-4)
            assert counters["aot_autograd"][f"autograd_cache_{kind}"] == 1
