"""Which cases of a parametrised test the quick run keeps, and which the slow one."""

from collections.abc import Sequence, Set

Choice = tuple[str, int]
"""A parameter, and which of its values it has."""


def covering(cases: Sequence[Set[Choice]], count: int | None = None) -> set[int]:
    """Numbers of `count` cases, each of which shows the most values of parameters that none before it showed; or of as
    many as show all values.

    Args:
        cases: of each case, its parameters with the number of the value that each has.
    """
    chosen: set[int] = set()
    seen: set[Choice] = set()
    for _ in range(len(cases) if count is None else min(count, len(cases))):
        best = max((n for n in range(len(cases)) if n not in chosen), key=lambda n: len(cases[n] - seen))
        if count is None and chosen and cases[best] <= seen:
            break
        chosen.add(best)
        seen |= cases[best]
    return chosen
