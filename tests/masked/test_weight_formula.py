"""What is taken for the formula of a layer's weight, what it reads, and who else does."""

import operator
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import Examples
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.utils import prune

from sparsecomp.options import Options
from sparsecomp.passes.engine.rule import Context
from sparsecomp.passes.facts.analysis import analyse
from sparsecomp.passes.masked import formula as weight_formula
from sparsecomp.passes.masked import masked_weight, merged_weight
from sparsecomp.passes.masked.formula import Formula, formula_of, writes_elsewhere
from sparsecomp.report import Report


def judged(model: Callable[..., Any]) -> tuple[fx.GraphModule, fx.Node, Formula | None, Any]:
    """The graph of `model(x, w, m, other)`, its last layer, the formula of that one's weight, and a context."""
    gm = fx.symbolic_trace(model)
    layer = [node for node in gm.graph.nodes if weight_formula.is_layer(node)][-1]
    ctx = Context(gm, Options(), Report(), analyse(gm))
    return gm, layer, formula_of(layer.args[1], layer, ctx), ctx


def _written(value: Any, mask: Any, by: Any) -> Any:
    copy = value.clone()
    copy.masked_fill_(mask, by)
    return copy


def _through_a_view(value: Any, by: Any) -> Any:
    copy = value.clone()
    copy.view(4, 4).mul_(by)
    return copy


CASES: dict[str, tuple[Callable[..., Any], str, str]] = {
    # the operators in order, and what they read
    "product": (lambda x, w, m, o: F.linear(x, w * m), "mul", "w m"),
    "view of a product": (lambda x, w, m, o: F.linear(x, (w * m).view(4, 4)), "mul view", "w m"),
    "where": (lambda x, w, m, o: F.linear(x, torch.where(m > 0, w, o)), "gt where", "m w o"),
    "of a softmax": (lambda x, w, m, o: F.linear(x, torch.softmax(w, 0) * m), "mul", "softmax m"),
    "of a sine": (lambda x, w, m, o: F.linear(x, torch.sin(w) * m), "sin mul", "w m"),
    "of rolled blocks": (lambda x, w, m, o: F.linear(x, w * m.movedim(0, 1).roll(1, 0)), "movedim roll mul", "w m"),
    "in place": (lambda x, w, m, o: F.linear(x, w.mul_(m)), "mul_", "w m"),
    "written": (lambda x, w, m, o: F.linear(x, _written(w, m, 0.0)), "clone masked_fill_", "w m"),
    "through a view": (lambda x, w, m, o: F.linear(x, _through_a_view(w, m)), "clone view mul_", "w m"),
    "cast": (lambda x, w, m, o: F.linear(x, (w.half() * m).float()), "half mul float", "w m"),
    "numbers only": (lambda x, w, m, o: F.linear(x, w * 0 + 1), "mul add", "w"),
    "matrix": (lambda x, w, m, o: torch.matmul(x, (w * m).t()), "mul t", "w m"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_formula_is_the_pure_operators_in_front_of_a_weight(name: str) -> None:
    model, operators, sources = CASES[name]
    gm, layer, formula, ctx = judged(model)
    assert formula is not None and formula.result is layer.args[1]
    names = [getattr(node.target, "__name__", str(node.target)) for node in formula.nodes]
    assert names == operators.split()
    assert sorted(source.name for source in formula.sources) == sorted(sources.split())
    changed = writes_elsewhere(formula, layer, ctx)
    assert (None if changed is None else changed.name) == ("w" if name == "in place" else None)
    assert formula.outside(layer) == []
    assert formula.readers() == [layer]
    assert formula.spelled() == ", ".join(
        word for word in ("masked_fill", "mul", "where") if any(word in part for part in operators.split())
    )
    assert weight_formula.has_writes(formula) == any(word in operators for word in ("where", "masked_fill"))


@pytest.mark.parametrize(
    "model",
    [
        lambda x, w, m, o: F.linear(x, w), lambda x, w, m, o: F.linear(x, w.softmax(0)),
        lambda x, w, m, o: torch.matmul(x, w),
    ],
)  # fmt: skip
def test_a_weight_as_it_is_has_none(model: Callable[..., Any]) -> None:
    assert judged(model)[2] is None


VALUES = {"w": torch.arange(16.0).view(4, 4) - 7, "m": torch.eye(4), "o": torch.full((4, 4), 0.5)}


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("of a softmax", "cast", "written")])
def test_its_value_and_its_function_are_what_the_model_computes(name: str) -> None:
    gm, layer, formula, _ = judged(CASES[name][0])
    assert formula is not None
    known = {source: VALUES[source.name].clone() for source in formula.sources}
    x = torch.eye(4)
    expected = gm(x, *(VALUES[key].clone() for key in ("w", "m", "o")))
    weight = formula.values(known)[formula.result]
    assert all(torch.equal(value, VALUES[source.name]) for source, value in known.items())
    product = F.linear(x, weight) if layer.target is F.linear else x @ weight
    torch.testing.assert_close(product, expected)
    arguments = [VALUES[source.name].clone() for source in formula.sources]
    for dtype in (None, torch.float64, torch.float16):
        result = formula.module(dtype)(*(argument.clone() for argument in arguments))
        wanted = weight if dtype is None else weight.to(dtype)
        assert result.dtype is wanted.dtype and torch.equal(result, wanted)


