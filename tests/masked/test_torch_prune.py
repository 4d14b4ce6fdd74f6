"""Layers that torch.nn.utils.prune masks: found by the rule, with the attribute that its hook leaves behind, and what
sparse and RESU layers take of them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting import rewritten, site
from torch import Tensor, nn
from torch.nn.utils import prune

import sparsecomp
from sparsecomp.errors import FormatError, MaskError
from sparsecomp.formats import BSR, NM
from sparsecomp.nn import SparseEmbedding, SparseLinear, wrap_module
from sparsecomp.nn.masked.masked_weight import Mode
from sparsecomp.ops.masked import folded_weight
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.masked import masked_weight
from sparsecomp.passes.masked.fold import FoldedForm
from sparsecomp.reference.memo import MEMO

pytestmark = pytest.mark.quick_cases(1)

FROZEN = {"implementation": "auto", "strict": True, "frozen": True}


def inputs(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = inputs(4, 512)


def twin(layer: nn.Module) -> nn.Module:
    """A copy, for which the attributes that pruning has left must be no results of autograd."""
    with torch.no_grad():
        for hook in list(layer._forward_pre_hooks.values()):
            hook(layer, None)
    return copy.deepcopy(layer)


def several(layer: nn.Module) -> None:
    prune.random_unstructured(layer, "weight", 0.5)
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.ln_structured(layer, "weight", 0.25, n=2, dim=0)
    assert isinstance(next(iter(layer._forward_pre_hooks.values())), prune.PruningContainer)


def with_bias(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.9)
    prune.l1_unstructured(layer, "bias", 0.5)


METHODS: dict[str, Callable[[Any], Any]] = {
    "l1_unstructured": lambda layer: prune.l1_unstructured(layer, "weight", 0.9),
    "random_unstructured": lambda layer: prune.random_unstructured(layer, "weight", 0.9),
    "ln_structured": lambda layer: prune.ln_structured(layer, "weight", 0.5, n=2, dim=1),
    "random_structured": lambda layer: prune.random_structured(layer, "weight", 0.5, dim=0),
    "custom_from_mask": lambda layer: prune.custom_from_mask(layer, "weight", inputs(*layer.weight.shape) > 1),
    "global_unstructured": lambda layer: prune.global_unstructured(
        [(layer, "weight")], prune.L1Unstructured, amount=0.9
    ),
    "several": several,
    "with bias": with_bias,
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(512, 512),
    "conv1d": lambda: nn.Conv1d(512, 256, 3, padding=1),
    "conv2d": lambda: nn.Conv2d(256, 128, 3, padding=1),
}
GIVEN = {"linear": X, "conv1d": inputs(2, 512, 6), "conv2d": inputs(2, 256, 4, 4)}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_folded_and_leaves_what_eager_does(method, kind):
    torch.manual_seed(0)
    layer, x = LAYERS[kind](), GIVEN[kind]
    METHODS[method](layer)
    eager = twin(layer)
    layer.weight = None  # what is read is what the call has set
    with torch.no_grad():
        found, report = rewritten(layer, x, **FROZEN)
        assert torch.equal(found, eager(x))
    assert site(report, "masked_weight").implementation == "folded dense"
    for name in ("weight", "bias"):
        mine, its = getattr(layer, name), getattr(eager, name)
        assert torch.equal(mine, its) and mine.stride() == its.stride() and mine.requires_grad == its.requires_grad
    graph = report.graph_after
    assert graph.count("sparsecomp.folded_weight.default(") == 1 and "pruned_tensor * " not in graph
    assert list(layer.state_dict()) == list(eager.state_dict())


@pytest.mark.parametrize("way", ["compile", "optimize", "promise for a while"])
def test_the_attribute_follows_writes_through_the_compiler(way):
    layer = prune.l1_unstructured(nn.Linear(512, 512), "weight", 0.9)
    model = nn.Sequential(layer, nn.ReLU()).eval()
    with torch.no_grad(), sparsecomp.ops.frozen_weights() if way == "promise for a while" else torch.no_grad():
        if way == "optimize":
            run = sparsecomp.optimize(model, X, frozen=True)
        else:
            options = {"frozen": True} if way == "compile" else {}
            run = torch.compile(model, backend="sparsecomp", options=options)
        for write in (lambda: None, lambda: layer.weight_orig.mul_(2), lambda: layer.weight_mask[:9].zero_()):
            write()
            made, left = MEMO.made, []
            for _ in range(2):
                out = run(X)
                left.append(layer.weight)
                assert torch.equal(layer.weight, layer.weight_mask * layer.weight_orig)
                torch.testing.assert_close(out, model(X))
            assert left[0].data_ptr() == left[1].data_ptr() and MEMO.made - made <= 2
    report = run.report if way == "optimize" else sparsecomp.last_report()
    assert [one.implementation for one in report.rewritten] == ["folded dense"]


def test_a_write_to_the_attribute_lasts_until_the_next_call():
    layer = prune.l1_unstructured(nn.Linear(512, 512), "weight", 0.9)
    run = torch.compile(layer, backend="sparsecomp", options={"frozen": True})
    with torch.no_grad():
        wanted = run(X)
        layer.weight.fill_(7)
        layer.weight.requires_grad_()
        assert torch.equal(run(X), wanted)
        assert torch.equal(layer.weight, layer.weight_mask * layer.weight_orig) and not layer.weight.requires_grad


def test_a_layer_pruned_again_and_one_whose_pruning_is_removed_after_compiling():
    layer = prune.l1_unstructured(nn.Linear(512, 512), "weight", 0.5)
    run = torch.compile(layer, backend="sparsecomp", options={"frozen": True})
    with torch.no_grad():
        run(X)
        prune.ln_structured(layer, "weight", 0.5, n=1, dim=0)
        wanted = copy.deepcopy(layer)(X)
        torch.testing.assert_close(run(X), wanted)
        prune.remove(layer, "weight")
        torch.testing.assert_close(run(X), wanted)
    assert list(layer.state_dict()) == ["bias", "weight"] and isinstance(layer.weight, nn.Parameter)


class Twice(nn.Module):
    """A layer that runs twice, and whose attribute the model reads itself."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.read = prune.random_unstructured(nn.Linear(512, 512), "weight", 0.5), read

    def forward(self, x: Tensor) -> Any:
        out = self.layer(self.layer(x))
        return out, self.read(self.layer.weight)


