"""The rule for masked weights: every spelling, what is folded, what is left and why, and that changes are seen."""

import random
from typing import Any

import pytest
import torch
from masked_models import FACTORS, INPUTS, SHAPES, SPELLINGS, Masked
from rewriting import rewritten, site
from torch import Tensor


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
