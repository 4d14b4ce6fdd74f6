"""The fact algebra against brute force: every combination of values must lie in the combined fact."""

import itertools
from dataclasses import replace

import pytest
import torch
from fact_checker import check_values
from hypothesis import given
from hypothesis import strategies as st

from sparsecomp.passes import facts as algebra
from sparsecomp.passes.facts import Origin, SparsityFact, binary, constant, integers
from sparsecomp.passes.transfer.pointwise import cast

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
        holds(x + y, algebra.add(a, b, dtype))
        holds(x * y, algebra.multiply(a, b, dtype))
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
    two = algebra.add(binary(), binary(), torch.float32)
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
    inside = algebra.add(integers(0, limit - 1), binary(), dtype)
    beyond = algebra.add(integers(0, limit), binary(), dtype)
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
    total = algebra.add(scaled, scaled, torch.float32)
    assert total is not None and not total.integral and total.exact_zeros
