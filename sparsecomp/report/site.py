"""Places that rules looked at, and layers: what such places that came to the same are to a reader."""

from dataclasses import dataclass

WRITTEN_ONCE = "frozen=True promises that the weight stays: it is written out once then"
"""At the end of the reason of a site that writes its weight out in each call, where the promise would help."""

COMPARED_COPY = "compared copy"
"""What a site runs as whose weight has a dense copy that each call compares with it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a call.

    Attributes:
        seconds: of what runs.
        dense_seconds: of the dense operator in its place.
        source: "estimated" or "measured".
    """

    seconds: float
    dense_seconds: float
    source: str = "estimated"

    @property
    def gain(self) -> float:
        """Speed-up over the dense operator."""
        return self.dense_seconds / self.seconds


@dataclass(slots=True)
class Site:
    """One place that a rule looked at.

    Attributes:
        rule: the rule's name.
        node: the node's name in the captured graph.
        rewritten: whether the rule replaced it.
        reason: why, or which condition failed.
        why: the kind of condition that failed, a name of `passes.engine.rule.Why`; empty for a rewritten site.
        location: the user's `file:line`, empty if the graph does not know it.
        module: dotted path of the module that made the call, empty if unknown.
        density: share of non-zero inputs in [0, 1], None if nobody measured or assumed one.
        density_source: "measured", "assumed" or "unknown".
        implementation: "dense" or the sparse implementation.
        precision: the numeric mode, empty for a dense site.
        expected_gain: estimated speed-up over dense; None for a dense site, or where there is no estimate.
        estimate: seconds, where there is an estimate.
        graph: which of the model's graphs it is in, from 0.
    """

    rule: str
    node: str
    rewritten: bool
    reason: str
    location: str = ""
    module: str = ""
    density: float | None = None
    density_source: str = "unknown"
    implementation: str = "dense"
    precision: str = ""
    expected_gain: float | None = None
    estimate: Estimate | None = None
    why: str = ""
    graph: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """Sites of one rule at one place that came to the same: one, or one a time step."""

    sites: tuple[Site, ...]

    @property
    def site(self) -> Site:
        """The first, which stands for all but in density, gain and time."""
        return self.sites[0]

    @property
    def name(self) -> str:
        """The module's path, or the node's name where no module made the call; and how often."""
        name = self.site.module or self.site.node
        return name if self.count == 1 else f"{name} ×{self.count}"

    @property
    def count(self) -> int:
        """How many sites there are."""
        return len(self.sites)

    @property
    def density(self) -> float | None:
        """The mean of what is known."""
        known = [site.density for site in self.sites if site.density is not None]
        return sum(known) / len(known) if known else None

    @property
    def gains(self) -> list[float]:
        """Estimated speed-ups over dense."""
        return [site.expected_gain for site in self.sites if site.expected_gain is not None]

    @property
    def seconds(self) -> float | None:
        """Of all sites together; None if that of one is not known."""
        known = [site.estimate.seconds for site in self.sites if site.estimate is not None]
        return sum(known) if len(known) == self.count else None
