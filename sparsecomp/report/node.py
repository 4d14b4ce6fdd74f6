"""What the report keeps of each node of a graph, and the graph made of them."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum

import networkx


class Timing(StrEnum):
    """What is known of the time that a node takes."""

    ESTIMATED = "estimated"
    MEASURED = "measured"
    INCLUDED = "in another's"
    """Its time is in that of a node beside it, which the same rewrite made."""
    NONE = "none"
    """It takes none: inputs, parameters, views."""
    UNKNOWN = "not estimated"

    @property
    def counts(self) -> bool:
        """Whether there is a number."""
        return self in (Timing.ESTIMATED, Timing.MEASURED)


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a graph.

    Attributes:
        name: its name there.
        op: what it calls, or `input`, `parameter` or `output`.
        inputs: names of the nodes that it reads.
        fact: what every value of its result obeys, empty if nothing is known.
        density: share of non-zero inputs in [0, 1], None if unknown.
        implementation: what runs it, of a rewritten or a judged layer; else empty.
        rule: which rule made it, empty for a node of the model itself.
        timing: what is known of its time.
        seconds, dense_seconds: its time, and the dense operator's in its place; None if unknown.
        location: the user's `file:line`, empty if unknown.
        module: dotted path of the module that made the call, empty if unknown.
        graph: which of the model's graphs it is in, from 0.
    """

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    fact: str = ""
    density: float | None = None
    implementation: str = ""
    rule: str = ""
    timing: Timing = Timing.UNKNOWN
    seconds: float | None = None
    dense_seconds: float | None = None
    location: str = ""
    module: str = ""
    graph: int = 0


def digraph(nodes: Iterable[Node]) -> networkx.DiGraph:
    """Nodes and what they read, with plain numbers and texts as attributes; what is unknown is left out.

    A node is called by its name, in a second graph of the model `1:name`, and so on.
    """
    found = networkx.DiGraph()
    for node in nodes:
        known = {name: getattr(node, name) for name in _ATTRIBUTES if getattr(node, name) not in (None, "")}
        found.add_node(_key(node.graph, node.name), **known | {"timing": node.timing.value})
        found.add_edges_from((_key(node.graph, read), _key(node.graph, node.name)) for read in node.inputs)
    return found


_ATTRIBUTES = [field.name for field in fields(Node) if field.name not in ("name", "inputs", "timing")]


def _key(graph: int, name: str) -> str:
    return f"{graph}:{name}" if graph else name
