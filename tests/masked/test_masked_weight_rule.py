"""The rule for masked weights: every spelling, what is folded, what is left and why, and that changes are seen."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked_models import FACTORS, INPUTS, SHAPES, SPELLINGS, Masked
from rewriting import Examples, rewritten, site
from torch import Tensor, fx, nn

from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.engine.rule import OWNED
from sparsecomp.passes.masked import masked_weight


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("layer", SHAPES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_folded_once_and_gives_eager_bits(spelling, layer):
    model = Masked(SPELLINGS[spelling], layer)
    x = torch.randn(INPUTS[layer], generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found, report = rewritten(model, x, implementation="auto", strict=True, frozen=True)
        assert torch.equal(found, model(x))
    done = site(report, "masked_weight")
    assert done.rewritten and done.implementation == "folded dense"
    size = "x".join(map(str, SHAPES[layer]))
    assert f"{size} at" in done.reason and f"sparsity by torch's {layer}: " in done.reason
    assert "_sparsecomp_constant0" in report.graph_after and "_sparsecomp_constant1" not in report.graph_after


GIVEN = {
    "x": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "w": nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(1))),
    "m": torch.eye(5, 4), "n": torch.full((5, 4), 0.5), "s": torch.full((4,), 0.5), "u": torch.ones(5, 4),
}  # fmt: skip
"""An input, a parameter, a mask, two buffers that are none, and a tensor that is no module's."""


def _mask_written(x: Any, w: Any, m: Any, n: Any, s: Any, u: Any) -> Any:
    y = F.linear(x, w * m)
    m.mul_(2)
    return y


def _read_too(x: Any, w: Any, m: Any, n: Any, s: Any, u: Any) -> Any:
    weight = w * m
    return F.linear(x, weight), weight.sum()


def _viewed_too(x: Any, w: Any, m: Any, n: Any, s: Any, u: Any) -> Any:
    weight = w * m
    return F.linear(x, weight), weight.view(4, 5)


FOLDED = "folded dense"
JUDGED: dict[str, tuple[Callable[..., Any], str | None]] = {
    # of what is `GIVEN`; None where there is no site
    "masked": (lambda x, w, m, n, s, u: F.linear(x, w * m), FOLDED),
    "masks alone": (lambda x, w, m, n, s, u: F.linear(x, n * m), FOLDED),
    "matmul": (lambda x, w, m, n, s, u: x @ (w * m).t(), FOLDED),
    "matmul of a masked input": (lambda x, w, m, n, s, u: (w * m) @ x.t(), None),
    "addmm": (lambda x, w, m, n, s, u: torch.addmm(s[:1], x, (w * m).t()), FOLDED),
    "embedding": (lambda x, w, m, n, s, u: F.embedding(x.abs().long(), w * m), FOLDED),
    "plain": (lambda x, w, m, n, s, u: F.linear(x, w), None),
    "twice": (lambda x, w, m, n, s, u: F.linear(x, w * 2), None),
    "a sum": (lambda x, w, m, n, s, u: F.linear(x, w + m), None),
    "scaled columns": (lambda x, w, m, n, s, u: F.linear(x, w * s), None),
    "no mask": (lambda x, w, m, n, s, u: F.linear(x, w * n), "`n` holds other values than 0 and 1"),
    "masked input": (lambda x, w, m, n, s, u: F.linear(x, u * m), None),
    "of an input": (
        lambda x, w, m, n, s, u: F.linear(x, torch.where(m > 0, w, u)),
        "`u` is no parameter or buffer, but an input of the graph",
    ),
    "unknown factor": (lambda x, w, m, n, s, u: F.linear(x, w * u), None),
    "computed": (
        lambda x, w, m, n, s, u: F.linear(x, torch.where(m > 0, w, u.softmax(0))),
        "it depends on `softmax`, which is computed in each call",
    ),
    "written": (_mask_written, "`m` may be written to in this graph"),
    "read too": (_read_too, "`sum_1` reads it too, so it is computed all the same"),
    "viewed too": (_viewed_too, FOLDED),
    "no layer": (lambda x, w, m, n, s, u: (w * m).sum(), None),
}  # fmt: skip


