"""Sums of bytes over time are made of the maps that layers read, for Inductor to let them lie as these ask.

A layer on spikes reads maps (T · N, C, …), channels innermost. What Inductor makes in the shape (T, N, C, …) for
several readers it lets lie in its own order, and copies it for each layer, since a view cannot change that. Made as
maps, it lies as the first layer asks.
"""

import operator
from typing import Any

import torch
from torch import fx

from sparsecomp.passes.engine.rule import call
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.reference.geometry import is_channels_last

_JOINED = (operator.add, operator.sub, operator.mul, torch.rsub)


def sum_maps(gm: fx.GraphModule) -> None:
    """Make sums, differences and products of bytes of maps, where they and what they are made of lie channels-last."""
    for node in list(gm.graph.nodes):
        if node.target in _JOINED and not node.kwargs and _is_of_maps(node):
            with gm.graph.inserting_before(node):
                maps = call(node.graph, node, node.target, *(_maps_of(one, node) for one in node.args))
                over_time = call(node.graph, node, torch.unflatten, maps, 0, tuple(example_of(node).shape[:2]))
            over_time.meta["example_value"] = example_of(node)
            for reader in list(node.users):
                if _is_flatten(reader):
                    reader.replace_all_uses_with(maps)
                    gm.graph.erase_node(reader)
            node.replace_all_uses_with(over_time)
            gm.graph.erase_node(node)


def _is_of_maps(node: fx.Node) -> bool:
    """Whether all tensors of a call are bytes (T, N, C, …) of one shape, and maps channels-last without time."""
    every = [example_of(one) for one in (node, *node.all_input_nodes)]
    return all(
        isinstance(one, torch.Tensor) and one.dtype is torch.int8 and one.dim() > 4
        and all(isinstance(size, int) for size in one.shape) and one.shape == every[0].shape
        and one.stride(0) == one.shape[1] * one.stride(1) and is_channels_last(one.flatten(0, 1))
        for one in every
    )  # fmt: skip


def _maps_of(operand: Any, reader: fx.Node) -> Any:
    """An operand without time: what it was made of if it is such a sum."""
    if not isinstance(operand, fx.Node):
        return operand
    if operand.target is torch.unflatten and operand.args[1:] == (0, tuple(example_of(operand).shape[:2])):
        return operand.args[0]
    return call(reader.graph, reader, torch.flatten, operand, 0, 1)


def _is_flatten(reader: fx.Node) -> bool:
    return reader.target in ("flatten", torch.flatten) and reader.args[1:] == (0, 1) and not reader.kwargs
