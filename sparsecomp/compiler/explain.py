"""`explain`: what the compiler would do to a model, without compiling it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sparsecomp import _compat
from sparsecomp.compiler.call import Call
from sparsecomp.compiler.capture import capture, tell_breaks
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.options import Options
from sparsecomp.passes.engine.rule import TAG
from sparsecomp.report import Report, merge
from sparsecomp.training.pruning.layouts import FromMask

_GRADIENTS = "the model is in evaluation mode, but gradients are on: for inference, call it under torch.no_grad()"
_PRUNED = (
    "half or more of the weight is zero in {layers}: sparsecomp.sparsify(model, sparsecomp.FromMask()) makes them "
    "sparse layers, of which explain says whether they pay"
)
_NAMED = 6
"""Layers that a note names."""


def explain(
    model: Callable[..., Any],
    /,
    *args: Any,
    device: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Report:
    """What the compiler would rewrite in `model`, what not, and why; with densities measured on the given input.

    Runs the model uncompiled, and leaves it as it was.

    Args:
        model: any module or function.
        *args: its inputs.
        device: a word of a known card's name, such as `"h100"`: what would be rewritten there is estimated, whatever
            this machine has. Known are the H100 and each card that imported tuning results are of. By default it is for
            the devices of the tensors.
        options: as for `torch.compile(backend="sparsecomp")`; see `Options`.
        kwargs: inputs by name. Needed only for those that have the name of an option.
        **keywords: options, and inputs by name if `kwargs` is not given.

    Returns:
        A report of all graphs of the model, with Dynamo's reasons for graph breaks.

    Raises:
        OptionError: an unknown option or value, or a card that nothing is known of.
        InputError: a keyword that is both an option and an input.
        Exception: what `model` itself raises on these inputs.
    """
    own = ("device",) if device is not None else ()
    target = None if device is None else target_named(device)
    call = Call.of(model, args, options, kwargs, keywords, own).accepted()
    graphs, breaks = capture(call)
    reports = []
    for graph in graphs:
        report = graph.rewrite(call.options, target)
        if not report.graph_before:
            report.graph_before = report.graph_after = _compat.readable(graph.gm, TAG)
        reports.append(report)
    merged = merge(reports, "torch.compile")
    tell_breaks(merged, breaks)
    if torch.is_grad_enabled() and not call.model.training and any(p.requires_grad for p in call.model.parameters()):
        merged.note(_GRADIENTS)
    pruned = _pruned(call.model)
    if pruned:
        merged.note(_PRUNED.format(layers=", ".join(pruned[:_NAMED] + ["…"] * (len(pruned) > _NAMED))))
    if target is not None:
        merged.capture += f", estimated for {target.device.name}"
    return merged


def _pruned(model: nn.Module) -> list[str]:
    """Names of plain linear layers that `FromMask` would make sparse.

    One that is all zeros was not pruned, but begins so; of those that torch prunes, rules tell.
    """
    found = []
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and isinstance(layer.weight, nn.Parameter) and not layer.weight.is_meta:
            stored = int(layer.weight.count_nonzero())
            if 0 < stored <= (1 - FromMask.least) * layer.weight.numel():
                found.append(name or "the model")
    return found
