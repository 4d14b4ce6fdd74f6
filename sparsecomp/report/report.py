"""The report itself: what it holds, and its forms: a line, a table, JSON, a graph, a page."""

import difflib
import html
import json
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import networkx
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from sparsecomp.report import page
from sparsecomp.report.columns import COLUMNS, span
from sparsecomp.report.model_gain import ModelGain, model_gain
from sparsecomp.report.node import Node, digraph
from sparsecomp.report.site import COMPARED_COPY, WRITTEN_ONCE, Layer, Site
from sparsecomp.report.text import rendered

_REASONS = 3
"""The most that the first line tells; the table tells all."""


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
        before, after: the nodes of the same graphs.
        graph_breaks: why the model could not be captured in one graph.
        notes: things to know that belong to no site, such as a missing CUDA device.
        graphs: how many there are; none of a model that Dynamo skips as a whole.
        disabled: names of the rules that the options switched off.
    """

    capture: str = "torch.compile"
    sites: list[Site] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    graph_before: str = ""
    graph_after: str = ""
    before: list[Node] = field(default_factory=list)
    after: list[Node] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    graphs: int = 1
    disabled: tuple[str, ...] = ()

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
        dense = [(kind, sum(layer.count for layer in layers)) for kind, layers in self.why_not()]
        parts = [f"{count} dense because {kind}" for kind, count in dense[:_REASONS]]
        others = sum(count for _, count in dense[_REASONS:])
        parts += [f"{others} for other reasons"] if others else []
        done = self._nothing() or f"{len(self.rewritten)} of {len(self.sites)} sites rewritten{self._written_out()}"
        gain = str(self.model_gain() or "") if self.rewritten else ""
        return "; ".join(filter(None, (f"sparsecomp, {self.capture}: {done}{self._promise()}", gain, ", ".join(parts))))

    def _nothing(self) -> str:
        if not self.graphs:
            return "no graph was compiled, the model runs as it is"
        if self.sites:
            return ""
        off = f" ({', '.join(self.disabled)} switched off)" if self.disabled else ""
        return f"{'what was captured has no layer that a rule looks at' if self.passes else 'no rule was run'}{off}"

    def _written_out(self) -> str:
        """What there is to know of rewritten sites that run dense."""
        ways = {"dense": "written out", COMPARED_COPY: "compared with its copy"}
        dense = [site for site in self.rewritten if site.implementation in ways]
        promise = f" ({WRITTEN_ONCE})" if any(WRITTEN_ONCE in site.reason for site in dense) else ""
        seen = " or ".join(way for name, way in ways.items() if any(site.implementation == name for site in dense))
        return f", {len(dense)} of them to run dense, the weight {seen} in each call{promise}" if dense else ""

    def why_not(self) -> list[tuple[str, list[Layer]]]:
        """The layers that stay dense, by the kind of condition that failed; the most frequent first."""
        kinds: dict[str, list[Layer]] = {}
        for layer in self.layers:
            if not layer.site.rewritten:
                kinds.setdefault(layer.site.why or layer.site.reason, []).append(layer)
        groups = [(layers[0].site.reason.partition(":")[0], layers) for layers in kinds.values()]
        return sorted(groups, key=lambda group: -sum(layer.count for layer in group[1]))

    def graph(self) -> networkx.DiGraph:
        """The graph after rewriting: nodes with what is known of them, as `Node` describes it.

        `networkx.write_graphml(report.graph(), path)` writes it to a file.
        """
        return digraph(self.after)

    def model_gain(self) -> ModelGain | None:
        """The expected gain of the whole model; None where the time of no operator is known."""
        return model_gain(self.graph())

    def _promise(self) -> str:
        gains = [site.expected_gain for site in self.rewritten if site.expected_gain is not None]
        if not self.rewritten:
            return ""
        return f", expected {span(gains)} as fast" if gains else ", no gain estimated"

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
        shown = [column for column in COLUMNS if column.on_terminal]
        for column in shown:
            table.add_column(column.title, overflow="fold")
        for layer in self.layers:
            cells = (Text(column.text(layer)) for column in shown)
            table.add_row(*cells, style="green" if layer.site.rewritten else None)
        return table

    def to_html(self, path: str | Path) -> None:
        """Write the report as one page that needs nothing else, and no network."""
        Path(path).write_text(self._page(), encoding="utf-8")

    def _repr_html_(self) -> str:
        """The page in a frame, whose style leaves a notebook's alone."""
        return f'<iframe srcdoc="{html.escape(self._page())}" style="width: 100%; height: 40em; border: 0"></iframe>'

    def _page(self) -> str:
        return page.render(self.before, self.after, summary=self.summary, report=self, gain=self.model_gain())

    def __str__(self) -> str:
        table = [self.to_table()] if self.sites else []
        breaks = [f"graph break: {_brief(text)}" for text in self.graph_breaks]
        return rendered(Text(self.summary), *table, *map(Text, (*breaks, *self.notes)))


def merge(reports: Iterable[Report], capture: str) -> Report:
    """One report of several graphs of one model."""
    parts = list(reports)
    merged = Report(capture=capture if len(parts) < 2 else f"{capture}, {len(parts)} graphs", graphs=len(parts))
    for place, report in enumerate(parts):
        merged.sites += [replace(site, graph=place) for site in report.sites]
        merged.before += [replace(node, graph=place) for node in report.before]
        merged.after += [replace(node, graph=place) for node in report.after]
        merged.passes += report.passes
        merged.disabled = report.disabled
        merged.graph_breaks += report.graph_breaks
        for text in report.notes:
            merged.note(text)
        merged.graph_before = "\n\n".join(filter(None, (merged.graph_before, report.graph_before)))
        merged.graph_after = "\n\n".join(filter(None, (merged.graph_after, report.graph_after)))
    return merged


def _brief(text: str) -> str:
    """Dynamo's title of a graph break and its explanation, without hints and the user's stack."""
    title, _, rest = text.partition("\n")
    told = [line.partition("Explanation:")[2].strip() for line in rest.splitlines() if "Explanation:" in line]
    return ": ".join([title, *told[:1]])