def test_the_base_is_what_views_were_made_of() -> None:
    for name, depth in (("product", 0), ("view of a product", 1), ("matrix", 1)):
        _, layer, formula, _ = judged(CASES[name][0])
        assert formula is not None
        base = formula.result
        for _ in range(depth):
            base = base.args[0]
        assert formula.base() is base
        assert {f"{one.name} {other.name}" for one, other in weight_formula.factors(formula)} == {"w m"}


def _read_too(x: Any, w: Any, m: Any, o: Any) -> Any:
    weight = w * m
    return F.linear(x, weight) + weight.sum()


def _two_layers(x: Any, w: Any, m: Any, o: Any) -> Any:
    weight = w * m
    return F.linear(F.linear(x, weight), weight)


def _written_before(x: Any, w: Any, m: Any, o: Any) -> Any:
    w.add_(1)
    return F.linear(x, w * m)


def _written_between(x: Any, w: Any, m: Any, o: Any) -> Any:
    weight = w * m
    m.zero_()
    return F.linear(x, weight)


def _read_before_it_is_written(x: Any, w: Any, m: Any, o: Any) -> Any:
    weight = w.clone()
    before = weight.sum()
    weight.mul_(m)
    return F.linear(x, weight) + before


def _written_by_an_unknown(x: Any, w: Any, m: Any, o: Any) -> Any:
    weight = w * m
    weight.cumsum_(0)
    return F.linear(x, weight)


@pytest.mark.parametrize(
    ("model", "written", "outside"),
    [
        (_read_too, None, ["sum_1"]), (_two_layers, None, []), (_written_before, "w", []),
        (_written_between, "m", []),
        (_read_before_it_is_written, "clone", ["sum_1"]), (_written_by_an_unknown, "mul", ["cumsum_"]),
    ],
)  # fmt: skip
def test_who_else_reads_and_writes(model: Callable[..., Any], written: str | None, outside: list[str]) -> None:
    _, layer, formula, ctx = judged(model)
    assert formula is not None
    found = writes_elsewhere(formula, layer, ctx)
    assert (None if found is None else found.name) == written
    assert [node.name for node in formula.outside(layer)] == outside


def _given_out(x: Any, w: Any, m: Any, o: Any) -> Any:
    weight = w * m
    return F.linear(x, weight), weight


def _view_given_out(x: Any, w: Any, m: Any, o: Any) -> Any:
    weight = w * m
    return F.linear(x, weight), weight.t()


def _given_out_and_read(x: Any, w: Any, m: Any, o: Any) -> Any:
    weight = w * m
    return F.linear(x, weight), weight, weight.sum()


def _of_two_layers(x: Any, w: Any, m: Any, o: Any) -> Any:
    weight = w * m
    return F.linear(F.linear(x, weight), weight), weight


def _product_given_out(x: Any, w: Any, m: Any, o: Any) -> Any:
    weight = w * m
    return F.linear(x, weight + 0), weight