@pytest.mark.parametrize(
    ("read", "kept"),
    [(lambda w: None, True), (lambda w: w, True), (lambda w: w.sum(), False), (lambda w: w.mul_(2).sum(), False)],
)
def test_who_else_reads_the_product(read, kept):
    model = Twice(read)
    twin(model.layer)
    eager = copy.deepcopy(model)
    with torch.no_grad():
        for _ in range(2):
            found, report = rewritten(model, X, **FROZEN)
            for mine, its in zip(found, eager(X), strict=True):
                assert mine is its is None or torch.equal(mine, its)
            assert torch.equal(model.layer.weight, eager.layer.weight)
    first, second = (site(report, "masked_weight", index) for index in (0, 1))
    assert first.rewritten and second.rewritten == kept


def test_the_operator_by_itself():
    mask, weight = inputs(96, 64) > 0, inputs(96, 64, seed=3).requires_grad_()
    name = folded_weight.named_formula("torch_prune", lambda mask, weight: mask.to(dtype=weight.dtype) * weight)
    recipe = folded_weight.Recipe(folded_weight.Folded(name), "always")
    operator = torch.ops.sparsecomp.folded_weight.default
    with pytest.raises(NotImplementedError, match="no_grad"):
        operator([mask, weight], recipe.written())
    with torch.no_grad():
        found, again = (operator([mask, weight], recipe.written()) for _ in range(2))
        assert torch.equal(found, torch.where(mask, weight, 0)) and found.data_ptr() == again.data_ptr()
        torch.library.opcheck(operator, ([mask, weight], recipe.written()))


def test_sparse_formats_keep_a_dense_product_for_the_attribute(monkeypatch):
    layer = prune.l1_unstructured(nn.Linear(512, 512), "weight", 0.9)
    choice = FoldedForm("csr", (1, 1), "512x512", Decision("spmm_csr", "faster"))
    monkeypatch.setattr(masked_weight, "choose_fold", lambda op, weight, ctx: choice)
    with torch.no_grad():
        found, report = rewritten(layer, X, **FROZEN)
        assert torch.equal(layer.weight, layer.weight_mask * layer.weight_orig)
        torch.testing.assert_close(found, layer(X), rtol=1e-5, atol=1e-5)
    assert " csr 1x1" in report.graph_after and " dense 1x1" in report.graph_after


