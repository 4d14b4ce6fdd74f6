"""What a compilation did and did not do, and why: a rewrite nobody can inspect is a rewrite nobody can trust."""

import difflib
import io
import json
import shutil
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from weakref import WeakKeyDictionary

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_WIDTH = 160
"""Of what is not printed to a terminal."""
_NEWLINE = "\n"
_REASONS = 3
"""The most that the first line tells; the table tells all."""


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
    why: str = ""
    graph: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """Sites of one rule at one place that came to the same: one, or one a time step."""

    sites: tuple[Site, ...]

    @property
    def site(self) -> Site:
        """The first, which stands for all but in density and gain."""
        return self.sites[0]

    @property
    def name(self) -> str:
        """The module's path, or the node's name where no module made the call; and how often."""
        name = self.site.module or self.site.node
        return name if len(self.sites) == 1 else f"{name} ×{len(self.sites)}"

    @property
    def density(self) -> float | None:
        """The mean of what is known."""
        known = [site.density for site in self.sites if site.density is not None]
        return sum(known) / len(known) if known else None

    @property
    def gains(self) -> list[float]:
        """Estimated speed-ups over dense."""
        return [site.expected_gain for site in self.sites if site.expected_gain is not None]


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
        capture: how the graphs were obtained.
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

    @property
    def changed(self) -> bool:
        """Whether any rule changed a graph."""
        return any(done.rewritten for done in self.passes)

    @property
    def layers(self) -> list[Layer]:
        """The sites, with those of repeated time steps together."""
        found: dict[Hashable, list[Site]] = {}
        for site in self.sites:
            place = (site.module, site.location) if site.module or site.location else site.node
            outcome = site.implementation, site.precision, site.why, site.density_source
            found.setdefault((site.graph, site.rule, place, site.rewritten, outcome), []).append(site)
        return [Layer(tuple(sites)) for sites in found.values()]

    @property
    def summary(self) -> str:
        """One line: how many sites were rewritten, what that promises, and why the others were not."""
        kinds: dict[str, str] = {}  # of each, how it is put at the first site
        for site in self.sites:
            if not site.rewritten:
                kinds.setdefault(site.why or site.reason, site.reason.partition(":")[0])
        dense = Counter(site.why or site.reason for site in self.sites if not site.rewritten).most_common()
        parts = [f"{count} dense because {kinds[kind]}" for kind, count in dense[:_REASONS]]
        others = sum(count for _, count in dense[_REASONS:])
        parts += [f"{others} for other reasons"] if others else []
        done = f"{len(self.rewritten)} of {len(self.sites)} sites rewritten"
        return "; ".join(filter(None, (f"sparsecomp, {self.capture}: {done}{self._promise()}", ", ".join(parts))))

    def _promise(self) -> str:
        gains = [site.expected_gain for site in self.rewritten if site.expected_gain is not None]
        if not self.rewritten:
            return ""
        return f", expected {_range(gains)} as fast" if gains else ", no gain estimated"

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
        """A rich table, one row a layer."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for column in ("rule", "site", "location", "runs as", "density", "gain", "reason"):
            table.add_column(column, overflow="fold")
        for layer in self.layers:
            table.add_row(*map(Text, _cells(layer)), style="green" if layer.site.rewritten else None)
        return table

    def __str__(self) -> str:
        breaks = [f"graph break: {text.partition(_NEWLINE)[0]}" for text in self.graph_breaks]
        return rendered(Text(self.summary), self.to_table(), *map(Text, (*breaks, *self.notes)))


def rendered(*parts: RenderableType) -> str:
    """Text of rich's tables and texts, as wide as the terminal."""
    stream = io.StringIO()
    console = Console(file=stream, width=shutil.get_terminal_size((_WIDTH, 0)).columns)
    for part in parts:
        console.print(part)
    return stream.getvalue().rstrip("\n")


def merge(reports: Iterable[Report], capture: str) -> Report:
    """One report of several graphs of one model."""
    parts = list(reports)
    merged = Report(capture=capture if len(parts) == 1 else f"{capture}, {len(parts)} graphs")
    for place, report in enumerate(parts):
        merged.sites += [replace(site, graph=place) for site in report.sites]
        merged.passes += report.passes
        merged.graph_breaks += report.graph_breaks
        for text in report.notes:
            merged.note(text)
        merged.graph_before = "\n\n".join(filter(None, (merged.graph_before, report.graph_before)))
        merged.graph_after = "\n\n".join(filter(None, (merged.graph_after, report.graph_after)))
    return merged


class Compilations:
    """The reports of one model's compiled graphs. One that is compiled anew, for another batch size, has one report."""

    def __init__(self) -> None:
        self._reports: dict[Hashable, Report] = {}

    def add(self, graph: Hashable, report: Report) -> None:
        """Keep the report of a graph, in place of an earlier one of the same; the model becomes the latest."""
        global _last
        self._reports[graph] = report
        _last = self

    def report(self, capture: str = "torch.compile") -> Report:
        """All graphs in one report."""
        return merge(self._reports.values(), capture)


_by_model: WeakKeyDictionary[object, Compilations] = WeakKeyDictionary()
_last: Compilations | Report | None = None


def compilations_of(model: object | None) -> Compilations:
    """The compilations of what one call of `torch.compile` made; new ones if that is not known."""
    return Compilations() if model is None else _by_model.setdefault(model, Compilations())


def last_report() -> Report | None:
    """The report of the model that was compiled latest in this process, of all its graphs; None before the first."""
    return _last.report() if isinstance(_last, Compilations) else _last


def remember(report: Report) -> None:
    """Make `report` the latest one."""
    global _last
    _last = report


def _cells(layer: Layer) -> list[str]:
    site, density = layer.site, layer.density
    file, _, line = site.location.rpartition(":")
    return [
        site.rule, layer.name, f"{PurePath(file).name}:{line}" if file else "",
        f"{site.implementation}, {site.precision}" if site.precision else site.implementation,
        "" if density is None else f"{density:.1%}{' assumed' * (site.density_source == 'assumed')}",
        _range(layer.gains) if layer.gains else "", site.reason,
    ]  # fmt: skip


def _range(gains: list[float]) -> str:
    least, most = f"{min(gains):.2f}x", f"{max(gains):.2f}x"
    return least if least == most else f"{least} to {most}"
