"""What it takes to gather from few lines that each lie in one piece, a warp's threads at neighbouring entries."""

import sympy

_LANES = 32
_LINE = 128
"""Bytes of a line of L1."""
_CYCLE = 1 / 1.7e9
_LEAST = 10
"""Cycles that a warp's load takes in any case."""


def gather_seconds(
    rows: sympy.Expr, width: sympy.Expr, count: sympy.Expr, batch: sympy.Expr, entries: sympy.Expr,
    variation: sympy.Expr, itemsize: sympy.Expr,
) -> sympy.Expr:  # fmt: skip
    """Seconds to visit each entry of `rows` once for each of `count` lines of `width` numbers.

    A warp's load touches the lines of L1 that its entries span. Fitted to an H200, float32 and float16, 512 to 4096
    squared, 2 to 64 lines: 0.7 to 1.3 of what was measured, 2 where half is stored and lines are two.
    """
    mean = sympy.Max(entries / rows, 1)
    longest = sympy.Min(mean * (1 + variation), width)
    spanned = sympy.Max(sympy.Min(_LANES, 1 + _LANES * width * itemsize / (_LINE * mean)), _LEAST)
    loads = batch * rows * count * sympy.Max(longest / _LANES, 1)
    processors = sympy.Symbol("processors", nonnegative=True)
    return 1e-6 + 5e-8 * longest / _LANES + loads * spanned * _CYCLE / processors
