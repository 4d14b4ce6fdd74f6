"""The report as one HTML page with its style and script inside; its text is escaped by the template engine."""

import difflib
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from sparsecomp.report.columns import COLUMNS, Bar, Column
from sparsecomp.report.node import Node
from sparsecomp.report.site import Layer

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
)

ROW = 46
"""Height of a node in the drawing of a graph, in pixels."""
_GUTTER = 54
"""Width of the strip beside the nodes in which their edges run."""
_SHOWN_INPUTS = 4


def render(before: list[Node], after: list[Node], **report: Any) -> str:
    """The page of a report, of which the graphs are drawn beside each other."""
    return _TEMPLATES.get_template("page.html").render(
        drawings=list(_drawings(before, after)), columns=COLUMNS, bar=_bar, source=_source, row=ROW, gutter=_GUTTER,
        **report,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Side:
    """One of two graphs, with a row for each node; None where only the other graph has one.

    Attributes:
        rows: the nodes.
        edges: curves from a node to those that read it, as SVG paths, and whether either end is new.
        anchors: the element of each node's name.
    """

    title: str
    rows: list[Node | None]
    changed: frozenset[str]
    edges: list[tuple[str, bool]]
    anchors: dict[str, str]

    def inputs(self, node: Node) -> list[tuple[str, str]]:
        """What a node reads, by name and element; parameters are not drawn."""
        return [(name, self.anchors[name]) for name in node.inputs if name in self.anchors][:_SHOWN_INPUTS]


def _drawings(before: list[Node], after: list[Node]) -> Iterator[tuple[_Side, _Side]]:
    """The two sides of each of the model's graphs."""
    for graph in sorted({node.graph for node in after}):
        old, new = (_drawn(nodes, graph) for nodes in (before, after))
        left, right = _aligned(old, new)
        names = [frozenset(node.name for node in nodes) for nodes in (old, new)]
        yield _side("before", left, names[0] - names[1]), _side("after", right, names[1] - names[0])


def _drawn(nodes: Iterable[Node], graph: int) -> list[Node]:
    return [node for node in nodes if node.graph == graph and node.op != "parameter"]


def _aligned(old: list[Node], new: list[Node]) -> tuple[list[Node | None], list[Node | None]]:
    """Both with gaps, so that what stayed stands in one row."""
    matcher = difflib.SequenceMatcher(None, *([node.name for node in nodes] for nodes in (old, new)), autojunk=False)
    left: list[Node | None] = []
    right: list[Node | None] = []
    for _, start, end, first, last in matcher.get_opcodes():
        height = max(end - start, last - first)
        left += [*old[start:end], *[None] * (height - (end - start))]
        right += [*new[first:last], *[None] * (height - (last - first))]
    return left, right


def _side(title: str, rows: list[Node | None], changed: frozenset[str]) -> _Side:
    places = {node.name: place for place, node in enumerate(rows) if node is not None}
    edges = [
        (_curve(places[name], places[node.name]), bool({name, node.name} & changed))
        for node in rows if node is not None for name in node.inputs if name in places
    ]  # fmt: skip
    anchors = {node.name: f"{title}-{node.graph}-{place}" for place, node in enumerate(rows) if node is not None}
    return _Side(title, rows, changed, edges, anchors)


def _curve(start: int, end: int) -> str:
    """From one row to another: the farther, the wider it swings."""
    top, bottom = (start + 0.5) * ROW, (end + 0.5) * ROW
    swing = min(4 + 5 * (abs(end - start) - 1), _GUTTER - 8) / 0.75  # a curve reaches three quarters of its handles
    edge = _GUTTER - 4
    return f"M{edge},{top:.0f} C{edge - swing:.1f},{top:.0f} {edge - swing:.1f},{bottom:.0f} {edge},{bottom:.0f}"


def _bar(column: Column, layer: Layer, layers: list[Layer]) -> float | None:
    """Length of a cell's bar in [0, 1]; None for no bar."""
    value = column.number(layer)
    if column.bar is Bar.NONE or value is None:
        return None
    most = max(column.number(other) or 0.0 for other in layers) if column.bar is Bar.OF_MOST else 1.0
    return value / most if most else 0.0


@dataclass(frozen=True, slots=True)
class _Source:
    """A line of the user's code: its name, its text, and a link to the file where there is one."""

    name: str
    path: str
    text: str
    link: str


def _source(location: str) -> _Source | None:
    file, _, line = location.rpartition(":")
    if not file or not line.isdigit():
        return None
    path = Path(file)
    link = path.resolve().as_uri() if path.is_file() else ""
    return _Source(f"{path.name}:{line}", location, linecache.getline(file, int(line)).strip(), link)
