"""One time step of a neuron as a small typed description: charge, fire and reset, each operation in the order written.

A neuron that a person writes by hand is a handful of elementwise operations, of which there are many spellings:
dividing by a time constant and multiplying with its inverse round differently, and so fire differently. A description
keeps each operation apart, and whoever runs it rounds after each: kernels, and the reference here.

    t0 = mul v0 n0; t1 = add t0 x; t2 = ge t1 n1; t3 = float t2; t4 = sub n2 t3; t5 = mul t1 t4; spike t2; v0 t5

is a leaky neuron with a hard reset: x is the input of the step, v0 and v1 its states, p0 to p5 tensors and n0 to n7
numbers that stay the same over time.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import InputError

STATES, PARAMETERS, NUMBERS = 2, 6, 8
"""How many a description has room for."""
OPERATIONS = ("add", "sub", "mul", "div", "neg", "ge", "gt", "le", "lt", "not", "float", "where")
"""What one instruction can do, on float32 and on truth values; a kernel knows them by their place."""
COMPARISONS = ("ge", "gt", "le", "lt")
_NAMES = (
    "x", *(f"v{i}" for i in range(STATES)), *(f"p{i}" for i in range(PARAMETERS)), *(f"n{i}" for i in range(NUMBERS))
)  # fmt: skip
PLACES: Mapping[str, int] = {name: place for place, name in enumerate(_NAMES)}
"""Where the values of a step stand by name; results of its instructions follow."""
_ARITY = {"neg": 1, "not": 1, "float": 1, "where": 3}
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
    """

    code: tuple[Instruction, ...]
    spike: int
    states: tuple[int, ...]

    def __str__(self) -> str:
        """The description as text, which `neuron_of` reads."""
        lines = [
            f"t{index} = {' '.join((one.operation, *map(_name, one.operands)))}" for index, one in enumerate(self.code)
        ]
        after = [f"v{index} {_name(place)}" for index, place in enumerate(self.states)]
        return "; ".join([*lines, f"spike {_name(self.spike)}", *after])

    def formula(self, numbers: Sequence[float]) -> str:
        """The description as formulas with its numbers: s is 1 where it fires, h what is read more than once."""
        code = dict(enumerate(self.code, len(_NAMES)))
        read = Counter([place for one in self.code for place in one.operands] + [*self.states])
        names: dict[int, str] = {self.spike: "s"}

        def written(place: int, whole: bool = False) -> str:
            if place in names and not whole:
                return names[place]
            if place < len(_NAMES):
                name = _NAMES[place]
                return f"{numbers[int(name[1:])]:g}" if name[0] == "n" else name
            one = code[place]
            parts = [written(operand) for operand in one.operands]
            if one.operation == "float":
                return parts[0]
            if one.operation in _SIGNS:
                text = f"{parts[0]} {_SIGNS[one.operation]} {parts[1]}"
                return text if whole else f"({text})"
            return f"{one.operation}({', '.join(parts)})"

        shown = []
        for place, one in code.items():
            if read[place] > 1 and one.operation != "float" and place not in names:
                names[place] = f"h{len(names)}"
            if place in names:
                shown.append(f"{names[place]} = {written(place, whole=True)}")
        return "; ".join([*shown, *(f"v{index} = {written(place)}" for index, place in enumerate(self.states))])


def _name(place: int) -> str:
    return _NAMES[place] if place < len(_NAMES) else f"t{place - len(_NAMES)}"


@lru_cache(maxsize=256)
def neuron_of(text: str) -> Neuron:
    """The description that a text is of.

    Raises:
        InputError: it is none.
    """
    places, code, after = dict(PLACES), [], {}
    try:
        for line in text.split("; "):
            left, _, right = line.partition(" = ")
            if right:
                operation, *names = right.split()
                operands = [places[name] for name in names]
                if operation not in OPERATIONS or len(operands) != _ARITY.get(operation, 2):
                    raise ValueError
                places[left] = len(places)
                code.append(Instruction(operation, *operands))
            else:
                name, value = left.split()
                after[name] = places[value]
        states = tuple(after[f"v{index}"] for index in range(max(1, len(after) - 1)))
        return Neuron(tuple(code), after["spike"], states)
    except (KeyError, ValueError):
        raise InputError(
            f"{text!r} describes no neuron; needed are lines such as 't0 = add v0 x' of {', '.join(OPERATIONS)}, then "
            "'spike t1' and 'v0 t2' for each state, divided by '; '"
        ) from None


def neuron_reference(
    x: Tensor,
    states: Sequence[Tensor | None],
    starts: Sequence[float],
    parameters: Sequence[Tensor],
    numbers: Sequence[float],
    step: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each step in plain torch, operation by operation; see `sparsecomp.ops.neuron`."""
    neuron, like = neuron_of(step), x[0]
    # in the dtype of the tensors: of a number torch may take another operation
    fixed = [*parameters, *[0.0] * (PARAMETERS - len(parameters))]
    fixed += [torch.full((), number, dtype=x.dtype, device=x.device) for number in numbers]
    fixed += [0.0] * (NUMBERS - len(numbers))
    now: list[Any] = [
        torch.full_like(like, start) if given is None else given
        for given, start in zip(states, starts, strict=True)
    ]
    spikes = torch.empty_like(x, dtype=torch.int8)
    for time in range(x.shape[0]):
        values: list[Any] = [x[time], *now, *[0.0] * (STATES - len(now)), *fixed]
        for one in neuron.code:
            values.append(_DONE[one.operation](*(values[place] for place in one.operands)))
        spikes[time] = values[neuron.spike]
        now = [values[place] for place in neuron.states]
    last = [torch.empty_like(like).copy_(value) for value in now] if keep else []
    last += [x.new_empty(0) for _ in range(STATES - len(last))]
    return spikes, last[0], last[1]


_DONE: Mapping[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg,
    "ge": torch.ge, "gt": torch.gt, "le": torch.le, "lt": torch.lt,
    "not": torch.logical_not, "float": Tensor.float, "where": torch.where,
}  # fmt: skip
