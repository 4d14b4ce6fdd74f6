"""Element-wise arithmetic: sums, products, clamping, rounding, selection."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from sparsecomp.passes.facts.registry import Facts, Kept, Lost, LostKind, Result, is_integer, transfer
from sparsecomp.passes.facts.spike_sources import straight_through
from sparsecomp.passes.graph.canonicalize import CanonicalOp, dtype_of, numel_of
from sparsecomp.reference import facts as algebra
from sparsecomp.reference.facts import Origin, SparsityFact


def unknown_operand(op: CanonicalOp, operand: Any) -> Lost:
    """An operand without a fact ends the domain."""
    return Lost(LostKind.UNKNOWN_OPERAND, f"{op.name} with `{operand}`, whose values are unknown, ends the domain")


@transfer("add", "sub", "rsub")
def add(op: CanonicalOp, facts: Facts) -> Result:
    """`input + alpha * other`; intervals add up. The straight-through idiom is recognised first."""
    left, right = op.input, op.get("other")
    if op.name == "rsub":
        left, right = right, left
    if op.get("alpha", 1) != 1:
        return Lost(LostKind.UNSUPPORTED, f"{op.name} with alpha is not analysed")
    minus = op.name != "add"
    idiom = straight_through(left, right, minus, facts)
    if idiom is not None:
        return idiom
    a, b = facts.of(left), facts.of(right)
    if a is None and b is None:
        return None
    if a is None or b is None:
        known, unknown = (right, left) if a is None else (left, right)
        return unknown_operand(op, unknown) if isinstance(known, fx.Node) else None
    dtype = dtype_of(op.node)
    if minus:
        # Negating first would wrap in an unsigned dtype although the difference need not.
        b = algebra.mirrored(b)
    result = algebra.add_facts(a, b, dtype)
    if result is not None and not result.integral and (a.integral or b.integral):
        return Kept(result, Lost(LostKind.RESCALES, f"{op.name} of values on different grids ends the domain"))
    return result


@transfer("mul")
def mul(op: CanonicalOp, facts: Facts) -> Result:
    """Zero where either operand is; on the grid of both scales if both have one."""
    left, right = op.input, op.get("other")
    a, b = facts.of(left), facts.of(right)
    if a is not None and b is not None:
        return algebra.multiply_facts(a, b, dtype_of(op.node))
    if a is None and b is None:
        return None
    fact, known, other = (a, left, right) if a is not None else (b, right, left)
    assert fact is not None
    if isinstance(other, fx.Node) and numel_of(other) == 1 and _floating(other):
        return algebra.multiply_by_node(fact, other.name)
    if fact.is_zero:
        return replace(fact, finite=False)
    if not fact.exact_zeros:
        return unknown_operand(op, other) if isinstance(known, fx.Node) else None
    return Kept(algebra.zeros_kept(fact, finite=False), unknown_operand(op, other))


def _floating(value: Any) -> bool:
    dtype = dtype_of(value)
    return dtype is not None and dtype.is_floating_point


@transfer("div")
def div(op: CanonicalOp, facts: Facts) -> Result:
    """Division by a constant rescales the grid; by anything else it keeps the zeros only (and 0 / 0 is NaN)."""
    fact, divisor = facts.of(op.input), op.get("other")
    if op.get("rounding_mode") is not None:
        return _whole_quotient(op, fact)
    if fact is None:
        return None
    if isinstance(divisor, int | float):
        if algebra.is_dyadic(float(divisor)):
            return algebra.rescale(fact, 1.0 / divisor, dtype_of(op.node))
        # too small a divisor makes an infinite scale, and an infinite one a scale of zero
        if fact.is_binary_if_finite and divisor > 0 and 0 < (scale := 1.0 / divisor) < math.inf:
            return algebra.fit_dtype(replace(fact, scale=scale), dtype_of(op.node))
    return Kept(
        algebra.zeros_kept(fact, finite=False),
        Lost(LostKind.RESCALES, f"division by `{divisor}` keeps zeros but not the domain"),
    )


@transfer("floor_divide")
def floor_divide(op: CanonicalOp, facts: Facts) -> Result:
    """Integers, zero where the dividend is, unless the divisor is zero or NaN."""
    return _whole_quotient(op, facts.of(op.input))


def _whole_quotient(op: CanonicalOp, dividend: SparsityFact | None) -> SparsityFact:
    origin = Origin.UNKNOWN if dividend is None else dividend.origin
    source = op.node.name if dividend is None else dividend.source
    return SparsityFact(None, None, True, origin=origin, exact_zeros=True, source=source)


@transfer("neg")
def neg(op: CanonicalOp, facts: Facts) -> Result:
    """The interval mirrored."""
    fact = facts.of(op.input)
    return None if fact is None else algebra.negate(fact, dtype_of(op.node))


@transfer("abs", "square")
def magnitude(op: CanonicalOp, facts: Facts) -> Result:
    """Non-negative."""
    fact = facts.of(op.input)
    if fact is None:
        # Integer types have a most negative number without a positive twin.
        return algebra.interval(0, None) if _floating(op.input) else None
    if op.name == "square":
        squared = algebra.multiply_facts(fact, fact, torch.float64)
        assert squared is not None
        return algebra.fit_dtype(replace(squared, lo=max(squared.lo or 0, 0)), dtype_of(op.node))
    bounds = [bound for bound in (fact.lo, fact.hi) if bound is not None]
    hi = max(map(abs, bounds)) if len(bounds) == 2 else None
    if isinstance(fact.scale, str) or fact.scale < 0:
        return algebra.zeros_kept(fact, finite=fact.finite)
    lo = max(fact.lo or 0, -(fact.hi or 0), 0)
    return algebra.fit_dtype(replace(fact, lo=lo, hi=hi), dtype_of(op.node))


@transfer("pow")
def power(op: CanonicalOp, facts: Facts) -> Result:
    """Positive powers keep {0, 1}, everything else is forgotten."""
    fact, exponent = facts.of(op.input), op.get("other")
    if fact is None:
        return None
    positive = isinstance(exponent, int | float) and exponent > 0
    if positive and fact.is_binary_if_finite:
        return fact
    return Lost(LostKind.UNSUPPORTED, f"power {exponent} ends the domain")


def relu_of_unknown(op: CanonicalOp) -> SparsityFact:
    """What is known of any ReLU's result."""
    return SparsityFact(0, None, origin=Origin.RELU, exact_zeros=True, source=op.node.name)


