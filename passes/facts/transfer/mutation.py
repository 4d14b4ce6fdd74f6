"""Operators that write into part of their first argument.

The returned fact holds for the whole tensor after the write; the analysis applies it to every alias.
"""

from typing import Any

from sparsecomp.passes.facts.registry import Facts, Lost, LostKind, Result, transfer
from sparsecomp.passes.facts.transfer.pointwise import stored
from sparsecomp.passes.graph.canonicalize import CanonicalOp
from sparsecomp.reference import facts as algebra


def _partly(op: CanonicalOp, facts: Facts, value: Any) -> Result:
    """Part of the tensor is overwritten: an element is an old one or a new one."""
    written = stored(facts, value, op.input)
    if written is None:
        return Lost(LostKind.MUTATED, f"{op.name} writes `{value}`, whose values are unknown")
    before = facts.of(op.input)
    return None if before is None else algebra.join((before, written))


@transfer("setitem")
def setitem(op: CanonicalOp, facts: Facts) -> Result:
    """`out[index] = value`."""
    return _partly(op, facts, op.get("value"))


@transfer("copy")
def copy(op: CanonicalOp, facts: Facts) -> Result:
    """`out.copy_(src)` overwrites everything."""
    return stored(facts, op.get("src"), op.input)


@transfer("fill")
def fill(op: CanonicalOp, facts: Facts) -> Result:
    """`out.fill_(value)` overwrites everything."""
    return stored(facts, op.get("value"), op.input)


@transfer("index_fill")
def index_fill(op: CanonicalOp, facts: Facts) -> Result:
    """Rows become a number."""
    return _partly(op, facts, op.get("value"))


@transfer("index_copy")
def index_copy(op: CanonicalOp, facts: Facts) -> Result:
    """Rows are replaced."""
    return _partly(op, facts, op.get("source"))


@transfer("masked_scatter")
def masked_scatter(op: CanonicalOp, facts: Facts) -> Result:
    """Masked elements are replaced."""
    return _partly(op, facts, op.get("source"))


@transfer("index_put")
def index_put(op: CanonicalOp, facts: Facts) -> Result:
    """Indexed elements are replaced, or added to with `accumulate`."""
    if op.get("accumulate"):
        return Lost(LostKind.MUTATED, "index_put with accumulate adds an unknown number of times")
    return _partly(op, facts, op.get("values"))


@transfer("scatter")
def scatter(op: CanonicalOp, facts: Facts) -> Result:
    """Indexed elements are replaced."""
    return _partly(op, facts, op.get("src"))
