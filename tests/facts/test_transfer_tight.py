"""Element-wise operators on integers of every small range: the claim is the least and the greatest value there is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fact_checker import check
from torch import Tensor, fx
from torch.fx.passes.shape_prop import ShapeProp

from sparsecomp.reference.facts import Origin

X = torch.arange(-1.0, 5.0)  # thresholds at 0, 1 and 2 make every count from 0 to 3


def integers(lo: int, steps: int) -> Callable[[Tensor], Tensor]:
    """A tensor that holds every integer from `lo` to `lo + steps`."""

    def of(x: Tensor) -> Tensor:
        total = torch.zeros_like(x) + lo
        for threshold in range(steps):
            total = total + (x > threshold).float()
        return total

    return of


GRIDS: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": lambda k: -k,
    "square": lambda k: k.square(),
    "relu": F.relu,
    "relu6": lambda k: F.relu6(k + 5),
    "clamp 0 1": lambda k: k.clamp(0, 1),
    "clamp -1 2": lambda k: k.clamp(-1, 2),
    "clamp 2 -1": lambda k: k.clamp(2, -1),
    "clamp 1": lambda k: k.clamp(min=1),
    "clamp to 0": lambda k: k.clamp(max=0),
    "clamp_min": lambda k: torch.clamp_min(k, 0),
    "clamp_max": lambda k: torch.clamp_max(k, -1),
    "hardtanh": F.hardtanh,
    "round": torch.round,
    "floor": lambda k: torch.floor(k),
    "add 2": lambda k: k + 2,
    "2 minus": lambda k: 2 - k,
    "minus 2": lambda k: k - 2,
    "times -3": lambda k: k * -3,
    "over 4": lambda k: k / 4,
    "times 0": lambda k: k * 0,
    "plus a half": lambda k: k + 0.5,
    "where": lambda k: torch.where(k > -99, k, 1.0),
    "masked_fill": lambda k: k.masked_fill(k < -99, -1),
    "tril": lambda k: k.expand(6, 6).tril(),
    "pad 1": lambda k: F.pad(k, (1, 1), value=1.0),
    "pad 0": lambda k: F.pad(k, (0, 1)),
    "cat": lambda k: torch.cat((k, k * -1)),
    "maximum": lambda k: torch.maximum(k, torch.zeros_like(k)),
    "to int8": lambda k: k.to(torch.int8),
    "half": lambda k: k.half(),
    "copy": lambda k: torch.zeros_like(k).copy_(k),
}
JOINED = {"where": (1, 1), "masked_fill": (-1, -1), "maximum": (0, 0), "tril": (0, 0)}
"""What may be chosen of the other operand, of which the analysis does not know that it never is."""


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("name", GRIDS)
def test_claims_are_tight(name: str) -> None:
    for lo in range(-2, 2):
        for steps in range(4):
            made = integers(lo, steps)
            fact, result = _claimed(GRIDS[name], made)
            least, greatest = result.min().item(), result.max().item()
            if name in JOINED:
                whole = made(X)
                least, greatest = min(whole.min().item(), JOINED[name][0]), max(whole.max().item(), JOINED[name][1])
            assert fact is not None and fact.integral and fact.exact and fact.finite, f"{lo}..{lo + steps}: {fact}"
            assert (fact.lo * fact.scale, fact.hi * fact.scale) == (least, greatest), f"{lo}..{lo + steps}: {fact}"
            assert fact.exact_zeros == (fact.lo <= 0 <= fact.hi)


def _claimed(
    function: Callable[[Tensor], Tensor], made: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[Any, Tensor]:
    """The fact of what `function` returns for what `made` makes, after a checked run, and the value."""
    gm = fx.symbolic_trace(lambda x: function(made(x)))
    ShapeProp(gm).propagate(X)
    analysis = check(gm, X).analysis
    output = next(node for node in gm.graph.nodes if node.op == "output")
    return analysis.fact(output.args[0], at=output), gm(X).double()


INTERVALS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int | None, int | None, bool]]] = {
    # (least, greatest, exact zeros) of anything at all, and of a half of integers from -2 to 1
    "relu": (F.relu, (0, None, True)),
    "abs": (lambda x: x.abs(), (0, None, False)),
    "clamp 0 1": (lambda x: x.clamp(0, 1), (0, 1, True)),
    "clamp 0": (lambda x: x.clamp(min=0), (0, None, True)),
    "clamp to 0": (lambda x: x.clamp(max=0), (None, 0, True)),
    "clamp -1 1": (lambda x: x.clamp(-1, 1), (-1, 1, False)),
    "clamp 2 -1": (lambda x: x.clamp(2, -1), (-1, -1, False)),
    "clamp 0 -1": (lambda x: x.clamp(0, -1), (-1, -1, False)),
    "round": (torch.round, (None, None, True)),
    "floor of sigmoid": (lambda x: torch.floor(torch.sigmoid(x)), (0, 1, True)),
    "half": (lambda x: x // 2, (None, None, True)),
    "clamp 0 to 1.5": (lambda x: x.clamp(0, 1.5), (0, 2, False)),
    "clamp from -1.5": (lambda x: x.clamp(min=-1.5), (-2, None, False)),
    "relu6": (F.relu6, (0, 6, True)),
    "sigmoid": (torch.sigmoid, (0, 1, False)),
    "tanh": (torch.tanh, (-1, 1, False)),
    "relu of sigmoid": (lambda x: F.relu(torch.sigmoid(x)), (0, 1, True)),
    "relu of tanh": (lambda x: F.relu(torch.tanh(x)), (0, 1, True)),
    "clamped tanh": (lambda x: torch.tanh(x).clamp(0, 2), (0, 1, False)),
    "minus sigmoid": (lambda x: -torch.sigmoid(x), (-1, 0, False)),
    "sigmoid plus tanh": (lambda x: torch.sigmoid(x) + torch.tanh(x), (-1, 2, False)),
    "sigmoid times tanh": (lambda x: torch.sigmoid(x) * torch.tanh(x), (-1, 1, False)),
    "masked": (lambda x: x.masked_fill(x > 0, 0), (None, None, True)),
    "masked sigmoid": (lambda x: torch.sigmoid(x).masked_fill(x > 0, 0), (0, 1, False)),
    "pad sigmoid": (lambda x: F.pad(torch.sigmoid(x), (1, 1)), (0, 1, False)),
    "sign": (torch.sign, (-1, 1, True)),
    "sign of relu": (lambda x: torch.sign(F.relu(x)), (0, 1, True)),
    "tril": (lambda x: x.expand(6, 6).tril(), (None, None, True)),
    "tril of tanh": (lambda x: torch.tanh(x).expand(6, 6).tril(), (-1, 1, True)),
    "dropout of relu": (lambda x: F.dropout(F.relu(x), 0.3, True), (0, None, True)),
    "spikes times x": (lambda x: (x > 0).float() * x, (None, None, True)),
    "spikes over x": (lambda x: (x > 0).float() / (x + 9), (None, None, True)),
    "spikes times relu": (lambda x: (x > 0).float() * F.relu(x), (0, None, True)),
    "sum of relus": (lambda x: F.relu(x) + F.relu(-x), (0, None, True)),
    "relu plus sigmoid": (lambda x: F.relu(x) + torch.sigmoid(x), (0, None, False)),
    "relu from a half on": (lambda x: F.relu(x).clamp(min=0.5), (0, None, False)),
    "relu up to a half": (lambda x: F.relu(x).clamp(max=0.5), (0, 1, True)),
    "relu up to minus a half": (lambda x: F.relu(x).clamp(max=-0.5), (-1, 0, False)),
    "halves from a half on": (lambda x: ((x > 0).float() * 0.5).clamp(0.5, 2), (0, 1, False)),
    "halves up to one": (lambda x: ((x > 0).float() * 0.5).clamp(-1.5, 1), (0, 1, True)),
    "sum of spikes over a computed axis": (lambda x: (x > 0).float().sum((x.dim() - 1,)), (0, None, True)),
    "sum of relus over an axis": (lambda x: F.relu(x).sum(0), (0, None, True)),
    "sum of sigmoids over an axis": (lambda x: torch.sigmoid(x).sum(0), (0, None, False)),
    "sum of tanhs": (lambda x: torch.tanh(x).sum(), (None, None, False)),
    "rand": (lambda x: torch.rand_like(x), (0, 1, False)),
    "average of relu": (lambda x: F.avg_pool1d(F.relu(x)[None], 2), (0, None, True)),
    "sum of windows": (lambda x: F.avg_pool2d(F.relu(x)[None, None], (1, 2), divisor_override=1), (0, None, True)),
    "minus the sum": (lambda x: F.avg_pool2d(F.relu(x)[None, None], (1, 2), divisor_override=-1), (None, None, True)),
    "relu over 4": (lambda x: F.relu(x) / 4, (0, None, True)),
}


@pytest.mark.parametrize("name", INTERVALS)
def test_intervals_are_what_is_written_down(name: str) -> None:
    function, (lo, hi, zeros) = INTERVALS[name]
    fact, _ = _claimed(function)
    assert fact is not None and (fact.lo, fact.hi, fact.exact_zeros) == (lo, hi, zeros), fact


ORIGINS: dict[str, tuple[Callable[[Tensor], Tensor], Origin]] = {
    "threshold": (lambda x: x > 0, Origin.SPIKE),
    "spikes as bool": (lambda x: (x > 0).float().bool(), Origin.SPIKE),
    "relu": (F.relu, Origin.RELU),
    "relu as bool": (lambda x: F.relu(x).bool(), Origin.RELU),
    "anything as bool": (lambda x: x.bool(), Origin.MASK),
    "equal": (lambda x: x == 0, Origin.MASK),
    "spikes and spikes": (lambda x: torch.logical_and(x > 0, x > 1), Origin.SPIKE),
    "spikes and a mask": (lambda x: torch.logical_and(x > 0, x == 1), Origin.MASK),
    "spikes or spikes": (lambda x: (x > 0) | (x > 1), Origin.SPIKE),
    "not spikes": (lambda x: ~(x > 0), Origin.MASK),
    "sign of relu": (lambda x: torch.sign(F.relu(x)), Origin.RELU),
    "sign": (torch.sign, Origin.SPIKE),
    "dropout of relu": (lambda x: F.dropout(F.relu(x), 0.3, True), Origin.RELU),
    "dropout": (lambda x: F.dropout(x, 0.3, True), Origin.MASK),
    "dropout of counts": (lambda x: F.dropout((x > 0).float() + 2, 0.3, True), Origin.MASK),
    "relu of scaled spikes": (lambda x: F.relu((x > 0).float() * -0.3), Origin.SPIKE),
    "triangle": (lambda x: x.expand(6, 6).tril(), Origin.MASK),
    "masked": (lambda x: x.masked_fill(x > 0, 0), Origin.MASK),
    "clamp from zero": (lambda x: x.clamp(min=0), Origin.RELU),
    "clamp": (lambda x: x.clamp(-1, 1), Origin.UNKNOWN),
    "spikes times relu": (lambda x: (x == 1).float() * 2 * F.relu(x), Origin.UNKNOWN),
    "spikes over four": (lambda x: (x > 0).float() / 4, Origin.SPIKE),
    "rounded quotient of spikes": (lambda x: torch.div((x > 0).float(), x + 9, rounding_mode="floor"), Origin.SPIKE),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_where_zeros_come_from(name: str) -> None:
    function, origin = ORIGINS[name]
    fact, _ = _claimed(lambda x: function(x))
    assert fact is not None and fact.origin is origin, fact


def test_of_integers_nothing_is_claimed_that_the_least_one_breaks() -> None:
    fact, value = _claimed(lambda x: (x * 0 - 2**31).int().abs())
    assert value.min() < 0 and (fact is None or fact.lo is None)
    assert _claimed(lambda x: x.int().abs())[0] is None


def test_random_numbers_are_finite() -> None:
    assert _claimed(lambda x: torch.rand_like(x))[0].finite and not _claimed(torch.sigmoid)[0].finite


def test_zeros_are_told_by_the_name_of_what_made_them() -> None:
    spikes: dict[str, Callable[[Tensor], Tensor]] = {
        "dropout": lambda s: F.dropout(s, 1.0, True),
        "not": lambda s: ~s.bool(),
        "as bool": lambda s: s.bool(),
        "sum": lambda s: s + s,
        "rounded quotient": lambda s: s // 2,
        "sign, which makes its own": torch.sign,
    }
    sources = {name: _claimed(lambda x, f=f: f((x > 0).float()))[0].source for name, f in spikes.items()}
    assert sources.pop("sign, which makes its own") == "sign"
    assert set(sources.values()) == {"gt"}
    assert _claimed(lambda x: F.dropout(torch.sigmoid(x), 0.3, True))[0].source == "dropout"
