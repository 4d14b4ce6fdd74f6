"""Comparisons and logical operators: whatever goes in, bits come out."""

from sparsecomp.passes.facts.registry import Facts, Result, transfer
from sparsecomp.passes.graph.canonicalize import CanonicalOp
from sparsecomp.reference import facts as algebra
from sparsecomp.reference.facts import Origin


@transfer("ge", "gt", "le", "lt")
def threshold(op: CanonicalOp, facts: Facts) -> Result:
    """A threshold: the way every hard spike is made. NaN compares false, so a spike is never NaN."""
    return algebra.binary(op.node.name, Origin.SPIKE)


@transfer(
    "eq", "ne", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isinf", "isfinite", "any", "all"
)
def predicate(op: CanonicalOp, facts: Facts) -> Result:
    """A truth value; it keeps the origin of its operands if they agree."""
    known = [facts.of(value) for value in (op.input, op.get("other"))]
    origins = {fact.origin for fact in known if fact is not None}
    origin = origins.pop() if op.name.startswith("logical") and len(origins) == 1 else Origin.MASK
    return algebra.binary(op.node.name, origin)
