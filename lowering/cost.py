"""What a candidate should cost: a roofline of expressions over sizes and configuration, against the card's ceilings.

The estimate need not be a time to believe in; it has to put the good configurations first, so that few are measured, and
to know on which side of dense a problem falls. Expressions are sympy's, so that they can be solved for a break-even point
and may keep a size that is only known at run time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import sympy

from sparsecomp.lowering.ceilings import Ceilings

if TYPE_CHECKING:
    from sparsecomp.lowering.template import Candidate

_ITEM_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


def sizes(names: str) -> tuple[sympy.Symbol, ...]:
    """Symbols for the numbers that a cost depends on, by the names of a problem's and a configuration's fields.

    ``itemsize`` stands for the bytes of a problem's ``dtype``, ``processors`` for the card's multiprocessors.
    """
    return tuple(sympy.Symbol(name, nonnegative=True) for name in names.split())


@dataclass(frozen=True)
class Cost:
    """Cost of one launch as expressions over the problem's, the configuration's and the card's numbers.

    Attributes:
        bytes: device memory traffic.
        operations: arithmetic; a multiply-accumulate counts two.
        rate: name of the ceiling that bounds the arithmetic, a field of ``Ceilings``.
        launches: kernel launches.
        seconds: what the above do not cover, such as waves that leave processors idle, in seconds.
    """

    bytes: sympy.Expr
    operations: sympy.Expr = sympy.Integer(0)
    rate: str = "fp32"
    launches: sympy.Expr = sympy.Integer(1)
    seconds: sympy.Expr = sympy.Integer(0)

    def expression(self, ceilings: Ceilings) -> sympy.Expr:
        """Seconds on a card: the longer of traffic and arithmetic, the launches, and the rest."""
        traffic = self.bytes / ceilings.bandwidth
        arithmetic = self.operations / getattr(ceilings, self.rate)
        return sympy.Max(traffic, arithmetic) + self.launches * ceilings.launch + self.seconds

    def estimate(self, values: Mapping[str, Any], ceilings: Ceilings) -> float:
        """Seconds for the given numbers; names that the expressions do not use are ignored.

        Raises:
            KeyError: a number that the expressions need is missing.
        """
        names, function = _compiled(self, ceilings)
        known = {**asdict(ceilings), **values}
        return float(function(*(known[name] for name in names)))


@lru_cache(maxsize=256)
def _compiled(cost: Cost, ceilings: Ceilings) -> tuple[tuple[str, ...], Callable[..., float]]:
    expression = cost.expression(ceilings)
    symbols = sorted(expression.free_symbols, key=str)
    return tuple(map(str, symbols)), sympy.lambdify(symbols, expression, modules="math")


def seconds(candidate: "Candidate[Any]", problem: Any, ceilings: Ceilings) -> float:
    """Estimated seconds of a candidate for a problem (a NamedTuple)."""
    numbers = {**problem._asdict(), **candidate.config}
    if "dtype" in numbers:
        numbers["itemsize"] = _ITEM_SIZES[numbers["dtype"]]
    return candidate.template.cost.estimate(numbers, ceilings)


def rank(candidates: "Sequence[Candidate[Any]]", problem: Any, ceilings: Ceilings) -> "list[Candidate[Any]]":
    """``candidates``, the cheapest by estimate first; equals stay in order."""
    return sorted(candidates, key=lambda candidate: seconds(candidate, problem, ceilings))


def break_even(cost: sympy.Expr, rival: sympy.Expr, unknown: sympy.Symbol) -> sympy.Expr | None:
    """Where ``cost`` meets ``rival``, for a cost linear in ``unknown`` (a density) and a rival free of it.

    Returns:
        The value as an expression over whatever else is symbolic, such as a batch; None where ``unknown`` costs nothing.
    """
    slope = sympy.diff(cost, unknown)
    if slope == 0:
        return None
    return sympy.simplify((rival - cost.subs(unknown, 0)) / slope)
