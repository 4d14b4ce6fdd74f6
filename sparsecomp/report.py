"""What a compilation did and did not do, and why: a rewrite nobody can inspect is a rewrite nobody can trust."""

import difflib
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDTH = 200


@dataclass(slots=True)
class Site:
    """One place that a rule looked at.

    Attributes:
        rule: the rule's name.
        node: the node's name in the captured graph.
        rewritten: whether the rule replaced it.
        reason: why, or which condition failed.
        location: the user's `file:line`, empty if the graph does not know it.
        module: dotted path of the module that made the call, empty if unknown.
        density: share of non-zero inputs in [0, 1], None if nobody measured or assumed one.
        density_source: "measured", "assumed" or "unknown".
        implementation: "dense" or the sparse implementation.
        precision: the numeric mode, empty for a dense site.
        expected_gain: estimated speed-up over dense; None for a dense site, or where there is no estimate.
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


@dataclass(slots=True)
class PassRecord:
    """Time and number of rewrites of one rule on one graph."""

    rule: str
    seconds: float
    rewritten: int


@dataclass(slots=True)
class Report:
    """The result of `explain`, and what the last compilation left (`last_report`).

    Attributes:
        sites: every candidate site, rewritten or not.
        passes: time of each rule.
        capture: how the graph was obtained.
        graph_before, graph_after: readable code; equal if nothing was rewritten.
        graph_breaks: why the model could not be captured in one graph.
        notes: things to know that belong to no site, such as a missing CUDA device.
    """

    capture: str = "torch.compile"
    sites: list[Site] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    graph_before: str = ""
    graph_after: str = ""
    graph_breaks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def rewritten(self) -> list[Site]:
        """The sites that were replaced."""
        return [site for site in self.sites if site.rewritten]

    def note(self, text: str) -> None:
        """Add a note once."""
        if text not in self.notes:
            self.notes.append(text)

    def to_json(self) -> str:
        """Everything in the report as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def diff(self) -> str:
        """A unified diff of the graph's code; empty if nothing was rewritten."""
        before, after = self.graph_before.splitlines(), self.graph_after.splitlines()
        return "\n".join(difflib.unified_diff(before, after, "before", "after", lineterm=""))

    def to_table(self) -> Table:
        """A rich table, one row a site."""
        table = Table(title=f"sparsecomp: {len(self.rewritten)} of {len(self.sites)} sites rewritten ({self.capture})")
        for column in ("rule", "site", "location", "implementation", "precision", "density", "gain", "reason"):
            table.add_column(column, overflow="fold")
        for site in self.sites:
            table.add_row(*_cells(site), style="green" if site.rewritten else None)
        return table

    def __str__(self) -> str:
        stream = io.StringIO()
        console = Console(file=stream, width=_WIDTH)
        console.print(self.to_table())
        for text in (*(f"graph break: {text}" for text in self.graph_breaks), *self.notes):
            console.print(text, markup=False, highlight=False)
        return stream.getvalue()


def merge(reports: Iterable[Report], capture: str) -> Report:
    """One report of several graphs of one model."""
    merged = Report(capture=capture)
    for report in reports:
        merged.sites += report.sites
        merged.passes += report.passes
        merged.graph_breaks += report.graph_breaks
        for text in report.notes:
            merged.note(text)
        merged.graph_before = "\n\n".join(filter(None, (merged.graph_before, report.graph_before)))
        merged.graph_after = "\n\n".join(filter(None, (merged.graph_after, report.graph_after)))
    return merged


_last: Report | None = None


def last_report() -> Report | None:
    """The report of the latest compilation in this process, None before the first."""
    return _last


def remember(report: Report) -> None:
    """Make `report` the latest one."""
    global _last
    _last = report


def _cells(site: Site) -> list[str]:
    density = "" if site.density is None else f"{site.density:.1%} {site.density_source}"
    gain = "" if site.expected_gain is None else f"{site.expected_gain:.2f}x"
    cells: list[Any] = [
        site.rule, site.module or site.node, site.location, site.implementation, site.precision, density, gain,
        site.reason,
    ]  # fmt: skip
    return [str(cell).replace("[", r"\[") for cell in cells]