def test_precision_exact_multiplies_zeros_by_what_is_not_finite():
    layer, x = prune.l1_unstructured(nn.Linear(512, 512), "weight", 0.9), X.clone()
    x[0, 3] = torch.nan
    with torch.no_grad():
        found, report = rewritten(layer, x, precision="exact", **FROZEN)
        assert torch.equal(found.isnan(), layer(x).isnan()) and found[0].isnan().all()
    assert "precision='exact' multiplies its zeros too" in site(report, "masked_weight").reason


def test_a_graph_that_is_replayed_gives_out_its_own(monkeypatch):
    layer = prune.l1_unstructured(nn.Linear(512, 512), "weight", 0.9)
    monkeypatch.setattr(masked_weight.Context, "keep", lambda ctx, *sources: "prepared")
    with torch.no_grad():
        found, report = rewritten(layer, X, **FROZEN)
        assert torch.equal(found, layer(X))
    assert "`output` reads it too" in site(report, "masked_weight").reason
    assert "prune.remove" in site(report, "masked_weight").reason


@pytest.mark.parametrize(
    ("features", "options", "why"),
    [
        (512, {"frozen": False}, "it is multiplied by its mask in each call; once it is trained, torch.nn.utils"),
        (360, {}, "its 129600 elements are masked faster than an operator is called (from 131072 on it is folded)"),
    ],
)
def test_what_is_left_names_what_helps(features, options, why):
    layer = prune.l1_unstructured(nn.Linear(features, features), "weight", 0.9)
    with torch.no_grad():
        found, report = rewritten(layer, X[:, :features], **{**FROZEN, **options})
        assert torch.equal(found, layer(X[:, :features]))
    reason = site(report, "masked_weight").reason
    assert why in reason and "prune.remove" in reason and "sparsify(model, sparsecomp.FromMask())" in reason


@pytest.mark.parametrize("device", [None, "h100"])
def test_the_promise_is_named_only_where_it_does_more_than_the_ways_out(device):
    model = nn.Sequential(prune.l1_unstructured(nn.Linear(512, 512), "weight", 0.9))
    with torch.no_grad():
        reason = site(sparsecomp.explain(model, X, device=device), "masked_weight").reason
    assert ("frozen=True promises" in reason) == (device is not None)
    assert "prune.remove" in reason and "sparsecomp.FromMask()" in reason


def _pruned(layer, amount=0.9):
    return prune.l1_unstructured(layer, "weight", amount)


class Derived(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (_pruned(nn.Linear(16, 16)), torch.ones(2, 16)),
        (_pruned(nn.Linear(16, 16), 0.4), torch.ones(2, 16)),
        (_pruned(Derived(16, 16)), torch.ones(2, 16)),
        (_pruned(nn.Conv2d(16, 16, 3)), torch.ones(1, 16, 8, 8)),
        (_pruned(nn.ConvTranspose2d(16, 16, 3)), torch.ones(1, 16, 8, 8)),
        (_pruned(nn.Embedding(16, 16)), torch.zeros(2, dtype=torch.int64)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sparsify_is_named_where_it_makes_the_layer_sparse_and_nowhere_else(layer, x):
    model = nn.Sequential(layer)
    reason = site(sparsecomp.explain(model, x), "masked_weight").reason
    try:
        helps = isinstance(sparsecomp.sparsify(model, sparsecomp.FromMask())[0], SparseLinear)
    except MaskError:
        helps = False
    assert ("sparsify" in reason) == helps and "prune.remove" in reason


def test_in_evaluation_mode_with_gradients_the_reason_says_what_to_do():
    report = sparsecomp.explain(_pruned(nn.Linear(16, 16)).eval(), torch.ones(2, 16))
    reason = site(report, "masked_weight").reason
    assert any("in evaluation mode, but gradients are on" in note for note in report.notes)
    assert "gradients are on" in reason and "torch.no_grad()" in reason and "training" not in reason


@pytest.mark.parametrize("frozen", [False, "buffers", True])
def test_gradients_in_training(frozen):
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    with_bias(model[0])
    twin(model[0])
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="sparsecomp", options={"frozen": frozen})
    for _ in range(2):
        for call, one in ((run, model), (eager, eager)):
            one.zero_grad()
            call(X).square().mean().backward()
    for (name, mine), its in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, msg=name)
    assert (model[0].weight_orig.grad[model[0].weight_mask == 0] == 0).all()
    assert model[0].weight.grad_fn is not None and torch.equal(model[0].weight, eager[0].weight)


# ---- layers that take the mask over -----------------------------------------------------------------------------


