"""Batch-norm in training that is called once a time step, as one pass over all steps.

Each call normalises by the statistics of its own step and moves the running ones by them. The former are sums over
other dimensions where all steps lie behind one another; the latter are moved step by step, in order, as before.
Inductor, which does batch-norm by such sums too, makes of it what it makes of one call.
"""

import operator
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.passes.engine.ordered import is_kept
from sparsecomp.passes.engine.rule import Context, call
from sparsecomp.passes.graph.canonicalize import CanonicalOp, dtype_of, example_of, op_of
from sparsecomp.reference.precision import KERNEL_DTYPES


def is_step_norm(op: CanonicalOp) -> bool:
    """Whether a call normalises by the statistics of what it is given."""
    if op.name != "batch_norm" or not op.known or op.get("training") is not True:
        return False
    example, running = example_of(op.input), _running(op)
    return (
        example is not None and example.dtype in KERNEL_DTYPES
        and all(type(size) is int for size in example.shape) and example.numel() > example.shape[1]
        and len([one for one in running if one is not None]) in (0, 2)
        and all(dtype_of(one) is torch.float32 for one in running if one is not None)
        and all(isinstance(op.get(name), float | int) for name in ("momentum", "eps"))
    )  # fmt: skip


def statistics_alone(nodes: Iterable[fx.Node], ctx: Context) -> list[list[fx.Node]]:
    """Calls that write to nothing but running statistics which are theirs alone: they pass whatever else writes.

    Returns:
        The calls of each such pair of statistics, which have to stay in their order among themselves.
    """
    found: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        op = op_of(node)
        if op is not None and is_step_norm(op) and None not in _running(op):
            found.setdefault(_running(op), []).append(node)
    return [calls for running, calls in found.items() if _are_alone(running, calls, ctx)]


def may_move(op: CanonicalOp, ctx: Context, beside: Container[fx.Node] = ()) -> bool:
    """Whether running statistics may be moved by a write, which autograd sees, unlike batch-norm's own: who read them
    before, but for those `beside`, may have kept them for its backward."""
    order, running = ctx.analysis.order, [one for one in _running(op) if isinstance(one, fx.Node)]
    return all(one in beside for node in running for one in node.users if order[one] < order[op.node])


def _running(op: CanonicalOp) -> tuple[Any, Any]:
    return op.get("running_mean"), op.get("running_var")


def _are_alone(running: Sequence[fx.Node], calls: list[fx.Node], ctx: Context) -> bool:
    theirs = all(set(one.users) == set(calls) and one.op in ("placeholder", "get_attr") for one in running)
    # a call may read them as its weight too, or both be one
    once = all([*op.args.values()].count(one) == 1 for node in calls if (op := op_of(node)) for one in running)
    inputs = [node for node in ctx.gm.graph.nodes if node.op in ("placeholder", "get_attr")]
    memories = [_compat.storage_of(example) for one in inputs if isinstance(example := example_of(one), torch.Tensor)]
    own = [_compat.storage_of(example_of(one)) for one in running]
    kept = {one for node in calls for one in (node, *node.all_input_nodes)} - set(running)
    return theirs and once and all(memories.count(one) == 1 for one in own) and all(is_kept(one, ctx) for one in kept)


def each_normalised(x: fx.Node, count: int, first: fx.Node) -> fx.Node:
    """What the calls of all steps give, one behind the other along dimension 0, as `x` has their inputs.

    Args:
        x: (T · N, C, …).
        count: T.
        first: the call of the first step.
    """
    op, example = op_of(first), example_of(first)
    assert op is not None and example is not None

    def do(target: Any, *args: Any) -> fx.Node:
        return call(x.graph, first, target, *args)

    steps = do(torch.unflatten, x, 0, (count, -1))
    if example.dtype is not torch.float32:
        steps = do(torch.Tensor.float, steps)
    mean, var, scale = statistics(steps, op, do)
    found = do(torch.mul, do(torch.sub, steps, mean), scale)
    for target, name in ((torch.mul, "weight"), (torch.add, "bias")):
        if op.get(name) is not None:
            found = do(target, found, do(torch.Tensor.view, op.get(name), (-1, *[1] * (example.dim() - 2))))
    if example.dtype is not torch.float32:
        found = do(torch.Tensor.to, found, example.dtype)
    move_statistics(op, mean, var, count, do)
    return do(torch.flatten, found, 0, 1)


def statistics(steps: fx.Node, op: CanonicalOp, do: Any) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Mean, variance and inverse deviation (T, 1, C, 1, …) of float32 (T, N, C, …), as a call normalises with."""
    example = example_of(op.node)
    assert example is not None
    both = do(torch.var_mean, steps, [1, *range(3, 1 + example.dim())], False, True)
    var, mean = do(operator.getitem, both, 0), do(operator.getitem, both, 1)
    return mean, var, do(torch.rsqrt, do(torch.add, var, op.get("eps")))


def move_statistics(op: CanonicalOp, mean: fx.Node, var: fx.Node, count: int, do: Any) -> None:
    """Move the running statistics by those of `statistics`, of so many steps; a call is one of them."""
    example = example_of(op.node)
    assert example is not None
    size = example.numel() // example.shape[1]
    unbiased = do(torch.mul, var, size / (size - 1))
    for running, own in zip(_running(op), (mean, unbiased), strict=True):
        if running is not None:
            own = do(torch.flatten, do(torch.Tensor.detach, own), 1)
            do(torch.Tensor.copy_, running, _moved(running, own, op.get("momentum"), count, do))


def _moved(running: fx.Node, own: fx.Node, momentum: float, count: int, do: Any) -> fx.Node:
    """Running statistics after all steps, of each of which `own` (T, C) has a row."""
    for step in range(count):
        kept = do(torch.mul, running, 1 - momentum)
        running = do(torch.add, kept, do(torch.mul, do(torch.select, own, 0, step), momentum))
    return running