@pytest.mark.parametrize(
    ("model", "pruned", "keep", "expected"),
    [
        (_given_out, True, "always", True), (_given_out, True, "asked", True), (_given_out, True, "prepared", False),
        (_given_out, False, "always", False), (CASES["product"][0], True, "always", False),
        (_view_given_out, True, "always", False), (_given_out_and_read, True, "always", False),
        (_of_two_layers, True, "always", False), (_product_given_out, True, "always", False),
    ],
)  # fmt: skip
def test_the_product_that_torchs_pruning_leaves_behind_is_the_one_that_is_kept(model, pruned, keep, expected) -> None:
    gm, layer, formula, _ = judged(model)
    assert formula is not None
    if pruned:
        formula.nodes[0].meta["stack_trace"] = f'File "{prune.__file__}", line 1, in __call__'
    assert masked_weight.is_given_out(formula, layer, keep) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(torch.tensor([True, False]), True), (torch.tensor([0.0, 1.0]), True), (torch.tensor([1, 0]), True),
     (torch.tensor([0.0, 0.5]), False), (torch.tensor([2]), False), (torch.tensor([torch.nan]), False),
     (torch.zeros(0), True), (3, False)],
)  # fmt: skip
def test_a_mask_is_truth_values_or_nothing_but_0_and_1(value: Any, expected: bool) -> None:
    assert weight_formula.is_mask(value) == expected


def _set(into: Any, index: Any, value: Any) -> Any:
    into.tracer.create_proxy("call_function", operator.setitem, (into, index, value), {})
    return into


def _scattered(w: Any, o: Any, m: Any, *, view: bool) -> Any:
    zeros = torch.zeros_like(w)
    _set(zeros.view(-1) if view else zeros, m.bool().view(-1) if view else m.bool(), o.view(-1)[:4])
    return zeros


