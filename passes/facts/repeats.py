"""Which values hold the same thing several times along one dimension, and how each is computed once.

A spiking network that is shown an image repeats it at every time step: `x.unsqueeze(0).repeat(T, 1, 1, 1, 1)`. What
treats every step alike gives equal steps again. For each operator known to do so a function here says along which
dimension its result repeats, and which call gives one step of it from one step of its operand. Sizes are compared as
expressions over Dynamo's symbols, so that what holds in the example holds for every batch.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import sympy
import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.graph.operators import OPERATORS, Trait


class Repeats(NamedTuple):
    """Along `dim` a value is `times` copies, one behind the other; or, if `inner`, `times` copies of each element."""

    dim: int
    times: int
    inner: bool = False


class OneStep(NamedTuple):
    """A value that repeats, and the call that gives one step of it.

    Attributes:
        repeats: how.
        target: what is called for one step; None for the same call.
        args: its arguments, of which those that repeat stand for one step of themselves.
    """

    repeats: Repeats
    target: Any = None
    args: tuple[Any, ...] = ()


@dataclass(slots=True)
class Flow:
    """What repeats, as far as one source reaches.

    Attributes:
        steps: each value that repeats, in the order of the graph, the source first.
        ends: products whose first operand is such a value and that mix its steps, or are not known to keep them apart.
        fixed: the sizes of the example are those of every call, or are symbols.
    """

    fixed: bool
    steps: dict[fx.Node, OneStep] = field(default_factory=dict)
    ends: list[CanonicalOp] = field(default_factory=list)

    def of(self, value: Any) -> Repeats | None:
        """How an argument repeats, None if it is not known to."""
        step = self.steps.get(value) if isinstance(value, fx.Node) else None
        return None if step is None else step.repeats


Rule: TypeAlias = Callable[[CanonicalOp, Flow], OneStep | None]
_SOURCES: dict[str, Rule] = {}
_RULES: dict[str, Rule] = {}


def flow_from(
    source: fx.Node, order: Mapping[fx.Node, int], fixed: bool, admits: Callable[[CanonicalOp, Flow], bool]
) -> Flow | None:
    """What repeats because `source` repeats something; None if it does not.

    Args:
        order: the position of each node.
        fixed: as of `Flow`.
        admits: whether an operator whose result repeats may be looked through; an input is not asked about.
    """
    op, flow = op_of(source), Flow(fixed)
    step = _input(source, flow) if op is None else _step(op, flow, _SOURCES)
    if step is None:
        return None
    flow.steps[source] = step
    if op is not None and not admits(op, flow):
        return None
    readers = Readers(order, source.users)
    for node in readers:
        op = op_of(node)
        if op is None:
            continue
        step = _step(op, flow, _RULES) or _trained_norm(op, flow)
        if step is not None:
            flow.steps[node] = step
            if admits(op, flow):
                readers.add(node.users)
                continue
            del flow.steps[node]
        if op.has(Trait.PRODUCT) and op.input in flow.steps:
            flow.ends.append(op)
    return flow


class Readers:
    """Nodes in the order of the graph, each once, to which more may be added on the way."""

    def __init__(self, order: Mapping[fx.Node, int], nodes: Iterable[fx.Node]) -> None:
        self._order = order
        self._pending: list[tuple[int, fx.Node]] = []
        self._seen: set[fx.Node] = set()
        self.add(nodes)

    def add(self, nodes: Iterable[fx.Node]) -> None:
        """Let these come too, unless they were there before."""
        for node in nodes:
            if node not in self._seen:
                self._seen.add(node)
                heapq.heappush(self._pending, (self._order[node], node))

    def __iter__(self) -> Iterator[fx.Node]:
        while self._pending:
            yield heapq.heappop(self._pending)[1]


def is_function(op: CanonicalOp) -> bool:
    """Whether equal operands give an equal result, and nothing else happens."""
    known = op.known and not op.inplace and op.out is None and (op.name in _RULES or op.name in _SOURCES)
    random = op.has(Trait.DROPOUT) and not op.is_identity
    return known and not random and not (op.name == "batch_norm" and op.get("training") is not False)


def keeps_rows_apart(op: CanonicalOp) -> bool:
    """Whether the same call on more rows of its first argument, along dimension 0, gives more rows of its result: each
    row is treated as if it were there alone."""
    example = example_of(op.input)
    if example is None or not example.dim():
        return False
    rows = Repeats(0, example.shape[0])
    step = _step(op, Flow(fixed=True, steps={op.input: OneStep(rows)}), _RULES)
    return step is not None and step.target is None and step.repeats == rows


def takes_step(op: CanonicalOp, fixed: bool) -> bool:
    """Whether this takes one step of what was just repeated, all of which are equal.

    Args:
        fixed: as of `Flow`.
    """
    parts = op_of(op.input) if op.name == "getitem" and isinstance(op.input, fx.Node) else None
    split = parts is not None and parts.name == "unbind"
    taken = parts if split else op
    source = op_of(taken.input) if taken is not None and isinstance(taken.input, fx.Node) else None
    step = None if source is None else _step(source, Flow(fixed), _SOURCES)
    if source is None or taken is None or step is None or step.repeats.inner or type(op.get("index")) is not int:
        return False
    sizes, (dim, times, _) = _sizes(source.node), step.repeats
    alone = sizes is not None and sizes[dim] == times and (fixed or source.name in ("expand", "stack"))
    return alone and (taken.get("dim", 0) == dim if taken.name in ("select", "unbind", "getitem") else False)


def _step(op: CanonicalOp, flow: Flow, rules: Mapping[str, Rule]) -> OneStep | None:
    rule = rules.get(op.name)
    return None if rule is None or not is_function(op) or example_of(op.node) is None else rule(op, flow)


def _rule(*names: str, table: dict[str, Rule] = _RULES) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        table.update(dict.fromkeys(names, function))
        return function

    return register


def _input(source: fx.Node, flow: Flow) -> OneStep | None:
    """An input that was expanded before the graph, which serves such strides alone. With a gradient, each copy has its
    own."""
    example = example_of(source)
    if source.op != "placeholder" or not flow.fixed or example is None or example.requires_grad:
        return None
    for dim, (size, stride) in enumerate(zip(example.shape, example.stride(), strict=True)):
        if type(size) is int and size > 1 and type(stride) is int and stride == 0 and 0 not in example.shape:
            return OneStep(Repeats(dim, size), torch.narrow, (source, dim, 0, 1))
    return None


# ---- what repeats something -------------------------------------------------------------------------------------


@_rule("expand", table=_SOURCES)
def _expand(op: CanonicalOp, flow: Flow) -> OneStep | None:
    sizes, before = op.get("size"), _sizes(op.input)
    if not isinstance(sizes, tuple | list) or before is None or 0 in before:
        return None
    added = len(sizes) - len(before)
    for dim, size in enumerate(sizes):
        if type(size) is int and size > 1 and (dim < added or _is_one(op.input, dim - added, flow)):
            one = [*sizes[:dim], 1, *sizes[dim + 1 :]]
            return OneStep(Repeats(dim, size), torch.Tensor.expand, (op.input, one))
    return None


@_rule("repeat", "tile", table=_SOURCES)
def _repeat(op: CanonicalOp, flow: Flow) -> OneStep | None:
    times, before = op.get("size"), _sizes(op.input)
    if not isinstance(times, tuple | list) or before is None or 0 in before:
        return None
    times = [*[1] * (len(before) - len(times)), *times]
    for dim, count in enumerate(times):
        if type(count) is int and count > 1:
            one = [*times[:dim], 1, *times[dim + 1 :]]
            return OneStep(Repeats(dim, count), torch.Tensor.repeat, (op.input, one))
    return None


@_rule("repeat_interleave", table=_SOURCES)
def _repeat_interleave(op: CanonicalOp, flow: Flow) -> OneStep | None:
    count, dim, before = op.get("repeats"), op.get("dim"), _sizes(op.input)
    if type(count) is not int or count < 2 or type(dim) is not int or before is None or 0 in before:
        return None
    one = [1] * len(before)
    return OneStep(Repeats(dim % len(before), count, inner=True), torch.Tensor.repeat, (op.input, one))


@_rule("cat", "stack", table=_SOURCES)
def _join(op: CanonicalOp, flow: Flow) -> OneStep | None:
    parts, dim = op.get("tensors"), op.get("dim")
    if not isinstance(parts, tuple | list) or len(parts) < 2 or type(dim) is not int:
        return None
    first, after = parts[0], _sizes(op.node)
    if not isinstance(first, fx.Node) or any(part is not first for part in parts) or not after or 0 in after:
        return None
    # one part is joined to nothing: a copy, as of several
    return OneStep(Repeats(dim % len(after), len(parts)), op.node.target, ([first], dim))


# ---- what keeps the steps apart ---------------------------------------------------------------------------------

_MIXING = ("repeat_interleave", "tril", "triu")
_POINTWISE = [
    name for name, operator in OPERATORS.items() if operator.traits == Trait.ELEMENTWISE and name not in _MIXING
]


@_rule(*_POINTWISE, "where", "masked_fill")
def _pointwise(op: CanonicalOp, flow: Flow) -> OneStep | None:
    """Operands that do not repeat must be the same at every step: without that dimension, or of size 1 there."""
    return _aligned(op, flow, op.node.all_input_nodes)


def _aligned(op: CanonicalOp, flow: Flow, operands: Sequence[Any]) -> OneStep | None:
    rank, found = _rank(op.node), set()
    for value in operands:
        repeats = flow.of(value)
        if repeats is not None:
            found.add(repeats._replace(dim=repeats.dim + rank - _rank(value)))
    if len(found) != 1:
        return None
    (repeats,) = found
    others = [value for value in operands if flow.of(value) is None]
    alike = all(_is_number(value) or _is_one(value, repeats.dim - rank + _rank(value), flow) for value in others)
    return OneStep(repeats) if alike else None


@_rule(*(name for name, operator in OPERATORS.items() if operator.traits & (Trait.SAME | Trait.CAST | Trait.DROPOUT)))
def _same(op: CanonicalOp, flow: Flow) -> OneStep | None:
    repeats = flow.of(op.input)
    return None if repeats is None else OneStep(repeats)


def _leading(op: CanonicalOp, flow: Flow, dims: int) -> OneStep | None:
    """One that takes the first `dims` dimensions of its input as a batch, and has no other operand that repeats."""
    repeats = flow.of(op.input)
    alone = sum(flow.of(value) is not None for value in op.args.values()) == 1
    return OneStep(repeats) if repeats is not None and alone and repeats.dim < dims else None


def _of_images(*kinds: str) -> list[str]:
    return [f"{kind}{dims}d" for kind in kinds for dims in (1, 2, 3)]


@_rule("linear", *_of_images("conv", "conv_transpose"))
def _layer(op: CanonicalOp, flow: Flow) -> OneStep | None:
    return _leading(op, flow, _rank(op.input) - 1 - _image_dims(op))


@_rule(*_of_images("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"))
def _pool(op: CanonicalOp, flow: Flow) -> OneStep | None:
    return None if op.get("return_indices") else _leading(op, flow, _rank(op.input) - _image_dims(op))


@_rule("batch_norm", "group_norm")
def _norm(op: CanonicalOp, flow: Flow) -> OneStep | None:
    """In training batch-norm is no such function: the variance of n elements is not that of their copies."""
    return _leading(op, flow, 1 + (op.step_mode == "m"))


def _trained_norm(op: CanonicalOp, flow: Flow) -> OneStep | None:
    """But mean and variance of copies are those of one: who takes all sizes for it computes it once, too."""
    if op.name != "batch_norm" or not op.known or op.inplace or op.get("training") is not True or not flow.fixed:
        return None
    repeats = flow.of(op.input)
    return _leading(op, flow, 1) if repeats is not None and not repeats.inner and op.step_mode == "s" else None


@_rule("layer_norm", "rms_norm")
def _layer_norm(op: CanonicalOp, flow: Flow) -> OneStep | None:
    shape = op.get("normalized_shape")
    return _leading(op, flow, _rank(op.input) - (len(shape) if isinstance(shape, tuple | list) else 1))


@_rule("pad")
def _pad(op: CanonicalOp, flow: Flow) -> OneStep | None:
    widths = op.get("pad")
    padded = len(widths) // 2 if isinstance(widths, tuple | list) else _rank(op.input)
    return _leading(op, flow, _rank(op.input) - padded)


@_rule("interpolate", "im2col")
def _resample(op: CanonicalOp, flow: Flow) -> OneStep | None:
    return _leading(op, flow, 1)


@_rule("matmul")
def _matmul(op: CanonicalOp, flow: Flow) -> OneStep | None:
    """Batches are multiplied each for itself, and so are the rows of the first operand."""
    left, right = op.input, op.get("other")
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or min(_rank(left), _rank(right)) < 2:
        return None
    repeats = flow.of(left)
    if repeats is not None and repeats.dim == _rank(left) - 2 and flow.of(right) is None:
        return OneStep(repeats._replace(dim=_rank(op.node) - 2))
    step = _aligned(op, flow, (left, right))
    return step if step is not None and step.repeats.dim < _rank(op.node) - 2 else None


# ---- what gives another shape -----------------------------------------------------------------------------------


@_rule("permute", "transpose", "t")
def _transpose(op: CanonicalOp, flow: Flow) -> OneStep | None:
    repeats, rank = flow.of(op.input), _rank(op.input)
    order = list(range(rank))
    if repeats is None:
        return None
    if op.name == "permute":
        order = op.get("dims")
    else:
        first, second = (op.get("dim0"), op.get("dim1")) if op.name == "transpose" else (0, rank - 1)
        if type(first) is int and type(second) is int:
            order[first], order[second] = order[second], order[first]
        else:
            return None
    if not isinstance(order, tuple | list) or any(type(dim) is not int for dim in order):
        return None
    return OneStep(repeats._replace(dim=[dim % rank for dim in order].index(repeats.dim)))


@_rule("unsqueeze")
def _unsqueeze(op: CanonicalOp, flow: Flow) -> OneStep | None:
    repeats, dim = flow.of(op.input), op.get("dim")
    if repeats is None or type(dim) is not int:
        return None
    return OneStep(repeats._replace(dim=repeats.dim + (dim % _rank(op.node) <= repeats.dim)))


@_rule("flatten")
def _flatten(op: CanonicalOp, flow: Flow) -> OneStep | None:
    repeats = _reshaped(op, flow)
    return None if repeats is None else OneStep(repeats)


@_rule("view", "reshape", "unflatten")
def _reshape(op: CanonicalOp, flow: Flow) -> OneStep | None:
    repeats = _reshaped(op, flow)
    sizes, dim = op.get("sizes" if op.name == "unflatten" else "size"), 0
    if repeats is None or not isinstance(sizes, tuple | list) or op.reinterprets():
        return None
    if op.name == "unflatten":
        dim = op.get("dim")
        if type(dim) is not int:
            return None
        dim %= _rank(op.input)
    place = repeats.dim - dim
    if 0 <= place < len(sizes):
        size = _one_step(sizes, place, repeats.times, flow)
        if size is None:
            return None
        sizes = [*sizes[:place], size, *sizes[place + 1 :]]
    if op.name == "unflatten":
        return OneStep(repeats, torch.unflatten, (op.input, dim, sizes))
    return OneStep(repeats, torch.Tensor.reshape, (op.input, sizes))


def _one_step(sizes: Sequence[Any], place: int, times: int, flow: Flow) -> int | None:
    """The size at `place` without the copies; None if it cannot be told."""
    size = sizes[place]
    if type(size) is int and size > 0:
        return size // times
    inferred = [other for index, other in enumerate(sizes) if index != place and other == -1]
    return -1 if flow.fixed and not inferred else None


def _reshaped(op: CanonicalOp, flow: Flow) -> Repeats | None:
    """Where the copies lie once the elements, in their order, have another shape.

    `outer` elements lie in front of what repeats, and `within` in one copy of it.
    """
    repeats, before, after = flow.of(op.input), _sizes(op.input), _sizes(op.node)
    if repeats is None or before is None or after is None:
        return None
    dim, times, inner = repeats
    if not flow.fixed and (dim or inner):
        return None
    one = before[dim] / times
    outer = math.prod(before[:dim], start=one if inner else sympy.Integer(1))
    within = math.prod(before[dim + 1 :], start=sympy.Integer(1) if inner else one)
    for place, size in enumerate(after):
        if _is_whole(outer / size):
            outer /= size
            continue
        of_one = size / (outer * times)
        fits = _is_whole(of_one) and _is_whole(within / of_one) and 1 in (outer, of_one)
        return Repeats(place, times, inner=outer != 1) if fits else None
    return None


# ---- sizes ------------------------------------------------------------------------------------------------------


def _sizes(value: Any) -> list[sympy.Expr] | None:
    example = example_of(value)
    return None if example is None else [sympy.sympify(_compat.size_expression(size)) for size in example.shape]


def _rank(value: Any) -> int:
    example = example_of(value)
    return -1 if example is None else len(example.shape)


def _image_dims(op: CanonicalOp) -> int:
    return int(op.name[-2]) if op.name.endswith("d") else 0


def _is_whole(expression: sympy.Expr) -> bool:
    return expression.is_integer is True


def _is_number(value: Any) -> bool:
    known = value.meta.get("example_value") if isinstance(value, fx.Node) else value
    return isinstance(known, int | float | torch.SymInt | torch.SymFloat)


def _is_one(value: Any, dim: int, flow: Flow) -> bool:
    """Whether a tensor has no such dimension, or one of size 1, whatever it is called with."""
    sizes = _sizes(value)
    if sizes is None or dim < 0:
        return sizes is not None
    return sizes[dim] == 1 and (flow.fixed or value.op == "get_attr" or _made_one(value, dim, len(sizes)))


def _made_one(value: fx.Node, dim: int, rank: int) -> bool:
    """Whether the dimension was put there as one of size 1."""
    op = op_of(value)
    return op is not None and op.name == "unsqueeze" and type(op.get("dim")) is int and op.get("dim") % rank == dim
