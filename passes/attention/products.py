"""The two products of an attention written by hand, by `matmul` or `einsum`: which operand is which, how it lies."""

from typing import Any

from torch import fx

from sparsecomp.passes.attention.site import View
from sparsecomp.passes.graph.canonicalize import CanonicalOp, op_of, shape_of

Steps = tuple[tuple[str, tuple[Any, ...]], ...]
THREE: Steps = (("unsqueeze", (1,)),)
"""How (batch, length, depth) becomes one of a single head."""
_BACK: Steps = (("squeeze", (1,)),)
_SAME = (0, 1, 2, 3)


def outer_product(op: CanonicalOp) -> tuple[fx.Node, View, Steps] | None:
    """Of a product that may be the last: the weights (…, queries, keys), the values, and the steps from (batch, heads,
    queries, depth) to what it gives."""
    if op.name == "einsum":
        return _einsum_outer(op)
    found = _factors(op)
    if found is None:
        return None
    weights, values, dims = found
    return weights, View(values, THREE if dims == 3 else ()), _BACK if dims == 3 else ()


def scores_of(op: CanonicalOp) -> tuple[View, View] | None:
    """Of a product that may give scores (…, queries, keys): the queries and the keys."""
    if op.name == "einsum":
        return _einsum_scores(op)
    found = _factors(op)
    if found is None:
        return None
    queries, keys, dims = found
    steps, swap = THREE if dims == 3 else (), op_of(keys)
    if swap is not None and _swaps_last_two(swap) and isinstance(swap.input, fx.Node):
        return View(queries, steps), View(swap.input, steps)
    return View(queries, steps), View(keys, (("transpose", (-2, -1)), *steps))


def _factors(op: CanonicalOp) -> tuple[fx.Node, fx.Node, int] | None:
    """The operands of a product of batches of matrices, and their dimensions."""
    one, other = op.input, op.get("other")
    if op.name != "matmul" or op.inplace or not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return None
    left, right = shape_of(one), shape_of(other)
    if left is None or right is None or len(left) != len(right) or len(left) not in (3, 4):
        return None
    return one, other, len(left)


def _swaps_last_two(op: CanonicalOp) -> bool:
    shape = shape_of(op.input)
    if shape is None or op.inplace:
        return False
    order = list(range(len(shape)))
    order[-2:] = order[:-3:-1]
    if op.name == "permute":
        dims = op.get("dims")
        return isinstance(dims, tuple | list) and [dim % len(shape) for dim in dims] == order
    if op.name == "transpose":
        return {op.get("dim0") % len(shape), op.get("dim1") % len(shape)} == set(order[-2:])
    return op.name == "mT"


def _letters(op: CanonicalOp) -> tuple[list[str], list[Any]] | None:
    """Letters of an einsum's two operands and of its result, of four dimensions each, and the operands."""
    equation, *operands = op.args.values()
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or equation.count("->") != 1:
        return None
    letters = equation.replace(" ", "").replace("->", ",").split(",")
    alike = len(letters) == 3 and all(len(set(one)) == len(one) == 4 for one in letters)
    nodes = len(operands) == 2 and all(isinstance(one, fx.Node) for one in operands)
    return (letters, operands) if alike and nodes and "." not in equation else None


def _einsum_scores(op: CanonicalOp) -> tuple[View, View] | None:
    found = _letters(op)
    if found is None:
        return None
    (one, other, out), (first, second) = found
    (batch, head, query, key), views = out, []
    if query not in one:
        one, other, first, second = other, one, second, first
    depth = "".join(set(one) & set(other) - {batch, head})
    for node, letters, place in ((first, one, query), (second, other, key)):
        if len(depth) != 1 or set(letters) != {batch, head, place, depth}:
            return None
        views.append(_permuted(node, letters, batch + head + place + depth))
    return views[0], views[1]


def _einsum_outer(op: CanonicalOp) -> tuple[fx.Node, View, Steps] | None:
    found = _letters(op)
    if found is None:
        return None
    (one, other, out), (first, second) = found
    for weights, values, node, beside in ((one, other, first, second), (other, one, second, first)):
        batch, head, query, key = weights
        depth = "".join(set(values) - set(weights))
        if len(depth) == 1 and set(values) == {batch, head, key, depth} and set(out) == {batch, head, query, depth}:
            back = tuple((batch + head + query + depth).index(letter) for letter in out)
            view = _permuted(beside, values, batch + head + key + depth)
            return node, view, () if back == _SAME else (("permute", back),)
    return None


def _permuted(node: fx.Node, letters: str, wanted: str) -> View:
    order = tuple(letters.index(letter) for letter in wanted)
    return View(node, () if order == _SAME else (("permute", order),))
