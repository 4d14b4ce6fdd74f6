"""The fact algebra against brute force: every combination of values must lie in the combined fact."""

import itertools
from dataclasses import replace

import pytest
import torch
from fact_checker import check_values
from hypothesis import given
from hypothesis import strategies as st

from sparsecomp.passes.facts.transfer.pointwise import cast
from sparsecomp.reference import facts as algebra
from sparsecomp.reference.facts import Origin, SparsityFact, binary, constant, integers

SCALES = [1.0, 0.5, 0.25, 2.0, 0.3]


@st.composite
def small_facts(draw: st.DrawFn) -> SparsityFact:
    lo = draw(st.integers(-3, 3))
    hi = draw(st.integers(lo, lo + 3))
    return replace(integers(lo, hi), scale=draw(st.sampled_from(SCALES)))


def values(fact: SparsityFact) -> list[torch.Tensor]:
    assert fact.lo is not None and fact.hi is not None and isinstance(fact.scale, float)
    scale = torch.tensor(fact.scale)
    return [torch.tensor(float(k)) * scale for k in range(fact.lo, fact.hi + 1)]


def holds(result: torch.Tensor, fact: SparsityFact | None) -> None:
    if fact is not None:
        assert isinstance(fact.scale, float)
        check_values(result, fact, fact.scale, str(fact))


@given(small_facts(), small_facts())
def test_sum_product_and_join_hold_for_all_values(a: SparsityFact, b: SparsityFact) -> None:
    dtype = torch.float32
    for x, y in itertools.product(values(a), values(b)):
        holds(x + y, algebra.add_facts(a, b, dtype))
        holds(x * y, algebra.multiply_facts(a, b, dtype))
        holds(x, algebra.join((a, b)))
        holds(y, algebra.join((a, b)))
        holds(-x, algebra.negate(a, dtype))


@given(small_facts(), st.sampled_from([torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool]))
def test_conversion_holds(a: SparsityFact, dtype: torch.dtype) -> None:
    for x in values(a):
        fact = cast(a, torch.float32, dtype)
        if isinstance(fact, SparsityFact):
            holds(x.to(dtype), fact)


def test_binary_is_binary_and_counts_are_not() -> None:
    assert binary().is_binary and binary().fits_int8
    two = algebra.add_facts(binary(), binary(), torch.float32)
    assert two is not None and not two.is_binary and two.fits_int8 and (two.lo, two.hi) == (0, 2)
    assert not integers(-1, 1).is_binary
    assert not replace(binary(), scale="factor").is_binary and replace(binary(), scale="factor").is_scaled_binary


def test_approximate_or_not_finite_is_not_binary() -> None:
    near = replace(binary(), exact=False)
    assert near.is_nearly_binary and not near.is_binary and not near.fits_int8
    doubtful = replace(binary(), finite=False)
    assert doubtful.is_binary_if_finite and not doubtful.is_binary and not doubtful.fits_int8


@pytest.mark.parametrize("dtype,limit", [(torch.bfloat16, 256), (torch.float16, 2048), (torch.float32, 2**24)])
def test_sum_beyond_the_integers_of_a_dtype_loses_its_bound(dtype: torch.dtype, limit: int) -> None:
    inside = algebra.add_facts(integers(0, limit - 1), binary(), dtype)
    beyond = algebra.add_facts(integers(0, limit), binary(), dtype)
    assert inside is not None and inside.hi == limit
    assert beyond is not None and beyond.hi is None and beyond.integral


def test_unsigned_difference_wraps() -> None:
    fact = algebra.negate(binary(), torch.uint8)
    assert fact is not None and fact.lo is None and not fact.fits_int8


def test_constants() -> None:
    assert constant(float("nan")) is None and constant(float("inf")) is None
    zero, quarter, third = constant(0), constant(0.25), constant(1 / 3)
    assert zero is not None and zero.is_zero and zero.exact_zeros
    assert quarter is not None and quarter.on_grid and quarter.value_bounds() == (0, 1)
    assert third is not None and not third.on_grid


def test_zeros_join_any_grid_and_keep_the_origin() -> None:
    zero = constant(0)
    scaled = replace(binary("lif"), scale="factor")
    joined = algebra.join((zero, scaled))
    assert joined is not None and joined.scale == "factor" and joined.integral
    assert joined.origin is Origin.SPIKE and joined.source == "lif"


def test_different_named_scales_do_not_join() -> None:
    joined = algebra.join((replace(binary(), scale="a"), replace(binary(), scale="b")))
    assert joined is not None and not joined.integral and joined.exact_zeros


