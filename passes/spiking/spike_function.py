"""A spike function that a person writes as a `torch.autograd.Function`, read off the two bodies that Dynamo gives it.

Its forward says when a neuron fires, its backward what gradient the membrane gets for that: a surrogate, which is no
derivative of anything. Both are straight-line code on few values, with writes to temporaries (`g[mask] = 0`,
`x.pow_(2)`) in between, and become operations that a description of a neuron holds (`sparsecomp.reference.neuron`).
A body that does anything else is none of that, and is told apart by what it does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.passes.graph.canonicalize import CanonicalOp, dtype_of, example_of, filled_with, op_of, shape_of
from sparsecomp.passes.graph.functions import body_at
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.spiking.half_precision import computed_in, rounded, rounded_before, rounding
from sparsecomp.reference.neuron import COMPARISONS, ROUNDINGS
from sparsecomp.reference.precision import KERNEL_DTYPES

GRADIENT = "g"
"""What the backward is given for the spikes."""
Operand: TypeAlias = float | str
"""A number, or by name a line of the code (`t0`, `t1`, …), an argument (`a0`, `a1`, …) or the gradient."""
_EXACT = ("add", "sub", "mul", "div", "neg", "abs", "max", "min", "where", "float", "not", *COMPARISONS, *ROUNDINGS)
"""What rounds the same everywhere: by nothing else may a neuron fire."""
_KNOWN_KEYWORDS = {"args_tensor_mask", "non_differentiable_idx", "saved_for_backward_idx", "dirty_idx"}


class Line(NamedTuple):
    """One operation of a description, as `sparsecomp.reference.neuron` names them, and what it reads."""

    operation: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class SpikeFunction:
    """What such a function does.

    Attributes:
        code: lines of the forward, and behind them those of the backward.
        truth: the line that says whether the neuron fires.
        result: which of the results it is that gives spikes, None for one that stands alone.
        of: which argument has the gradient.
        slope: the operand that is its gradient.
        obstacle: why the gradient cannot be told, in place of `of` and `slope`.
    """

    code: tuple[Line, ...]
    truth: str
    result: int | None
    of: int = 0
    slope: Operand = GRADIENT
    obstacle: str = ""


def line_of(operand: str) -> int:
    """The line of the code that is named."""
    return int(operand[1:])


class _Unread(Exception):
    """A body does what no description holds; the message says what."""


def spike_function(node: fx.Node) -> SpikeFunction | None:
    """What a call of a function does, if nothing but spikes is read of what it gives.

    Torch 2.11 gives what a forward computes on the way as further results, and older releases a result, not a tuple.
    """
    bodies, code = [body_at(one) for one in node.args[:2]], _Code()
    forward, backward = bodies if len(bodies) == 2 else (None, None)
    if forward is None or backward is None:
        return None
    try:
        outs, *saved = code.run(forward, [f"a{index}" for index in range(len(node.args) - 2)])
        result = _only_one_read(node) if isinstance(outs, list) else None
        truth = code.truth_of(outs if result is None else outs[result])
    except _Unread:
        return None
    grads = [GRADIENT if index == (result or 0) else None for index in range(len(_listed(outs)))]
    try:
        of, slope = _slope(node, backward, code, grads, [one for each in saved for one in _listed(each)])
    except _Unread as obstacle:
        return SpikeFunction(tuple(code.lines), truth, result, obstacle=str(obstacle))
    return SpikeFunction(tuple(code.lines), truth, result, of, slope)


def _only_one_read(node: fx.Node) -> int:
    """Which of its results is read, where that is one."""
    items = [op_of(user) for user in node.users]
    read = {op.get("index") if op is not None and op.name == "getitem" else None for op in items}
    only = read.pop() if len(read) == 1 else None
    if type(only) is not int or only < 0:
        raise _Unread("several of its results are read, or none")
    return only


def goes_straight_through(fires: fx.Node) -> bool:
    """Whether a truth value becomes spikes by `(hard - soft).detach() + soft` or `hard + (soft - soft.detach())`.

    They are no ones and zeros: the former is rounded, and the latter is NaN where a membrane is.
    """
    casts = (user for user in fires.users if (op := op_of(user)) is not None and op.has(Trait.CAST))
    for hard in (fires, *casts):
        for user in hard.users:
            op = op_of(user)
            if op is None or op.name not in ("add", "sub"):
                continue
            others = [one for one in op.args.values() if one is not hard]
            if any(_is(reader, "detach") for reader in user.users) or any(map(_is_zero, others)):
                return True
    return False


def _is_zero(value: Any) -> bool:
    """Whether something is subtracted from itself, one of both without a gradient."""
    op = op_of(value) if _is(value, "sub") else None
    return op is not None and any(_is(one, "detach") for one in op.args.values())


def _is(value: Any, name: str) -> bool:
    op = op_of(value) if isinstance(value, fx.Node) else None
    return op is not None and op.name == name


def _slope(
    node: fx.Node, backward: fx.GraphModule, code: "_Code", grads: list[str | None], saved: list[Any]
) -> tuple[int, Operand]:
    """Which argument has a gradient, and what it is, for these gradients of the results."""
    keywords = {name: value for name, value in node.kwargs.items() if value not in (None, [], ())}
    if keywords.keys() - _KNOWN_KEYWORDS or "non_differentiable_idx" in keywords or "dirty_idx" in keywords:
        raise _Unread("it marks what it gives, as without a gradient or as written to")
    if not all(isinstance(one, _Value) for one in saved):
        raise _Unread("it keeps what is no tensor")
    found = code.run(backward, [*grads, *(one.what for one in saved)])
    mask: Any = node.kwargs.get("args_tensor_mask")
    counts = {len(node.args) - 2} if mask is None else {len(node.args) - 2, len(mask), sum(mask)}
    given = {index: one for index, one in enumerate(found) if one is not None}
    if len(found) not in counts or len(given) != 1:
        raise _Unread(f"{len(given)} of what it is given have a gradient, and not one")
    of, value = given.popitem()
    shapes = {shape_of(one) for one in (node.args[2 + of], _listed(_results(backward))[of])}
    if len(shapes) > 1:
        raise _Unread("its gradient is of another shape than what it is given")
    if not isinstance(value, _Value) or isinstance(value.what, float) or not code.vanishes(value.what):
        # a backward that no gradient reaches is not called; a description has one in each step
        raise _Unread("its gradient is a number, or not known to be 0 where that of its spikes is")
    return of, value.what


def _results(body: fx.GraphModule) -> Sequence[Any]:
    found = body.graph.output_node().args[0]
    return found if isinstance(found, tuple | list) else (found,)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


# ---- running a body on names --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Value:
    """A tensor of a body: what it holds now, and whether the body made it, so that it may write to it."""

    what: Operand
    own: bool


class _Code:
    """The lines of both bodies as they are read."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.truths: set[Operand] = set()
        self._values: dict[fx.Node, _Value] = {}

    def run(self, body: fx.GraphModule, given: Sequence[Operand | None]) -> list[Any]:
        """What a body gives for these values, where it reads none that is None.

        Older releases of torch put a context before them.
        """
        inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
        if len(inputs) - len(given) not in (0, 1):
            raise _Unread("its bodies do not fit together")
        for node, what in zip(inputs[len(inputs) - len(given) :], given, strict=True):
            if what is not None:
                self._values[node] = _Value(what, own=False)
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output") and not _compat.sets_grad_mode(node):
                self._values[node] = self._done(node)
        return [self._result(one) for one in _results(body)]

    def truth_of(self, out: Any) -> str:
        """The line that says whether the neuron fires, of a result that holds ones and zeros that say so."""
        line = self._line_of(out.what) if isinstance(out, _Value) else None
        truth = line.operands[0] if line is not None and line.operation == "float" else None
        if not isinstance(truth, str) or not self._is_exact(truth):
            raise _Unread("it gives something else than ones and zeros")
        return truth

    def vanishes(self, what: Operand) -> bool:
        """Whether a value is known to be 0 where the gradient for the spikes is."""
        line = self._line_of(what)
        if line is None:
            return what in (GRADIENT, 0.0)
        each = [*map(self.vanishes, line.operands)]
        match line.operation:
            case "mul":
                return any(each)
            case "div" | "neg" | "abs" | "sqrt" | "bfloat16" | "float16":
                return each[0]
            case "add" | "sub":
                return all(each)
            case "where":
                return all(each[1:])
            case "max" | "min":  # a gradient that is cut off on both sides of 0
                side = 1 if line.operation == "max" else -1
                bounds = [isinstance(one, float) and side * one <= 0 for one in line.operands]
                return any(each) and all(a or b for a, b in zip(each, bounds, strict=True))
            case _:
                return False

    def _is_exact(self, what: Operand) -> bool:
        line = self._line_of(what)
        return line is None or (line.operation in _EXACT and all(map(self._is_exact, line.operands)))

    def _line_of(self, what: Operand) -> Line | None:
        return self.lines[line_of(what)] if isinstance(what, str) and what[0] == "t" else None

    def _result(self, given: Any) -> Any:
        if isinstance(given, tuple | list):
            return [self._result(one) for one in given]
        return self._values.get(given) if isinstance(given, fx.Node) else given

    def _done(self, node: fx.Node) -> _Value:
        op = op_of(node)
        if op is None or not op.known or op.out is not None:
            raise _Unread(f"it computes {node.target if op is None else op.name}")
        if dtype_of(node) not in (None, torch.bool, *KERNEL_DTYPES):
            raise _Unread(f"{op.name} gives {dtype_of(node)}")
        if op.has(Trait.SAME) and not op.inplace:
            source = self._value(op.input)
            if op.name == "clone":
                return _Value(source.what, own=True)
            # another name of it, or a copy: of both nothing is known any more once one is written to
            source.own = source.own and op.name in ("detach", "alias", "identity")
            return source
        number = filled_with(node)
        if number is not None:
            return _Value(number, own=True)
        what = self._rounded(self._computed(op), dtype_of(node))
        if dtype_of(node) is torch.bool and what not in self.truths:
            raise _Unread(f"it computes {op.name} of truth values")
        if not op.inplace:
            # a cast to what something is already gives it itself
            stays = op.has(Trait.CAST) and what == self._value(op.input).what
            return self._value(op.input) if stays else _Value(what, own=True)
        written = self._value(op.input)
        if not written.own:
            raise _Unread(f"{op.name} writes to what it is given")
        written.what = what if written.what in self.truths else self._number(what)
        return written

    def _value(self, operand: Any) -> _Value:
        found = self._values.get(operand) if isinstance(operand, fx.Node) else None
        if found is None:
            raise _Unread(f"it reads {operand}")
        return found

    def _operand(self, given: Any) -> Operand:
        return float(given) if isinstance(given, bool | int | float) else self._value(given).what

    # ---- single operations ------------------------------------------------------------------------------------------

    def _computed(self, op: CanonicalOp) -> Operand:
        if op.name == "setitem":
            whole = shape_of(op.input) is not None and shape_of(op.get("index")) == shape_of(op.input)
            if not whole or isinstance(op.get("value"), fx.Node):
                raise _Unread("it writes to a part of a tensor that no truth value tells")
            return self._where(op.get("index"), op.get("value"), op.input)
        if op.name == "masked_fill":
            return self._where(op.get("mask"), op.get("value"), op.input)
        if op.name == "where":
            return self._where(op.get("condition"), op.get("input"), op.get("other"))
        if op.name in ("clamp", "clamp_min", "clamp_max"):
            found = self._operand(op.input)
            found = found if op.get("min") is None else self._emit("max", found, self._operand(op.get("min")))
            return found if op.get("max") is None else self._emit("min", found, self._operand(op.get("max")))
        if op.has(Trait.CAST):
            return self._cast(op)
        if op.get("alpha", 1) != 1 or op.get("rounding_mode") is not None:
            raise _Unread(f"it computes {op.name} in another form")
        meaning = _MEANINGS.get(op.name)
        if meaning is None:
            raise _Unread(f"it computes {op.name}")
        given = [op.input, *(value for name, value in op.args.items() if name in ("other", "values"))]
        return meaning(self, *self._read(op, given))

    def _read(self, op: CanonicalOp, given: Sequence[Any]) -> list[Operand]:
        """Operands, rounded where an operator in half precision does that with single numbers."""
        dtype, example, read = computed_in(op.node, given), example_of(op.node), [*map(self._operand, given)]
        name = "sub" if op.name == "rsub" else op.name
        before = () if example is None else rounded_before(name, given, example.device, rounding(dtype))
        for index in before:
            read[index] = self._rounded(read[index], dtype)
        return read

    def _where(self, condition: Any, one: Any, other: Any) -> Operand:
        truth, a, b = self._operand(condition) if isinstance(condition, fx.Node) else None, one, other
        if truth not in self.truths:
            raise _Unread("it chooses by what is no truth value")
        a, b = self._operand(a), self._operand(b)
        if (a, b) == (1.0, 0.0):
            return self._number(truth)
        return self._number(self._not(truth)) if (a, b) == (0.0, 1.0) else self._emit("where", truth, a, b)

    def _cast(self, op: CanonicalOp) -> Operand:
        what, dtype = self._operand(op.input), dtype_of(op.node)
        if dtype is None or "copy" in op.args or (dtype is torch.bool and what not in self.truths):
            raise _Unread(f"it computes {op.name} to {dtype}")
        return what if dtype is torch.bool else self._number(what)

    def _rounded(self, what: Operand, dtype: torch.dtype | None) -> Operand:
        """Something as half precision holds it, if a dtype is that."""
        operation, line = rounding(dtype), self._line_of(what)
        if not operation or what in self.truths or (line is not None and line.operation in ("float", operation)):
            return what
        return rounded(what, operation) if isinstance(what, float) else self._line(operation, what)

    def _number(self, what: Operand) -> Operand:
        """A truth value as a number; numbers as they are."""
        return self._line("float", what) if what in self.truths else what

    def _not(self, what: Operand) -> Operand:
        if what not in self.truths:
            raise _Unread("it negates what is no truth value")
        return self._line("not", what)

    def _emit(self, operation: str, *operands: Operand) -> Operand:
        """The place of what an operation gives, of numbers where its operands are truth values."""
        first = 1 if operation == "where" else 0
        read = [*operands[:first], *map(self._number, operands[first:])]
        if all(isinstance(one, float) for one in read):
            raise _Unread("it computes with numbers alone")
        if operation == "mul" and 1.0 in read:
            return read[1 - read.index(1.0)]
        return self._line(operation, *read)

    def _line(self, operation: str, *operands: Operand) -> str:
        self.lines.append(Line(operation, operands))
        # 0 and -0 are different
        name = f"t{[*map(repr, self.lines)].index(repr(self.lines[-1]))}"
        if name != f"t{len(self.lines) - 1}":
            self.lines.pop()
        if operation in (*COMPARISONS, "not"):
            self.truths.add(name)
        return name

    def _both(self, a: Operand, b: Operand) -> Operand:
        """Where two truth values are both true."""
        if a not in self.truths or b not in self.truths:
            raise _Unread("it joins what are no truth values")
        return self._line("gt", self._emit("mul", a, b), 0.0)

    def _power(self, a: Operand, exponent: Operand) -> Operand:
        if exponent not in (-2.0, -1.0, 1.0, 2.0, 3.0):
            raise _Unread(f"it computes a power of {exponent}")
        found = a = self._number(a)
        for _ in range(int(abs(float(exponent))) - 1):
            found = self._emit("mul", found, a)
        return found if float(exponent) > 0 else self._emit("div", 1.0, found)

    def _tanh(self, a: Operand) -> Operand:
        half = self._emit("sigmoid", self._emit("mul", 2.0, a))
        return self._emit("sub", self._emit("mul", 2.0, half), 1.0)

    def _heaviside(self, a: Operand, at_zero: Operand) -> Operand:
        if at_zero not in (0.0, 1.0):
            raise _Unread("its step function is neither 0 nor 1 at 0")
        return self._number(self._line("ge" if at_zero else "gt", self._number(a), 0.0))


