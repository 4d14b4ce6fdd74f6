"""`explain`: what the compiler would do to a model, without compiling it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from sparsecomp import _compat
from sparsecomp.compiler.backend import input_values, note_device
from sparsecomp.compiler.density import DensityRecorder
from sparsecomp.compiler.snapshot import undone
from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.engine.rule import TAG, Density
from sparsecomp.passes.rules import parse_options
from sparsecomp.report import Report, merge


def explain(
    model: nn.Module,
    *args: Any,
    mode: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
    **kwargs: Any,
) -> Report:
    """What the compiler would rewrite in `model`, what not, and why; with densities measured on the given input.

    Runs the model once, uncompiled, and leaves it as it was.

    Args:
        model: any module.
        *args, **kwargs: its inputs.
        mode, options: as for `torch.compile(backend="sparsecomp")`.

    Returns:
        A report of all graphs of the model, with Dynamo's reasons for graph breaks.

    Raises:
        OptionError: an unknown option or value.
    """
    parsed = parse_options(mode, options)
    captures, breaks = captured(model, model, args, kwargs)
    reports = [capture.report(parsed) for capture in captures]
    merged = merge(reports, f"torch.compile, {len(reports)} graph{'s' if len(reports) != 1 else ''}")
    merged.graph_breaks = breaks
    note_device(merged)
    return merged


def measured_densities(model: nn.Module, args: Sequence[Any]) -> dict[str, Density]:
    """Densities of every graph that `torch.compile` makes of `model`, by `passes.rule.site_key`."""
    captures, _ = captured(model, model.forward, args, {})
    return {key: density for capture in captures for key, density in capture.densities.items()}


def captured(
    model: nn.Module, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> "tuple[list[Capture], list[str]]":
    """Dynamo's graphs of one call of `function` (`model` or its `forward`), and the causes of graph breaks."""
    captures: list[Capture] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        captures.append(Capture(gm, example_inputs))
        return captures[-1].run

    breaks: list[str] = []
    with undone(model, args, kwargs), _compat.graph_break_reasons(breaks):
        _compat.isolated_compile(function, backend)(*args, **kwargs)
    return captures, breaks


class Capture:
    """One graph of Dynamo's, which measures its densities when it runs."""

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.gm = gm
        self.grad = torch.is_grad_enabled()
        self.values = input_values(gm, example_inputs)
        self.densities: dict[str, Density] = {}

    def run(self, *args: Any) -> Any:
        """Run the graph op by op."""
        recorder = DensityRecorder(self.gm)
        result = recorder.run(*args)
        self.densities.update(recorder.densities)
        return result

    def report(self, options: Options) -> Report:
        """What the rules would do to this graph; rewrites it."""
        with torch.set_grad_enabled(self.grad):
            report = pipeline.run(self.gm, options, values=self.values, densities=self.densities)
        if not report.graph_before:
            report.graph_before = report.graph_after = _compat.readable(self.gm, TAG)
        return report