@transfer("relu")
def relu(op: CanonicalOp, facts: Facts) -> Result:
    """Cuts off the negative part. Of unknown values it makes exact zeros (and passes NaN on)."""
    fact = facts.of(op.input)
    if fact is None:
        return relu_of_unknown(op)
    clipped = _clip(fact, 0, None)
    if clipped.integral or clipped.exact_zeros:
        return clipped
    return replace(clipped, origin=Origin.RELU, exact_zeros=True)


@transfer("clamp", "clamp_min", "clamp_max", "relu6", "hardtanh")
def clamp(op: CanonicalOp, facts: Facts) -> Result:
    """Clips the interval; a bound that is not a whole number ends the grid."""
    low, high = (0, 6) if op.name == "relu6" else (op.get("min", op.get("min_val")), op.get("max", op.get("max_val")))
    fact = facts.of(op.input)
    if not all(bound is None or isinstance(bound, int | float) for bound in (low, high)):
        return None if fact is None else Lost(LostKind.UNSUPPORTED, f"{op.name} with tensor bounds is not analysed")
    low, high = None if low == -math.inf else low, None if high == math.inf else high
    if not all(bound is None or math.isfinite(bound) for bound in (low, high)):
        return Lost(LostKind.UNSUPPORTED, f"{op.name} to NaN or infinity ends the domain")
    dtype = dtype_of(op.node)
    if not all(bound is None or _holds(dtype, bound) for bound in (low, high)):
        return Lost(LostKind.UNSUPPORTED, f"{op.name} to what its dtype cannot hold ends the domain")
    # a bound is rounded to the dtype, too; without one, bfloat16 rounds most
    return algebra.fit_dtype(_clamped(fact, low, high, op.node.name), dtype or torch.bfloat16)


