"""How a layer of fixed fan-in is spelled: inputs gathered by an index (n_out, k), times a weight (n_out, k), summed.

Whatever operators shape the index and the input, only two things count: that the index holds n_out · k numbers in the
order of the gathered inputs, the same ones for each row, and that the gathered inputs end in (n_out, k). Both are read
off the shapes, since all that may stand between keeps elements in their order.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.passes.engine.rule import Refusal, Why, refuse
from sparsecomp.passes.graph.canonicalize import CanonicalOp, dtype_of, example_of, numel_of, op_of
from sparsecomp.passes.graph.operators import Trait

_EXPANSIONS = ("expand", "expand_as", "repeat")
_EINSUM = re.compile(r"(\.\.\.)?([a-zA-Z]+),([a-zA-Z]+)->(\.\.\.)?([a-zA-Z]*)")


@dataclass(frozen=True, slots=True)
class Gathered:
    """x[..., index], as (..., n_out, k).

    Attributes:
        nodes: the gather and the views behind it, each of which the next one reads.
        x: (..., n_in).
        index: n_out · k numbers, in any shape.
        fan: n_out and k.
        by: the operator that gathers, which says what it does about negative numbers and such beyond n_in.
    """

    nodes: tuple[fx.Node, ...]
    x: fx.Node
    index: fx.Node
    fan: tuple[int, int]
    by: str


@dataclass(frozen=True, slots=True)
class GatheredLayer:
    """The sum over gathered inputs times weights.

    Attributes:
        gathered: the inputs.
        weight: n_out · k numbers, in any shape.
        nodes: of the graph, in order: those that gather, the product if it is one of its own, the sum.
    """

    gathered: Gathered
    weight: fx.Node
    nodes: tuple[fx.Node, ...]


def layer_of(node: fx.Node) -> GatheredLayer | Refusal | None:
    """The layer whose sum a node is, or what of its form has no operator; None if it sums no gathered inputs."""
    op = op_of(node)
    if op is None:
        return None
    if op.name == "einsum":
        return _of_einsum(node)
    return _of_sum(node, op) if op.name == "sum" and op.known else None


def _of_sum(node: fx.Node, op: CanonicalOp) -> GatheredLayer | Refusal | None:
    product = op_of(op.input) if isinstance(op.input, fx.Node) else None
    if product is not None and product.has(Trait.CAST) and isinstance(product.input, fx.Node):
        product = op_of(product.input)
    if product is None or product.name != "mul":
        return None
    factors = product.input, product.get("other")
    found = _either(*factors)
    if found is None or isinstance(found, Refusal):
        return found
    gathered, weight = found
    last, dims = len(_shape(product.node) or ()) - 1, op.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, Sequence) or [dim % (last + 1) for dim in dims] != [last]:
        return refuse(Why.GATHERED_AS_WRITTEN, detail="the sum is not over the last dimension alone")
    if op.get("keepdim") or op.out is not None:
        return refuse(Why.GATHERED_AS_WRITTEN, detail="the sum keeps the dimension, or is written to another tensor")
    if product.inplace or product.out is not None:
        return refuse(Why.GATHERED_AS_WRITTEN, detail="the product is written to another tensor")
    if _shape(product.node) != _shape(gathered.nodes[-1]) or not _fits(weight, gathered):
        return _other_weight(weight, gathered)
    chain = op.input, *((product.node,) if op.input is not product.node else ())
    return _checked(GatheredLayer(gathered, weight, (*gathered.nodes, *chain[::-1], node)))


def _of_einsum(node: fx.Node) -> GatheredLayer | Refusal | None:
    equation, *operands = node.args
    if not isinstance(equation, str) or len(operands) != 2 or node.kwargs:
        return None
    found = _either(*operands)
    if found is None or isinstance(found, Refusal):
        return found
    gathered, weight = found
    left, _, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    inputs, weights = terms if operands[0] is gathered.nodes[-1] else terms[::-1]
    form = _EINSUM.fullmatch(f"{inputs},{weights}->{result}")
    if form is None or not _sums_the_last(*form.groups(default="")):
        return refuse(Why.GATHERED_AS_WRITTEN, detail=f"einsum {equation!r} is no sum over the last dimension alone")
    if not _fits(weight, gathered):
        return _other_weight(weight, gathered)
    return _checked(GatheredLayer(gathered, weight, (*gathered.nodes, node)))


def _sums_the_last(more: str, inputs: str, weights: str, more_out: str, result: str) -> bool:
    distinct = len(set(inputs)) == len(inputs)
    return distinct and more == more_out and weights == inputs[-2:] and len(weights) == 2 and result == inputs[:-1]


def _either(one: Any, other: Any) -> tuple[Gathered, fx.Node] | Refusal | None:
    """Gathered inputs, and what they are multiplied by."""
    for value, beside in ((one, other), (other, one)):
        found = gathered_of(value) if isinstance(value, fx.Node) else None
        if found is not None and isinstance(beside, fx.Node):
            return (found, beside) if isinstance(found, Gathered) else found
    return None


def _fits(weight: fx.Node, gathered: Gathered) -> bool:
    shape, rank = _shape(weight), len(_shape(gathered.nodes[-1]) or ())
    return shape is not None and len(shape) <= rank and _bare(shape) == _bare(gathered.fan)


def _other_weight(weight: fx.Node, gathered: Gathered) -> Refusal:
    shape = tuple(_shape(weight) or ())
    return refuse(Why.GATHERED_AS_WRITTEN, detail=f"its weight is {shape}, not one {gathered.fan} for all rows")


def _checked(layer: GatheredLayer) -> GatheredLayer | Refusal:
    """Refuses what is read elsewhere, and what changes the dtype on the way."""
    *inner, last = layer.nodes
    for node, reader in zip(inner, (*inner[1:], last), strict=True):
        others = [user for user in node.users if user is not reader]
        if others:
            return refuse(Why.GATHERED_AS_WRITTEN, detail=f"`{others[0].name}` reads `{node.name}` too")
    dtypes = {dtype_of(node) for node in (layer.gathered.x, layer.weight, *layer.nodes)}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        return refuse(Why.GATHERED_AS_WRITTEN, detail=f"its dtype changes on the way ({names}), which rounds elsewhere")
    return layer


def gathered_of(node: fx.Node) -> Gathered | Refusal | None:
    """The gathered inputs that a node holds, of a fixed fan-in: None if it holds something else."""
    views: list[fx.Node] = []
    while (op := op_of(node)) is not None and isinstance(op.input, fx.Node):
        if not (_keeps_order(op) or op.has(Trait.CAST)):
            break
        views.insert(0, node)
        node = op.input
    form = None if op is None or op.inplace else _FORMS.get(op.name)
    found = None if form is None or op is None else form(op)
    if found is None:
        return None
    shape, own, numbers = _shape((node, *views)[-1]), _shape(found.x), numel_of(found.index)
    if not shape or not own or numbers is None or len(shape) != len(own) + 1 or shape[:-2] != own[:-1]:
        return None
    outputs, fan_in = shape[-2:]
    if type(outputs) is not int or type(fan_in) is not int or numbers != outputs * fan_in:
        return None
    if not _is_index(found.index):
        detail = f"its index is {dtype_of(found.index)}, not int32 or int64"
        return refuse(Why.GATHERED_AS_WRITTEN, detail=detail)
    return replace(found, nodes=(node, *views), fan=(outputs, fan_in))


def _keeps_order(op: CanonicalOp) -> bool:
    """Whether the result is the input in another shape, in the same order."""
    return op.has(Trait.ROW_MAJOR) and op.has(Trait.VIEW) and op.name != "detach"


def source_of(node: fx.Node) -> fx.Node:
    """What a node shows in another shape or integer type, in the same order."""
    while (op := op_of(node)) is not None and isinstance(op.input, fx.Node) and not op.inplace:
        casts = op.has(Trait.CAST) and _is_index(op.input) and _is_index(node)
        if not (_keeps_order(op) or _is_unsqueeze(op) or casts):
            break
        node = op.input
    return node


def _is_index(node: fx.Node) -> bool:
    return dtype_of(node) in (torch.int32, torch.int64)


# -- what gathers; None where it is not along the last dimension, or not the same for each row


def _by_getitem(op: CanonicalOp) -> Gathered | None:
    index = op.get("index")
    *before, last = index if isinstance(index, tuple) else (index,)
    rank = len(_shape(op.input) or ())
    whole = all(one is Ellipsis or one == slice(None) for one in before)
    if not isinstance(last, fx.Node) or not whole or before.count(Ellipsis) > 1:
        return None
    if Ellipsis not in before and len(before) + 1 != rank:
        return None
    return _found(op, op.input, last)


def _by_index_select(op: CanonicalOp) -> Gathered | None:
    return _found(op, op.input, op.get("index")) if _is_last(op.get("dim"), op.input) else None


def _by_gather(op: CanonicalOp) -> Gathered | None:
    """`gather` and `take_along_dim`, whose index has a number for each element of the result."""
    wide, index = op.input, op.get("index", op.get("indices"))
    out, shape = _shape(op.node), _shape(index)
    if not _is_last(op.get("dim"), wide) or not out or not shape:
        return None
    source = _unexpanded(index)
    for x, dims in ((wide, 1), (_unstacked(wide), 2)):
        own, each = _shape(x), shape[-dims:]
        same = own is not None and out[:-dims] == own[:-1] and len(out) == len(own) - 1 + dims
        if same and out[-dims:] == each and _bare(_shape(source) or ()) == _bare(each):
            return _found(op, x, source)
    return None


_FORMS = {
    "getitem": _by_getitem, "index_select": _by_index_select, "gather": _by_gather, "take_along_dim": _by_gather,
}  # fmt: skip


def _found(op: CanonicalOp, x: Any, index: Any) -> Gathered | None:
    known = example_of(x) is not None and example_of(index) is not None
    return Gathered((op.node,), x, index, (0, 0), op.name) if known and op.out is None else None


def _is_last(dim: object, value: object) -> bool:
    rank = len(_shape(value) or ())
    return type(dim) is int and rank > 0 and dim % rank == rank - 1


def _unexpanded(node: Any) -> Any:
    """What all rows of a node are copies of; itself if it is no such."""
    op = op_of(node) if isinstance(node, fx.Node) else None
    return op.input if op is not None and op.name in _EXPANSIONS and not op.inplace else node


def _unstacked(node: Any) -> Any:
    """What (..., n) a node (..., m, n) repeats, or None."""
    inner = _unexpanded(node)
    op = op_of(inner) if isinstance(inner, fx.Node) else None
    if op is None or not isinstance(op.input, fx.Node) or not (_keeps_order(op) or _is_unsqueeze(op)):
        return None
    shape, own = _shape(inner), _shape(op.input)
    return op.input if shape and own and shape == [*own[:-1], 1, own[-1]] else None


def _is_unsqueeze(op: CanonicalOp) -> bool:
    """Whether it is spelled x[:, None]."""
    index = op.get("index") if op.name == "getitem" else ()
    parts = index if isinstance(index, tuple) else (index,)
    return bool(parts) and all(one is None or one is Ellipsis or one == slice(None) for one in parts)


def _shape(value: object) -> list[Any] | None:
    example = example_of(value)
    return None if example is None else [_compat.size_expression(size) for size in example.shape]


def _bare(shape: Sequence[Any]) -> list[Any]:
    """Without the ones in front."""
    first = next((place for place, size in enumerate(shape) if size != 1), len(shape))
    return list(shape[first:])
