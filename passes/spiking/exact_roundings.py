"""Descriptions of neurons in half precision without the roundings that change nothing.

Each operation of such a neuron is rounded. Much of what it computes has nothing to round: a spike times a membrane, one
minus a spike, a membrane less zero. What is left out costs a kernel two conversions for each neuron and step.
"""

from collections.abc import Sequence

import torch

from sparsecomp.reference.neuron import COMPARISONS, PLACES, ROUNDINGS, STATES, Instruction, Neuron

_ZERO, _BIT, _HALF, _WIDE, _TRUTH = range(5)
"""What a value may be: zero, zero or one (and neither is -0), a number that the half precision holds, any number, or a
truth value."""
_FIRST_STATE, _FIRST_PARAMETER, _FIRST_NUMBER, _FIRST_RESULT = PLACES["v0"], PLACES["p0"], PLACES["n0"], len(PLACES)


def without_exact_roundings(
    neuron: Neuron, numbers: Sequence[float], rounding: str, states: Sequence[bool], parameters: Sequence[bool]
) -> Neuron:  # fmt: skip
    """The same neuron, whose spikes and states are the same bits, of an input that `rounding` has rounded.

    Args:
        rounding: the name of the instruction.
        states, parameters: which first states and parameters such a number is known to hold.
    """
    known = [_HALF, *[_HALF if given else _WIDE for given in states], *[_WIDE] * (STATES - len(states))]
    known += [_HALF if index < len(parameters) and parameters[index] else _WIDE for index in range(len(_PARAMETERS))]
    known += [_of_number(number, rounding) for number in numbers]
    known += [_WIDE] * (_FIRST_RESULT - len(known))
    while True:
        code = _Code(neuron, numbers, rounding, known)
        after = [code.kinds[code.same[place]] for place in neuron.states]
        grown = [index for index, kind in enumerate(after) if kind > _HALF and known[_FIRST_STATE + index] <= _HALF]
        if not grown:
            return code.kept()
        for index in grown:
            known[_FIRST_STATE + index] = _WIDE


_PARAMETERS = [name for name in PLACES if name.startswith("p")]


def _of_number(number: float, rounding: str) -> int:
    if number == 0 and str(float(number)) == "0.0":
        return _ZERO
    if number == 1:
        return _BIT
    return _HALF if holds(number, rounding) else _WIDE


def holds(number: float, rounding: str) -> bool:
    """Whether a number stays as it is."""
    return float(torch.tensor(number, dtype=ROUNDINGS[rounding], device="cpu")) == number


class _Code:
    """The instructions of a neuron, and of each place what it is.

    Attributes:
        same: of each place the one that has its value.
        kinds: what each is.
    """

    def __init__(self, neuron: Neuron, numbers: Sequence[float], rounding: str, known: Sequence[int]) -> None:
        self._neuron, self._numbers, self._rounding = neuron, numbers, rounding
        self.same, self.kinds = [*range(_FIRST_RESULT)], [*known]
        self._code: list[Instruction] = []
        for place, one in enumerate(neuron.code, _FIRST_RESULT):
            one = one._replace(**{name: self.same[getattr(one, name)] for name in "abc"})
            self._code.append(one)
            self.same.append(self._as(one, place))
            self.kinds.append(self._kind(one))

    def _as(self, one: Instruction, place: int) -> int:
        """The place that has the value of an instruction already, or its own."""
        a, b = self.kinds[one.a], self.kinds[one.b]
        if one.operation == self._rounding and (a <= _HALF or self._only_its_sign_is_read(one.a, place)):
            return one.a
        if one.operation == "sub" and self._is_zero(one.b):
            return one.a
        if one.operation == "mul" and max(a, b) <= _BIT:
            return next((operand for operand in (one.a, one.b) if self._is_zero(operand)), place)
        return place

    def _is_zero(self, place: int) -> bool:
        """Whether this is the number 0."""
        return place < _FIRST_RESULT and self.kinds[place] == _ZERO

    def _only_its_sign_is_read(self, place: int, rounded: int) -> bool:
        """Whether a sum of two numbers of half precision is rounded for comparisons with zero alone: what is not zero
        rounds to no zero, since half precision holds the least difference of its numbers."""
        one = self._code[place - _FIRST_RESULT] if place >= _FIRST_RESULT else None
        if one is None or one.operation not in ("add", "sub") or max(self.kinds[one.a], self.kinds[one.b]) > _HALF:
            return False
        readers = [reader for reader in self._neuron.code if rounded in reader.operands]
        compared = all(reader.operation in COMPARISONS and self._zero_beside(reader, rounded) for reader in readers)
        return compared and rounded not in (*self._neuron.states, self._neuron.spike)

    def _zero_beside(self, reader: Instruction, place: int) -> bool:
        other = reader.b if reader.a == place else reader.a
        return other < _FIRST_RESULT and self._is_zero(other)

    def _kind(self, one: Instruction) -> int:
        a, b, c = (self.kinds[place] for place in (one.a, one.b, one.c))
        halves, bits = max(a, b) <= _HALF, max(a, b) <= _BIT
        match one.operation:
            case "float":
                return _BIT
            case "stop":
                return a
            case operation if operation == self._rounding:
                return min(a, _HALF)
            case "neg" | "abs":
                return max(a, _HALF)
            case "mul":
                return max(a, b) if bits else _HALF if halves and min(a, b) <= _BIT else _WIDE
            case "add" | "sub":
                if one.operation == "sub" and a == _BIT and self._is_one(one.a) and b <= _BIT:
                    return _BIT
                return max(a, b, _HALF if bits else 0) if halves and (bits or _ZERO in (a, b)) else _WIDE
            case "where":
                return max(b, c)
            case "max" | "min":
                return max(a, b)
            case operation if operation in (*COMPARISONS, "not"):
                return _TRUTH
        return _WIDE

    def _is_one(self, place: int) -> bool:
        index = place - _FIRST_NUMBER
        return 0 <= index < len(self._numbers) and self._numbers[index] == 1

    def kept(self) -> Neuron:
        """The instructions that something is made of."""
        neuron, same = self._neuron, self.same
        needed = {same[place] for place in (neuron.spike, *neuron.states)}
        for place in range(len(self.kinds) - 1, _FIRST_RESULT - 1, -1):
            if place in needed:
                needed.update(self._code[place - _FIRST_RESULT].operands)
        kept = [place for place in range(_FIRST_RESULT, len(self.kinds)) if place in needed]
        moved = {place: place for place in range(_FIRST_RESULT)}
        moved |= {place: index for index, place in enumerate(kept, _FIRST_RESULT)}
        code = [self._code[place - _FIRST_RESULT] for place in kept]
        return Neuron(
            tuple(one._replace(**{name: moved.get(getattr(one, name), 0) for name in "abc"}) for one in code),
            moved[same[neuron.spike]], tuple(moved[same[place]] for place in neuron.states),
        )  # fmt: skip
