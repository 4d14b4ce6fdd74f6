"""Which cases of a parametrised test the quick run keeps."""

from collections.abc import Sequence, Set


def covering(cases: Sequence[Set[tuple[str, int]]], count: int) -> set[int]:
    """Numbers of `count` cases, each of which shows the most values of parameters that none before it showed.

    Args:
        cases: of each case, its parameters with the number of the value that each has.
    """
    chosen: set[int] = set()
    seen: set[tuple[str, int]] = set()
    for _ in range(min(count, len(cases))):
        best = max((n for n in range(len(cases)) if n not in chosen), key=lambda n: len(cases[n] - seen))
        chosen.add(best)
        seen |= cases[best]
    return chosen
