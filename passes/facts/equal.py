"""Which calls give the same: a loop over time steps that calls a layer on the same image calls it T times.

Inductor merges equal calls where it computes gradients, and in inference calls each of them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx

from sparsecomp.passes.facts.repeats import Readers, is_function, takes_step
from sparsecomp.passes.graph.canonicalize import CanonicalOp, op_of


def equal_calls(
    first: fx.Node,
    order: Mapping[fx.Node, int],
    fixed: bool,
    mode_of: Callable[[fx.Node, CanonicalOp], object],
) -> dict[fx.Node, fx.Node]:
    """Calls in the place of which an earlier one can stand, those on equal results included; each with the earlier one.

    Only for the first of several equal calls, and only if no operand of it has an equal one itself, of which this is
    told too.

    Args:
        order: the position of each node.
        fixed: as of `repeats.Flow`.
        mode_of: what a call depends on besides its operands; None if it must stay.
    """
    op = op_of(first)
    if op is None or not _is_first(first, op, fixed) or _follows_twins(first, fixed):
        return {}
    readers = Readers(order, (user for user in op.input.users if user.target == first.target))
    merged: dict[fx.Node, fx.Node] = {}
    known: dict[object, fx.Node] = {}
    spread: set[fx.Node] = set()
    for node in readers:
        op = op_of(node)
        mode = None if op is None or not _is_known(op, fixed) else mode_of(node, op)
        if op is None or mode is None:
            continue
        earlier = known.setdefault((mode, _key(op, merged, fixed)), node)
        if earlier is not node:
            merged[node] = earlier
            if earlier not in spread:
                readers.add(earlier.users)
                spread.add(earlier)
            readers.add(node.users)
    return merged


def _is_known(op: CanonicalOp, fixed: bool) -> bool:
    return is_function(op) or takes_step(op, fixed)


def _is_first(node: fx.Node, op: CanonicalOp, fixed: bool) -> bool:
    """Whether it is the first of several equal calls."""
    twins = _twins(op, fixed)
    return next(twins, None) is node and next(twins, None) is not None


def _twins(op: CanonicalOp, fixed: bool) -> Iterator[fx.Node]:
    """The calls that are as this one on the same operands, itself included."""
    if not isinstance(op.input, fx.Node) or len(op.input.users) < 2 or not _is_known(op, fixed):
        return
    key = _key(op, {}, fixed)
    for user in op.input.users:
        other = op_of(user) if user.target == op.node.target else None
        if other is not None and _key(other, {}, fixed) == key:
            yield user


def _follows_twins(node: fx.Node, fixed: bool) -> bool:
    """Whether what it is computed of is one of several equal calls."""
    pending, seen = [*node.all_input_nodes], {node}
    while pending:
        one = pending.pop()
        op = None if one in seen else op_of(one)
        seen.add(one)
        if op is None or not _is_known(op, fixed):
            continue
        if len([*_twins(op, fixed)]) > 1:
            return True
        pending += one.all_input_nodes
    return False


def _key(op: CanonicalOp, merged: Mapping[fx.Node, fx.Node], fixed: bool) -> object:
    """What equal calls have in common."""
    node = op.node
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: _named(merged.get(argument, argument)))
    if takes_step(op, fixed):
        args = ("a step of", args[0])
    return node.op, node.target, repr(args), repr(sorted(kwargs.items()))


def _named(node: fx.Node) -> Any:
    """An operand as what tells it from others: an attribute is the same however often it is read."""
    return ("attribute", node.target) if node.op == "get_attr" else node