def _holds(dtype: torch.dtype | None, number: float) -> bool:
    """Whether a number does not wrap around in a dtype; None may be any."""
    if dtype is not None and dtype.is_floating_point:
        return True
    limits = torch.iinfo(dtype or torch.int8)
    return (limits.min if dtype is not None else 0) <= number <= limits.max


def _clamped(fact: SparsityFact | None, low: float | None, high: float | None, source: str) -> SparsityFact:
    if low is not None and high is not None and low > high:
        low = high
    whole = all(bound is None or float(bound).is_integer() for bound in (low, high))
    if fact is None:
        zeros = (low == 0 or high == 0) and whole
        origin = Origin.RELU if zeros else Origin.UNKNOWN
        lo, hi = _floor(low), _ceil(high)
        return SparsityFact(lo, hi, origin=origin, exact_zeros=zeros, source=source)
    if fact.integral and whole:
        return _clip(fact, low, high)
    clipped = _clip(fact.values_only(), low, high)
    keeps_zero = (low is None or low <= 0) and (high is None or high >= 0)
    return replace(clipped, exact_zeros=fact.exact_zeros and keeps_zero)


def _floor(bound: float | None) -> int | None:
    return None if bound is None else math.floor(bound)


def _ceil(bound: float | None) -> int | None:
    return None if bound is None else math.ceil(bound)


def _clip(fact: SparsityFact, low: float | None, high: float | None) -> SparsityFact:
    """`fact` within bounds; a grid other than the whole numbers is given up. Fractions round outwards."""
    if low == 0 and high is None and fact.non_negative:
        return fact
    if fact.scale != 1.0:
        fact = fact.values_only()
    lo = _clip_bound(fact.lo, _floor(low), _floor(high))
    hi = _clip_bound(fact.hi, _ceil(low), _ceil(high))
    lo = _floor(low) if lo is None else lo
    hi = _ceil(high) if hi is None else hi
    zeros = fact.exact_zeros
    if fact.integral:
        zeros = (lo is None or lo <= 0) and (hi is None or hi >= 0)
    return replace(fact, lo=lo, hi=hi, exact_zeros=zeros)


def _clip_bound(bound: int | None, low: int | None, high: int | None) -> int | None:
    if bound is None:
        return None
    bound = bound if low is None else max(bound, low)
    return bound if high is None else min(bound, high)


@transfer("round", "floor", "ceil", "trunc")
def rounding(op: CanonicalOp, facts: Facts) -> Result:
    """Whole numbers within the bounds, which are whole; NaN and infinity pass."""
    fact = facts.of(op.input)
    if fact is None:
        return SparsityFact(None, None, True, exact_zeros=True, source=op.node.name)
    if fact.integral and fact.scale == 1.0 and fact.exact:
        return fact
    if fact.is_nearly_binary and op.name == "round":
        return replace(fact, exact=True)
    plain = fact.values_only()
    return replace(plain, integral=True, exact_zeros=True)


@transfer("sign", "sgn")
def sign(op: CanonicalOp, facts: Facts) -> Result:
    """-1, 0 or 1; `sgn` passes NaN on."""
    fact = facts.of(op.input)
    lo = 0 if fact is not None and fact.non_negative else -1
    origin = fact.origin if fact is not None else Origin.SPIKE
    finite = fact is not None and fact.finite
    return replace(algebra.integers(lo, 1, op.node.name, origin), finite=finite)


@transfer("maximum", "minimum")
def extremum(op: CanonicalOp, facts: Facts) -> Result:
    """One of the two operands."""
    return either(op, facts, op.input, op.get("other"))


