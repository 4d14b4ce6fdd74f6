"""What a candidate should cost: a roofline of expressions over sizes and configuration, against the card's ceilings."""

from dataclasses import dataclass

import sympy


@dataclass(frozen=True)
class Cost:
    """Cost of one launch as sympy expressions over the problem's and the configuration's names.

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
