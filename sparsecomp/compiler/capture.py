"""The graphs of a model: what the backend, `explain` and `optimize` have in common is that they rewrite these."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.compiler.call import Call
from sparsecomp.compiler.density import DensityRecorder
from sparsecomp.lowering.tuning.ceilings import Target
from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.engine.rule import OWNED, Density
from sparsecomp.report import Report
from sparsecomp.snn.norse import LEAF_MAKERS

_compat.trace_neurons_whole(LEAF_MAKERS)

_UNTOLD = "Dynamo gives no reason: the model has no operation on tensors, or TORCH_LOGS=+dynamo says what it skips"

NO_CUDA = "no CUDA device: layers on spikes stay dense unless an implementation is forced"


@dataclass(frozen=True, slots=True)
class Graph:
    """One graph of a model.

    Attributes:
        gm: the graph.
        values: real tensors behind its placeholders and attributes.
        densities: measured ones, by `passes.rule.site_key`.
        eager: the result is to run op by op, not through Inductor.
        gradients: whether gradients were switched on at its capture.
    """

    gm: fx.GraphModule
    values: Mapping[fx.Node, torch.Tensor]
    densities: Mapping[str, Density] = field(default_factory=dict)
    eager: bool = False
    gradients: bool = field(default_factory=torch.is_grad_enabled)

    @classmethod
    def of_dynamo(
        cls, gm: fx.GraphModule, example_inputs: Sequence[Any], densities: Mapping[str, Density], options: Options
    ) -> "Graph":
        """A graph as a backend gets it, to be rewritten under these options."""
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        if options.frozen:
            for node in placeholders:  # only now Dynamo can tell
                node.meta[OWNED] = _compat.has_module(node)
        pairs = zip(placeholders, example_inputs, strict=False)
        return cls(gm, {node: value for node, value in pairs if isinstance(value, torch.Tensor)}, densities)

    def rewrite(self, options: Options, target: Target | None = None) -> Report:
        """Run the rules over the graph, in place, and say what they did; for a card that need not be there."""
        with torch.set_grad_enabled(self.gradients):
            report = pipeline.run_rules(
                self.gm, options, values=self.values, densities=self.densities, eager=self.eager, target=target
            )  # fmt: skip
        if target is None and not torch.cuda.is_available():
            report.note(NO_CUDA)
        return report


def capture(call: Call) -> tuple[list[Graph], list[str]]:
    """The graphs that `torch.compile` makes of one call, with densities measured in it, and why there are several."""
    graphs: list[Graph] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        densities: dict[str, Density] = {}
        graphs.append(Graph.of_dynamo(gm, example_inputs, densities, call.options))

        def run(*args: Any) -> Any:
            recorder = DensityRecorder(gm)
            result = recorder.run(*args)
            densities.update(recorder.densities)
            return result

        return run

    breaks: list[str] = []
    with _compat.graph_break_reasons(breaks):
        call.run(_compat.isolated_compile(call.function, backend))
    return graphs, breaks


def tell_breaks(report: Report, breaks: list[str]) -> None:
    """Write to the report of a model's graphs why they are several, or none."""
    report.graph_breaks = breaks
    if not report.graphs and not breaks:
        report.note(_UNTOLD)
