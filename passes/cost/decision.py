"""Whether a rewrite pays: the one record of every rule's answer, and the one margin by which something must win."""

from collections.abc import Mapping
from math import inf, isinf
from types import MappingProxyType
from typing import NamedTuple

from sparsecomp.report import Estimate

MIN_GAIN = 1.03
"""Least speed-up over dense for which something sparse is chosen."""


class Decision(NamedTuple):
    """What runs.

    Attributes:
        implementation: `dense`, or the sparse implementation that pays.
        reason: for the report.
        seconds: by implementation, `dense` among them, infinite for one without kernels of its own; empty without an
            estimate.
        source: of the seconds, "estimated" or "measured".
    """

    implementation: str
    reason: str
    seconds: Mapping[str, float] = MappingProxyType({})
    source: str = "estimated"

    @property
    def dense(self) -> bool:
        return self.implementation == "dense"

    @property
    def gain(self) -> float | None:
        """Speed-up over dense of the fastest sparse implementation, chosen or not; None without an estimate."""
        sparse = min((seconds for name, seconds in self.seconds.items() if name != "dense"), default=inf)
        return None if isinf(sparse) else self.seconds["dense"] / sparse

    @property
    def estimate(self) -> Estimate | None:
        """Seconds of what runs and of the dense operator, for the report; None if those of what runs are not known."""
        ran = self.seconds.get(self.implementation, inf)
        return None if isinf(ran) else Estimate(ran, self.seconds["dense"], self.source)


def fastest(seconds: Mapping[str, float], source: str = "estimated", rival: str = "dense") -> Decision:
    """The fastest of implementations, `dense` among them, which stays unless another wins by `MIN_GAIN`.

    Args:
        source: "estimated" or "measured".
        rival: what to call the dense way in the reason.
    """
    name = min((name for name in seconds if name != "dense"), key=lambda name: seconds[name])
    form = "{:.1f} us" if source == "estimated" else "{:.3f} ms"
    scale = 1e6 if source == "estimated" else 1e3
    ours, theirs = (form.format(seconds[one] * scale) for one in (name, "dense"))
    if isinf(seconds[name]):
        reason = f"{name} has no kernel of its own for all of it, against {theirs} {rival}"
        return Decision("dense", reason, seconds, source)
    decision = Decision(name, f"{source} {ours} against {theirs} {rival}", seconds, source)
    if seconds["dense"] / seconds[name] < MIN_GAIN:
        return decision._replace(implementation="dense", reason=f"{name} {decision.reason}")
    return decision