def test_sum_of_scaled_spikes_off_a_power_of_two_leaves_the_grid() -> None:
    scaled = replace(binary(), scale=0.3)
    total = algebra.add_facts(scaled, scaled, torch.float32)
    assert total is not None and not total.integral and total.exact_zeros


def _ranges(scale: float) -> list[SparsityFact]:
    return [replace(integers(lo, hi), scale=scale) for lo in range(-2, 3) for hi in range(lo, lo + 3)]


@pytest.mark.parametrize("scale", [1.0, 0.5, 4.0])
@pytest.mark.parametrize("other", [1.0, 0.25])
def test_bounds_on_a_grid_are_those_of_all_values(scale: float, other: float) -> None:
    """Not only true but tight: the least and the greatest of all sums, products and joins."""
    for a, b in itertools.product(_ranges(scale), _ranges(other)):
        x, y = torch.stack(values(a)), torch.stack(values(b))
        every = {
            "sum": (algebra.add_facts(a, b, torch.float32), x[:, None] + y),
            "product": (algebra.multiply_facts(a, b, torch.float32), x[:, None] * y),
            "join": (algebra.join((a, b)), torch.cat((x, y))),
            "negation": (algebra.negate(a, torch.float32), -x),
        }
        for name, (fact, result) in every.items():
            assert fact is not None and fact.integral and fact.exact and fact.finite, name
            assert fact.lo is not None and fact.hi is not None and isinstance(fact.scale, float)
            assert name in ("product", "negation") or fact.exact_zeros == (fact.lo <= 0 <= fact.hi), f"{name} {a} {b}"
            found = (fact.lo * fact.scale, fact.hi * fact.scale)
            assert found == (result.min().item(), result.max().item()), f"{name} of {a} and {b}: {fact}"


_ENDS = [None, -2, -1, 0, 1, 2]


def test_an_unknown_end_stays_unknown_and_a_known_one_is_kept() -> None:
    """An unknown end is an infinity of its sign; a product of which one end is unknown keeps a sign at most."""
    ends = [(lo, hi) for lo in _ENDS for hi in _ENDS if lo is None or hi is None or lo <= hi]
    for (alo, ahi), (blo, bhi) in itertools.product(ends, ends):
        a, b = integers(alo, ahi), integers(blo, bhi)
        total, joined = algebra.add_facts(a, b, torch.float32), algebra.join((a, b))
        product, opposite = algebra.multiply_facts(a, b, torch.float32), algebra.negate(a, torch.float32)
        assert total is not None and joined is not None and product is not None and opposite is not None
        assert (total.lo, total.hi) == (_plus(alo, blo), _plus(ahi, bhi))
        assert joined.lo == (None if None in (alo, blo) else min(alo, blo))  # type: ignore[type-var]
        assert joined.hi == (None if None in (ahi, bhi) else max(ahi, bhi))  # type: ignore[type-var]
        assert (opposite.lo, opposite.hi) == (None if ahi is None else -ahi, None if alo is None else -alo)
        if None in (alo, ahi, blo, bhi):
            both_positive = alo is not None and blo is not None and alo >= 0 and blo >= 0
            assert (product.lo, product.hi) == (0 if both_positive else None, None), f"{a} {b}"
        zero_within = (joined.lo is None or joined.lo <= 0) and (joined.hi is None or joined.hi >= 0)
        assert joined.exact_zeros == zero_within


