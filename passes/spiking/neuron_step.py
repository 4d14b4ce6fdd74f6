"""What one time step of a neuron computes, read off the steps of a loop that was unrolled.

Such a loop leaves T copies of the same few elementwise operations, each reading what the one before left. The copies
are read side by side, from the membrane of every step (its charge) backwards: where all columns have the same
operation, that is an instruction of the description; where they read the same value, a parameter; where each reads
what belongs to the step before, a state; and what does not depend on the neuron's past is its input. What reads are
exact: two columns agree in every operation, number and order of operands, or there is no neuron.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from sparsecomp.passes.graph.canonicalize import CanonicalOp, dtype_of, example_of, filled_with, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.spiking.half_precision import rounded
from sparsecomp.passes.spiking.spike_function import GRADIENT, Operand, SpikeFunction, line_of
from sparsecomp.passes.spiking.step_operation import (
    Columns,
    StepOperation,
    backwards,
    fires_on,
    is_charge,
    reading,
    without_rounding,
)
from sparsecomp.reference.neuron import (
    COMPARISONS,
    NUMBERS,
    PARAMETERS,
    PLACES,
    PULLED,
    ROUNDINGS,
    STATES,
    Instruction,
    Neuron,
)
from sparsecomp.reference.precision import KERNEL_DTYPES

_Pull: TypeAlias = tuple[tuple[Instruction, ...], int]
"""Instructions of a gradient of firing, and the place of what they give."""
_X, _FIRST_PARAMETER, _FIRST_NUMBER, _FIRST_RESULT = PLACES["x"], PLACES["p0"], PLACES["n0"], len(PLACES)


class NoNeuron(Exception):
    """The steps are not copies of one another, or of more than a description holds; the message says what."""


class NoSurrogate(NoNeuron):
    """Neurons fire by a function whose gradient no description holds."""


@dataclass(slots=True)
class Steps:
    """The steps of a neuron, read side by side.

    Attributes:
        charges: one a step.
        cuda: it is to run on a GPU, where torch divides by a number by multiplying with its inverse.
        unchanged: whether nothing writes to a value after a node has run.
        trained: gradients go back through the steps.
        currents: an input that takes up its own of the step before is a state too.
        inputs: what the neuron is given, step by step.
        states: what each state is before each step.
        parameters: nodes.
        at: the places of each node's value, by step.
    """

    charges: Columns
    cuda: bool
    unchanged: Callable[[Any, fx.Node], bool]
    trained: bool
    currents: bool
    inputs: Columns = ()
    states: list[Columns] = field(default_factory=list)
    parameters: list[fx.Node] = field(default_factory=list)
    at: dict[fx.Node, dict[int, int]] = field(default_factory=dict)
    interior: dict[fx.Node, None] = field(default_factory=dict)
    _numbers: list[float] = field(default_factory=list)
    _code: list[Instruction] = field(default_factory=list)
    _truths: set[int] = field(default_factory=set)
    _places: dict[Columns, int] = field(default_factory=dict)
    _begun: set[Columns] = field(default_factory=set)
    _touching: dict[fx.Node, bool] = field(default_factory=dict)
    _after: list[int] = field(default_factory=list)
    _pulls: dict[int, _Pull] = field(default_factory=dict)

    @classmethod
    def of(
        cls, charges: Columns, cuda: bool, unchanged: Callable[[Any, fx.Node], bool], trained: bool
    ) -> "Steps":  # fmt: skip
        """Read all steps, with what its input takes up of earlier ones if a description holds that.

        Raises:
            NoNeuron: they are no copies of one another.
        """
        try:
            return cls._of(charges, cuda, unchanged, trained, currents=True)
        except NoSurrogate:
            raise
        except NoNeuron:
            return cls._of(charges, cuda, unchanged, trained, currents=False)

    @classmethod
    def _of(
        cls, charges: Columns, cuda: bool, unchanged: Callable[[Any, fx.Node], bool], trained: bool, currents: bool
    ) -> "Steps":  # fmt: skip
        steps = cls(charges, cuda, unchanged, trained, currents)
        steps._touching.update({one: True for charge in charges for one in (charge, *fires_on(charge))})
        steps._read(charges)
        for state in steps.states:  # grows as they are read
            steps._after.append(steps._read(state[1:]))
        if not steps.inputs:
            raise NoNeuron("nothing that it reads changes from step to step")
        return steps

    @property
    def after(self) -> list[int]:
        """The place of each state after a step."""
        return self._after

    def fires(self) -> list[int]:
        """Places of the truth values that compare the charge of a step, and of what is not so."""
        found: dict[int, None] = {}
        for step, charge in enumerate(self.charges):
            places = [self.place_of(one, step) for one in fires_on(charge)]
            found.update(dict.fromkeys(self._bare(place) for place in places if place is not None))
        return [*found, *(self._instruction("not", [place]) for place in found)]

    def _bare(self, place: int) -> int:
        """The truth value that a place holds as a number, with a gradient or without."""
        one = self._code_at(self._going_on(place))
        return one.a if one is not None and one.operation in ("float", "fire") else place

    def _going_on(self, place: int) -> int:
        """What a place holds without a gradient, with it."""
        one = self._code_at(place)
        return one.a if one is not None and one.operation == "stop" else place

    def _code_at(self, place: int) -> Instruction | None:
        return self._code[place - _FIRST_RESULT] if place >= _FIRST_RESULT else None

    def is_spike(self, node: fx.Node, spike: int) -> int | None:
        """The step in which a node says whether the neuron fires, if it says that."""
        steps = [*self.at.get(node, {})]
        for step in (*steps, *(step - 1 for step in steps if step)):  # a reset may compare the state of the step before
            place = self.place_of(node, step)
            if place is not None and self._bare(place) == spike:
                return step
        return None

    def is_state(self, node: fx.Node) -> int | None:
        """The state that a node holds after the last step, if it does, with its gradient or without."""
        place = self.at.get(node, {}).get(len(self.charges) - 1)
        for held in () if place is None else (place, self._going_on(place)):
            if held in self._after:
                return self._after.index(held)
        return None

    def leaves(self, node: fx.Node, step: int) -> frozenset[int]:
        """The input, states and parameters to which a gradient goes back from a node, through all steps before."""
        place, found = self.place_of(node, step), set()
        pending = [] if place is None else [place]
        while pending:
            place = pending.pop()
            if place not in found:
                found.add(place)
                pending += self._gives_gradients_to(place)
        return frozenset(place for place in found if _X <= place < _FIRST_NUMBER)

    def _gives_gradients_to(self, place: int) -> Sequence[int]:
        state = place - PLACES["v0"]
        if 0 <= state < len(self._after):
            return (self._after[state],)
        one = self._code_at(place)
        if one is None or one.operation in ("stop", "float", "not", *COMPARISONS):
            return ()
        if one.operation == "fire":
            return (one.b,)
        return one.operands[1:] if one.operation == "where" else one.operands

    def is_early(self, node: fx.Node) -> bool:
        """Whether a node is made of first states alone."""
        places = self.at.get(node, {})
        return places.keys() == {0} and not self._reads_input(places[0])

    def _reads_input(self, place: int) -> bool:
        if place < _FIRST_RESULT:
            return place == _X
        return any(map(self._reads_input, self._code[place - _FIRST_RESULT].operands))

    def place_of(self, value: Any, step: int, depth: int = 6) -> int | None:
        """The place of a value in a step, if it is made of the values of that step alone, which are near."""
        known = self.at.get(value, {}).get(step)
        if known is None:
            plain = self._plain(value)
            known = self._place_of(value, step, depth) if plain is value else self.place_of(plain, step, depth)
            if known is not None and isinstance(value, fx.Node):
                self.at.setdefault(value, {})[step] = known
        return known

    def _place_of(self, value: Any, step: int, depth: int) -> int | None:
        if isinstance(value, float):
            return self._number(value)
        for place, parameter in enumerate(self.parameters, _FIRST_PARAMETER):
            if value is parameter or self._equal((parameter, value)):
                return place
        found = reading(value)
        if found is None or not depth:
            return None
        places = [self.place_of(operand, step, depth - 1) for operand in found.operands]
        try:
            return None if None in places else self._emitted(found, places)
        except NoNeuron:
            return None

    def description(self, spike: int) -> tuple[Neuron, list[float]]:
        """The description of a step that fires by the truth value at a place, and its numbers; nothing unneeded.

        Raises:
            NoNeuron: it is longer than descriptions are, or fires with several gradients.
        """
        fires = [place for place in self._pulls if self._bare(place) == spike]
        spike = fires[0] if fires else spike
        needed, pending = set(), [*fires, spike, *self._after]
        while pending:
            place = pending.pop()
            if place not in needed:
                needed.add(place)
                pending += self._code[place - _FIRST_RESULT].operands if place >= _FIRST_RESULT else ()
        pulls = {self._pulls[place] for place in needed if place in self._pulls}
        if len(fires) > 1 or len(pulls) > 1:
            raise NoSurrogate("it fires with several gradients")
        pull, pulled = pulls.pop() if pulls else ((), 0)
        needed.update(place for one in pull for place in one.operands if place < 0)
        numbers = [index for index in range(len(self._numbers)) if _numbered(index) in needed]
        if len(numbers) > NUMBERS:
            raise NoNeuron(f"it has more than {NUMBERS} numbers")
        moved = {_numbered(index): _FIRST_NUMBER + new for new, index in enumerate(numbers)}
        code: list[Instruction] = []
        for index, one in enumerate(self._code):
            if _FIRST_RESULT + index in needed:
                moved[_FIRST_RESULT + index] = _FIRST_RESULT + len(code)
                code.append(Instruction(one.operation, *(moved.get(place, place) for place in one.operands)))
        back = tuple(
            Instruction(one.operation, *(moved[place] if place < 0 else place for place in one.operands))
            for one in pull
        )
        after = tuple(moved.get(place, place) for place in self._after)
        neuron = Neuron(tuple(code), moved[spike], after, back, pulled)
        return neuron, [self._numbers[index] for index in numbers]

    # ---- columns ----------------------------------------------------------------------------------------------------

    def _read(self, columns: Columns) -> int:
        """The place of a value that is read in each step, or in each but the last."""
        columns = tuple(map(self._plain, columns))
        if all(isinstance(one, float) for one in columns):
            return self._same_number(columns)
        place = self._places.get(_key(columns))
        if place is None:
            place = self._leaf(columns)
            place = self._made(columns) if place is None else place
            self._places[_key(columns)] = place
            self._places.setdefault(_key(columns[: len(self.charges) - 1]), place)
            for step, node in enumerate(columns):
                if isinstance(node, fx.Node):
                    self.at.setdefault(node, {})[step] = place
        return place

    def _leaf(self, columns: Columns) -> int | None:
        if self._equal(columns):
            return self._parameter(columns[0])
        whole = len(columns) == len(self.charges)
        if whole and (_key(columns[1:]) in self._begun or _key(columns[1:]) in self._places):
            return self._state(columns)
        if not any(map(self._touches, columns)) and not (whole and self.currents and self._recurs(columns)):
            return self._input(columns)
        if self._operands(columns) is not None:
            return None
        if not whole or not all(map(self._touches, columns[1:])):
            raise NoNeuron(f"its steps differ at {columns[-1]}")
        return self._state(columns)

    def _made(self, columns: Columns) -> int:
        if len(columns) == len(self.charges):
            self._begun.add(_key(columns[:-1]))
        found = self._operands(columns)
        assert found is not None
        self.interior.update(dict.fromkeys(one for one in columns if isinstance(one, fx.Node)))
        operation, operands = found
        return self._emitted(operation, [self._read(one) for one in operands])

    def _operands(self, columns: Columns) -> tuple[StepOperation, list[Columns]] | None:
        """The operation that all columns have in common, and its operands column by column."""
        found = [reading(one) for one in columns]
        kinds = {None if one is None else one.kind for one in found[1:] or found}
        last = found[-1]
        if len(kinds) > 1 or last is None:
            return None
        first = found[0] or _folded(columns[0], found[1:])
        if first is not None and first.rounds and not last.rounds:
            first = without_rounding(first)
        if first is None or first.kind not in kinds:
            return None
        rows = [first, *found[1:]]
        return last, list(zip(*(one.operands for one in rows if one is not None), strict=True))

    def _equal(self, columns: Columns, depth: int = 4) -> bool:
        """Whether all columns are one value, or the same operations on such; a single column proves that of neither."""
        columns = tuple(map(self._plain, columns))
        first = columns[0]
        if not all(isinstance(one, fx.Node) for one in columns):
            return all(type(one) is type(first) and repr(one) == repr(first) for one in columns)
        known = self._places.get(columns)
        if known is not None:
            return known < 0 or _FIRST_PARAMETER <= known < _FIRST_NUMBER
        if self._touches(first) or not depth:
            return False
        if len(set(columns)) == 1 and (len(columns) > 1 or first.op in ("placeholder", "get_attr")):
            return True
        ops = [op_of(one) for one in columns]
        kinds = {None if op is None or not _is_plain(op) else (op.name, dtype_of(op.node)) for op in ops}
        if len(kinds) > 1 or None in kinds:
            return False
        args = [tuple(op.args.values()) for op in ops if op is not None]
        return all(self._equal(one, depth - 1) for one in zip(*args, strict=True))

    def _recurs(self, columns: Columns) -> bool:
        """Whether a value takes up its own of the step before, as a decaying current does: then it has a past too."""
        for earlier, now in itertools.pairwise(columns):
            if not isinstance(now, fx.Node) or earlier not in backwards(now):
                return False
        self._touching = {node: True for node, touches in self._touching.items() if touches}
        self._touching.update(dict.fromkeys(columns, True))
        return True

    def _touches(self, value: Any) -> bool:
        """Whether a value depends on the neuron's past, by elementwise operations and not through another neuron."""
        if not isinstance(value, fx.Node):
            return False
        path = [value]
        while path:
            node = path[-1]
            found = reading(node)
            foreign = node not in self._touching and is_charge(node)
            inside = () if found is None or foreign else found.operands
            operands = [one for one in inside if isinstance(one, fx.Node)]
            unknown = [] if node in self._touching else [one for one in operands if one not in self._touching]
            if unknown:
                path.append(unknown[0])
                continue
            path.pop()
            if node not in self._touching:
                self._touching[node] = any(self._touching[one] for one in operands)
        return self._touching[value]

    def _plain(self, value: Any) -> Any:
        """Of a copy what it is one of, and a number in the place of a tensor that is filled with it."""
        while isinstance(value, fx.Node) and self.unchanged(value, value):
            found = reading(value)
            same = ("same",) if self.trained else ("same", "stop")
            if found is None or found.operation not in same or not self.unchanged(found.operands[0], value):
                number = filled_with(value)
                return value if number is None else number
            value = found.operands[0]
        return float(value) if isinstance(value, bool | int | float) else value

    # ---- places -----------------------------------------------------------------------------------------------------

    def _same_number(self, columns: Columns) -> int:
        if len(set(_key(columns))) > 1 or not math.isfinite(columns[0]):
            raise NoNeuron("a number changes from step to step, or is not finite")
        return self._number(columns[0])

    def _number(self, number: float) -> int:
        known = [one.hex() for one in (*self._numbers, number)]
        if known.index(number.hex()) == len(self._numbers):
            self._numbers.append(number)
        return _numbered(known.index(number.hex()))

    def _parameter(self, node: fx.Node) -> int:
        example = example_of(node)
        if example is None or sum(size != 1 for size in example.shape) > 1:
            return self._input((node,) * len(self.charges))
        if example.dtype not in KERNEL_DTYPES:
            raise NoNeuron(f"its parameter {node.name} is of {example.dtype}")
        if node not in self.parameters:
            if len(self.parameters) == PARAMETERS:
                raise NoNeuron(f"it has more than {PARAMETERS} parameters")
            self.parameters.append(node)
        return _FIRST_PARAMETER + self.parameters.index(node)

    def _input(self, columns: Columns) -> int:
        if len(columns) < len(self.charges) or self.inputs not in ((), columns):
            raise NoNeuron("it has several inputs")
        if not all(isinstance(one, fx.Node) for one in columns):
            raise NoNeuron("an input of a step is a number")
        self.inputs = columns
        return _X

    def _state(self, columns: Columns) -> int:
        if len(self.states) == STATES:
            raise NoNeuron(f"it has more than {STATES} states")
        self.states.append(columns)
        return PLACES["v0"] + len(self.states) - 1

    def _emitted(self, what: StepOperation, places: list[Any]) -> int:
        """The place of what an operation gives, the same for the same one."""
        if what.function is not None:
            return self._fired(what.function, places)
        for index in what.rounded:
            places[index] = self._rounded(places[index], what.rounds)
        return self._rounded(self._result(what.operation, places), what.rounds)

    def _rounded(self, place: int, rounds: str) -> int:
        """The place of a value as it is in half precision, if that is asked for."""
        value, one = self._value(place), self._code_at(place)
        if not rounds or self._bare(place) in self._truths or (one is not None and one.operation == rounds):
            return place
        return self._instruction(rounds, [place]) if value is None else self._number(rounded(value, rounds))

    def _result(self, operation: str, places: list[Any]) -> int:
        if operation == "same" or (operation == "float" and places[0] not in self._truths):
            return places[0]
        if operation == "stop":
            stopped = not self.trained or places[0] < 0 or places[0] in self._truths
            return places[0] if stopped or self._going_on(places[0]) != places[0] else self._instruction("stop", places)
        if operation in ROUNDINGS:
            return self._rounded(places[0], operation)
        if operation == "not" or operation == "float":
            return self._instruction(operation, places)
        if operation == "heaviside":
            return self._heaviside(*places)
        if operation == "where":
            return self._where(*places)
        places = [self._as_number(place) for place in places]
        values = [self._value(place) for place in places]
        if None not in values:
            raise NoNeuron("it computes with numbers alone")
        if operation == "mul" and 1.0 in values:
            return places[1 - values.index(1.0)]
        if operation == "div" and self.cuda and values[1] is not None:
            operation, places = "mul", [places[0], self._number(_inverse(values[1]))]
        return self._instruction(operation, places)

    def _fired(self, function: SpikeFunction, places: list[int]) -> int:
        """The place of what a function gives: ones where it fires, with its gradient where that is asked for."""
        known: dict[Operand, int] = {f"a{index}": place for index, place in enumerate(places)}

        def place_of(operand: Operand) -> int:
            if not isinstance(operand, str):
                return self._number(operand)
            if operand not in known:
                line = function.code[line_of(operand)]
                known[operand] = self._result(line.operation, [*map(place_of, line.operands)])
            return known[operand]

        truth = place_of(function.truth)
        if not self.trained:
            return self._as_number(truth)
        if function.obstacle:
            raise NoSurrogate(f"the gradient of its spikes is none that a description holds: {function.obstacle}")
        place = self._instruction("fire", [truth, places[function.of]])
        pull = self._pull(function, places)
        if self._pulls.setdefault(place, pull) != pull:
            raise NoSurrogate("it fires with several gradients")
        return place

    def _pull(self, function: SpikeFunction, places: list[int]) -> _Pull:
        """The instructions of the gradient of firing, whose numbers stand where those of the steps do."""
        code: list[Instruction] = []
        known: dict[Operand, int] = {GRADIENT: PULLED["g"]}
        for index, place in enumerate(places):
            if place == places[function.of]:
                known[f"a{index}"] = PULLED["u"]
            elif place < 0 or _FIRST_PARAMETER <= place < _FIRST_NUMBER:
                known[f"a{index}"] = place

        def place_of(operand: Operand) -> int:
            if not isinstance(operand, str):
                return self._number(operand)
            if operand not in known and operand.startswith("a"):
                raise NoSurrogate("the gradient of its spikes depends on more than one value of a step")
            if operand not in known:
                line = function.code[line_of(operand)]
                code.append(Instruction(line.operation, *map(place_of, line.operands)))
                known[operand] = _FIRST_RESULT + len(code) - 1
            return known[operand]

        pulled = place_of(function.slope)
        return tuple(code), pulled

    def _where(self, truth: int, one: int, other: int) -> int:
        if truth not in self._truths:
            raise NoNeuron("it chooses by what is no truth value")
        if (self._value(one), self._value(other)) == (1.0, 0.0):
            return self._as_number(truth)
        return self._instruction("where", [truth, self._as_number(one), self._as_number(other)])

    def _heaviside(self, place: int, at_zero: int) -> int:
        value = self._value(at_zero)
        if value not in (0.0, 1.0):
            raise NoNeuron("its step function is neither 0 nor 1 at 0")
        return self._as_number(self._instruction("ge" if value else "gt", [place, self._number(0.0)]))

    def _instruction(self, operation: str, places: list[int]) -> int:
        one = Instruction(operation, *places)
        if one not in self._code:
            self._code.append(one)
        place = _FIRST_RESULT + self._code.index(one)
        if operation in (*COMPARISONS, "not"):
            self._truths.add(place)
        return place

    def _as_number(self, place: int) -> int:
        return self._instruction("float", [place]) if place in self._truths else place

    def _value(self, place: int) -> float | None:
        """The number at a place, if that is one."""
        return self._numbers[-1 - place] if place < 0 else None


