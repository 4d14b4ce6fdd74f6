"""A batch-norm in evaluation whose result described neurons alone read is the first instructions of their step.

Inductor fuses such a batch-norm with a loop that is written by hand. Before an operator it would be a pass of its own,
which reads and writes every number. The instructions are those of torch's decomposition, in its order, and half
precision is rounded to once, at the end. Mean, variance, weight and bias are parameters as they are, so that no launch
computes anything of them. Where a layer runs in one launch with its neurons, `fuse_conv_neuron` has taken the
batch-norm along before; the library's own neurons get theirs by `fuse_neurons`, and in training `norm_ahead` is what
this is.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operator)
from sparsecomp.passes.engine.rule import Context, Plan, Rule, Verdict, Why, call, refuse
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.spiking.half_precision import rounding
from sparsecomp.passes.spiking.neurons_behind import DESCRIBED, are_steps_of, idle_readers, is_evaluated, unviewed
from sparsecomp.passes.spiking.operand import attribute
from sparsecomp.reference.neuron import NUMBERS, PARAMETERS, PLACES, Instruction, Neuron, neuron_of
from sparsecomp.reference.precision import KERNEL_DTYPES

_FIRST_RESULT = len(PLACES)


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: described neurons that are given what a batch-norm in evaluation makes."""
    if node.target is not DESCRIBED:
        return None
    views, found = unviewed(node.args[0])
    op = op_of(found) if isinstance(found, fx.Node) else None
    if op is None or op.name != "batch_norm" or not is_evaluated(op):
        return None
    obstacle = _obstacle(node, op, views, ctx)
    if obstacle is not None:
        return refuse(Why.NOT_FOLDED, detail=obstacle)
    idle = [one for part in (*views, op.node) for one in idle_readers(part)]
    return Plan(
        lambda: _build(node, op), "one pass over memory less: it is part of the neurons' step", "fused",
        dead=(*dict.fromkeys((*idle, *views, op.node)),), layer=op.node,
    )  # fmt: skip


RULE = Rule("neuron_norm", consider, after=("fuse_conv_neuron",), of_rewritten=True)


def _obstacle(node: fx.Node, op: CanonicalOp, views: list[fx.Node], ctx: Context) -> str | None:
    current, before = example_of(node.args[0]), example_of(op.input)
    if current is None or before is None or current.dtype is not before.dtype or before.dtype not in KERNEL_DTYPES:
        return "its shape or dtype is unknown"
    if not are_steps_of(current, before):
        return "its channels are not those of the neurons"
    passed = {node, *views, op.node}.union(*map(idle_readers, (*views, op.node)))
    if any(not passed.issuperset(one.users) for one in (*views, op.node)):
        return "somebody else reads its result"
    if not all(ctx.analysis.unchanged(one, op.node, node) for one in (*views, op.node, *op.node.all_input_nodes)):
        return "what it reads, or its result, is written to"
    if _led(node, op) is None:
        return "the neurons' description has no room for it"
    return None


def _affine(op: CanonicalOp) -> Mapping[str, str]:
    """The parameters that a batch-norm has, in order, and what is done by them."""
    return {name: how for name, how in (("weight", "mul"), ("bias", "add")) if op.get(name) is not None}


def _led(node: fx.Node, op: CanonicalOp) -> tuple[Neuron, list[float]] | None:
    """The neurons with the batch-norm's instructions ahead, and their numbers; None if there is no room for these."""
    parameters, numbers, eps, one = node.args[3], node.args[4], float(op.get("eps")), 1.0
    assert isinstance(parameters, list | tuple) and isinstance(numbers, list | tuple)
    numbers = [*numbers, *(number for number in dict.fromkeys((one, eps)) if number not in numbers)]
    affine = _affine(op)
    if len(numbers) > NUMBERS or len(parameters) + 2 + len(affine) > PARAMETERS:
        return None
    mean, var, *rest = range(PLACES["p0"] + len(parameters), PLACES["p0"] + PARAMETERS)
    code: list[Instruction] = []

    def emit(operation: str, *operands: int) -> int:
        code.append(Instruction(operation, *operands))
        return _FIRST_RESULT + len(code) - 1

    wide = emit("sqrt", emit("add", var, PLACES["n0"] + numbers.index(eps)))
    inverse = emit("div", PLACES["n0"] + numbers.index(one), wide)
    value = emit("mul", emit("sub", PLACES["x"], mean), inverse)
    for how, place in zip(affine.values(), rest, strict=False):
        value = emit(how, value, place)
    half = rounding(example_of(op.input).dtype)
    return _behind(neuron_of(str(node.args[5])), code, emit(half, value) if half else value), numbers


def _behind(neuron: Neuron, code: list[Instruction], given: int) -> Neuron:
    """A neuron behind other instructions, that sees their result at `given` as its input."""

    def moved(place: int) -> int:
        return given if place == PLACES["x"] else place + len(code) * (place >= _FIRST_RESULT)

    own = (Instruction(one.operation, *map(moved, one.operands)) for one in neuron.code)
    return Neuron((*code, *own), moved(neuron.spike), tuple(map(moved, neuron.states)))


def _build(node: fx.Node, op: CanonicalOp) -> Mapping[fx.Node, fx.Node]:
    def emit(target: Any, *args: Any) -> fx.Node:
        return call(node.graph, node, target, *args)

    led = _led(node, op)
    assert led is not None
    _, states, starts, parameters, _, _, *rest = node.args
    assert isinstance(parameters, list | tuple)
    trailing = (-1, *[1] * (example_of(op.input).dim() - 2))
    names = ("running_mean", "running_var", *_affine(op))
    by_channel = [emit(torch.reshape, attribute(op, name), trailing) for name in names]
    x = emit(torch.unflatten, op.input, 0, (example_of(node.args[0]).shape[0], -1))
    neuron, numbers = led
    made = emit(DESCRIBED, x, states, starts, [*parameters, *by_channel], numbers, str(neuron), *rest)
    return {node: made}
