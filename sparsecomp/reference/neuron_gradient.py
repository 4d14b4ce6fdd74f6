"""The gradient of a neuron's time step as instructions too, so that one kernel goes back through all steps.

Backward differentiation of a description is a description: each instruction, the last first, adds to the gradients of
what it read. Those of the step itself are done again before, since nothing but inputs and first states is kept, by the
same instructions, so that the same neurons fire.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.reference.neuron import (
    COMPARISONS,
    PARAMETERS,
    PLACES,
    PULLED,
    STATES,
    Instruction,
    Neuron,
    neuron_of,
    run_code,
    unchanging,
)
from sparsecomp.reference.precision import accumulator

GIVEN = {name: place for place, name in enumerate(("spikes", "v0", "v1", "zero"), len(PLACES))}
"""Where the gradients stand that a step is given, of its spikes and of the states after it, and a zero."""
_MOVED = len(GIVEN)
_FIRST_NUMBER = PLACES["n0"]


class StepBack(NamedTuple):
    """A step and its gradient.

    Attributes:
        code: instructions; their places are those of `PLACES`, of `GIVEN` and of results, in this order.
        x, states, parameters: places of the gradients.
    """

    code: tuple[Instruction, ...]
    x: int
    states: tuple[int, ...]
    parameters: tuple[int, ...]


@lru_cache(maxsize=256)
def step_back(neuron: Neuron) -> StepBack:
    """The gradient of a step of a neuron, which may or may not say what the gradient of firing is."""
    made = _Maker(neuron)
    made.go_back()
    return made.found()


@lru_cache(maxsize=256)
def known_sums(neuron: Neuron) -> Mapping[int, tuple[int, int]]:
    """Parameters whose gradient is minus that of another times a third, and these two: nothing is to be summed for it.

    Such is a mean, subtracted from what a factor multiplies and a bias is added to, if all three are of one shape.
    """
    back, found = step_back(neuron), {}
    results = dict(enumerate(back.code, len(PLACES) + _MOVED))
    factors = {PLACES[f"p{index}"]: index for index in range(PARAMETERS)}
    for index, place in enumerate(back.parameters):
        negative = results.get(place)
        product = results.get(negative.a) if negative is not None and negative.operation == "neg" else None
        if product is not None and product.operation == "mul" and product.a in back.parameters and product.b in factors:
            found[index] = back.parameters.index(product.a), factors[product.b]
    return found


def gradients_reference(
    grads: Sequence[Tensor], x: Tensor, states: Sequence[Tensor | None], starts: Sequence[float],
    parameters: Sequence[Tensor], numbers: Sequence[float], step: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients for x, each state and each parameter, of those for spikes and last states, in plain torch."""
    dtype, currents = x.dtype, x.to(accumulator(x.dtype))
    neuron, zero = neuron_of(step), torch.zeros_like(currents[0])
    back, fixed = step_back(neuron), unchanging(currents, parameters, numbers)
    now: list[Any] = [zero + start if given is None else given for given, start in zip(states, starts, strict=True)]
    before = []
    for current in currents.unbind():
        before.append([current, *now, *[zero] * (STATES - len(now))])
        values = run_code([*before[-1], *fixed], neuron.code)
        now = [values[place] for place in neuron.states]
    by_x, sums = [], [zero for _ in parameters]
    by_states = [*grads[1:], *[zero] * (STATES + 1 - len(grads))]
    for values, grad in zip(reversed(before), reversed(grads[0].to(zero.dtype).unbind()), strict=True):
        values = run_code([*values, *fixed, grad, *by_states, zero], back.code)
        by_x.append(values[back.x].expand_as(zero))
        by_states = [values[place].expand_as(zero) for place in back.states]
        sums = [one + values[place] for one, place in zip(sums, back.parameters, strict=False)]
    by_parameters = [one.sum_to_size(parameter.shape) for one, parameter in zip(sums, parameters, strict=True)]
    return [torch.stack(by_x[::-1]).to(dtype), *by_states[: len(states)], *by_parameters]


class _Maker:
    def __init__(self, neuron: Neuron) -> None:
        self._neuron = neuron
        self._code = [Instruction(one.operation, *map(_moved, one.operands)) for one in neuron.code]
        self._gradients: dict[int, int] = {}

    def go_back(self) -> None:
        """Through all instructions, from what the step gives on."""
        neuron = self._neuron
        self._add(_moved(neuron.spike), GIVEN["spikes"])
        for index, place in enumerate(neuron.states):
            self._add(_moved(place), GIVEN[f"v{index}"])
        first = len(PLACES) + _MOVED
        for index in reversed(range(len(neuron.code))):
            grad = self._gradients.get(first + index)
            if grad is not None:
                self._through(self._code[index], first + index, grad)

    def found(self) -> StepBack:
        """What was made; a gradient that nothing adds to is zero."""
        zero, places = GIVEN["zero"], self._gradients
        states = tuple(places.get(PLACES[f"v{index}"], zero) for index in range(STATES))
        parameters = tuple(places.get(PLACES[f"p{index}"], zero) for index in range(PARAMETERS))
        return StepBack(tuple(self._code), places.get(PLACES["x"], zero), states, parameters)

    def _through(self, one: Instruction, result: int, grad: int) -> None:
        a, b, c = one.a, one.b, one.c
        match one.operation:
            case "add":
                self._add(a, grad)
                self._add(b, grad)
            case "sub":
                self._add(a, grad)
                self._add(b, self._emit("neg", grad))
            case "mul":
                self._add(a, self._emit("mul", grad, b))
                self._add(b, self._emit("mul", grad, a))
            case "div":
                over = self._emit("div", grad, b)
                self._add(a, over)
                self._add(b, self._emit("neg", self._emit("mul", over, result)))
            case "neg":
                self._add(a, self._emit("neg", grad))
            case "bfloat16" | "float16":
                self._add(a, grad)
            case "where":
                self._add(b, self._emit("where", a, grad, GIVEN["zero"]))
                self._add(c, self._emit("where", a, GIVEN["zero"], grad))
            case "fire":
                self._add(b, self._pulled(b, grad))
            case _:  # truth values, and what is cut off
                pass

    def _pulled(self, u: int, grad: int) -> int:
        """The gradient for `u` of firing by it."""
        places = {PULLED["u"]: u, PULLED["g"]: grad}
        for index, one in enumerate(self._neuron.pull):
            operands = [places.get(place, place) for place in one.operands]
            places[len(PLACES) + index] = self._emit(one.operation, *operands)
        return places.get(self._neuron.pulled, self._neuron.pulled)

    def _add(self, place: int, grad: int) -> None:
        if _FIRST_NUMBER <= place < len(PLACES) or self._is_truth(place):
            return
        known = self._gradients.get(place)
        self._gradients[place] = grad if known is None else self._emit("add", known, grad)

    def _is_truth(self, place: int) -> bool:
        index = place - len(PLACES) - _MOVED
        return index >= 0 and self._code[index].operation in (*COMPARISONS, "not")

    def _emit(self, operation: str, *operands: int) -> int:
        one = Instruction(operation, *operands)
        if one not in self._code:
            self._code.append(one)
        return len(PLACES) + _MOVED + self._code.index(one)


def _moved(place: int) -> int:
    """A place of a step, among those of its gradient."""
    return place if place < len(PLACES) else place + _MOVED
