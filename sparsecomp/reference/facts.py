"""What is known about the values of one tensor, and the arithmetic on that knowledge.

A rewrite may only treat an operand as spikes if its values are *proved* to be spikes. A `SparsityFact` is such a
proof: it says which values an element can take, and where the zeros come from. The functions here combine facts and
never claim more than floating-point arithmetic keeps: a sum whose bound passes the range in which a dtype holds every
integer loses its bound, a product of scales that would round loses its grid.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from numbers import Real

import torch

from sparsecomp.errors import InputError

MAX_SCALE_EXPONENT = 10
"""Power-of-two scales between 2**-10 and 2**10 stay exact and clear of underflow in every supported float dtype."""

INTEGER_LIMIT = {
    torch.float64: 2**53,
    torch.float32: 2**24,
    torch.float16: 2**11,
    torch.bfloat16: 2**8,
}
"""Up to which a dtype holds every whole number."""
_UNKNOWN_DTYPE_RANGE = (0, 127)
_SMALLEST_MAXIMUM = 65504.0  # the largest finite float16, for a dtype that is not known
_LARGEST: dict[torch.dtype | None, float] = {
    torch.float64: 1.7e308,
    torch.float32: 3.4e38,
    torch.float16: _SMALLEST_MAXIMUM,
    torch.bfloat16: 3.3e38,
}


class Origin(Enum):
    """Why a tensor has zeros."""

    SPIKE = "spike"
    RELU = "relu"
    MASK = "mask"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class SparsityFact:
    """What each element `e` of a tensor may be.

    With `integral`, `e == k * scale` for an integer `lo <= k <= hi` (`None`: no bound). Without it, `lo <= e <= hi`.
    If `scale` is a float that is not a power of two, `k * scale` means the product rounded to the tensor's dtype; if it
    is a string, it names the fx node (or module attribute) that holds the one-element factor, which may be anything:
    the claim is that `e` is 0, or what `k * factor` gives; `finite` says that nothing else makes it NaN or infinite.

    Attributes:
        lo: least `k` (or least value), None if unknown.
        hi: greatest `k` (or greatest value), None if unknown.
        integral: elements lie on the grid `k * scale`.
        scale: 1.0, another float, or the name of the node that holds the factor.
        origin: why there are zeros.
        exact_zeros: where the origin is silent, the element is exactly zero.
        exact: False if non-zero elements may be a few units in the last place off the grid (straight-through spikes).
            Zeros are still exact. A rule decides whether it may round.
        finite: False if an element may also be NaN or infinite, whatever else is claimed.
        source: the node or neuron that produced the zeros, for people to read.
    """

    lo: int | None = None
    hi: int | None = None
    integral: bool = False
    scale: float | str = 1.0
    origin: Origin = Origin.UNKNOWN
    exact_zeros: bool = False
    exact: bool = True
    finite: bool = False
    source: str = ""

    @property
    def is_binary(self) -> bool:
        """Every element is exactly 0 or 1: no NaN, no rounding."""
        return self.is_binary_if_finite and self.finite

    @property
    def is_binary_if_finite(self) -> bool:
        """Every element is exactly 0 or 1, or it is NaN or infinite."""
        return self.is_nearly_binary and self.exact

    @property
    def is_nearly_binary(self) -> bool:
        """Every element is 0 or 1 up to a few units in the last place, or it is NaN or infinite."""
        return self.integral and self.scale == 1.0 and self.within(0, 1)

    @property
    def is_scaled_binary(self) -> bool:
        """Every element is exactly 0 or `scale`."""
        return self.integral and self.exact and self.finite and self.within(0, 1)

    @property
    def largest(self) -> int:
        """The largest magnitude of its whole numbers, as far as bounds are known; 0 without any."""
        return max(abs(self.lo or 0), abs(self.hi or 0))

    @property
    def fits_int8(self) -> bool:
        """Every element divided by `scale` is exactly an integer of one signed byte."""
        return self.integral and self.exact and self.finite and self.within(-128, 127)

    @property
    def is_zero(self) -> bool:
        """Every element is zero (or not finite, unless `finite`)."""
        return self.integral and self.lo == 0 and self.hi == 0

    @property
    def non_negative(self) -> bool:
        """No element is below zero (NaN aside)."""
        return self.lo is not None and self.lo >= 0 and not isinstance(self.scale, str) and self.scale > 0

    @property
    def on_grid(self) -> bool:
        """Sums and products of elements stay on a grid: integral, exact, with a power of two as the scale."""
        return self.integral and self.exact and is_dyadic(self.scale)

    def within(self, lo: int, hi: int) -> bool:
        """Whether both bounds are known and lie in `[lo, hi]`."""
        return self.lo is not None and self.hi is not None and lo <= self.lo and self.hi <= hi

    def value_bounds(self) -> tuple[int | None, int | None]:
        """Integer bounds on the values themselves, `scale` included, rounded outwards."""
        if isinstance(self.scale, str):
            return (0, 0) if self.is_zero else (None, None)
        ends = [None if bound is None else bound * self.scale for bound in (self.lo, self.hi)]
        if self.scale < 0:
            ends.reverse()
        # beyond 2**53 no dtype holds every integer: such a bound would only make arithmetic overflow
        lo, hi = (None if end is None or abs(end) > 2**53 else end for end in ends)
        return None if lo is None else math.floor(lo), None if hi is None else math.ceil(hi)

    def values_only(self) -> "SparsityFact":
        """The same bounds and zeros without the grid; without the name of a factor, nobody can ask if it is finite."""
        lo, hi = self.value_bounds()
        if not self.exact:
            lo, hi = (None if lo is None else lo - 1), (None if hi is None else hi + 1)
        finite = self.finite and not isinstance(self.scale, str)
        return replace(self, lo=lo, hi=hi, integral=False, scale=1.0, exact=True, finite=finite)

    def described(self) -> str:
        """One short phrase for a report, such as `{0, 1} from spike`."""
        lo = "-inf" if self.lo is None else str(self.lo)
        hi = "inf" if self.hi is None else str(self.hi)
        if self.integral:
            domain = "{0, 1}" if self.within(0, 1) and self.hi == 1 and self.lo == 0 else f"integers {lo}..{hi}"
            domain += "" if self.scale == 1.0 else f" x {self.scale}"
        else:
            domain = f"values {lo}..{hi}"
        notes = "" if self.exact else ", approximately"
        notes += "" if self.finite else ", NaN possible"
        return f"{domain}{notes} from {self.source or self.origin.value}"


def binary(source: str = "", origin: Origin = Origin.SPIKE) -> SparsityFact:
    """Exactly 0 or 1."""
    return integers(0, 1, source, origin)


def integers(lo: int | None, hi: int | None, source: str = "", origin: Origin = Origin.SPIKE) -> SparsityFact:
    """Exactly an integer of `[lo, hi]`; InputError if these are no such bounds."""
    check_bounds(lo, hi, integral=True)
    zeros = (lo is None or lo <= 0) and (hi is None or hi >= 0)
    return SparsityFact(lo, hi, True, 1.0, origin, zeros, True, True, source)


def interval(lo: int | None, hi: int | None, *, finite: bool = False) -> SparsityFact:
    """Any value of `[lo, hi]`: no zeros are promised; InputError if these are no such bounds."""
    check_bounds(lo, hi, integral=False)
    return SparsityFact(lo, hi, finite=finite)


def check_bounds(lo: object, hi: object, integral: bool) -> None:
    """InputError unless there can be values, or integers, of `[lo, hi]`."""
    kind = "whole" if integral else "finite"
    for bound in (lo, hi):
        if bound is None:
            continue
        if not isinstance(bound, Real) or isinstance(bound, bool) or not math.isfinite(bound) or integral and bound % 1:
            raise InputError(f"the bound {bound!r} is no {kind} number: give one, or None for no bound")
    if isinstance(lo, Real) and isinstance(hi, Real) and lo > hi:
        raise InputError(f"no value is from {lo!r} to {hi!r}: give the lower bound first")


def zeros_kept(fact: SparsityFact, *, finite: bool) -> SparsityFact:
    """Unknown values that are zero where `fact` is zero."""
    finite = finite and not isinstance(fact.scale, str)
    return SparsityFact(None, None, False, 1.0, fact.origin, fact.exact_zeros, True, finite, fact.source)


def constant(value: float) -> SparsityFact | None:
    """The fact of a Python number, or None for NaN and infinities."""
    if not math.isfinite(value):
        return None
    scale = next((2.0**-j for j in range(MAX_SCALE_EXPONENT + 1) if (value * 2.0**j).is_integer()), None)
    if scale is None or abs(value / scale) > 2**16:
        return SparsityFact(1, 1, True, float(value), Origin.UNKNOWN, False, True, True)
    k = int(value / scale)
    return SparsityFact(k, k, True, scale if k else 1.0, Origin.UNKNOWN, k == 0, True, True)


def is_dyadic(scale: float | str) -> bool:
    """A power of two that no supported dtype rounds."""
    if isinstance(scale, str):
        return False
    mantissa, exponent = math.frexp(scale)
    return mantissa == 0.5 and abs(exponent - 1) <= MAX_SCALE_EXPONENT


def fit_dtype(fact: SparsityFact, dtype: torch.dtype | None) -> SparsityFact | None:
    """What is left of a computed fact once the result is stored in `dtype` (None: unknown dtype).

    Floats above their integer limit round to other integers, so only the bounds go; integer dtypes wrap around.
    """
    if dtype is None:
        lo, hi = _UNKNOWN_DTYPE_RANGE
    elif dtype in INTEGER_LIMIT:
        lo, hi = -INTEGER_LIMIT[dtype], INTEGER_LIMIT[dtype]
    elif dtype is torch.bool:
        return binary(fact.source, fact.origin)
    elif not dtype.is_floating_point and not dtype.is_complex:
        lo, hi = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    else:
        return None
    if dtype is None or dtype.is_floating_point:
        if isinstance(fact.scale, float) and abs(fact.scale) < torch.finfo(dtype or torch.float16).tiny:
            fact = fact.values_only()  # what is subnormal there, or zero, is no grid to divide by
        if not _below(fact, _LARGEST.get(dtype, _SMALLEST_MAXIMUM)):
            fact = replace(fact, finite=False)
    if dtype is None and fact.lo is not None and fact.lo > 1:
        fact = replace(fact, lo=1)  # it may be bool, where one and one is one
    if fact.within(lo, hi):
        return fact
    if dtype is not None and dtype.is_floating_point:
        return _round_outside(fact, -lo)
    if dtype is None:
        # The sign survives in any float dtype, but an unsigned one would wrap: claim nothing but the grid.
        return replace(fact, lo=None, hi=None, finite=False)
    return replace(fact, lo=None, hi=None)


def _round_outside(fact: SparsityFact, limit: int) -> SparsityFact:
    """Drop the bounds beyond the integer limit of a float dtype."""
    lo = fact.lo if fact.lo is not None and abs(fact.lo) <= limit else None
    hi = fact.hi if fact.hi is not None and abs(fact.hi) <= limit else None
    return replace(fact, lo=lo, hi=hi)


def _below(fact: SparsityFact, largest: float) -> bool:
    """Whether no element is so large that a dtype with numbers up to `largest` makes it infinite."""
    if isinstance(fact.scale, str):
        return fact.within(-1, 1)
    if fact.lo is None or fact.hi is None:
        return False
    return all(abs(bound * fact.scale) <= largest for bound in (fact.lo, fact.hi))


def join(facts: Iterable[SparsityFact | None]) -> SparsityFact | None:
    """What holds for an element that obeys one of `facts` (cat, stack, where, a write into part of a tensor)."""
    joined: SparsityFact | None = None
    for fact in facts:
        if fact is None:
            return None
        joined = fact if joined is None else join_two(joined, fact)
    return joined


def join_two(a: SparsityFact, b: SparsityFact) -> SparsityFact:
    """What holds for an element that obeys `a` or `b`."""
    origin, source = _provenance(a, b)
    common = _common_scale(a, b)
    exact_zeros = a.exact_zeros and b.exact_zeros
    if common is None:
        a, b = a.values_only(), b.values_only()
        scale, integral = 1.0, False
    else:
        a, b, scale = common
        integral = True
    lo = None if a.lo is None or b.lo is None else min(a.lo, b.lo)
    hi = None if a.hi is None or b.hi is None else max(a.hi, b.hi)
    exact, finite = a.exact and b.exact, a.finite and b.finite
    if integral and exact:
        exact_zeros = (lo is None or lo <= 0) and (hi is None or hi >= 0)
    return SparsityFact(lo, hi, integral, scale, origin, exact_zeros, exact, finite, source)


def add_facts(a: SparsityFact, b: SparsityFact, dtype: torch.dtype | None) -> SparsityFact | None:
    """`a + b`, stored in `dtype`."""
    if a.is_zero or b.is_zero:
        other = b if a.is_zero else a
        return fit_dtype(replace(other, finite=a.finite and b.finite), dtype)
    origin, source = _provenance(a, b)
    zeros, finite = a.exact_zeros and b.exact_zeros, a.finite and b.finite
    common = _common_scale(a, b) if a.on_grid and b.on_grid else None
    if common is None:
        a, b = a.values_only(), b.values_only()
        integral, scale = False, 1.0
    else:
        a, b, scale = common
        integral = True
    lo = None if a.lo is None or b.lo is None else a.lo + b.lo
    hi = None if a.hi is None or b.hi is None else a.hi + b.hi
    if integral:
        zeros = (lo is None or lo <= 0) and (hi is None or hi >= 0)
    return fit_dtype(SparsityFact(lo, hi, integral, scale, origin, zeros, True, finite, source), dtype)


def negate(a: SparsityFact, dtype: torch.dtype | None) -> SparsityFact | None:
    """`-a`, stored in `dtype`."""
    return fit_dtype(mirrored(a), dtype)


def mirrored(a: SparsityFact) -> SparsityFact:
    """`-a`, before it is stored."""
    lo = None if a.hi is None else -a.hi
    hi = None if a.lo is None else -a.lo
    return replace(a, lo=lo, hi=hi)


def multiply_facts(a: SparsityFact, b: SparsityFact, dtype: torch.dtype | None) -> SparsityFact | None:
    """`a * b`, stored in `dtype`: zero where either is zero, on the grid of both scales."""
    if not (a.exact and b.exact) and not (_is_mask(a) or _is_mask(b)):
        a, b = a.values_only(), b.values_only()
    origin, source = _provenance(a, b)
    zeros, finite = a.exact_zeros or b.exact_zeros, a.finite and b.finite
    scale = _product_scale(a, b)
    if scale is None:
        a, b = a.values_only(), b.values_only()
        lo, hi = product_bounds(a, b)
        fact = SparsityFact(lo, hi, False, 1.0, origin, zeros, True, finite, source)
        return fit_dtype(fact, dtype)
    lo, hi = product_bounds(a, b)
    exact = a.exact and b.exact
    return fit_dtype(SparsityFact(lo, hi, True, scale, origin, zeros, exact, finite, source), dtype)


def multiply_by_node(a: SparsityFact, factor: str) -> SparsityFact:
    """`a * factor` for a one-element tensor held by the node `factor`."""
    if a.is_zero:
        return replace(a, finite=False)
    if _is_mask(a):
        return replace(a, scale=factor)
    return zeros_kept(a, finite=False)


def product_bounds(a: SparsityFact, b: SparsityFact) -> tuple[int | None, int | None]:
    """Bounds of the product of two intervals."""
    if a.lo is not None and a.hi is not None and b.lo is not None and b.hi is not None:
        corners = [x * y for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
        return min(corners), max(corners)
    both_positive = a.lo is not None and b.lo is not None and a.lo >= 0 and b.lo >= 0
    return (0 if both_positive else None), None


def rescale(a: SparsityFact, factor: float, dtype: torch.dtype | None) -> SparsityFact | None:
    """`a * factor` for a Python number."""
    fact = constant(factor)
    return zeros_kept(a, finite=False) if fact is None else multiply_facts(a, fact, dtype)


def _provenance(a: SparsityFact, b: SparsityFact) -> tuple[Origin, str]:
    """The origin and source of the operand that brings the zeros; the first if both do."""
    if a.origin is Origin.UNKNOWN or (a.is_zero and not b.is_zero):
        return b.origin, b.source or a.source
    if b.origin is Origin.UNKNOWN or b.is_zero or a.origin is b.origin:
        return a.origin, a.source or b.source
    return Origin.UNKNOWN, a.source or b.source


def _is_mask(a: SparsityFact) -> bool:
    return a.integral and a.exact and a.scale == 1.0 and a.within(-1, 1)


def _common_scale(a: SparsityFact, b: SparsityFact) -> tuple[SparsityFact, SparsityFact, float | str] | None:
    """Both facts on one grid, or None. A tensor of zeros lies on every grid."""
    if not (a.integral and b.integral):
        return None
    if a.scale == b.scale:
        return a, b, a.scale
    if a.is_zero:
        return replace(a, scale=b.scale), b, b.scale
    if b.is_zero:
        return a, replace(b, scale=a.scale), a.scale
    if not (is_dyadic(a.scale) and is_dyadic(b.scale)):
        return None
    scale = min(float(a.scale), float(b.scale))
    return _on_scale(a, scale), _on_scale(b, scale), scale


def _on_scale(fact: SparsityFact, scale: float) -> SparsityFact:
    ratio = int(float(fact.scale) / scale)
    lo = None if fact.lo is None else fact.lo * ratio
    hi = None if fact.hi is None else fact.hi * ratio
    return replace(fact, lo=lo, hi=hi, scale=scale)


def _product_scale(a: SparsityFact, b: SparsityFact) -> float | str | None:
    """The scale of the product, or None where rounding could leave the grid."""
    if not (a.integral and b.integral):
        return None
    if a.is_zero or b.is_zero:
        return 1.0
    if is_dyadic(a.scale) and is_dyadic(b.scale):
        product = float(a.scale) * float(b.scale)
        return product if is_dyadic(product) else None
    plain, other = (a, b) if is_dyadic(a.scale) else (b, a)  # an inexact operand comes with a mask only
    if plain.scale == 1.0 and plain.within(-1, 1) and other.within(-1, 1):
        return other.scale
    return None
