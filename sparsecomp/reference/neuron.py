"""One time step of a neuron as a small typed description: charge, fire and reset, each operation in the order written.

A neuron that a person writes by hand is a handful of elementwise operations, of which there are many spellings:
dividing by a time constant and multiplying with its inverse round differently, and so fire differently. A description
keeps each operation apart, and whoever runs it rounds after each: kernels, and the reference here.

    t0 = mul v0 n0; t1 = add t0 x; t2 = ge t1 n1; t3 = float t2; t4 = sub n2 t3; t5 = mul t1 t4; spike t2; v0 t5

is a leaky neuron with a hard reset: x is the input of the step, v0 and v1 its states, p0 to p5 tensors and n0 to n7
numbers that stay the same over time.

A neuron that is trained fires by `fire t2 u`: 1 where t2 is true, with a gradient for u that is no derivative. What it
is the description says too, of u and of the gradient g that it is given: `b0 = abs u; b1 = add b0 n3; b2 = div g b1;
pull b2`. `stop t3` is t3 without a gradient. `bfloat16 t1` and `float16 t1` round t1 to such a number, as the
operations of a neuron in half precision do: each computes in float32.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import InputError
from sparsecomp.reference.precision import KERNEL_DTYPES, accumulator

STATES, PARAMETERS, NUMBERS = 2, 6, 8
"""How many a description has room for."""
ROUNDINGS: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Instructions that round, and to what; the gradient goes through them as it is."""
OPERATIONS = (
    "add", "sub", "mul", "div", "neg", "ge", "gt", "le", "lt", "not", "float", "where", "fire", "stop", *ROUNDINGS,
    "abs", "exp", "sqrt", "sigmoid", "max", "min",
)  # fmt: skip
"""What one instruction can do, on float32 and on truth values; a kernel knows them by their place. The last line
is of operations that gradients of firing alone are made of."""
COMPARISONS = ("ge", "gt", "le", "lt")
_NAMES = (
    "x", *(f"v{i}" for i in range(STATES)), *(f"p{i}" for i in range(PARAMETERS)), *(f"n{i}" for i in range(NUMBERS))
)  # fmt: skip
PLACES: Mapping[str, int] = {name: place for place, name in enumerate(_NAMES)}
"""Where the values of a step stand by name; results of its instructions follow."""
PULLED: Mapping[str, int] = {**PLACES, "u": PLACES["x"], "g": PLACES["v0"]}
"""The same of the instructions that give the gradient of firing."""
_STATE_NAMES = tuple(f"v{i}" for i in range(STATES))
_PULLABLE = {name: place for name, place in PULLED.items() if name not in ("x", *_STATE_NAMES)}
_ONE = ("neg", "not", "float", "stop", *ROUNDINGS, "abs", "exp", "sqrt", "sigmoid")
_ARITY = {**dict.fromkeys(_ONE, 1), "where": 3}
_SIGNS = {"add": "+", "sub": "-", "mul": "·", "div": "/", "ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


class Instruction(NamedTuple):
    """An operation on values, by their places; those that it does not take are 0."""

    operation: str
    a: int
    b: int = 0
    c: int = 0

    @property
    def operands(self) -> tuple[int, ...]:
        """The places that it reads."""
        return (self.a, self.b, self.c)[: _ARITY.get(self.operation, 2)]


@dataclass(frozen=True, slots=True)
class Neuron:
    """One time step.

    Attributes:
        code: instructions, in order.
        spike: place of the truth value that says where it fires.
        states: places of the values that each state has after the step.
        pull: instructions on u and g, in order, by places of their own.
        pulled: the place among them of the gradient for u.
    """

    code: tuple[Instruction, ...]
    spike: int
    states: tuple[int, ...]
    pull: tuple[Instruction, ...] = ()
    pulled: int = 0

    def __str__(self) -> str:
        """The description as text, which `neuron_of` reads."""
        lines = [
            f"t{index} = {' '.join((one.operation, *map(_name, one.operands)))}" for index, one in enumerate(self.code)
        ]
        after = [f"v{index} {_name(place)}" for index, place in enumerate(self.states)]
        if self.is_trained:
            after += [
                f"b{index} = {' '.join((one.operation, *(_name(place, True) for place in one.operands)))}"
                for index, one in enumerate(self.pull)
            ]
            after.append(f"pull {_name(self.pulled, True)}")
        return "; ".join([*lines, f"spike {_name(self.spike)}", *after])

    @property
    def _truth(self) -> int:
        """The place of the truth value by which it fires."""
        one = self.code[self.spike - len(_NAMES)] if self.spike >= len(_NAMES) else None
        return one.a if one is not None and one.operation == "fire" else self.spike

    @property
    def is_trained(self) -> bool:
        """Whether it says what the gradient of firing is."""
        return any(one.operation == "fire" for one in self.code)

    def formula(self, numbers: Sequence[float]) -> str:
        """The description as formulas with its numbers: s is 1 where it fires, h what is read more than once."""
        code = dict(enumerate(self.code, len(_NAMES)))
        read = Counter([place for one in self.code for place in one.operands] + [*self.states])
        names: dict[int, str] = {self._truth: "s"}

        def written(place: int, whole: bool = False) -> str:
            if place in names and not whole:
                return names[place]
            if place < len(_NAMES):
                name = _NAMES[place]
                return f"{numbers[int(name[1:])]:g}" if name[0] == "n" else name
            one = code[place]
            if one.operation in ROUNDINGS:
                return written(one.a, whole)
            parts = [written(operand) for operand in one.operands]
            if one.operation in ("float", "fire", "stop"):
                return parts[0]
            if one.operation in _SIGNS:
                text = f"{parts[0]} {_SIGNS[one.operation]} {parts[1]}"
                return text if whole else f"({text})"
            return f"{one.operation}({', '.join(parts)})"

        shown = []
        for place, one in code.items():
            if read[place] > 1 and one.operation not in ("float", "fire", "stop") and place not in names:
                names[place] = f"h{len(names)}"
            if place in names:
                shown.append(f"{names[place]} = {written(place, whole=True)}")
        return "; ".join([*shown, *(f"v{index} = {written(place)}" for index, place in enumerate(self.states))])


def _name(place: int, pulled: bool = False) -> str:
    if place >= len(_NAMES):
        return f"{'b' if pulled else 't'}{place - len(_NAMES)}"
    return {"x": "u", "v0": "g"}.get(_NAMES[place], _NAMES[place]) if pulled else _NAMES[place]


@lru_cache(maxsize=256)
def neuron_of(text: str) -> Neuron:
    """The description that a text is of.

    Raises:
        InputError: it is none.
    """
    places, pulls, code, pull, after = dict(PLACES), dict(_PULLABLE), [], [], {}
    try:
        for line in text.split("; "):
            left, _, right = line.partition(" = ")
            known, into = (pulls, pull) if left.startswith(("b", "pull")) else (places, code)
            if right:
                operation, *names = right.split()
                operands = [known[name] for name in names]
                if operation not in OPERATIONS or len(operands) != _ARITY.get(operation, 2):
                    raise ValueError
                known[left] = len(PLACES) + len(into)
                into.append(Instruction(operation, *operands))
            else:
                name, value = left.split()
                after[name] = known[value]
        states = tuple(after[f"v{index}"] for index in range(sum(name in after for name in _STATE_NAMES) or 1))
        found = Neuron(tuple(code), after["spike"], states, tuple(pull), after.get("pull", 0))
        if found.is_trained != ("pull" in after):
            raise ValueError
        return found
    except (KeyError, ValueError):
        raise InputError(
            f"{text!r} describes no neuron; needed are lines such as 't0 = add v0 x' of {', '.join(OPERATIONS)}, then "
            "'spike t1' and 'v0 t2' for each state, divided by '; '"
        ) from None


def neuron_with(
    step: str, states: Sequence[Any], starts: Sequence[float], parameters: Sequence[Any], numbers: Sequence[float]
) -> Neuron:  # fmt: skip
    """The neuron that a text describes, with as much given as it reads.

    Raises:
        InputError: `step` describes none, or more or less is given than it has states, or there is room for.
    """
    neuron = neuron_of(step)
    if not len(neuron.states) == len(states) == len(starts):
        raise InputError(
            f"{len(states)} first states and {len(starts)} starts; {step!r} has {len(neuron.states)} states: "
            "give as many of both, of states None for its start everywhere"
        )
    if len(parameters) > PARAMETERS or len(numbers) > NUMBERS:
        given = f"{len(parameters)} parameters and {len(numbers)} numbers"
        raise InputError(f"{given}; a description has room for {PARAMETERS} and {NUMBERS}")
    return neuron


def neuron_given(
    x: Tensor, states: Sequence[Tensor | None], starts: Sequence[float], parameters: Sequence[Tensor],
    numbers: Sequence[float], step: str,
) -> Neuron:  # fmt: skip
    """The same of neurons that are given x.

    Raises:
        InputError: besides, a state or parameter does not fit a time step, or there is none.
    """
    neuron = neuron_with(step, states, starts, parameters, numbers)
    if not x.dim() or x.shape[0] < 1 or x.is_complex():
        raise InputError(f"x is {x.dtype} {tuple(x.shape)}; needed are real numbers (T, …) of one time step and more")
    shape = x.shape[1:]
    wrong = [tuple(v.shape) for v in states if v is not None and not _fits(v.shape, shape, len(shape))]
    if wrong:
        raise InputError(f"a first state is {wrong[0]}, needs the shape of a time step, {tuple(shape)}")
    wrong = [tuple(one.shape) for one in parameters if not _fits(one.shape, shape, 1)]
    if wrong:
        raise InputError(f"a parameter is {wrong[0]}, needs one number, or those of one dimension of {tuple(shape)}")
    return neuron


def _fits(given: torch.Size, shape: torch.Size, most: int) -> bool:
    """Whether a shape broadcasts to another, with several elements along so many dimensions at most."""
    several = [dim - len(given) for dim, size in enumerate(given) if size != 1]
    return len(several) <= most and len(given) <= len(shape) and all(given[dim] == shape[dim] for dim in several)


def neuron_reference(
    x: Tensor,
    states: Sequence[Tensor | None],
    starts: Sequence[float],
    parameters: Sequence[Tensor],
    numbers: Sequence[float],
    step: str,
    keep: bool,
    state_dtype: torch.dtype | None = None,
    spike_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each step in plain torch, operation by operation; see `sparsecomp.ops.neuron`."""
    neuron, kept = neuron_given(x, states, starts, parameters, numbers, step), kept_in(state_dtype, x, states)
    spikes, x = spikes_like(x, spike_dtype), x.to(accumulator(x.dtype))
    like, fixed = x[0], unchanging(x, parameters, numbers)
    now: list[Any] = [
        torch.full_like(like, start) if given is None else given.to(like.dtype)
        for given, start in zip(states, starts, strict=True)
    ]
    for time in range(x.shape[0]):
        values = run_code([x[time], *now, *[0.0] * (STATES - len(now)), *fixed], neuron.code)
        spikes[time] = values[neuron.spike]
        now = [values[place] for place in neuron.states]
    last = [torch.empty_like(like, dtype=kept).copy_(value) for value in now] if keep else []
    last += [x.new_empty(0, dtype=kept) for _ in range(STATES - len(last))]
    return spikes, last[0], last[1]


def spikes_like(x: Tensor, spike_dtype: torch.dtype | None) -> Tensor:
    """Room for the spikes of all steps, bytes by default.

    Raises:
        InputError: a dtype that kernels write no spikes in.
    """
    if spike_dtype not in (None, torch.int8, *KERNEL_DTYPES):
        raise InputError(f"spike_dtype={spike_dtype}; needed is int8, float32, float16 or bfloat16, or None")
    return torch.empty_like(x, dtype=spike_dtype or torch.int8)


def kept_in(state_dtype: torch.dtype | None, x: Tensor, states: Sequence[Tensor | None]) -> torch.dtype:
    """The dtype of first and last states: that asked for, or the one that is computed in.

    Raises:
        InputError: it is not float32 or of half precision, or a first state is of another.
    """
    kept = accumulator(x.dtype) if state_dtype is None else state_dtype
    if state_dtype is not None and state_dtype not in KERNEL_DTYPES:
        raise InputError(f"state_dtype={state_dtype}; needed is float32, float16 or bfloat16, or None")
    other = [str(given.dtype) for given in states if given is not None and given.dtype is not kept]
    if other:
        raise InputError(f"a first state is {other[0]}, and states are {kept}: give it in that, or state_dtype")
    return kept


def unchanging(x: Tensor, parameters: Sequence[Tensor], numbers: Sequence[float]) -> list[Any]:
    """Parameters and numbers in their places behind the states; what there is not is 0."""
    # in the dtype of the tensors: of a number torch may take another operation
    known = [torch.full((), number, dtype=x.dtype, device=x.device) for number in numbers]
    given = [one.to(x.dtype) for one in parameters]
    return [*given, *[0.0] * (PARAMETERS - len(given)), *known, *[0.0] * (NUMBERS - len(numbers))]


def run_code(values: list[Any], code: Sequence[Instruction]) -> list[Any]:
    """Values, and behind them the results of the instructions; truth values become numbers of the first one's dtype."""
    values, dtype = [*values], values[0].dtype
    for one in code:
        operands = [values[place] for place in one.operands]
        values.append(
            operands[0].to(dtype) if one.operation in ("float", "fire") else _DONE[one.operation](*operands)
        )
    return values


def trained_reference(
    x: Tensor,
    states: Sequence[Tensor | None],
    starts: Sequence[float],
    parameters: Sequence[Tensor],
    numbers: Sequence[float],
    step: str,
) -> tuple[Tensor, ...]:
    """Spikes, in the dtype of x, and last states, through which torch differentiates as often as it is asked to."""
    neuron, currents = neuron_given(x, states, starts, parameters, numbers, step), x.to(accumulator(x.dtype))
    fixed, like = unchanging(currents, parameters, numbers), currents[0]
    now: list[Any] = [
        torch.full_like(like, start) if given is None else given
        for given, start in zip(states, starts, strict=True)
    ]
    spikes = []
    for current in currents.unbind():
        values = [current, *now, *[0.0] * (STATES - len(now)), *fixed]
        for one in neuron.code:
            if one.operation == "fire":
                values.append(_Fire.apply(values[one.a], values[one.b], neuron, tuple(fixed)))
            else:
                values = run_code(values, [one])
        spikes.append(values[neuron.spike].to(x.dtype).expand_as(like))
        now = [values[place] for place in neuron.states]
    return torch.stack(spikes), *(value.expand_as(like) for value in now)


class _Fire(torch.autograd.Function):
    """Ones where a neuron fires, with the gradient of its description."""

    @staticmethod
    def forward(ctx: Any, fires: Tensor, u: Tensor, neuron: Neuron, fixed: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(u)
        ctx.neuron, ctx.fixed = neuron, fixed
        return fires.to(u.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (u,) = ctx.saved_tensors
        values: list[Any] = [u, grads[0], *[0.0] * (STATES - 1), *ctx.fixed]
        values = run_code(values, ctx.neuron.pull)
        return None, values[ctx.neuron.pulled], None, None


class _Round(torch.autograd.Function):
    """A tensor whose values are those of a smaller dtype, in its own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


_DONE: Mapping[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg,
    "ge": torch.ge, "gt": torch.gt, "le": torch.le, "lt": torch.lt,
    "not": torch.logical_not, "where": torch.where, "stop": Tensor.detach,
    "abs": torch.abs, "exp": torch.exp, "sqrt": torch.sqrt, "sigmoid": torch.sigmoid,
    "max": torch.maximum, "min": torch.minimum,
    "bfloat16": lambda value: _Round.apply(value, torch.bfloat16),
    "float16": lambda value: _Round.apply(value, torch.float16),
}  # fmt: skip