LINEAR: dict[str, tuple[Callable[..., Any], bool]] = {
    # of w and o, for masks m: a sum of each of them times constants?
    "sum": (lambda w, o, m: w * m + o * (1 - m), True),
    "difference": (lambda w, o, m: m * w - o, True),
    "where": (lambda w, o, m: torch.where(m > 0, w, o), True),
    "blend of products": (lambda w, o, m: (w + o) * m / 2, True),
    "negative": (lambda w, o, m: -(w * m) + o, True),
    "view": (lambda w, o, m: (w.view(-1) * m.view(-1)).view(4, 4) + o, True),
    "wider": (lambda w, o, m: (w.double() * m + o).float(), True),
    "product of both": (lambda w, o, m: w * o * m, False),
    "product of views": (lambda w, o, m: (w.view(-1) * o.view(-1)).view(4, 4) * m, False),
    "square": (lambda w, o, m: w * w + o, False),
    "quotient": (lambda w, o, m: m / (w + 9) + o, False),
    "whole quotient": (lambda w, o, m: torch.div(w, 2, rounding_mode="floor") + o, False),
    "size": (lambda w, o, m: w.abs() * m + o, False),
    "comparison": (lambda w, o, m: torch.where(w > 0, w, o), False),
    "rounded": (lambda w, o, m: w.half().float() * m + o, False),
    "rounded constant": (lambda w, o, m: w * m.half().float() + o, True),
    "without gradients": (lambda w, o, m: w.detach() * m + o, False),
    "written": (lambda w, o, m: w * m + _scattered(w, o, m, view=False), True),
    "written through a view": (lambda w, o, m: w * m + _scattered(w, o, m, view=True), True),
    "written, times the other": (lambda w, o, m: w * _scattered(w, o, m, view=False), False),
    "written through a view, times the other": (lambda w, o, m: w * _scattered(w, o, m, view=True), False),
    "as large as": (lambda w, o, m: torch.ones_like(w) * m + w + o, True),
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_in_two_weights(name: str) -> None:
    call, expected = LINEAR[name]
    gm = fx.symbolic_trace(lambda x, w, o, m: F.linear(x, call(w, o, m)))
    given = torch.ones(4, 4), *(VALUES[key].clone() for key in ("w", "o", "m"))
    ShapeProp(gm).propagate(*given)
    layer = next(node for node in gm.graph.nodes if weight_formula.is_layer(node))
    ctx: Any = SimpleNamespace(analysis=analyse(gm))
    formula = formula_of(layer.args[1], layer, ctx)
    assert formula is not None
    order = {"w": 0, "o": 1}
    part = replace(formula, sources=tuple(sorted(formula.sources, key=lambda node: order.get(node.name, 2))))
    assert merged_weight.is_linear(part, part.sources[:2]) == expected
    if expected:  # twice both is twice the result less what neither has a part in
        x, w, o, m = given
        once, twice, none = (gm(x, k * w, k * o, m) for k in (1, 2, 0))
        torch.testing.assert_close(twice - none, 2 * (once - none))


def _scattered_first(w: Any, t: Any, m: Any) -> Any:
    return torch.zeros_like(w).masked_scatter(m, t) + w


def _set_by(w: Any, t: Any, index: Any) -> Any:
    return _set(w.clone(), index, t)


ROLES: dict[str, tuple[Callable[..., Any], dict[str, Tensor], str | None, bool]] = {
    # of w (4, 4), t (6,) and m, a mask: the sources in the operator's order, and whether a mask says where t goes
    "scattered": (lambda w, t, m, i: w.masked_scatter(m, t), {}, "w t m", True),
    "theta first": (lambda w, t, m, i: _scattered_first(w, t, m), {}, "w t m", True),
    "set by a mask": (lambda w, t, m, i: _set_by(w, t, m), {}, "w t m", True),
    "set by rows": (lambda w, t, m, i: _set_by(w, t[0], i), {}, "w t i", False),
    "put by a mask": (lambda w, t, m, i: w.index_put((m,), t), {}, "w t m", True),
    "put by places": (lambda w, t, m, i: w.index_put((i, i), t[:2]), {}, "w t i", False),
    "buffer that is trained": (
        lambda w, t, m, i: w.masked_scatter(m, t), {"t": torch.ones(6).requires_grad_()}, "w t m", True,
    ),
    "one trained": (lambda w, t, m, i: w.masked_scatter(m, t), {"t": torch.ones(6)}, None, True),
    "three trained": (lambda w, t, m, i: w.masked_scatter(m, t) * i, {"i": nn.Parameter(torch.ones(4))}, None, True),
    "blend": (lambda w, t, m, i: w * m + t * ~m, {"t": nn.Parameter(torch.ones(4, 4))}, None, False),
    "wider theta": (
        lambda w, t, m, i: w.masked_scatter(m, t.float()), {"t": nn.Parameter(torch.ones(6).double())}, None, True,
    ),
    "wider result": (lambda w, t, m, i: w.masked_scatter(m, t).double(), {}, None, True),
    "transposed": (lambda w, t, m, i: w.masked_scatter(m, t).t(), {}, None, True),
    "part": (lambda w, t, m, i: w.masked_scatter(m, t)[:2], {}, None, True),
}  # fmt: skip


@pytest.mark.parametrize("name", ROLES)
def test_which_sources_are_weight_and_theta(name: str) -> None:
    call, change, expected, by_mask = ROLES[name]
    given = {"w": nn.Parameter(torch.randn(4, 4)), "t": nn.Parameter(torch.randn(6)),
             "m": torch.arange(16).view(4, 4) < 6, "i": torch.tensor([0, 2])} | change  # fmt: skip
    gm = fx.symbolic_trace(lambda x, w, t, m, i: F.linear(x, call(w, t, m, i)))
    x = torch.ones(3, 4, dtype=torch.float64 if name == "wider result" else torch.float32)
    Examples(gm).run(x, *(one.detach().clone() for one in given.values()))
    layer = next(node for node in gm.graph.nodes if weight_formula.is_layer(node))
    ctx: Any = SimpleNamespace(analysis=analyse(gm))
    formula = formula_of(layer.args[1], layer, ctx)
    assert formula is not None
    values = {node: given[node.name] for node in gm.graph.find_nodes(op="placeholder") if node.name in given}
    found = merged_weight.by_roles(formula, values)
    assert (None if found is None else " ".join(source.name for source in found.sources)) == expected
    assert merged_weight.scatters_by_mask(formula) == by_mask