def _plus(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


NAMED = replace(binary("lif"), scale="factor")
BINARY = "is_binary is_binary_if_finite is_nearly_binary"
PROPERTIES = ["is_binary", "is_binary_if_finite", "is_nearly_binary", "is_scaled_binary", "fits_int8", "is_zero",
              "non_negative", "on_grid"]  # fmt: skip


@pytest.mark.parametrize(
    "fact,true",
    [
        (binary(), f"{BINARY} is_scaled_binary fits_int8 non_negative on_grid"),
        (replace(binary(), finite=False), "is_binary_if_finite is_nearly_binary non_negative on_grid"),
        (replace(binary(), exact=False), "is_nearly_binary non_negative"),
        (replace(binary(), integral=False), "non_negative"),
        (replace(binary(), scale=0.5), "is_scaled_binary fits_int8 non_negative on_grid"),
        (replace(binary(), scale=0.3), "is_scaled_binary fits_int8 non_negative"),
        (replace(binary(), scale=-1.0), "is_scaled_binary fits_int8"),
        (NAMED, "is_scaled_binary fits_int8"),
        (integers(0, 2), "fits_int8 non_negative on_grid"),
        (integers(-1, 1), "fits_int8 on_grid"),
        (integers(-128, 127), "fits_int8 on_grid"),
        (integers(-129, 0), "on_grid"),
        (integers(0, 128), "non_negative on_grid"),
        (integers(0, None), "non_negative on_grid"),
        (integers(None, 0), "on_grid"),
        (constant(0), f"{BINARY} is_scaled_binary fits_int8 is_zero non_negative on_grid"),
        (replace(integers(0, 0), finite=False), "is_binary_if_finite is_nearly_binary is_zero non_negative on_grid"),
        (replace(integers(0, 0), integral=False), "non_negative"),
        (integers(1, 1), f"{BINARY} is_scaled_binary fits_int8 non_negative on_grid"),
        (integers(-1, 0), "fits_int8 on_grid"),
    ],
)  # fmt: skip
def test_properties(fact: SparsityFact, true: str) -> None:
    assert [name for name in PROPERTIES if getattr(fact, name)] == true.split()


@pytest.mark.parametrize(
    "fact,bounds",
    [
        (integers(-3, 2), (-3, 2)),
        (replace(integers(-3, 2), scale=0.5), (-2, 1)),
        (replace(integers(-3, 2), scale=-0.3), (-1, 1)),
        (replace(integers(None, 2), scale=-1.0), (-2, None)),
        (NAMED, (None, None)),
        (replace(NAMED, hi=0), (0, 0)),
        (integers(-(2**53), 2**53), (-(2**53), 2**53)),
        (integers(-(2**53) - 2, 2**53 + 2), (None, None)),
    ],
)
def test_bounds_of_values_are_rounded_outwards(fact: SparsityFact, bounds: tuple[int | None, int | None]) -> None:
    assert fact.value_bounds() == bounds
    inexact = replace(fact, exact=False).values_only()
    assert (inexact.lo, inexact.hi) == (_plus(bounds[0], -1), _plus(bounds[1], 1))
    assert not inexact.integral and inexact.scale == 1.0 and inexact.exact
    assert inexact.finite == (not isinstance(fact.scale, str))


@pytest.mark.parametrize("exponent", [-11, -10, -1, 0, 1, 10, 11])
def test_a_power_of_two_is_dyadic_up_to_ten(exponent: int) -> None:
    assert algebra.is_dyadic(2.0**exponent) == (abs(exponent) <= 10)
    assert not algebra.is_dyadic(-(2.0**exponent)) and not algebra.is_dyadic(3 * 2.0**exponent)


@pytest.mark.parametrize(
    "value,k,scale",
    [(0.0, 0, 1.0), (3.0, 3, 1.0), (-0.75, -3, 0.25), (2.0**-10, 1, 2.0**-10), (2.0**-11, 1, 2.0**-11),
     (3 * 2.0**-10, 3, 2.0**-10), (3 * 2.0**-11, 1, 3 * 2.0**-11),
     (65536.0, 65536, 1.0), (65537.0, 1, 65537.0), (32768.5, 1, 32768.5), (0.1, 1, 0.1)],
)  # fmt: skip
def test_a_number_is_a_small_integer_of_a_power_of_two_or_its_own_scale(value: float, k: int, scale: float) -> None:
    fact = constant(value)
    assert fact is not None and (fact.lo, fact.hi, fact.scale) == (k, k, scale)
    assert fact.integral and fact.exact and fact.finite and fact.exact_zeros == (k == 0)


I8, U8, I32, F16, F32, BF16 = torch.int8, torch.uint8, torch.int32, torch.float16, torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    "fact,dtype,expected",
    [  # (lo, hi, integral, finite) of what is left
        (integers(-128, 127), I8, (-128, 127, True, True)),
        (integers(-128, 128), I8, (None, None, True, True)),
        (integers(-1, 3), U8, (None, None, True, True)),
        (integers(0, 255), U8, (0, 255, True, True)),
        (integers(0, 2**31), I32, (None, None, True, True)),
        (integers(5, 7), torch.bool, (0, 1, True, True)),
        (integers(-3, 2048), F16, (-3, 2048, True, True)),
        (integers(-2049, 2048), F16, (None, 2048, True, True)),
        (integers(-3, 2049), F16, (-3, None, True, True)),
        (integers(-3, 65504), F16, (-3, None, True, True)),
        (integers(-3, 65505), F16, (-3, None, True, False)),
        (integers(None, 3), F16, (None, 3, True, False)),
        (integers(0, 2**24 + 1), F32, (0, None, True, True)),
        (integers(0, 256), BF16, (0, 256, True, True)),
        (integers(0, 257), BF16, (0, None, True, True)),
        (replace(binary(), scale=2.0**-14), F16, (0, 1, True, True)),
        (replace(binary(), scale=2.0**-15), F16, (0, 1, False, True)),
        (replace(binary(), scale=70000.0), F16, (0, 1, True, False)),
        (NAMED, F16, (0, 1, True, True)),
        (replace(NAMED, hi=2), F16, (0, 2, True, False)),
        (integers(0, 127), None, (0, 127, True, True)),
        (integers(0, 128), None, (None, None, True, False)),
        (integers(-1, 3), None, (None, None, True, False)),
        (integers(3, 5), None, (1, 5, True, True)),
        (integers(1, 1), None, (1, 1, True, True)),
    ],
)
def test_what_a_dtype_leaves_of_a_result(fact: SparsityFact, dtype: torch.dtype | None, expected: tuple) -> None:
    left = algebra.fit_dtype(fact, dtype)
    assert left is not None and (left.lo, left.hi, left.integral, left.finite) == expected


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_have_no_facts(dtype: torch.dtype) -> None:
    assert algebra.fit_dtype(binary(), dtype) is None


