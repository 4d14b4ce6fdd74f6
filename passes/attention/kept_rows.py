"""Whether a mask of booleans that is computed of positions alone leaves each query a key."""

from typing import Any

import torch
from torch import Tensor, fx

from sparsecomp.passes.attention.mask import is_known
from sparsecomp.passes.graph.canonicalize import op_of

_MOST_CALLS = 64
"""By which a mask is computed."""


def leaves_each_query_a_key(mask: fx.Node, drops: bool, queries: int) -> bool:
    """Of a mask (…, queries, keys) that is True where a pair is dropped, or where it is kept; computes it.

    Args:
        queries: of the scores; a mask of one row is one for all.
    """
    calls = _calls_above(mask)
    if calls is None:
        return False
    found: dict[fx.Node, Any] = {}
    with torch.inference_mode(False), torch.no_grad():
        for node in calls:
            args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
            is_method = node.op == "call_method"
            function: Any = getattr(Tensor, str(node.target)) if is_method else node.target
            found[node] = function(*args, **kwargs)
        held = found[mask]
        if held.dim() < 2 or held.shape[-2] not in (1, queries):
            return False
        return bool((~held if drops else held).any(-1).all())


def _calls_above(mask: fx.Node) -> list[fx.Node] | None:
    """All calls that a value depends on, in order; None if it depends on anything else, or one writes in place."""
    found, pending = set(), [mask]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        op = op_of(node)
        if op is None or op.inplace or not is_known(node) or len(found) >= _MOST_CALLS or _is_written_to(node):
            return None
        found.add(node)
        pending += node.all_input_nodes
    return [node for node in mask.graph.nodes if node in found]


def _is_written_to(node: fx.Node) -> bool:
    return any((op := op_of(user)) is None or (op.inplace and op.input is node) for user in node.users)
