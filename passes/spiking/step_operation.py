"""What single nodes of a loop over time steps do, as operations of a neuron's description; which are its charges."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from sparsecomp.passes.graph.canonicalize import CanonicalOp, dtype_of, example_of, filled_with, numel_of, op_of
from sparsecomp.passes.graph.functions import calls_function
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.spiking.half_precision import computed_in, rounded_before, rounding
from sparsecomp.passes.spiking.spike_function import SpikeFunction, spike_function
from sparsecomp.reference.neuron import COMPARISONS
from sparsecomp.reference.precision import KERNEL_DTYPES

Columns: TypeAlias = tuple[Any, ...]
"""What is one and the same in the code, step by step: nodes or numbers."""
_SMALL = 2.0**15
_ARITHMETIC = ("add", "sub", "mul", "div", "neg", "where")


@dataclass(frozen=True, slots=True)
class StepOperation:
    """A node as an operation of a description, or as `same`, `heaviside` or `function`, which only look like ones.

    Attributes:
        function: what a function with a backward of its own does to its arguments, the operands.
        rounds: the instruction by which its result is rounded, in half precision.
        rounded: which operands are rounded by it before.
    """

    operation: str
    operands: tuple[Any, ...]
    function: SpikeFunction | None = None
    rounds: str = ""
    rounded: tuple[int, ...] = ()

    @property
    def kind(self) -> object:
        """What operations have in common that differ in their operands alone."""
        return self.operation, len(self.operands), repr(self.function), self.rounds, self.rounded


def reading(node: Any) -> StepOperation | None:
    """What a node does, None if no description can say that."""
    if calls_function(node):
        function = spike_function(node)
        return None if function is None else StepOperation("function", node.args[2:], function)
    op = op_of(node) if isinstance(node, fx.Node) else None
    if op is None or op.inplace or op.out is not None or not op.known:
        return None
    found, example = _reading(op), example_of(node)
    if found is None or found.operation in ("same", "stop"):
        return found
    truths = found.operation in (*COMPARISONS, "not")
    if example is None or (example.dtype is not torch.bool if truths else example.dtype not in KERNEL_DTYPES):
        return None
    rounds = rounding(computed_in(node, found.operands))
    before = rounded_before(found.operation, found.operands, example.device, rounds)
    return replace(found, rounds=rounds, rounded=before)


def _reading(op: CanonicalOp) -> StepOperation | None:
    pair = op.input, op.get("other")
    if op.name in ("add", "sub", "mul", "div") and op.get("alpha", 1) == 1 and op.get("rounding_mode") is None:
        # a number over a tensor is its reciprocal times the number
        return None if op.name == "div" and not isinstance(op.input, fx.Node) else StepOperation(op.name, pair)
    if op.name == "rsub":
        return StepOperation("sub", (pair[1], pair[0]))
    if op.name in COMPARISONS:
        return StepOperation(op.name, pair)
    if op.name in ("logical_not", "bitwise_not"):
        return StepOperation("not", (op.input,)) if dtype_of(op.input) is torch.bool else None
    if op.name == "neg":
        return StepOperation("neg", (op.input,))
    if op.name == "where":
        return StepOperation("where", (op.get("condition"), op.get("input"), op.get("other")))
    if op.name == "masked_fill":
        return StepOperation("where", (op.get("mask"), op.get("value"), op.input))
    if op.name == "heaviside":
        return StepOperation("heaviside", (op.input, op.get("values")))
    if op.has(Trait.CAST) and dtype_of(op.input) in (torch.bool, *KERNEL_DTYPES):
        return StepOperation("float", (op.input,))
    if op.name == "getitem" and calls_function(op.input):
        function = spike_function(op.input)
        spikes = function is not None and function.result == op.get("index")
        return StepOperation("same", (op.input,)) if spikes else None
    same = "stop" if op.name == "detach" else "same"
    return StepOperation(same, (op.input,)) if op.has(Trait.SAME) and _stays(op) else None


def without_rounding(found: StepOperation) -> StepOperation:
    """The same in float32, if it rounds nothing that it gives: zero times or plus something, as in a first step."""
    zero, rounded = any(map(_is_zero, found.operands)), [found.operands[index] for index in found.rounded]
    exact = found.operation == "mul" and all(map(_is_small, rounded))
    exact = exact or (found.operation in ("add", "sub") and not rounded)
    return replace(found, rounds="", rounded=()) if zero and exact else found


def _is_zero(value: Any) -> bool:
    """Whether something is made of zeros, or times zeros."""
    if not isinstance(value, fx.Node):
        return value == 0
    found = reading(value) if filled_with(value) is None else None
    return filled_with(value) == 0 or (
        found is not None and found.operation == "mul" and any(map(_is_zero, found.operands))
    )


def _is_small(value: Any) -> bool:
    """Whether a single number is known not to become infinite in half precision."""
    op = op_of(value) if isinstance(value, fx.Node) else None
    if op is None:
        return not isinstance(value, fx.Node) and abs(value) <= _SMALL
    bounds = op.get("min"), op.get("max")
    clamped = op.name == "clamp" and all(isinstance(one, int | float) and abs(one) <= _SMALL for one in bounds)
    return clamped or op.name == "sigmoid"


def _stays(op: CanonicalOp) -> bool:
    before, after = example_of(op.input), example_of(op.node)
    return before is not None and after is not None and before.device == after.device


def fires_on(node: fx.Node) -> Iterator[fx.Node]:
    """Comparisons of a value, or of its distance from a threshold, with something."""
    for user in node.users:
        found = reading(user)
        if found is None or _is_smaller(node, user):
            continue
        if found.function is not None and found.operands[found.function.of] is not node:
            continue  # a threshold that the function is given too
        if _compares(found):
            yield user
        elif _is_distance(user, found):
            yield from (one for one in user.users if not _reads_no_value(one, user))


def _compares(found: StepOperation) -> bool:
    return found.operation in (*COMPARISONS, "heaviside", "function")


def _is_distance(node: fx.Node, found: StepOperation) -> bool:
    """Whether this is a value, but for a number or a tensor of fewer elements, such as a threshold, and is compared."""
    nearby = found.operation in ("same", "stop") or (
        found.operation in ("add", "sub") and any(_is_smaller(one, node) for one in found.operands)
    )
    readers = [user for user in node.users if not _reads_no_value(user, node)]
    return nearby and all((on := reading(user)) is not None and _compares(on) for user in readers)


def _reads_no_value(user: fx.Node, node: fx.Node) -> bool:
    """Whether a reader asks but for shape and type, as `zeros_like(u)` and `fires.to(u)` do."""
    op = op_of(user)
    if op is None or not op.known or op.inplace:
        return False
    return op.has(Trait.FILL) or (op.has(Trait.CAST) and op.input is not node)


def _is_smaller(value: Any, node: fx.Node) -> bool:
    size, whole = numel_of(value), _numel(node)
    return not isinstance(value, fx.Node) or (size is not None and whole is not None and size < whole)


def _numel(node: fx.Node) -> int | None:
    function = spike_function(node) if calls_function(node) else None
    given = node if function is None or function.result is None else node.meta["example_value"][function.result]
    return numel_of(given)


def is_charge(node: fx.Node) -> bool:
    """Whether a neuron could fire by this value."""
    found = reading(node)
    if found is not None and (found.operation not in _ARITHMETIC or _is_distance(node, found) or _is_of_truths(node)):
        return False
    return dtype_of(node) in KERNEL_DTYPES and any(True for _ in fires_on(node))


def _is_of_truths(value: Any, depth: int = 4) -> bool:
    """Whether a value is computed of truth values and numbers alone."""
    found = reading(value)
    if not isinstance(value, fx.Node) or dtype_of(value) is torch.bool:
        return True
    return found is not None and depth > 0 and all(_is_of_truths(one, depth - 1) for one in found.operands)


def before(charge: fx.Node) -> fx.Node | None:
    """The charge that this one takes up, without a comparison between; None if it is none, or several."""
    found = {one for one in backwards(charge) if is_charge(one)}
    return found.pop() if len(found) == 1 else None


def backwards(charge: fx.Node) -> Iterator[fx.Node]:
    """What a charge is made of, up to other charges and comparisons."""
    seen, pending = {charge}, [charge]
    while pending:
        node = pending.pop()
        found = reading(node)
        if found is None or _compares(found) or (node is not charge and is_charge(node)):
            continue
        for operand in found.operands:
            if isinstance(operand, fx.Node) and operand not in seen:
                seen.add(operand)
                pending.append(operand)
                yield operand


def is_last(charge: fx.Node) -> bool:
    """Whether no other charge takes this one up."""
    seen, pending = {charge}, [charge]
    while pending:
        for user in pending.pop().users:
            found = reading(user)
            if user in seen or found is None or _compares(found):
                continue
            seen.add(user)
            if not is_charge(user):
                pending.append(user)
            elif before(user) is charge:
                return False
    return True


def chain_to(charge: fx.Node) -> Columns:
    """The charges of all steps up to this one, the first of them the first that is made as it is."""
    found, operation = [charge], reading(charge)
    assert operation is not None
    while (earlier := before(found[-1])) is not None:
        made = reading(earlier)
        if made is None or made.operation != operation.operation:
            break
        found.append(earlier)
    return tuple(reversed(found))
