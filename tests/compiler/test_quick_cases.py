"""A test's quick cases show as many values of its parameters as so few can, its slow ones every two together."""

from itertools import combinations, product

import pytest
from quick_cases import covering, pairwise

CASES = [{("a", a), ("b", b), ("c", c)} for a, b, c in product(range(2), range(3), range(4))]


@pytest.mark.parametrize(("count", "shown"), [(0, 0), (1, 3), (2, 6), (3, 8), (4, 9), (100, 9)])
def test_as_many_values_as_possible(count: int, shown: int) -> None:
    """4 values of c need 4 cases; meanwhile both of a and all of b have been seen."""
    chosen = covering(CASES, count)
    assert len(chosen) == min(count, len(CASES))
    assert len(set().union(*(CASES[n] for n in chosen))) == shown


def test_cases_without_parameters_come_last() -> None:
    assert covering([set(), {("a", 0)}, set(), {("a", 1)}], 2) == {1, 3}


@pytest.mark.parametrize("chosen", [set(), {0, 5, 23}])
def test_every_two_values_are_shown_together(chosen: set[int]) -> None:
    added = pairwise(CASES, chosen)
    pairs = [set(combinations(sorted(case), 2)) for case in CASES]
    assert set().union(*(pairs[n] for n in added | chosen)) == set().union(*pairs)
    assert not added & chosen
    assert len(added) <= 16 < len(CASES)  # 12 show all pairs of b and c


def test_every_case_of_two_parameters_is_needed() -> None:
    cases = [{("a", a), ("b", b)} for a, b in product(range(2), range(3))]
    assert pairwise(cases, {4}) == {0, 1, 2, 3, 5}
    assert pairwise([set(), set()]) == set()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", ["x", "y"])
def test_equal_values_of_cases_are_recognised(a: int, b: str, request: pytest.FixtureRequest) -> None:
    """Of what is run, quick or slow, two cases show both values of each parameter."""
    name = request.node.originalname
    cases = [item.callspec.params for item in request.session.items if getattr(item, "originalname", None) == name]
    if len(cases) > 1:
        assert {case["a"] for case in cases} == {1, 2} and {case["b"] for case in cases} == {"x", "y"}
