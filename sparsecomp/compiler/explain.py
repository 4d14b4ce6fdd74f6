"""`explain`: what the compiler would do to a model, without compiling it."""

from collections.abc import Callable, Mapping
from typing import Any

from sparsecomp import _compat
from sparsecomp.compiler.call import Call
from sparsecomp.compiler.capture import capture
from sparsecomp.options import Options
from sparsecomp.passes.engine.rule import TAG
from sparsecomp.report import Report, merge


def explain(
    model: Callable[..., Any],
    /,
    *args: Any,
    options: Mapping[str, Any] | Options | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Report:
    """What the compiler would rewrite in `model`, what not, and why; with densities measured on the given input.

    Runs the model uncompiled, and leaves it as it was.

    Args:
        model: any module or function.
        *args: its inputs.
        options: as for `torch.compile(backend="sparsecomp")`; see `Options`.
        kwargs: inputs by name. Needed only for those that have the name of an option.
        **keywords: options, and inputs by name if `kwargs` is not given.

    Returns:
        A report of all graphs of the model, with Dynamo's reasons for graph breaks.

    Raises:
        OptionError: an unknown option or value.
        InputError: a keyword that is both an option and an input.
        Exception: what `model` itself raises on these inputs.
    """
    call = Call.of(model, args, options, kwargs, keywords).accepted()
    graphs, breaks = capture(call)
    reports = []
    for graph in graphs:
        report = graph.rewrite(call.options)
        if not report.graph_before:
            report.graph_before = report.graph_after = _compat.readable(graph.gm, TAG)
        reports.append(report)
    merged = merge(reports, "torch.compile")
    merged.graph_breaks = breaks
    return merged
