"""The rule for masked weights: every spelling, what is folded, what is left and why, and that changes are seen."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import rewritten, site
from torch import Tensor, nn

SHAPES = {"linear": (384, 352), "conv2d": (128, 128, 3, 3)}
INPUTS = {"linear": (3, 5, 352), "conv2d": (2, 128, 5, 4)}


class Masked(nn.Module):
    """A layer whose weight a test gives."""

    def __init__(
        self, effective: Callable[[Any], Tensor], layer: str = "linear", values: Any = None, shape: Any = None
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shape = shape or SHAPES[layer]
        mask = torch.rand(shape, generator=generator) > 0.7
        self.weight = nn.Parameter(torch.randn(shape, generator=generator))
        self.phi = nn.Parameter(torch.randn(shape, generator=generator))
        self.theta = nn.Parameter(torch.randn(int((~mask).sum()), generator=generator))
        self.bias = nn.Parameter(torch.randn(shape[0], generator=generator))
        self.register_buffer("mask", mask)
        self.register_buffer("numbers", mask.float() if values is None else torch.where(mask, *values))
        self.register_buffer("index", (~mask).flatten().nonzero()[:, 0])
        self.register_buffer("places", (~mask).nonzero().t().contiguous())
        self.effective, self.layer = effective, layer

    def forward(self, x: Tensor) -> Tensor:
        weight = self.effective(self)
        return F.linear(x, weight, self.bias) if self.layer == "linear" else F.conv2d(x, weight, self.bias, padding=1)


def by_setitem(m: Any) -> Tensor:
    weight = m.weight.clone()
    weight[~m.mask] = m.theta
    return weight


def by_view(m: Any) -> Tensor:
    weight = torch.zeros_like(m.weight)
    weight.view(-1)[m.index] = m.theta
    return m.mask * m.weight + weight


def by_diagonal(m: Any) -> Tensor:
    weight = m.mask * m.weight
    weight.diagonal().mul_(2)
    return weight


SPELLINGS: dict[str, Callable[[Any], Tensor]] = {
    "mask * weight": lambda m: m.mask * m.weight,
    "numbers * weight": lambda m: m.numbers * m.weight,
    "weight * mask.float()": lambda m: m.weight * m.mask.float(),
    "mul method": lambda m: m.weight.mul(m.mask.to(m.weight.dtype)),
    "blend": lambda m: m.numbers * m.weight + (1 - m.numbers) * m.phi,
    "blend, inverted": lambda m: m.mask * m.weight + ~m.mask * m.phi,
    "where": lambda m: torch.where(m.mask, m.weight, 0),
    "where phi": lambda m: torch.where(m.mask, m.weight, m.phi),
    "where not": lambda m: torch.where(~m.mask, 0.0, m.weight),
    "where of numbers": lambda m: torch.where(m.numbers > 0.5, m.weight, m.phi),
    "masked_fill": lambda m: m.weight.masked_fill(~m.mask, 0),
    "masked_scatter": lambda m: m.weight.masked_scatter(~m.mask, m.theta),
    "index_put": lambda m: m.weight.index_put(tuple(m.places), m.theta),
    "scatter": lambda m: m.weight.flatten().scatter(0, m.index, m.theta).view_as(m.weight),
    "index_copy": lambda m: m.weight.flatten().index_copy(0, m.index, m.theta).view(m.weight.shape),
    "setitem": by_setitem,
    "setitem of a view": by_view,
    "diagonal in place": by_diagonal,
    "in place": lambda m: m.weight.clone().mul_(m.mask),
    "by scores": lambda m: m.weight * (m.phi.sigmoid() > 0.5),
    "by blocks": lambda m: m.weight * m.mask[::2].repeat_interleave(2, 0),
    "moved": lambda m: (m.weight.movedim(0, 1) * m.mask.movedim(0, 1)).movedim(1, 0).contiguous(),
    "twice": lambda m: m.weight * m.mask * (m.weight.abs() > 0.1),
}
FACTORS = ("weight", "theta", "phi", "bias")


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
    assert f"sparsecomp.folded_{layer.removesuffix('2d')}.default(" in report.graph_after


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
