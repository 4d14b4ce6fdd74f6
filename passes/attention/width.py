"""How many keys a mask keeps in a row at most, where it is computed of positions and of where a sequence is.

A model with a static cache knows the position of a query on its device only. The mask of a window compares keys with
that position twice, from above and from below, and the difference of both bounds is a number: the window. Such bounds
are sums of an index of a dimension, of tensors of which nothing is asked, and of a number.

It is what an estimate reckons with, and no more: what is computed follows the mask.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of, shape_of
from sparsecomp.passes.graph.operators import Trait

_KEYS = ("index", 1)
"""The index of the last dimension, of a mask that of keys."""
_ONE = ("one",)
Sum = dict[Any, int]
"""Factors of the index of a dimension, which is counted from the last, of tensors as nodes, and of one."""
_AND = frozenset({"bitwise_and", "logical_and"})
_COMPARED = {"le": (1, 0), "lt": (1, 1), "ge": (-1, 0), "gt": (-1, 1)}
"""By comparison of a and b: the factors by which times (a - b) plus what is 0 at most, in whole numbers."""


class _Bounds(NamedTuple):
    """Sums that a key that is kept is no more than, and no less than."""

    above: list[Sum]
    below: list[Sum]


def width_of(mask: fx.Node) -> int | None:
    """Keys that each row of a bool mask (…, keys) keeps at most, all between the first and the last of them; None if
    nothing is known."""
    bounds = _Bounds([], [])
    for node in _conditions(mask):
        _bound(node, bounds)
    widths = [width for high in bounds.above for low in bounds.below if (width := _width(high, low)) is not None]
    return min(widths, default=None)


def _conditions(mask: fx.Node) -> Iterator[fx.Node]:
    """What must be true together for the mask to be."""
    pending = [mask]
    while pending:
        op = op_of(pending.pop())
        if op is None or op.inplace or op.out is not None:
            continue
        if op.name in _AND or op.name == "mul":
            pending += [one for one in (op.input, op.get("other")) if isinstance(one, fx.Node)]
        elif (op.has(Trait.CAST) or _keeps_keys(op)) and isinstance(op.input, fx.Node):
            pending.append(op.input)
        elif op.name in _COMPARED:
            yield op.node


def _bound(node: fx.Node, bounds: _Bounds) -> None:
    """Enter what a comparison says of a key."""
    op = op_of(node)
    assert op is not None
    factor, more = _COMPARED[op.name]
    one, other = _sum(op.input), _sum(op.get("other"))
    if one is None or other is None:
        return
    least = _added(_times(one, factor), _times(other, -factor))  # this, plus `more`, is 0 at most
    least = _added(least, {_ONE: more})
    of_key = least.pop(_KEYS, 0)
    if of_key == 1:
        bounds.above.append(_times(least, -1))
    elif of_key == -1:
        bounds.below.append(least)


def _width(high: Sum, low: Sum) -> int | None:
    difference = {atom: factor for atom, factor in _added(high, _times(low, -1)).items() if factor}
    number = difference.pop(_ONE, 0)
    return None if difference else max(number + 1, 0)


def _sum(value: object) -> Sum | None:
    """What a value is the sum of; None of what is no whole number."""
    if isinstance(value, int):
        return {_ONE: int(value)}
    if not isinstance(value, fx.Node):
        return None
    example = example_of(value)
    if example is not None and (example.dtype.is_floating_point or example.dtype in (torch.bool, torch.complex64)):
        return None
    op = op_of(value)
    wide = example is not None and example.dtype in (torch.int32, torch.int64)  # in narrower ones positions wrap round
    found = None if not wide or op is None or op.inplace or op.out is not None else _sum_of(op)
    return {value: 1} if found is None else found


def _sum_of(op: CanonicalOp) -> Sum | None:
    """Of the call of an operator; None of one that is a tensor of which nothing is known."""
    if op.name == "arange":
        return _sum_of_range(op)
    one, other = op.input, op.get("other")
    if op.name in ("add", "sub", "rsub") and op.get("alpha", 1) in (1, None):
        first, second = _sum(one), _sum(other)
        if first is None or second is None:
            return None
        return _added(_times(first, -1 if op.name == "rsub" else 1), _times(second, -1 if op.name == "sub" else 1))
    if op.name == "neg":
        found = _sum(one)
        return None if found is None else _times(found, -1)
    if op.has(Trait.CAST) and isinstance(one, fx.Node):
        return _sum(one)
    return _sum_of_view(op) if op.has(Trait.VIEW) and isinstance(one, fx.Node) else None


def _sum_of_range(op: CanonicalOp) -> Sum | None:
    """Of `arange`, of which only the index tells apart what it holds."""
    numbers = [one for one in op.node.args if isinstance(one, int)]
    shape = shape_of(op.node)
    steps = numbers[2:3] or [op.node.kwargs.get("step", 1)]
    if shape is None or len(numbers) != len(op.node.args) or steps != [1]:
        return None
    start = numbers[0] if len(numbers) > 1 else op.node.kwargs.get("start", 0)
    if not isinstance(start, int):
        return None
    return {_ONE: start} if shape == (1,) else {_KEYS: 1, _ONE: start}


def _sum_of_view(op: CanonicalOp) -> Sum | None:
    """Of a view that leaves dimensions longer than 1 in their order."""
    before, after, found = shape_of(op.input), shape_of(op.node), _sum(op.input)
    if before is None or after is None or found is None:
        return None
    if op.name in ("expand", "broadcast_to", "expand_as"):
        return found
    old, new = ([-place for place in range(-len(shape), 0) if shape[place] != 1] for shape in (before, after))
    if [before[-place] for place in old] != [after[-place] for place in new] or not _is_whole(op, len(old)):
        return None
    moved = {("index", one): ("index", other) for one, other in zip(old, new, strict=True)}
    return {moved.get(atom, atom): n for atom, n in found.items()}


def _is_whole(op: CanonicalOp, dims: int) -> bool:
    """Whether a view with as many dimensions longer than 1 as before has the same elements in the same order."""
    if op.name == "getitem":
        return all(one is None or one is Ellipsis or one == slice(None) for one in _parts(op))
    return op.has(Trait.ROW_MAJOR) or (dims <= 1 and op.has(Trait.MOVES))


def _keeps_keys(op: CanonicalOp) -> bool:
    """Whether a view leaves the last dimension what it was."""
    before, after = shape_of(op.input), shape_of(op.node)
    if not op.has(Trait.VIEW) or not before or not after or before[-1] != after[-1] or before[-1] is None:
        return False
    if op.name != "getitem":
        return op.has(Trait.ROW_MAJOR) or op.name in ("expand", "broadcast_to", "expand_as")
    parts = _parts(op)
    simple = all(one is None or one is Ellipsis or isinstance(one, int | slice) for one in parts)
    short = Ellipsis not in parts and sum(one is not None for one in parts) < len(before)
    return simple and (short or parts[-1] is Ellipsis or parts[-1] == slice(None))


def _parts(op: CanonicalOp) -> tuple[Any, ...]:
    index = op.get("index")
    return index if isinstance(index, tuple) else (index,)


def _added(one: Sum, other: Sum) -> Sum:
    return {atom: one.get(atom, 0) + other.get(atom, 0) for atom in (*one, *other)}


def _times(one: Sum, factor: int) -> Sum:
    return {atom: factor * n for atom, n in one.items()}
