"""How a value lies in memory: whether it lies as another, and a copy that does.

Who views a value, in the graph or behind it, asks that what takes its place lies as it did.
"""

from collections.abc import Sequence

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.passes.engine.rule import call
from sparsecomp.passes.graph.canonicalize import example_of


def lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same strides, where these count."""
    of_several = [dim for dim, size in enumerate(a.shape) if size != 1]
    return all(a.stride(dim) == b.stride(dim) for dim in of_several)


def laid_as(value: fx.Node, like: fx.Node) -> fx.Node:
    """A value of a new node, copied to where `like` lay if it lies otherwise."""
    found, wanted = _example(value), example_of(like)
    if found is None or wanted is None or lie_alike(found, wanted):
        return value
    order = sorted(range(wanted.dim()), key=wanted.stride().__getitem__, reverse=True)
    with value.graph.inserting_before(value.next):
        made = call(value.graph, like, torch.Tensor.contiguous, permuted(value, order, like))
        return permuted(made, [order.index(dim) for dim in range(wanted.dim())], like)


def permuted(value: fx.Node, order: Sequence[int], like: fx.Node) -> fx.Node:
    """A value with its dimensions in another order."""
    return value if [*order] == sorted(order) else call(value.graph, like, torch.Tensor.permute, value, [*order])


def _example(node: fx.Node) -> torch.Tensor | None:
    """The example of a new node, computed as those of what it reads are, where they are known."""
    pending = [node]
    while pending:
        missing = [one for one in pending[-1].all_input_nodes if "example_value" not in one.meta]
        if missing:
            pending += missing
            continue
        one = pending.pop()
        if "example_value" not in one.meta:
            one.meta["example_value"] = _compat.propagate_fakes(one)
    return example_of(node)
