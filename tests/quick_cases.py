"""Which cases of a parametrised test the quick run keeps, and which the slow one."""

from collections.abc import Iterable, Sequence, Set
from itertools import combinations

Choice = tuple[str, int]
"""A parameter, and which of its values it has."""


def covering(cases: Sequence[Set[Choice]], count: int) -> set[int]:
    """Numbers of `count` cases, each of which shows the most values of parameters that none before it showed.

    Args:
        cases: of each case, its parameters with the number of the value that each has.
    """
    chosen: set[int] = set()
    seen: set[Choice] = set()
    for _ in range(min(count, len(cases))):
        best = max((n for n in range(len(cases)) if n not in chosen), key=lambda n: len(cases[n] - seen))
        chosen.add(best)
        seen |= cases[best]
    return chosen


def pairwise(cases: Sequence[Set[Choice]], chosen: Iterable[int] = ()) -> set[int]:
    """Numbers of the cases beside those `chosen`, with which every two values that occur together in a case do so in
    one of these (D. M. Cohen et al., The AETG System, IEEE TSE 23(7), 1997: most faults show with two values)."""
    pairs = [{*case, *combinations(sorted(case), 2)} for case in cases]
    seen = set().union(*(pairs[n] for n in chosen))
    added: set[int] = set()
    while True:
        best = max(range(len(cases)), key=lambda n: len(pairs[n] - seen), default=None)
        if best is None or pairs[best] <= seen:
            return added
        added.add(best)
        seen |= pairs[best]