def _plain(operation: str) -> Callable[..., Operand]:
    return lambda code, *operands: code._emit(operation, *operands)


_MEANINGS: Mapping[str, Callable[..., Operand]] = {
    **{name: _plain(name) for name in ("add", "sub", "mul", "div", "neg", "abs", "exp", "sqrt", "sigmoid")},
    **{name: _plain(name) for name in COMPARISONS},
    "maximum": _plain("max"), "minimum": _plain("min"),
    "rsub": lambda code, a, b: code._emit("sub", b, a),
    "relu": lambda code, a: code._emit("max", a, 0.0),
    "logical_not": _Code._not, "bitwise_not": _Code._not, "logical_and": _Code._both, "bitwise_and": _Code._both,
    "logical_or": lambda code, a, b: code._not(code._both(code._not(a), code._not(b))),
    "bitwise_or": lambda code, a, b: code._not(code._both(code._not(a), code._not(b))),
    "heaviside": _Code._heaviside,
    "pow": _Code._power, "square": lambda code, a: code._power(a, 2.0),
    "reciprocal": lambda code, a: code._power(a, -1.0),
    "rsqrt": lambda code, a: code._emit("div", 1.0, code._emit("sqrt", a)),
    "sign": lambda code, a: code._emit("sub", code._emit("gt", a, 0.0), code._emit("lt", a, 0.0)),
    "tanh": _Code._tanh,
}  # fmt: skip
