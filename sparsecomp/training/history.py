"""What a training run reports: plain records that JSON carries."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class PhaseRecord:
    """A finished phase of training steps, with the mean of its losses (NaN without a step).

    Cycles count from 0; the fine-tuning has the number after the last.
    """

    cycle: int
    phase: str
    steps: int
    loss: float


@dataclass(frozen=True)
class LayerReport:
    """One weight after a commit. `calibrated` is False where its pruner had no input statistics to go by."""

    name: str
    size: int
    kept: int
    resurrected: int
    surviving: int
    calibrated: bool


@dataclass(frozen=True)
class CycleReport:
    """The end of a cycle.

    `moved` theta were not 0; `resurrected` of them came back in this commit. Of the `earlier` resurrections of
    the cycles before, `surviving` have been kept without a break since.
    """

    cycle: int
    size: int
    kept: int
    moved: int
    resurrected: int
    earlier: int
    surviving: int
    layers: tuple[LayerReport, ...]

    @property
    def sparsity(self) -> float:
        """Share of all masked weights that is pruned, by the count; 0 where there is none."""
        return 1 - self.kept / self.size if self.size else 0.0


@dataclass
class History:
    """Records of the phases and cycles so far, in order."""

    phases: list[PhaseRecord] = field(default_factory=list)
    cycles: list[CycleReport] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The records as plain dicts, lists and numbers, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "History":
        """The records that `to_dict` gave."""
        cycles = [
            CycleReport(**{**report, "layers": tuple(LayerReport(**layer) for layer in report["layers"])})
            for report in state["cycles"]
        ]
        return cls([PhaseRecord(**record) for record in state["phases"]], cycles)