def _told(model: Callable[..., Any], eager: bool = False, **options: Any) -> str | None:
    """What the rule says of the one site of a graph, if there is one; results stay."""
    gm = fx.symbolic_trace(model)
    copies = lambda: [value.clone() for value in GIVEN.values()]  # noqa: E731
    with torch.no_grad():
        Examples(gm).run(*copies())
        expected = model(*copies())
        placeholders = dict(zip(GIVEN, gm.graph.find_nodes(op="placeholder"), strict=True))
        for name, node in placeholders.items():
            node.meta[OWNED] = name not in "xu"
            if name in "mns":
                node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    values = {node: GIVEN[name] for name, node in placeholders.items() if name not in "xu"}
    parsed = Options(strict=True, **{"frozen": True, **options})
    report = pipeline.run_rules(gm, parsed, values=values, eager=eager, rules=[masked_weight.RULE])
    with torch.no_grad():
        torch.testing.assert_close(gm(*copies()), expected, rtol=0, atol=0)
    if not report.sites:
        return None
    (found,) = report.sites
    return found.implementation if found.rewritten else found.reason


@pytest.mark.parametrize("name", JUDGED)
def test_which_weights_are_folded(name):
    model, expected = JUDGED[name]
    with torch.no_grad():
        found = _told(model)
    assert (found is None) == (expected is None)
    assert found is None or expected in found


@pytest.mark.parametrize(
    ("options", "grad", "expected"),
    [
        ({"implementation": "dense"}, False, "implementation='dense' was asked for"),
        ({"frozen": False}, False, "frozen=True promises that it is not"),
        ({"frozen": "buffers"}, False, "frozen=True promises that it is not"),
        ({"eager": True}, False, "gradients are on"), ({}, True, "gradients are on, and its mul is elementwise"),
    ],
)  # fmt: skip
def test_when_a_masked_weight_stays(options, grad, expected):
    with torch.set_grad_enabled(grad):
        assert expected in _told(lambda x, w, m, n, s, u: F.linear(x, w * m), **options)


def test_a_weight_of_buffers_is_not_folded_where_the_graph_runs_op_by_op():
    with torch.no_grad():
        assert "the graph runs op by op" in _told(JUDGED["masks alone"][0], eager=True)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("layer", SHAPES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_training_is_left_alone_with_eager_gradients(spelling, layer):
    model = Masked(SPELLINGS[spelling], layer)
    x = torch.randn(INPUTS[layer], generator=torch.Generator().manual_seed(2))
    grads = []
    for call in (lambda x: rewritten(model, x, implementation="auto", strict=True, frozen=True), model):
        given = x.clone().requires_grad_()
        out = call(given)
        if call is not model:
            out, report = out
            assert not report.rewritten and "as it was written" in site(report, "masked_weight").reason
        out.square().mean().backward()
        grads.append([out, given.grad, *(getattr(model, name).grad for name in FACTORS)])
        model.zero_grad()
    for found, wanted in zip(*grads, strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or torch.equal(found, wanted)


def _drawn(seed: int) -> list[tuple[str, int, float]]:
    """Steps in place and out of place, each with a mask and a number."""
    draw = random.Random(seed)
    steps = ("mul", "mul_", "masked_fill", "masked_fill_", "set", "row", "view", "alias", "back", "where", "where")
    return [(draw.choice(steps), draw.randrange(4), draw.choice((0.0, 0.25))) for _ in range(draw.randint(1, 4))]


def _by_steps(m: Any, steps: list[tuple[str, int, float]]) -> Tensor:
    weight = m.weight.clone()
    for step, which, number in steps:
        mask = (m.mask, ~m.mask, m.numbers > 0, m.phi.abs() > 0.5)[which]
        if step in ("mul", "mul_"):
            weight = getattr(weight, step)(mask)
        elif step.startswith("masked_fill"):
            weight = getattr(weight, step)(mask, number)
        elif step == "set":
            weight[mask] = number
        elif step == "row":
            weight[which].mul_(2)
        elif step == "view":
            weight.view(-1)[m.index] = number
        elif step == "alias":
            weight.diagonal().add_(1)
        elif step == "back":
            weight = (weight.t() + number).t().contiguous()
        else:
            weight = torch.where(mask, weight, m.phi)
    return weight


@pytest.mark.slow(reason="many formulas")
def test_random_formulas_fold_to_eager_bits_or_stay():
    folded, x = [], torch.randn(2, 352, generator=torch.Generator().manual_seed(2))
    for seed in range(30):
        steps = _drawn(seed)
        model = Masked(lambda m, steps=steps: _by_steps(m, steps))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            wanted = model(x)
            found, report = rewritten(model, x, implementation="auto", strict=True, verify=False, frozen=True)
        assert torch.equal(found, wanted), steps
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        folded.append(len(report.rewritten))
    assert 12 <= sum(folded) < 30, folded
