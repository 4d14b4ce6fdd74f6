"""The two products of an attention written by hand, by `matmul` or `einsum`: which operand is which, how it lies."""

from collections.abc import Sequence
from typing import Any

from torch import fx

from sparsecomp.passes.attention.site import GROUPS, THREE, Steps, View, by_groups
from sparsecomp.passes.graph.canonicalize import CanonicalOp, op_of, shape_of

_BACK: Steps = (("squeeze", (1,)),)
_QUERIES: dict[int, Steps] = {3: THREE, 4: (), 5: GROUPS}
"""By dimensions, the steps from queries to (batch, heads, length, depth)."""


def outer_product(op: CanonicalOp) -> tuple[fx.Node, View, Steps] | None:
    """Of a product that may be the last: the weights (…, queries, keys), the values, and the steps from (batch, heads,
    queries, depth) to what it gives."""
    if op.name == "einsum":
        return _einsum_outer(op)
    found = _factors(op)
    if found is None:
        return None
    weights, values, dims = found
    back = _BACK if dims == 3 else _split_groups(weights) if dims == 5 else ()
    return weights, View(values, _shared(values, dims)), back


def scores_of(op: CanonicalOp) -> tuple[View, View] | None:
    """Of a product that may give scores (…, queries, keys): the queries and the keys."""
    if op.name == "einsum":
        return _einsum_scores(op)
    found = _factors(op)
    if found is None:
        return None
    queries, keys, dims = found
    swap = op_of(keys)
    if swap is not None and _swaps_last_two(swap) and isinstance(swap.input, fx.Node):
        return View(queries, _QUERIES[dims]), View(swap.input, _shared(swap.input, dims))
    return View(queries, _QUERIES[dims]), View(keys, (("transpose", (-2, -1)), *_shared(keys, dims)))


def _shared(node: fx.Node, dims: int) -> Steps:
    """The steps from keys or values."""
    return by_groups(node) if dims == 5 else _QUERIES[dims]


def _split_groups(weights: fx.Node) -> Steps:
    """The steps back from all heads to those of keys and their groups, as weights have them."""
    return (("unflatten", (1, tuple((shape_of(weights) or ())[1:3]))),)


def _factors(op: CanonicalOp) -> tuple[fx.Node, fx.Node, int] | None:
    """The operands of a product of batches of matrices, and their dimensions."""
    one, other = op.input, op.get("other")
    if op.name != "matmul" or op.inplace or not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return None
    left, right = shape_of(one), shape_of(other)
    if left is None or right is None or len(left) != len(right) or len(left) not in _QUERIES:
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
    """Letters of an einsum's two operands and of its result, each of another dimension, and the operands."""
    equation, *operands = op.args.values()
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or equation.count("->") != 1:
        return None
    letters = equation.replace(" ", "").replace("->", ",").split(",")
    apart = len(letters) == 3 and all(len(set(one)) == len(one) in (4, 5) for one in letters)
    nodes = len(operands) == 2 and all(isinstance(one, fx.Node) for one in operands)
    return (letters, operands) if apart and nodes and "." not in equation else None


def _einsum_scores(op: CanonicalOp) -> tuple[View, View] | None:
    found = _letters(op)
    if found is None:
        return None
    (one, other, out), (first, second) = found
    *leading, query, key = out
    batch, head, *group = leading
    if query not in one:
        one, other, first, second = other, one, second, first
    depth = "".join(set(one) & set(other) - set(leading))
    of_queries, of_keys = (*leading, query, depth), (batch, head, key, depth)
    if len(depth) != 1 or set(one) != set(of_queries) or set(other) != set(of_keys):
        return None
    queries = _permuted(first, one, of_queries, GROUPS if group else ())
    return queries, _permuted(second, other, of_keys)


def _einsum_outer(op: CanonicalOp) -> tuple[fx.Node, View, Steps] | None:
    found = _letters(op)
    if found is None:
        return None
    (one, other, out), (first, second) = found
    for weights, values, node, beside in ((one, other, first, second), (other, one, second, first)):
        *leading, query, key = weights
        batch, head, *group = leading
        depth = "".join(set(values) - set(weights))
        of_values, of_result = (batch, head, key, depth), (*leading, query, depth)
        if len(depth) == 1 and set(values) == set(of_values) and set(out) == set(of_result):
            back = moved(tuple(map(of_result.index, out)))
            return node, _permuted(beside, values, of_values), (*(_split_groups(node) if group else ()), *back)
    return None


def _permuted(node: fx.Node, letters: str, wanted: Sequence[str], more: Steps = ()) -> View:
    return View(node, (*moved(tuple(map(letters.index, wanted))), *more))


def moved(order: tuple[int, ...]) -> Steps:
    """The step that brings dimensions in an order."""
    return () if order == tuple(range(len(order))) else (("permute", order),)
