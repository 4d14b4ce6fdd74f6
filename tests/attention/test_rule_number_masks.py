"""Numbers that are added to scores, made of booleans in the graph: judged as these, computed as they are."""

import math
from collections.abc import Callable

import attention_models as models
import pytest
import torch
import torch.nn.functional as F
from attention_models import N
from rewriting import rewritten, site
from test_rule_block_attention import Refused, judged, tokens
from torch import Tensor

import sparsecomp

LOWEST = torch.finfo(torch.float32).min


def there() -> Tensor:
    """Of two sequences, one of which ends early; its last queries keep nothing in the masks that are made of it."""
    return torch.arange(N) < torch.tensor([[N], [70]])


def _bert(m: Tensor) -> Tensor:
    return (1.0 - m[:, None, None].to(torch.float32)) * LOWEST


def _inverted(m: Tensor) -> Tensor:
    inverted = 1.0 - m[:, None, None].expand(-1, 1, N, -1).float()
    return inverted.masked_fill(inverted.to(torch.bool), LOWEST)


def _combined(m: Tensor) -> Tensor:
    causal = torch.triu(torch.full((N, N), LOWEST), diagonal=1)
    return causal[None, None].expand(2, 1, N, N) + _inverted(m)


def _updated(m: Tensor) -> Tensor:
    causal = torch.full((N, N), LOWEST).triu(1)
    causal *= torch.arange(N) > torch.arange(N)[:, None]
    causal = causal[None, None].expand(2, 1, -1, -1).clone()
    padded = causal[..., :N] + _bert(m)
    causal[..., :N] = causal.masked_fill(padded != 0, LOWEST)
    return causal


def _in_place(m: Tensor) -> Tensor:
    bias = torch.zeros(2, 1, N, N)
    bias.masked_fill_(~m[:, None, None], -math.inf)
    return bias


Made = Callable[[Tensor], Tensor]
OF_BOOLEANS: dict[str, Made] = {
    "chosen": lambda m: torch.where(m[:, None, None], 0.0, -math.inf),
    "chosen by tensors": lambda m: torch.where(m[:, None, None], torch.tensor(0.0), torch.tensor(-math.inf)),
    "dropped": lambda m: torch.where(~m[:, None, None], -math.inf, 0.0),
    "filled": lambda m: torch.zeros(2, 1, 1, N).masked_fill(~m[:, None, None], -math.inf),
    "cast to infinity": lambda m: torch.where(
        m[:, None, None], torch.zeros((), dtype=torch.float64), torch.full((), -1e300, dtype=torch.float64)
    ).float(),
    "queries too": lambda m: torch.where(m[:, None, :, None] & m[:, None, None], 0.0, -math.inf),
}  # fmt: skip
"""Of 0 and -inf: the booleans are scanned."""
OF_NUMBERS: dict[str, Made] = {
    "filled in place": lambda m: torch.zeros(2, 1, 1, N).masked_fill_(~m[:, None, None], -math.inf),
    "filled in place before": _in_place,
    "a view": lambda m: torch.where(m, 0.0, -math.inf)[:, None, None],
    "logarithm": lambda m: m[:, None, None].float().log(),
    "chosen, least": lambda m: torch.where(m[:, None, None], 0.0, LOWEST),
    "filled, least": lambda m: torch.zeros(2, 1, 1, N).masked_fill(m[:, None, None] == 0, LOWEST),
    "product": _bert,
    "product of whole numbers": lambda m: _bert(m.long()),
    "inverted": _inverted,
    "with a causal one": _combined,
    "changed in parts": _updated,
    "lesser": lambda m: torch.minimum(_bert(m), torch.full((N, N), -math.inf).triu(1)),
}
"""The numbers themselves are scanned."""
BIASES: dict[str, Made] = {
    "distances": lambda m: (torch.arange(N)[:, None] - torch.arange(N)).abs() * -0.5 * m[:, None, None],
    "a mask and distances": lambda m: _bert(m) + torch.arange(N).float(),
    "a finite number": lambda m: torch.where(m[:, None, None], 0.0, -1e9),
    "one in the place of zeros": lambda m: torch.where(m[:, None, None], 1.0, -math.inf),
    "written to before": lambda m: torch.zeros(2, 1, 1, N).add_(m[:, None, None].float()).masked_fill(
        ~m[:, None, None], -math.inf
    ),
}  # fmt: skip


def by_hand(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + added).softmax(-1) @ v


