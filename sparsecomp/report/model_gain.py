"""The gain of a whole model, which is less than that of its sites: the rest takes as long as before."""

from dataclasses import dataclass
from typing import Any

import networkx

from sparsecomp.report.node import Timing


@dataclass(frozen=True, slots=True)
class ModelGain:
    """Seconds of what is estimated of a model, as it runs and all dense.

    Attributes:
        seconds, dense_seconds: of all operators, one after another, as one stream of a GPU runs them.
        path, dense_path: along the critical path: the least that data dependencies allow.
        estimated, others: how many operators there are of which a time is known, and of which it is not.
    """

    seconds: float
    dense_seconds: float
    path: float
    dense_path: float
    estimated: int
    others: int

    @property
    def serial(self) -> float:
        """Expected speed-up of the operators in a row."""
        return self.dense_seconds / self.seconds

    @property
    def critical(self) -> float:
        """Expected speed-up of the critical path."""
        return self.dense_path / self.path

    def __str__(self) -> str:
        counted = f"{self.estimated} of {self.estimated + self.others} operators estimated"
        return f"whole model, {counted}: {self.serial:.2f}x in a row, {self.critical:.2f}x along the critical path"


def model_gain(graph: networkx.DiGraph) -> ModelGain | None:
    """The gain by the times in a graph's nodes; None if it has none."""
    nodes = [data for _, data in graph.nodes(data=True)]
    known = [data for data in nodes if Timing(data["timing"]).counts]
    if not sum(data["seconds"] for data in known):
        return None
    return ModelGain(
        sum(data["seconds"] for data in known), sum(data["dense_seconds"] for data in known),
        _longest_path(graph, "seconds"), _longest_path(graph, "dense_seconds"),
        len(known), sum(Timing(data["timing"]) is Timing.UNKNOWN for data in nodes),
    )  # fmt: skip


def _longest_path(graph: networkx.DiGraph, seconds: str) -> float:
    """Of each of a model's graphs, which run one after another."""
    ends: dict[Any, float] = {}
    longest: dict[int, float] = {}
    for node in networkx.topological_sort(graph):
        data = graph.nodes[node]
        ends[node] = max((ends[read] for read in graph.predecessors(node)), default=0.0) + data.get(seconds, 0.0)
        longest[data["graph"]] = max(longest.get(data["graph"], 0.0), ends[node])
    return sum(longest.values())
