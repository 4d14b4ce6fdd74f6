"""Ones that are written into zeros where a mask is true become that mask as numbers, from which neurons are read.

`out = zeros_like(v); out[v > 1] = 1.0` is how many spike functions are written. In training it is the body of a
`torch.autograd.Function`; in inference Dynamo inlines it, and what is written to in place is neither an operation of a
neuron nor part of a loop whose layers can run once. The zeros are seen by nobody, so the mask in their dtype is all
that is needed, and no write.
"""

import torch
from torch import fx

from sparsecomp.passes.engine.rule import Context, Plan, Rule, Verdict, call
from sparsecomp.passes.graph.canonicalize import dtype_of, example_of, filled_with, op_of, shape_of
from sparsecomp.reference.precision import KERNEL_DTYPES

_MASKS = {"setitem": "index", "masked_fill": "mask"}
"""Operators that write where a mask is true, and what they call it."""


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: the first such write of a graph stands for all."""
    if ctx.options.neurons != "fuse" or ctx.eager or _zeros(node, ctx) is None:
        return None
    if node is not next(one for one in ctx.gm.graph.nodes if _zeros(one, ctx) is not None):
        return None
    writes = {one: zeros for one in ctx.gm.graph.nodes if (zeros := _zeros(one, ctx)) is not None}
    reason = f"{len(writes)} tensors of zeros, with ones written where a mask is true, are the mask as numbers"
    places = tuple(writes)
    return Plan(lambda: _build(writes), reason, "written", dead=places[::-1], places=places)


RULE = Rule("written_spikes", consider)


def _zeros(node: fx.Node, ctx: Context) -> fx.Node | None:
    """The zeros into which a node writes ones, where a mask of their shape says so; None if it does anything else."""
    op = op_of(node)
    if op is None or not op.known or op.name not in _MASKS or node in ctx.transformed:
        return None
    zeros, mask, value, order = op.input, op.get(_MASKS[op.name]), op.get("value"), ctx.analysis.order
    if not isinstance(zeros, fx.Node) or not isinstance(value, int | float) or value != 1:
        return None
    if dtype_of(mask) is not torch.bool or dtype_of(zeros) not in KERNEL_DTYPES or filled_with(zeros) != 0.0:
        return None
    one, other, shape = example_of(zeros), example_of(mask), shape_of(zeros)
    if shape is None or None in shape or shape != shape_of(mask):
        return None
    alike = (one.stride(), one.device) == (other.stride(), other.device)
    first = all(order[user] >= order[node] for user in zeros.users)
    written = op.inplace or op.name == "setitem"
    return zeros if alike and first and written and not one.requires_grad else None


def _build(writes: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    made: dict[fx.Node, fx.Node] = {}
    for node, zeros in writes.items():
        op = op_of(node)
        assert op is not None
        with node.graph.inserting_before(node):
            spikes = call(node.graph, node, torch.Tensor.to, op.get(_MASKS[op.name]), dtype_of(zeros))
        made |= {node: spikes, zeros: spikes}
    return made