@transfer("where")
def where(op: CanonicalOp, facts: Facts) -> Result:
    """One of the two values; `where(condition)` alone gives indices."""
    if op.get("input") is None:
        return Lost(LostKind.UNSUPPORTED, "where with one argument gives indices")
    return either(op, facts, op.get("input"), op.get("other"))


@transfer("masked_fill")
def masked_fill(op: CanonicalOp, facts: Facts) -> Result:
    """The input or the fill value; filling with zero keeps what is zero."""
    fact, value = facts.of(op.input), op.get("value")
    if fact is None and facts.of(value) is not None and facts.of(value).is_zero:  # type: ignore[union-attr]
        return SparsityFact(None, None, origin=Origin.MASK, exact_zeros=True, source=op.node.name)
    written = stored(facts, value, op.input)
    if fact is None or written is None:
        return unknown_operand(op, op.input if fact is None else value)
    return algebra.join((fact, written))


def either(op: CanonicalOp, facts: Facts, first: Any, second: Any) -> Result:
    """Each element is one of the first operand or one of the second."""
    a, b = facts.of(first), facts.of(second)
    if a is None and b is None:
        return None
    if a is None or b is None:
        return unknown_operand(op, first if a is None else second)
    joined = algebra.join_two(a, b)
    # operands of different dtypes are promoted, which may round
    alike = dtype_of(first) is not None and dtype_of(first) == dtype_of(second)
    return joined if alike else algebra.fit_dtype(joined, dtype_of(op.node))


@transfer("bitwise_and", "bitwise_or", "bitwise_xor")
def bitwise(op: CanonicalOp, facts: Facts) -> Result:
    """Bits of bits are bits."""
    a, b = facts.of(op.input), facts.of(op.get("other"))
    if a is not None and b is not None and a.is_binary and b.is_binary:
        return algebra.binary(a.source or b.source, a.origin)
    return None if a is None and b is None else Lost(LostKind.UNSUPPORTED, f"{op.name} of integers is not analysed")


@transfer("bitwise_not")
def bitwise_not(op: CanonicalOp, facts: Facts) -> Result:
    """The complement of a bool; of an integer it is `-x - 1`."""
    fact = facts.of(op.input)
    if fact is None:
        return None
    if dtype_of(op.input) is torch.bool:
        return algebra.binary(fact.source, Origin.MASK)
    return Lost(LostKind.UNSUPPORTED, "bitwise not of integers is not analysed")


@transfer("sigmoid", "softmax", "hardsigmoid")
def unit_interval(op: CanonicalOp, facts: Facts) -> Result:
    """Between 0 and 1; no zeros are promised."""
    return algebra.interval(0, 1)


@transfer("tanh", "sin", "cos", "erf")
def symmetric_interval(op: CanonicalOp, facts: Facts) -> Result:
    """Between -1 and 1."""
    return algebra.interval(-1, 1)


@transfer("dropout", "dropout1d", "dropout2d", "dropout3d")
def dropout(op: CanonicalOp, facts: Facts) -> Result:
    """The identity in evaluation; in training zeros join, and survivors are scaled by 1 / (1 - p)."""
    fact = facts.of(op.input)
    if op.is_identity or op.get("p") == 0:
        return fact
    scaled = _survivors(fact, op.get("p"), dtype_of(op.node))
    if scaled is not None:
        return scaled
    reason = Lost(LostKind.RESCALES, "dropout in training rescales its input: zeros stay, the domain ends")
    kept = SparsityFact(None, None, origin=Origin.MASK, exact_zeros=True, source=op.node.name)
    if fact is not None:
        lo = 0 if fact.non_negative else None
        origin = fact.origin if fact.exact_zeros else Origin.MASK
        kept = replace(kept, lo=lo, origin=origin, source=fact.source or op.node.name)
    return Kept(kept, reason)


@transfer("alpha_dropout", "feature_alpha_dropout")
def alpha_dropout(op: CanonicalOp, facts: Facts) -> Result:
    """The identity in evaluation."""
    if op.is_identity:
        return facts.of(op.input)
    return Lost(LostKind.UNSUPPORTED, f"{op.name} in training drops to a number other than zero")