@pytest.mark.parametrize(
    "a,b,expected",
    [  # whose zeros they are: the operand's that brings them
        (binary("lif"), integers(1, 2, "n", Origin.UNKNOWN), (Origin.SPIKE, "lif")),
        (integers(1, 2, "n", Origin.UNKNOWN), binary("lif"), (Origin.SPIKE, "lif")),
        (integers(1, 2, "n", Origin.UNKNOWN), binary("", Origin.MASK), (Origin.MASK, "n")),
        (binary("lif"), binary("other"), (Origin.SPIKE, "lif")),
        (binary(""), binary("other"), (Origin.SPIKE, "other")),
        (binary("m", Origin.MASK), binary("lif"), (Origin.UNKNOWN, "m")),
        (binary("m", Origin.MASK), integers(0, 0, "z"), (Origin.MASK, "m")),
        (integers(0, 0, "z", Origin.MASK), binary("lif"), (Origin.SPIKE, "lif")),
        (integers(0, 0, "z", Origin.MASK), integers(0, 0, "y"), (Origin.MASK, "z")),
    ],
)
def test_where_zeros_come_from(a: SparsityFact, b: SparsityFact, expected: tuple[Origin, str]) -> None:
    joined = algebra.join((a, b))
    assert joined is not None and (joined.origin, joined.source) == expected


def test_a_named_factor_is_on_no_grid_but_its_own() -> None:
    twice = algebra.multiply_facts(NAMED, binary(), torch.float32)
    assert twice is not None and twice.integral and twice.scale == "factor" and (twice.lo, twice.hi) == (0, 1)
    counts = algebra.multiply_facts(NAMED, integers(0, 2), torch.float32)  # 2 * a subnormal factor may round
    assert counts is not None and not counts.integral and counts.exact_zeros
    third = algebra.multiply_facts(replace(binary(), scale=0.3), integers(-1, 1), torch.float32)
    assert third is not None and third.integral and (third.lo, third.hi, third.scale) == (-1, 1, 0.3)
    inexact = algebra.multiply_facts(replace(binary(), scale=0.3), replace(integers(-1, 1), exact=False), torch.float32)
    assert inexact is not None and not inexact.integral
    near = replace(binary(), scale=0.3, exact=False)
    for kept in (algebra.multiply_facts(near, binary(), F32), algebra.multiply_facts(binary(), near, F32)):
        assert kept is not None and kept.integral and not kept.exact and (kept.lo, kept.hi, kept.scale) == (0, 1, 0.3)
    for bounds in ((-2, 0), (0, 2)):
        some, bits = integers(*bounds), integers(-1, 1)
        for a, b in ((some, replace(bits, scale=0.3)), (bits, replace(some, scale=0.3))):
            for fact in (algebra.multiply_facts(a, b, F32), algebra.multiply_facts(b, a, F32)):
                assert fact is not None and not fact.integral and fact.exact_zeros
    tiny = algebra.multiply_facts(replace(binary(), scale=2.0**-6), replace(binary(), scale=2.0**-5), torch.float32)
    assert tiny is not None and not tiny.integral
    assert algebra.multiply_by_node(binary(), "f") == replace(binary(), scale="f")
    assert algebra.multiply_by_node(integers(0, 0), "f") == replace(integers(0, 0), finite=False)
    assert algebra.multiply_by_node(integers(0, 2, "n"), "f") == algebra.zeros_kept(integers(0, 2, "n"), finite=False)
    assert algebra.rescale(binary(), float("inf"), F32) == algebra.zeros_kept(binary(), finite=False)
    assert algebra.zeros_kept(binary(), finite=True).finite and not algebra.zeros_kept(NAMED, finite=True).finite


