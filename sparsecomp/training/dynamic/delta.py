"""A change of a pattern: what comes and what goes."""

from dataclasses import dataclass

from sparsecomp.errors import PatternError
from sparsecomp.formats import Pattern


@dataclass(frozen=True)
class PatternDelta:
    """Elements to add to a pattern and elements to take away, of which none is both.

    Raises:
        PatternError: an element is added and removed, or the two have other shapes or devices.
    """

    additions: Pattern
    removals: Pattern

    def __post_init__(self) -> None:
        if not self.additions.isdisjoint(self.removals):
            raise PatternError("a change adds and removes the same element: leave it out of both")

    @classmethod
    def between(cls, old: Pattern, new: Pattern) -> "PatternDelta":
        """What makes `new` of `old`."""
        return cls(new - old, old - new)

    @property
    def inverse(self) -> "PatternDelta":
        """What takes the change back."""
        return PatternDelta(self.removals, self.additions)

    def of(self, pattern: Pattern) -> Pattern:
        """The changed pattern.

        Raises:
            PatternError: an addition is there already, or a removal is not there.
        """
        if not self.additions.isdisjoint(pattern):
            raise PatternError(f"{(self.additions & pattern).nnz} of {self.additions.nnz} additions are stored already")
        if not self.removals <= pattern:
            raise PatternError(f"{(self.removals - pattern).nnz} of {self.removals.nnz} removals are not stored")
        size = pattern.nnz - self.removals.nnz
        return pattern.difference(self.removals, size).union(self.additions, size + self.additions.nnz)