def reading(made: Made, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, m: attend(q, k, v, made(m))


EVERY = OF_BOOLEANS | OF_NUMBERS | BIASES
DROPPING = ("a mask and distances", "one in the place of zeros", "written to before")
"""Biases of which a sequence of 70 tokens drops the last of three blocks of keys."""


@pytest.mark.parametrize("name", EVERY)
def test_each_is_judged_by_what_made_it_and_gives_what_eager_gives(name: str) -> None:
    model = Refused(reading(EVERY[name], F.scaled_dot_product_attention))
    x = tokens().requires_grad_()
    found, seen = judged(model, x, there())
    assert seen.rewritten, seen.reason
    share = 5 / 6 if name in DROPPING else 1.0 if name in BIASES else 0.75
    assert f"{share:.0%} of its blocks are assumed to be kept" in seen.reason
    right = model(x, there())
    torch.testing.assert_close(found, right, atol=5e-6, rtol=1e-4)
    grads = [torch.autograd.grad(one.square().sum(), x)[0] for one in (found, right)]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def _filled(number: float) -> Tensor:
    """(2, 1, 1, N), as much as `there` has."""
    return torch.zeros(2, 1, 1, N).masked_fill(~there()[:, None, None], number)


GIVEN: dict[str, tuple[Callable[[], Tensor], float]] = {
    "infinity": (lambda: _filled(-math.inf), 0.75),
    "the least number": (lambda: _filled(LOWEST).expand(2, 1, N, N).contiguous(), 0.75),
    "causal": (lambda: torch.full((N, N), LOWEST).triu(1), 6 / 9),
    "nothing dropped": (lambda: torch.zeros(N, N), 0.75),
    "a bias": (lambda: torch.linspace(0, 1, N)[None, None, None], 1.0),
    "a bias and infinity": (lambda: torch.linspace(0, 1, N) + _filled(-math.inf), 5 / 6),
    "a bias and the least number": (lambda: torch.linspace(0, 1, N) + _filled(LOWEST), 5 / 6),
}


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, by_hand])
@pytest.mark.parametrize("name", GIVEN)
def test_numbers_that_are_given_are_judged_by_what_they_are_in_the_first_call(
    name: str, attend: Callable[..., Tensor]
) -> None:
    """And what another call holds is added, whatever was seen."""
    model, (made, share) = Refused(attend), GIVEN[name]
    with torch.no_grad():
        found, seen = judged(model, tokens(), made())
        assert seen.rewritten, seen.reason
        assert f"{share:.0%} of its blocks are assumed to be kept" in seen.reason
        assert "by the call that it is compiled for" in seen.reason
        torch.testing.assert_close(found, model(tokens(), made()), atol=5e-6, rtol=1e-4)


@pytest.mark.slow(reason="compiles a model")
def test_numbers_of_other_calls_are_others() -> None:
    model = Refused(by_hand)
    compiled = torch.compile(model, backend="sparsecomp", options={"implementation": "skip"})
    with torch.no_grad():
        for number in (-math.inf, LOWEST, 3.0, 0.0):
            mask = _filled(number)
            torch.testing.assert_close(compiled(tokens(), mask), model(tokens(), mask), atol=5e-6, rtol=1e-4)
    assert [one.rewritten for one in sparsecomp.last_report().sites if one.rule == "block_attention"] == [True]


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, by_hand])
@pytest.mark.parametrize("name", OF_BOOLEANS)
def test_of_infinities_the_booleans_are_scanned(name: str, attend: Callable[..., Tensor]) -> None:
    model = Refused(reading(OF_BOOLEANS[name], attend))
    with torch.no_grad():
        found, report = rewritten(model, tokens(), there(), strict=True)
        right = model(tokens(), there())
    assert site(report, "block_attention").rewritten
    (line,) = [one for one in report.graph_after.splitlines() if "sparsecomp.block_attention.default(" in one]
    _, alibi, added, _ = line.split("], ")[1].split(", ", 4)[1:]
    assert alibi == added == "None", line
    torch.testing.assert_close(found, right, atol=2e-6, rtol=1e-4, equal_nan=True)


def test_gradients_of_queries_that_keep_nothing_stay_those_of_numbers() -> None:
    """By hand they are NaN, and go to all keys, where those of scores that are replaced do not."""
    model = Refused(reading(OF_BOOLEANS["queries too"], by_hand))
    x = tokens().requires_grad_()
    found, seen = judged(model, x, there())
    assert seen.rewritten
    right = model(x, there())
    assert right.isnan().any() and not right.isnan().all()
    for one, other in zip((found, torch.autograd.grad(found.square().sum(), x)[0]),
                          (right, torch.autograd.grad(right.square().sum(), x)[0]), strict=True):  # fmt: skip
        torch.testing.assert_close(one, other, equal_nan=True, atol=1e-4, rtol=1e-4)


def test_booleans_that_are_written_to_are_not_what_is_read() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        m = m.clone()
        added = torch.where(m[:, None, None], 0.0, -math.inf)
        m.logical_not_()
        return F.scaled_dot_product_attention(q, k, v, added)

    model = Refused(attend)
    with torch.no_grad():
        found, seen = judged(model, tokens(), there())
        assert seen.rewritten, seen.reason
        torch.testing.assert_close(found, model(tokens(), there()), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["added", "added_in_front"])
def test_models_that_make_their_numbers_themselves(name: str) -> None:
    model = models.Written(models.BY_HAND[name])
    found, seen = judged(model, tokens(), there()[:, None, None])
    assert seen.rewritten and "75% of its blocks" in seen.reason, seen.reason
    torch.testing.assert_close(found, model(tokens(), there()[:, None, None]), atol=2e-6, rtol=1e-4)
