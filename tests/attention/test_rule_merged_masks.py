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


def biases() -> Tensor:
    return torch.arange(TOKENS * TOKENS).view(TOKENS, TOKENS) % 7 * 0.25


MERGED: dict[str, Masked] = {
    "filled": lambda s, m: s.masked_fill(~causal(), -math.inf).masked_fill(~m, -math.inf),
    "chosen": lambda s, m: torch.where(m, torch.where(causal(), s, -math.inf), torch.tensor(-math.inf)),
    "both ways": lambda s, m: torch.where(~causal(), -math.inf, s).masked_fill(m.logical_not(), float("-inf")),
    "three": lambda s, m: s.masked_fill(~m, -math.inf).masked_fill(~causal(), -math.inf).masked_fill(
        torch.arange(TOKENS) == 0, -math.inf
    ),
    "scaled": lambda s, m: s.masked_fill(~causal(), -math.inf).masked_fill(~m, -math.inf) * 0.5,
    "added": lambda s, m: s + numbers(causal()) + numbers(m),
    "a bias and a mask": lambda s, m: s + biases() + numbers(m),
    "a mask and a bias": lambda s, m: s + numbers(causal()) + biases(),
    "a bias, filled": lambda s, m: (s + biases()).masked_fill(~causal(), -math.inf),
    "a bias, chosen": lambda s, m: torch.where(causal(), s + biases(), -math.inf),
    "least numbers added": lambda s, m: s + torch.where(causal(), 0.0, LEAST) + (1.0 - m.float()) * LEAST,
}  # fmt: skip
MERGED_IN_INFERENCE: dict[str, Masked] = {
    "filled and added": lambda s, m: s.masked_fill(~causal(), -math.inf) + numbers(m),
    "least numbers chosen and added": lambda s, m: torch.where(causal(), s, LEAST) + (1.0 - m.float()) * LEAST,
    "added and filled": lambda s, m: (s + numbers(m)).masked_fill(~causal(), LEAST),
    "a bias, filled by data": lambda s, m: (s + biases()).masked_fill(~m, -math.inf),
    "a bias, filled by the least number": lambda s, m: (s + biases()).masked_fill(~causal(), LEAST),
    "added and chosen": lambda s, m: torch.where(causal(), s + torch.where(m, 0.0, LEAST), LEAST),
}
"""In training scores that are replaced have no gradient, where all of a query's are."""
APART: dict[str, Masked] = {
    "other numbers": lambda s, m: s.masked_fill(~causal(), -math.inf).masked_fill(~m, -1e9),
    "two biases": lambda s, m: s + biases() + biases(),
    "a bias that is added later": lambda s, m: s.masked_fill(~causal(), -math.inf) + biases(),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MERGED_IN_INFERENCE)
def test_a_mask_that_fills_and_one_that_is_added_are_one_in_inference(name: str, dtype: torch.dtype) -> None:
    """Queries of which nothing is left are among them: the one that is first attends to itself alone."""
    function, mask = attend(MERGED_IN_INFERENCE[name]), there().clone()
    mask[1, ..., :3] = False
    operands = [one.detach().to(dtype) for one in given()]
    if dtype is torch.bfloat16:  # numbers of float32 make scores of that
        return _in_half_precision(name, operands, mask)
    with torch.no_grad():
        found, report = rewritten(function, *operands, mask, strict=True)
        right = function(*operands, mask)
    assert site(report, "block_attention").rewritten
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5, equal_nan=True)
    operands = given()
    found, report = rewritten(function, *operands, mask, strict=True)
    assert not any(one.rewritten for one in report.sites if one.rule == "block_attention")


def _in_half_precision(name: str, operands: list[Tensor], mask: Tensor) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        scores = MERGED_IN_INFERENCE[name]((q @ k.mT).float(), m)
        return scores.softmax(-1).to(v.dtype) @ v

    with torch.no_grad():
        found, report = rewritten(function, *operands, mask, strict=True)
        right = function(*operands, mask)
    assert site(report, "block_attention").rewritten
    torch.testing.assert_close(found, right, rtol=5e-2, atol=5e-2, equal_nan=True)


THREE_TIMES: dict[str, Masked] = {
    "filled twice and added": lambda s, m: s.masked_fill(~m, LEAST).masked_fill(~causal(), LEAST) + (
        1.0 - m.float()) * -1e30,
    "filled, added and filled": lambda s, m: (s.masked_fill(~m, LEAST) + (1.0 - m.float()) * -1e30).masked_fill(
        ~causal(), LEAST
    ),
    "filled by other numbers and added": lambda s, m: s.masked_fill(~causal(), -math.inf).masked_fill(~m, LEAST) + (
        1.0 - m.float()) * -1e30,
}  # fmt: skip


@pytest.mark.parametrize("name", THREE_TIMES)
def test_what_is_filled_in_replaces_what_was_filled_in_before(name: str) -> None:
    """Of a query that keeps nothing all least numbers are equal: none is the sum of two."""
    function, mask = attend(THREE_TIMES[name]), there().clone()
    mask[1, ..., :3] = False
    with torch.no_grad():
        found, _ = rewritten(function, *given(), mask, strict=True)
        right = function(*given(), mask)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5, equal_nan=True)


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