def _survivors(fact: SparsityFact | None, p: Any, dtype: torch.dtype | None) -> SparsityFact | None:
    """Dropout of integers: exact where 1 / (1 - p) is a power of two, else a mask times it, rounded in some order."""
    if not isinstance(p, int | float) or not 0 < p < 1:
        return None
    zero, scale = algebra.constant(0), 1 / (1 - p)
    kept = algebra.join((fact, zero))
    if kept is None or not kept.integral:
        return None
    if algebra.is_dyadic(scale):
        scaled = algebra.rescale(kept, scale, dtype)
        return scaled if scaled is not None and scaled.integral else None
    return replace(kept, scale=scale, exact=False) if kept.scale == 1.0 and kept.within(0, 1) else None


@transfer("leaky_relu", "gelu", "silu", "mish", "elu", "selu", "celu", "sqrt", "softsign")
def zero_preserving(op: CanonicalOp, facts: Facts) -> Result:
    """Functions with f(0) = 0 keep exact zeros and nothing else."""
    fact = facts.of(op.input)
    if fact is None or not fact.exact_zeros:
        return None if fact is None else Lost(LostKind.UNSUPPORTED, f"{op.name} ends the domain")
    return Kept(
        algebra.zeros_kept(fact, finite=False),
        Lost(LostKind.RESCALES, f"{op.name} keeps zeros but not the domain"),
    )


@transfer(
    "float", "double", "half", "bfloat16", "to", "type_as", "type", "int", "long", "short", "byte", "char",
    "prims::convert_element_type",
)  # fmt: skip
def convert(op: CanonicalOp, facts: Facts) -> Result:
    """A change of dtype or device: grids survive where the dtype holds them; bool input gives {0, 1}."""
    fact = facts.of(op.input)
    return None if fact is None else cast(fact, dtype_of(op.input), dtype_of(op.node) or _named_dtype(op))


def _named_dtype(op: CanonicalOp) -> torch.dtype | None:
    named = {
        "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
        "int": torch.int32, "long": torch.int64, "short": torch.int16, "byte": torch.uint8, "char": torch.int8,
    }  # fmt: skip
    if op.name in named:
        return named[op.name]
    return next((value for value in op.args.values() if isinstance(value, torch.dtype)), None)


def cast(fact: SparsityFact, source: torch.dtype | None, target: torch.dtype | None) -> SparsityFact | Lost:
    """`fact` after conversion from dtype `source` to `target` (None: unknown)."""
    if source is not None and source == target:
        return fact
    whole = fact.integral and fact.exact and fact.finite and fact.scale == 1.0
    if not whole and (target is None or is_integer(target)):
        # Conversion truncates, and makes arbitrary integers of NaN and infinity.
        name = "an unknown dtype" if target is None else target
        return Lost(LostKind.RESCALES, f"conversion to {name} of values off the integer grid ends the domain")
    if not algebra.is_dyadic(fact.scale):
        # The scale was rounded to the old dtype and would be rounded again.
        fact = algebra.zeros_kept(fact, finite=False)
    fitted = algebra.fit_dtype(fact, target)
    return Lost(LostKind.UNSUPPORTED, f"conversion to {target} is not analysed") if fitted is None else fitted


def stored(facts: Facts, value: Any, into: Any) -> SparsityFact | None:
    """The fact of `value` once it is written into the dtype of `into`."""
    fact = facts.of(value)
    if fact is None:
        return None
    result = cast(fact, dtype_of(value), dtype_of(into))
    return result if isinstance(result, SparsityFact) else None


@transfer("bool")
def to_bool(op: CanonicalOp, facts: Facts) -> Result:
    """Any tensor as a bool is {0, 1}."""
    fact = facts.of(op.input)
    return algebra.binary(fact.source if fact else op.node.name, fact.origin if fact else Origin.MASK)
