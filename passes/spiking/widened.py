"""Floats that are widened bytes: the bytes that they were, behind operators that only move elements."""

from typing import Any

import torch
from torch import fx

from sparsecomp.passes.engine.rule import Context
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.passes.graph.operators import Trait


def widened_from(x: fx.Node) -> fx.Node | None:
    """The int8 tensor that a node widened to floats where it lies."""
    op = op_of(x)
    if op is None or not op.has(Trait.CAST):
        return None
    source, widened = example_of(op.input), example_of(x)
    if source is None or widened is None or source.device != widened.device:
        return None
    return op.input if source.dtype is torch.int8 and widened.dtype.is_floating_point else None


def moved_from(x: fx.Node, ctx: Context) -> fx.Node | None:
    """The tensor whose elements a node holds in other places, if what it read can be read again."""
    op = op_of(x)
    if op is None or op.module is not None or not op.has(Trait.MOVES | Trait.VIEW) or op.reinterprets():
        return None
    # what else it reads, such as an index, is read again; numbers stay
    tensors = [read for read in x.all_input_nodes if isinstance(read.meta.get("example_value"), torch.Tensor)]
    return op.input if all(ctx.analysis.unchanged(read, x) for read in tensors) else None


def made_of_bytes(x: Any, ctx: Context, depth: int = 64) -> bool:
    """Whether floats are widened bytes, or moves, sums and max-pools of such, which other rules make in bytes."""
    op = op_of(x) if isinstance(x, fx.Node) and depth else None
    if op is None:
        return False
    if widened_from(x) is not None:
        return True
    moved = moved_from(x, ctx)
    made = (op.input, op.get("other")) if op.name == "add" else (op.input,)
    parts = made if op.name == "add" or op.name.startswith("max_pool") else (moved,)
    return all(made_of_bytes(one, ctx, depth - 1) for one in parts)


def in_bytes(x: Any, like: fx.Node) -> fx.Node:
    """The bytes of a node that is made of widened ones by moves alone: the moves are done again, of bytes."""
    source = widened_from(x)
    if source is not None:
        return source
    op = op_of(x)
    assert op is not None
    return on_bytes(x, {op.input: in_bytes(op.input, like)}, like)


def on_bytes(x: fx.Node, narrow: dict[Any, fx.Node], like: fx.Node) -> fx.Node:
    """The call of a node, of bytes in place of floats; what is made for two readers is shared by Inductor."""
    made = like.graph.node_copy(x, lambda old: narrow.get(old, old))
    made.meta.pop("example_value", None)
    return made
