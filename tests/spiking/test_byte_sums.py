"""Sums and products of widened bytes become bytes where they fit one: which do, and that floats stay the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import rewritten
from torch import Tensor

RULE = "byte_sums"


def spikes(x: Tensor) -> Tensor:
    return (x > 0).to(torch.int8).float()


def in_place(x: Tensor) -> Tensor:
    total = spikes(x)
    total += spikes(-x).flip(0).to(torch.int8).float()
    total += spikes(x)
    return total


def seen_before(x: Tensor) -> Tensor:
    """A view of what is written is read before, and not after."""
    total = spikes(x)
    most = total.view(-1).amax()
    total += spikes(-x)
    return total * most.sqrt()


def seen_after(x: Tensor) -> tuple[Tensor, Tensor]:
    first = spikes(x)
    rows = first.view(2, 6)
    first += spikes(-x)
    return first, rows


def kept_before(x: Tensor) -> tuple[Tensor, Tensor]:
    first = spikes(x)
    total = first.add_(spikes(-x))
    return total, first + 0.5


def written_bytes(x: Tensor) -> Tensor:
    fired = (x > 0).to(torch.int8)
    widened = fired.float()
    fired.zero_()
    return widened + spikes(-x)


def written_floats(x: Tensor) -> Tensor:
    total = spikes(x) + spikes(x)
    total[0] = 7.5
    return total + spikes(-x)


def written_behind(x: Tensor) -> tuple[Tensor, Tensor]:
    """The sum is right when it is read, and written to afterwards."""
    total = spikes(x) + spikes(x)
    both = total + spikes(-x)
    total.mul_(0.5)
    return both, total


def picked_by_written(x: Tensor) -> Tensor:
    place = (x[:, 0] > 0).long()
    picked = spikes(x).index_select(0, place)
    place.zero_()
    return picked + spikes(-x)


def doubled(x: Tensor, times: int) -> Tensor:
    total = spikes(x)
    for _ in range(times):
        total = total + total
    return total


SUMS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "sum": (lambda x: spikes(x) + spikes(-x), 1),
    "of a sum": (lambda x: (spikes(x) + spikes(-x)) + spikes(x), 2),
    "difference": (lambda x: spikes(x) - spikes(-x), 1),
    "product": (lambda x: spikes(x) * (spikes(x) + spikes(-x)), 2),
    "taken from one": (lambda x: spikes(-x) * (1.0 - spikes(x)), 2),
    "rsub": (lambda x: torch.rsub(spikes(x), 3), 1),
    "by name": (lambda x: torch.add(spikes(x), other=spikes(-x)), 1),
    "broadcast": (lambda x: spikes(x) + spikes(x)[:1], 1),
    "in place": (in_place, 2),
    "in place, seen before": (seen_before, 1),
    "in place, seen after": (seen_after, 0),
    "in place, read after": (kept_before, 0),
    "whole number": (lambda x: spikes(x) + 5, 1),
    "no whole number": (lambda x: spikes(x) + 0.5, 0),
    "zero, whose sign counts": (lambda x: spikes(x) * -0.0, 0),
    "negative": (lambda x: (spikes(x) - 1) * spikes(-x), 1),
    "times -1": (lambda x: spikes(x) * -1, 0),
    "beyond a byte": (lambda x: doubled(x, 7), 6),
    "number beyond a byte": (lambda x: spikes(x) + 128, 0),
    "alpha": (lambda x: torch.add(spikes(x), spikes(-x), alpha=2), 0),
    "of a float": (lambda x: spikes(x) + (x > 0.5).float(), 0),
    "of fractions": (lambda x: spikes(x) + 0.25 * spikes(-x), 0),
    "bytes written": (written_bytes, 0),
    "floats written": (written_floats, 1),
    "floats written behind": (written_behind, 2),
    "wider": (lambda x: spikes(x).double() + (x > 0).to(torch.int8).double(), 0),
    "of halves": (lambda x: (x > 0).to(torch.int8).half() + (x < 0).to(torch.int8).half(), 1),
    "strides that are zero": (lambda x: (x[:1] > 0).to(torch.int8).expand(3, 4).float() + spikes(x), 0),
    "pooled": (lambda x: F.max_pool2d(spikes(x).view(1, 1, 3, 4), 2, 1) + 3, 2),
    "pooled along one dimension": (lambda x: F.max_pool1d(spikes(x), 2) * 0.7, 1),
    "pooled, with places": (lambda x: F.max_pool1d(spikes(x), 2, return_indices=True)[0] + 0.5, 0),
    "viewed": (lambda x: spikes(x).view(-1) + spikes(-x).flatten(), 1),
    "picked": (lambda x: spikes(x)[torch.tensor([2, 0])] + spikes(-x)[:2], 1),
    "picked by what is written": (picked_by_written, 0),
    "a view in place": (lambda x: spikes(x).view(-1).add_(spikes(-x).view(-1)), 0),
    "turned": (lambda x: (x.T > 0).to(torch.int8).float() + (x.T < 0).to(torch.int8).float(), 1),
}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", SUMS)
def test_which_sums_are_made_in_bytes(name):
    make, made = SUMS[name]
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, report = rewritten(make, x, strict=True)
        expected = make(x)
    for ours, theirs in zip(*((one,) if isinstance(one, Tensor) else one for one in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert torch.equal(ours.signbit(), theirs.signbit()) and ours.stride() == theirs.stride()
    assert [site.rewritten for site in report.sites if site.rule == RULE] == [True] * made


def test_with_gradients_floats_stay():
    _, report = rewritten(lambda x: spikes(x) + spikes(-x), torch.randn(3, 4), strict=True)
    assert not [site for site in report.sites if site.rule == RULE]


def test_a_chain_is_made_in_bytes_up_to_a_length():
    """Each product reads the one before twice: they are 2^69 ways through them all."""

    def model(x: Tensor) -> Tensor:
        product = spikes(x)
        for _ in range(70):
            product = product * product
        return product

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, report = rewritten(model, x, strict=True)
    assert torch.equal(found, spikes(x))
    assert len([site for site in report.sites if site.rule == RULE]) == 64