def stale(layer: Any, method: str = "several") -> Any:
    """A pruned layer whose attributes are those of other weights, as after a step of an optimizer."""
    METHODS[method](layer)
    with torch.no_grad():
        for one in layer.parameters():
            one.mul_(2)
    return layer


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("method", ["several", "with bias"])
def test_a_sparse_layer_takes_the_mask_of_a_pruned_one(method, trained, grad):
    linear = stale(nn.Linear(64, 48), method)
    linear.weight_orig.requires_grad_(trained)
    linear.weight_orig.data[0, :32] = 0.0  # stored where the mask keeps it
    with torch.set_grad_enabled(grad):
        layer = SparseLinear.from_linear(linear)
    assert layer.values.numel() == int(linear.weight_mask.sum()) and layer.values.requires_grad == trained
    x = inputs(5, 64)
    torch.testing.assert_close(layer(x), linear(x))
    assert isinstance(layer.bias, nn.Parameter) and torch.equal(layer.bias, linear.bias)
    assert (layer.bias is linear.bias) == (method == "several")
    assert prune.is_pruned(linear)


def test_a_mask_or_sparsity_that_is_given_comes_first():
    linear = stale(nn.Linear(64, 48))
    assert SparseLinear.from_linear(linear, sparsity=0.9).values.numel() == 48 * 64 - round(0.9 * 48 * 64)
    mask = torch.eye(48, 64)
    layer = SparseLinear.from_linear(linear, mask=mask)
    weight = linear.weight_orig * linear.weight_mask * mask
    assert torch.equal(layer.weight.to_dense(), weight)


def test_formats_take_a_mask_that_fits_them():
    linear = nn.Linear(64, 48)
    groups = torch.tensor([1.0, 0, 1, 0]).repeat(48, 16)
    prune.custom_from_mask(linear, "weight", groups)
    layer = SparseLinear.from_linear(linear, NM, n=2, m=4)
    assert torch.equal(layer.weight.to_dense(), linear.weight_orig * groups)
    with pytest.raises(FormatError, match="blocks"):
        SparseLinear.from_linear(linear, BSR, block=16)


def test_masks_of_resu_and_parametrizations_are_taken_too():
    resu = wrap_module(nn.Linear(64, 48))
    with pytest.raises(FormatError, match=r"torch\.nn\.utils\.prune"):
        SparseLinear.from_linear(resu)  # all is active: there is no mask yet
    resu.masked.prune_(resu.weight, inputs(48, 64) > 0)
    assert SparseLinear.from_linear(resu).values.numel() == int((inputs(48, 64) > 0).sum())


def test_a_sparse_embedding_takes_the_mask_of_a_pruned_one():
    table = stale(nn.Embedding(30, 16), "l1_unstructured")
    layer, index = SparseEmbedding.from_embedding(table), torch.arange(30)
    assert layer.values.numel() == int(table.weight_mask.sum())
    assert torch.equal(layer(index), table(index))


def test_sparsify_takes_the_bias_that_pruning_makes():
    model = nn.Sequential(stale(nn.Linear(64, 48), "with bias"))
    wanted = model(X[:, :64])
    torch.testing.assert_close(sparsecomp.sparsify(model, sparsecomp.FromMask())(X[:, :64]), wanted)


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
@pytest.mark.parametrize("method", ["several", "with bias"])
def test_wrap_module_adopts_a_pruned_layer_with_its_parameter(method, kind):
    model, x = nn.Sequential(stale(LAYERS[kind](), method)), GIVEN[kind]
    layer, parameter = model[0], model[0].weight_orig
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wanted, mask = model(x), layer.weight_mask != 0
    wanted.sum().backward()
    optimizer.step()
    wanted = model(x).detach()
    wrap_module(model)
    assert layer.weight is parameter and layer.mode is Mode.SPARSE and torch.equal(layer.masked.mask.mask, mask)
    assert not [key for key in model.state_dict() if "weight_orig" in key or "weight_mask" in key]
    assert len(layer._forward_pre_hooks) == (method == "with bias")
    assert torch.equal(model(x), wanted)
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    found = layer.masked.effective(layer.weight)
    assert torch.equal(found != 0, mask) and not torch.equal(model(x), wanted)


def test_pruned_weights_that_are_shared_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(MaskError, match=r"weight of 0 .*shared weight.*prune\.remove.*sparsify"):
        wrap_module(model)
    assert prune.is_pruned(model[0]) and type(model[0]) is nn.Linear
