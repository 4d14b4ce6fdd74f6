"""A test's quick cases show as many values of its parameters as so few can, and all values are shown in the end."""

from itertools import product

import pytest
from quick_cases import covering

CASES = [{("a", a), ("b", b), ("c", c)} for a, b, c in product(range(2), range(3), range(4))]


@pytest.mark.parametrize(("count", "shown"), [(0, 0), (1, 3), (2, 6), (3, 8), (4, 9), (100, 9)])
def test_as_many_values_as_possible(count: int, shown: int) -> None:
    """4 values of c need 4 cases; meanwhile both of a and all of b have been seen."""
    chosen = covering(CASES, count)
    assert len(chosen) == min(count, len(CASES))
    assert len(set().union(*(CASES[n] for n in chosen))) == shown


def test_cases_without_parameters_come_last() -> None:
    assert covering([set(), {("a", 0)}, set(), {("a", 1)}], 2) == {1, 3}


def test_as_many_as_show_all_values() -> None:
    chosen = covering(CASES)
    assert len(chosen) == 4 and set().union(*(CASES[n] for n in chosen)) == set().union(*CASES)
    assert covering(CASES, 2) < chosen, "those who were chosen first stay"
    assert covering([set(), set()]) == {0}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", ["x", "y"])
def test_equal_values_of_cases_are_recognised(a: int, b: str, request: pytest.FixtureRequest) -> None:
    """Of what is run, quick or slow, two cases show both values of each parameter."""
    name = request.node.originalname
    cases = [item.callspec.params for item in request.session.items if getattr(item, "originalname", None) == name]
    if len(cases) > 1:
        assert {case["a"] for case in cases} == {1, 2} and {case["b"] for case in cases} == {"x", "y"}
