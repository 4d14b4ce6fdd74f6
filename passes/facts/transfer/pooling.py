"""Pooling, padding and upsampling."""

import math
from typing import Any

from sparsecomp.passes.facts.registry import Facts, Items, Kept, Lost, LostKind, Result, transfer
from sparsecomp.passes.facts.transfer.pointwise import stored
from sparsecomp.passes.graph.canonicalize import CanonicalOp, dtype_of, shape_of
from sparsecomp.reference import facts as algebra
from sparsecomp.reference.facts import SparsityFact


@transfer("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(op: CanonicalOp, facts: Facts) -> Result:
    """Picks elements, so every domain survives; the padding of -inf never wins a window that holds an element.

    With dilation a window can lie in the padding altogether and give -inf.
    """
    fact = facts.of(op.input)
    padding, dilation = _tuple(op.get("padding"), 1), _tuple(op.get("dilation"), 1)
    if fact is not None and any(padding) and any(step != 1 for step in dilation):
        return Lost(LostKind.UNSUPPORTED, "dilated max pooling with padding can give -inf")
    return Items((fact,)) if op.get("return_indices") else fact


@transfer("prims::_low_memory_max_pool_with_offsets")
def lowered_max_pool(op: CanonicalOp, facts: Facts) -> Result:
    """What Inductor makes of max pooling: elements, and where in its window each lay."""
    _, _, _, padding, dilation, *_ = op.args.values()
    fact = facts.of(op.input)
    return Items((fact,)) if not any(padding) or all(step == 1 for step in dilation) else None


@transfer("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(op: CanonicalOp, facts: Facts) -> Result:
    """Picks elements."""
    fact = facts.of(op.input)
    return Items((fact,)) if op.get("return_indices") else fact


@transfer("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(op: CanonicalOp, facts: Facts) -> Result:
    """Windows of 2**n elements that all count give multiples of 2**-n; others keep only the zeros."""
    fact = facts.of(op.input)
    rank = int(op.name[-2])
    count = math.prod(_tuple(op.get("kernel_size"), rank))
    padded = any(_tuple(op.get("padding"), 1))
    divisor = op.get("divisor_override")
    all_count = not op.get("ceil_mode") and (not padded or op.get("count_include_pad") is not False)
    if fact is not None and (padded or op.get("ceil_mode")):
        # a window over the edge has fewer elements: the others count as zeros
        fact = algebra.join((fact, algebra.constant(0)))
    return average(op, fact, count if all_count or divisor else None, divisor)


@transfer("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_avg_pool(op: CanonicalOp, facts: Facts) -> Result:
    """As average pooling, where the windows are all of one known size."""
    rank = int(op.name[-2])
    before, after = shape_of(op.input), shape_of(op.node)
    if before is None or after is None or op.step_mode != "s":
        return average(op, facts.of(op.input), None)
    windows = list(map(_adaptive_window, before[-rank:], after[-rank:]))
    return average(op, facts.of(op.input), None if None in windows else math.prod(one or 1 for one in windows))


def _adaptive_window(before: int | None, after: int | None) -> int | None:
    """Elements of each window along a dimension; a larger map has each element so many times."""
    if not before or not after or before % after and after % before:
        return None
    return max(before // after, 1)


def average(op: CanonicalOp, fact: SparsityFact | None, count: int | None, divisor: int | None = None) -> Result:
    """The mean of `count` elements (None: unknown or varying), divided by `divisor` instead if given."""
    if fact is None:
        return None
    if count is not None and fact.on_grid:
        total = sum_of(fact, count)
        divide_by = float(divisor or count)
        if total is not None and algebra.is_dyadic(divide_by):
            mean = algebra.rescale(total, 1.0 / divide_by, dtype_of(op.node))
            if mean is not None and mean.lo is not None and mean.hi is not None:
                return mean
    lo = 0 if fact.non_negative and (divisor is None or divisor > 0) else None
    kept = algebra.zeros_kept(fact, finite=False)
    kept = SparsityFact(lo, None, origin=kept.origin, exact_zeros=kept.exact_zeros, source=kept.source)
    return Kept(kept, Lost(LostKind.RESCALES, f"{op.name} keeps zeros but not the domain: it averages"))


def sum_of(fact: SparsityFact, count: int) -> SparsityFact | None:
    """The sum of `count` elements on a grid, before it is stored."""
    lo = None if fact.lo is None else fact.lo * count
    hi = None if fact.hi is None else fact.hi * count
    total = SparsityFact(lo, hi, True, fact.scale, fact.origin, fact.exact_zeros, True, fact.finite, fact.source)
    # Partial sums of one sign never pass the total, so float32 accumulators hold them all exactly.
    return total if total.within(-(2**24), 2**24) else None


def _tuple(value: Any, rank: int) -> tuple[int, ...]:
    if isinstance(value, tuple | list):
        return tuple(value) * rank if len(value) == 1 else tuple(value)
    return (value,) * rank if isinstance(value, int) else (0,)


@transfer("pad")
def pad(op: CanonicalOp, facts: Facts) -> Result:
    """Constant padding joins the constant; the other modes copy elements."""
    fact = facts.of(op.input)
    if op.get("mode") != "constant":
        return fact
    value = op.get("value")
    return algebra.join((fact, stored(facts, 0 if value is None else value, op.input)))


@transfer("im2col")
def im2col(op: CanonicalOp, facts: Facts) -> Result:
    """`F.unfold`: copies of elements, and zeros where it pads."""
    fact = facts.of(op.input)
    return fact if op.get("padding") == 0 or fact is None else algebra.join((fact, algebra.constant(0)))


@transfer("interpolate")
def interpolate(op: CanonicalOp, facts: Facts) -> Result:
    """Nearest copies elements; the other modes mix them."""
    fact = facts.of(op.input)
    if fact is None or op.get("mode", "nearest") in ("nearest", "nearest-exact"):
        return fact
    return Lost(LostKind.MIXES, f"{op.get('mode')} interpolation mixes values and ends the domain")
