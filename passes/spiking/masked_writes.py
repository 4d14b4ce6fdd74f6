"""A number that is written where a mask is true becomes a choice by that mask, from which neurons are read.

`out = zeros_like(v); out[v > 1] = 1.0` is how many spike functions are written, and `v[fired] = 0.0` a reset. In
training the former is the body of a `torch.autograd.Function`; in inference Dynamo inlines it, and what is written to
in place is neither an operation of a neuron nor part of a loop whose layers can run once. Nobody knows the memory that
is written to by another name, so that who reads it later may as well read a tensor of its own.
"""

from typing import Any

import torch
from torch import fx

from sparsecomp.passes.engine.rule import Context, Plan, Rule, Verdict, call
from sparsecomp.passes.graph.canonicalize import dtype_of, example_of, filled_with, op_of, shape_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.reference.precision import KERNEL_DTYPES

_MASKS = {"setitem": "index", "masked_fill": "mask"}
"""Operators that write where a mask is true, and what they call it."""
_NAMES = Trait.ALIAS | Trait.CAST | Trait.VIEW | Trait.PARTS | Trait.SAME
"""What may give the memory of its first argument another name."""


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: the first such write of a graph stands for all."""
    if ctx.options.neurons != "fuse" or ctx.eager or ctx.switches or not _is_choice(node, ctx):
        return None
    if node is not next(one for one in ctx.gm.graph.nodes if _is_choice(one, ctx)):
        return None
    writes = [one for one in ctx.gm.graph.nodes if _is_choice(one, ctx)]
    reason = f"{len(writes)} in-place writes of a number where a mask is true are choices by the mask"
    return Plan(lambda: _build(writes), reason, "chosen", dead=tuple(writes[::-1]), places=tuple(writes))


RULE = Rule("masked_writes", consider)


def _is_choice(node: fx.Node, ctx: Context) -> bool:
    """Whether a write to floats where a mask of their shape is true can be a tensor of its own."""
    op = op_of(node)
    if op is None or not op.known or op.name not in _MASKS or node in ctx.transformed:
        return False
    written, mask, value, order = op.input, op.get(_MASKS[op.name]), op.get("value"), ctx.analysis.order
    if not op.inplace or not isinstance(value, int | float):
        return False
    shape = shape_of(written)
    if dtype_of(mask) is not torch.bool or shape is None or None in shape or shape != shape_of(mask):
        return False
    one, other = example_of(written), example_of(mask)
    before = [user for user in written.users if order[user] < order[node]]
    alike = (one.stride(), one.device) == (other.stride(), other.device)
    return alike and _is_fresh(written) and all(map(_only_reads, before))


def _is_fresh(node: Any) -> bool:
    """Whether a call gives floats in memory of its own, which is no leaf of a gradient."""
    op = op_of(node)
    if op is None or not op.known or op.inplace or op.out is not None or dtype_of(node) not in KERNEL_DTYPES:
        return False
    if filled_with(node) is not None:
        return not example_of(node).requires_grad
    return op.has(Trait.ELEMENTWISE) and not op.has(_NAMES)


def _only_reads(node: fx.Node) -> bool:
    op = op_of(node)
    return op is not None and op.known and not op.inplace and op.out is None and not op.has(_NAMES)


def _build(writes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    made: dict[fx.Node, fx.Node] = {}
    for node in writes:
        op = op_of(node)
        assert op is not None and isinstance(op.input, fx.Node)
        written, mask, value = op.input, op.get(_MASKS[op.name]), float(op.get("value"))
        with node.graph.inserting_before(node):
            if value == 1.0 and filled_with(written) == 0.0:
                chosen = call(node.graph, node, torch.Tensor.to, mask, dtype_of(written))
            else:
                chosen = call(node.graph, node, torch.where, mask, value, written)
        made |= {node: chosen, written: chosen}
    return made
