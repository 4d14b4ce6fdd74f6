"""Calls of functions with a backward of their own, as Dynamo puts them into a graph with the bodies of both."""

from typing import Any

from torch import fx

from sparsecomp.passes.graph.canonicalize import target_name

APPLY = "higher_order::autograd_function_apply"


def calls_function(node: Any) -> bool:
    """Whether a node calls such a function; the bodies of its forward and backward are the first two arguments."""
    return isinstance(node, fx.Node) and node.op == "call_function" and target_name(node) == APPLY


def body_at(node: Any) -> fx.GraphModule | None:
    """The body that a node stands for, None if it stands for something else."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, fx.GraphModule) else None
