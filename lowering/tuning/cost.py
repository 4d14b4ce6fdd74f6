"""What a candidate should cost: a roofline of expressions over sizes and configuration, against what the card does.

The estimate need not be a time to believe in; it has to put the good configurations first, so that few are measured,
and to know on which side of dense a problem falls. Expressions are sympy's, so that they can be solved for a break-even
point and may keep a size that is only known at run time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import sympy
import torch

from sparsecomp.errors import SignatureError
from sparsecomp.lowering.tuning.cards import Card

if TYPE_CHECKING:
    from sparsecomp.lowering.tuning.template import Candidate


def sizes(names: str) -> tuple[sympy.Symbol, ...]:
    """Symbols for the numbers that a cost depends on, by the names of a problem's and a configuration's attributes.

    A name may have dots, as `conv.taps`. `itemsize` stands for the bytes of a problem's `dtype`; a number of
    `Card`, such as `processors`, for the card's.
    """
    return tuple(sympy.Symbol(name, nonnegative=True) for name in names.split())


@dataclass(frozen=True)
class Cost:
    """Cost of one launch as expressions over the problem's, the configuration's and the card's numbers.

    Attributes:
        bytes: device memory traffic.
        operations: arithmetic, which overlaps the traffic; a multiply-accumulate counts two.
        rate: name of the ceiling that bounds the arithmetic.
        launches: kernel launches.
        seconds: what the above do not cover, such as waves that leave processors idle, in seconds.
    """

    bytes: sympy.Expr
    operations: sympy.Expr = sympy.Integer(0)
    rate: str = "fp32"
    launches: sympy.Expr = sympy.Integer(1)
    seconds: sympy.Expr = sympy.Integer(0)

    def expression(self, card: Card, **values: float | sympy.Expr) -> sympy.Expr:
        """Seconds on a card: the longer of traffic and arithmetic, the launches, and the rest.

        Args:
            values: numbers, or expressions such as Dynamo's sizes, for symbols by name; others stay as they are.
        """
        traffic = self.bytes / card.bandwidth
        arithmetic = self.operations / getattr(card, self.rate)
        total = sympy.Max(traffic, arithmetic) + self.launches * card.launch + self.seconds
        numbers = {symbol: values.get(str(symbol), getattr(card, str(symbol), None)) for symbol in total.free_symbols}
        return total.subs({symbol: number for symbol, number in numbers.items() if number is not None})

    def estimate(self, values: Mapping[str, Any], card: Card) -> float:
        """Seconds for the given numbers; names that the expressions do not use are ignored.

        Raises:
            SignatureError: a number that the expressions need is missing.
        """
        names, function = _compiled(self, card)
        missing = [name for name in names if name not in values]
        if missing:
            raise SignatureError(f"the cost depends on {', '.join(missing)}: give a number for each")
        return float(function(*[values[name] for name in names]))


@lru_cache(maxsize=256)
def _compiled(cost: Cost, card: Card) -> tuple[tuple[str, ...], Callable[..., float]]:
    expression = cost.expression(card)
    symbols = sorted(expression.free_symbols, key=str)
    return tuple(map(str, symbols)), sympy.lambdify(symbols, expression, modules="math", cse=True)


def seconds(candidate: "Candidate[Any]", problem: Any, card: Card) -> float:
    """Estimated seconds of a candidate for a problem (a NamedTuple)."""
    cost, config = candidate.template.cost, candidate.config
    names, _ = _compiled(cost, card)
    numbers = {name: config[name] if name in config else _number(problem, name) for name in names}
    return cost.estimate(numbers, card)


def _number(problem: Any, name: str) -> Any:
    if name == "itemsize" and not hasattr(problem, name):
        return getattr(torch, problem.dtype).itemsize
    return attrgetter(name)(problem)


def rank(candidates: "Sequence[Candidate[Any]]", problem: Any, card: Card) -> "list[Candidate[Any]]":
    """`candidates`, the cheapest by estimate first; equals stay in order."""
    return sorted(candidates, key=lambda candidate: seconds(candidate, problem, card))


def waves(tiles: sympy.Expr, processors: sympy.Expr) -> sympy.Expr:
    """Tiles that the busiest of `processors` computes one after another."""
    return sympy.ceiling(tiles / processors)


def break_even(cost: sympy.Expr, rival: sympy.Expr, unknown: sympy.Symbol) -> sympy.Expr:
    """Greatest `unknown` (a density) at which `cost` is no more than a `rival` that does not depend on it.

    Args:
        cost: a sum, and maximum, of terms that grow linearly with `unknown`.

    Returns:
        An expression over whatever else is symbolic, such as a batch: negative where `cost` is always more, infinite
        where it never is.

    Raises:
        ValueError: `cost` is not of that form.
    """
    bounds = []
    for branch in _branches(cost, unknown):
        slope, at_zero = sympy.diff(branch, unknown), branch.subs(unknown, 0)
        if slope.has(unknown):
            raise ValueError(f"{cost} is not linear in {unknown}: give it as a sum of linear terms and maxima of them")
        if slope == 0:
            bounds.append(sympy.Piecewise((sympy.oo, at_zero <= rival), (-sympy.oo, True)))
        else:
            bounds.append((rival - at_zero) / slope)
    return sympy.Min(*bounds)


def _branches(cost: sympy.Expr, unknown: sympy.Symbol) -> list[sympy.Expr]:
    """Expressions that `cost` is the maximum of, with no maximum over `unknown` left in them."""
    maximum = next((found for found in cost.atoms(sympy.Max) if found.has(unknown)), None)
    if maximum is None:
        return [cost]
    parts: list[Any] = [cost.xreplace({maximum: part}) for part in maximum.args]
    return [branch for part in parts for branch in _branches(part, unknown)]
