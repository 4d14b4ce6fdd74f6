"""Scores that are masked twice are masked once, by what both masks keep, or stay as they are."""

import math
from collections.abc import Callable

import attention_models as models
import pytest
import torch
from rewriting import rewritten, site
from torch import Tensor

TOKENS = 70
LEAST = torch.finfo(torch.float32).min
Masked = Callable[[Tensor, Tensor], Tensor]


def there() -> Tensor:
    """Of two sequences, one of which ends early: whether a token is there."""
    return (torch.arange(TOKENS) < torch.tensor([[TOKENS], [30]]))[:, None, None]


def causal() -> Tensor:
    return models.by_tril(TOKENS)


def numbers(kept: Tensor) -> Tensor:
    return torch.zeros(kept.shape).masked_fill(~kept, -math.inf)


MERGED: dict[str, Masked] = {
    "filled": lambda s, m: s.masked_fill(~causal(), -math.inf).masked_fill(~m, -math.inf),
    "chosen": lambda s, m: torch.where(m, torch.where(causal(), s, -math.inf), torch.tensor(-math.inf)),
    "both ways": lambda s, m: torch.where(~causal(), -math.inf, s).masked_fill(m.logical_not(), float("-inf")),
    "three": lambda s, m: s.masked_fill(~m, -math.inf).masked_fill(~causal(), -math.inf).masked_fill(
        torch.arange(TOKENS) == 0, -math.inf
    ),
    "scaled": lambda s, m: s.masked_fill(~causal(), -math.inf).masked_fill(~m, -math.inf) * 0.5,
    "added": lambda s, m: s + numbers(causal()) + numbers(m),
    "least numbers added": lambda s, m: s + torch.where(causal(), 0.0, LEAST) + (1.0 - m.float()) * LEAST,
}  # fmt: skip
APART: dict[str, Masked] = {
    "filled and added": lambda s, m: s.masked_fill(~causal(), -math.inf) + numbers(m),
    "other numbers": lambda s, m: s.masked_fill(~causal(), -math.inf).masked_fill(~m, -1e9),
    "a bias": lambda s, m: s + torch.arange(TOKENS).float() + numbers(m),
    "in place": lambda s, m: s.masked_fill_(~causal(), -math.inf).masked_fill_(~m, -math.inf),
    "read between": lambda s, m: (one := s.masked_fill(~causal(), -1e4)).masked_fill(~m, -1e4) + one,
}


def attend(masked: Masked) -> Callable[..., Tensor]:
    return lambda q, k, v, m: masked(q @ k.mT * 0.25, m).softmax(-1) @ v


def given() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, TOKENS, 16, generator=random, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("name", MERGED)
def test_two_masks_are_one_to_the_rules(name: str) -> None:
    function, operands = attend(MERGED[name]), given()
    found, report = rewritten(function, *operands, there(), strict=True)
    seen = site(report, "block_attention")
    assert seen.rewritten, seen.reason
    right = function(*operands, there())
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5, equal_nan=True)
    grads = [torch.autograd.grad(one.nansum(), operands) for one in (found, right)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", APART)
def test_what_is_no_mask_twice_stays(name: str) -> None:
    function = attend(APART[name])
    with torch.no_grad():
        found, report = rewritten(function, *given(), there(), strict=True)
        torch.testing.assert_close(found, function(*given(), there()), rtol=1e-5, atol=1e-6, equal_nan=True)
    assert not any(one.rewritten for one in report.sites if one.rule == "block_attention")


def test_a_mask_that_is_written_to_between_is_read_before() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        m = m.clone()
        scores = (q @ k.mT).masked_fill(~causal(), -math.inf)
        dropped = ~m
        m.logical_not_()
        return scores.masked_fill(dropped, -math.inf).softmax(-1) @ v

    def other(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        m = m.clone()
        scores = (q @ k.mT).masked_fill(m, -math.inf)
        m.logical_not_()
        return scores.masked_fill(m & ~causal(), -math.inf).softmax(-1) @ v

    for one in (function, other):
        with torch.no_grad():
            found, _ = rewritten(one, *given(), there(), strict=True)
            torch.testing.assert_close(found, one(*given(), there()), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_what_is_no_attention_is_left_as_it_is() -> None:
    def function(x: Tensor, m: Tensor) -> Tensor:
        return x.masked_fill(m, 0.0).masked_fill(~m.flip(-1), 0.0).relu()

    _, report = rewritten(function, torch.randn(2, 8), torch.rand(2, 8) < 0.5)
    assert not report.graph_after or report.graph_after.count("masked_fill(") >= 2