def _key(columns: Columns) -> Columns:
    """The columns as a key: 0 and -0, and 1 and True, are different."""
    return tuple(one.hex() if isinstance(one, float) else one for one in columns)


def _numbered(index: int) -> int:
    """Where a number stands while the steps are read: there is room for as many as there are."""
    return -1 - index


def _inverse(number: float) -> float:
    """In float32, as torch computes it on a GPU."""
    return float(torch.tensor(number, dtype=torch.float32, device="cpu").reciprocal())


def _folded(value: Any, rest: Iterable[StepOperation | None]) -> StepOperation | None:
    """What a 0 was before Python computed it of a state of 0, as the other steps do: times or over a positive number,
    or the sum or the difference of two multiples; a number without a gradient is itself."""
    one = next(iter(rest))
    if isinstance(value, float) and one is not None and one.operation == "stop":
        return StepOperation("stop", (value,))
    if not isinstance(value, float) or value.hex() != (0.0).hex() or one is None:
        return None
    numbers = [operand for operand in one.operands if isinstance(operand, int | float)]
    if one.operation in ("add", "sub") and _multiplied(one.operands[0]) is _multiplied(one.operands[1]):
        return replace(one, operands=(value, value))
    if one.operation not in ("mul", "div") or len(numbers) != 1 or not 0 < numbers[0] < math.inf:
        return None
    if one.operation == "div" and isinstance(one.operands[0], int | float):
        return None
    return replace(one, operands=tuple(value if isinstance(it, fx.Node) else it for it in one.operands))


def _multiplied(value: Any) -> Any:
    """What is multiplied with, or divided by, numbers."""
    found = reading(value)
    nodes = [one for one in found.operands if isinstance(one, fx.Node)] if found is not None else []
    by_number = found is not None and found.operation in ("mul", "div") and len(nodes) == 1
    return _multiplied(nodes[0]) if by_number else value


def _is_plain(op: CanonicalOp) -> bool:
    plain = op.has(Trait.ELEMENTWISE) or op.name == "detach"
    return op.known and not op.inplace and op.out is None and plain
