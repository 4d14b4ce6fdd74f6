"""Calls that are put into a graph before any rule looks at it, with the examples that rules read."""

from typing import Any

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.passes.engine.rule import call


def inserted(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new call in front of a node, in whose place it stands.

    Raises:
        Exception: whatever the operator's meta implementation raises.
    """
    with before.graph.inserting_before(before):
        node = call(before.graph, before, target, *args)
    node.kwargs = kwargs
    node.meta["example_value"] = example = _compat.propagate_fakes(node)
    given = [other.meta["example_value"] for other in node.all_input_nodes]
    if torch.is_grad_enabled() and any(map(_wants_gradient, given)):
        for one in example if isinstance(example, tuple | list) else (example,):
            if one.is_floating_point():
                one.requires_grad_()
    return node


def _wants_gradient(example: Any) -> bool:
    return any(map(_wants_gradient, example)) if isinstance(example, tuple | list) else example.requires_grad
