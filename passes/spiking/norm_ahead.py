"""A batch-norm in training whose result a neuron alone reads is the first instructions of the neuron's step.

Apart, its result is written and read in the forward, and made again, written and read in the backward. As parameters of
the neuron, a mean, a factor and a bias for each channel, it costs none of that: the neuron reads what the layer gave,
and its gradients for factor and bias are the two sums that the gradient of a batch-norm asks for; that of the mean is
minus the factor times the latter. The rest is torch's to differentiate: how the factor is computed of the statistics,
and those of the layer's result. Nothing else is computed of the factor in the forward: of a kernel that sums and
writes the factor and what it is part of, Triton 3.6 makes none.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from sparsecomp.passes.engine.ordered import is_kept
from sparsecomp.passes.engine.rule import Context, call
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.spiking.neuron_call import starting_number
from sparsecomp.passes.spiking.neurons_behind import are_steps_of, unviewed
from sparsecomp.passes.spiking.step_norm import is_step_norm, may_move, move_statistics, statistics


@dataclass(frozen=True, slots=True)
class NormAhead:
    """A batch-norm, and how its result reaches a neuron.

    Attributes:
        op: the call.
        views: the views between, the last first.
        first: what a first membrane is made of that is one number, the last first: its shape is read off the input.
        steps: time steps.
    """

    op: CanonicalOp
    views: tuple[fx.Node, ...]
    first: tuple[fx.Node, ...]
    steps: int

    @property
    def place(self) -> fx.Node:
        """The node before which the statistics are computed, and the running ones moved."""
        return self.op.node

    @property
    def dead(self) -> tuple[fx.Node, ...]:
        """What nobody reads any more."""
        return (*self.first, *self.views, self.op.node)

    def build(self) -> tuple[fx.Node, list[fx.Node]]:
        """What the neuron reads in place of the result, (T, N, C, …), and its parameters: mean, factor and bias."""
        op, node = self.op, self.op.node
        trailing = (-1, *[1] * (example_of(node).dim() - 2))

        def do(target: Any, *args: Any) -> fx.Node:
            return call(node.graph, node, target, *args)

        def by_channel(of: fx.Node) -> fx.Node:
            return do(Tensor.view, of, trailing)

        with node.graph.inserting_before(node):
            assert isinstance(op.input, fx.Node)
            whole = do(torch.unsqueeze, op.input, 0)
            mean, var, scale = statistics(do(Tensor.float, whole), op, do)
            move_statistics(op, mean, var, 1, do)
            mean, factor = by_channel(mean), by_channel(scale)
            if isinstance(op.get("weight"), fx.Node):
                factor = do(torch.mul, factor, by_channel(op.get("weight")))
            given = op.get("bias")
            bias = by_channel(given) if isinstance(given, fx.Node) else do(torch.zeros_like, mean)
            return do(torch.unflatten, op.input, 0, (self.steps, -1)), [mean, factor, bias]


def norm_ahead(neuron: fx.Node, ctx: Context) -> NormAhead | None:
    """The batch-norm that gives a neuron its input (T, N, C, …), and nobody else anything."""
    x, v = neuron.args[:2]
    if not isinstance(x, fx.Node) or not isinstance(v, fx.Node):
        return None
    views, found = unviewed(x)
    op, example, given = op_of(found), example_of(found), example_of(x)
    if op is None or not is_step_norm(op) or example is None or given is None or not isinstance(op.input, fx.Node):
        return None
    first = _between(v, x) if starting_number(v) is not None else ()
    readers = {neuron, *views, *first[-1:]}
    alone = all(readers.issuperset(one.users) for one in (*views, found))
    same = are_steps_of(given, example)
    kept = all(is_kept(one, ctx) for one in (*views, found, op.input))
    kept = kept and may_move(op, ctx)
    kept = kept and is_kept(op.get("bias"), ctx, found)  # the neuron reads it, and its backward once more
    # detach gives the batch-norm none, and neither does a view that is made where gradients are off
    passed = not ctx.switched(found, neuron) and all(
        example_of(one).requires_grad == example.requires_grad for one in views
    )
    return NormAhead(op, tuple(views), first, given.shape[0]) if alone and same and kept and passed else None


def _between(last: fx.Node, first: fx.Node) -> tuple[fx.Node, ...]:
    """The calls from one node to the next that lead from the first, of which nobody else reads any; the last first."""
    found = []
    while last is not first:
        op = op_of(last)
        if op is None or len(last.users) != 1 or not isinstance(op.input, fx.Node):
            return ()
        found.append(last)
        last = op.input
    return tuple(found)