@pytest.mark.parametrize(
    "fact,text",
    [
        (binary("lif"), "{0, 1} from lif"),
        (binary(), "{0, 1} from spike"),
        (constant(0), "integers 0..0 from unknown"),
        (integers(1, 1), "integers 1..1 from spike"),
        (replace(integers(-2, None), scale=0.5, exact=False), "integers -2..inf x 0.5, approximately from spike"),
        (replace(integers(None, 3), finite=False), "integers -inf..3, NaN possible from spike"),
        (algebra.interval(0, 1, finite=True), "values 0..1 from unknown"),
    ],
)
def test_described(fact: SparsityFact, text: str) -> None:
    assert fact.described() == text


@pytest.mark.parametrize("a_holds", [False, True])
@pytest.mark.parametrize("b_holds", [False, True])
def test_a_result_is_finite_and_exact_only_if_both_operands_are(a_holds: bool, b_holds: bool) -> None:
    count, zero = integers(0, 2), integers(0, 0)
    for a, b in itertools.product((count, binary(), zero, replace(count, scale=0.3)), repeat=2):
        doubtful, other = replace(a, finite=a_holds), replace(b, finite=b_holds)
        for fact in (algebra.add_facts(doubtful, other, F32), algebra.multiply_facts(doubtful, other, F32)):
            assert fact is not None and fact.finite == (a_holds and b_holds)
        joined = algebra.join((doubtful, other))
        assert joined is not None and joined.finite == (a_holds and b_holds)
    near, masked = replace(binary(), exact=a_holds), replace(integers(-1, 1), exact=b_holds)
    joined, product = algebra.join((near, masked)), algebra.multiply_facts(near, masked, F32)
    assert joined is not None and joined.exact == (a_holds and b_holds)
    assert product is not None and product.integral == (a_holds or b_holds)
    assert product.exact == (a_holds == b_holds)  # without a grid nothing is off it


def test_zeros_are_exact_where_each_operand_says_so() -> None:
    off = replace(binary(), scale=0.3)
    unsure = replace(off, exact_zeros=False)
    for a, b in itertools.product((off, unsure), repeat=2):
        total, product = algebra.add_facts(a, b, F32), algebra.multiply_facts(a, b, F32)
        assert total is not None and total.exact_zeros == (a.exact_zeros and b.exact_zeros)
        assert product is not None and product.exact_zeros == (a.exact_zeros or b.exact_zeros)
        joined = algebra.join((a, replace(b, scale="factor")))
        assert joined is not None and joined.exact_zeros == (a.exact_zeros and b.exact_zeros)


@pytest.mark.parametrize("other", [binary(), integers(0, 2), replace(integers(-5, 2), scale=0.3), NAMED])
def test_nothing_times_anything_finite_is_nothing(other: SparsityFact) -> None:
    zero = integers(0, 0, "z")
    for fact in (algebra.multiply_facts(zero, other, F32), algebra.multiply_facts(other, zero, F32)):
        assert fact is not None and fact.is_zero and fact.scale == 1.0 and fact.exact and fact.exact_zeros


@pytest.mark.parametrize("lo,hi", [(-2048, 2048), (-2048, 2049), (-2049, 2048), (-2049, 2049)])
def test_a_bound_beyond_a_dtype_goes_alone(lo: int, hi: int) -> None:
    left = algebra.fit_dtype(integers(lo, hi), torch.float16)
    assert left is not None and (left.lo, left.hi) == (lo if lo >= -2048 else None, hi if hi <= 2048 else None)
    assert left.value_bounds() == (left.lo, left.hi)


def test_an_unknown_end_stays_unknown_on_a_finer_grid() -> None:
    for lo, hi in ((None, 3), (-3, None), (None, None), (-3, 3)):
        whole, halves = integers(lo, hi), replace(integers(-1, 1), scale=0.5)
        for fact in (algebra.join((whole, halves)), algebra.join((halves, whole))):
            assert fact is not None and fact.scale == 0.5
            assert (fact.lo, fact.hi) == (None if lo is None else 2 * lo, None if hi is None else 2 * hi)
