"""A test's quick cases show as many values of its parameters as so few can."""

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
