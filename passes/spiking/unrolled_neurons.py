"""A neuron that is written by hand, in a loop over time steps, becomes one operator over all steps.

Unrolled, such a loop is a chain of T times the same few elementwise operations. `neuron_step` reads off the dataflow
what one of them does; here is what else must be so before `sparsecomp::neuron`, which keeps its states in registers
and writes spikes as bytes, takes the place of all of them: nothing but spikes and the last states is read by others,
nothing is written to in between, and all inputs are there before the first spike is read. Where layers stand between,
`fuse_steps` has brought that about. Each operation is rounded as it was, so that the same spikes come out. In training
it is `sparsecomp::trained_neuron`, and each result and operand has a gradient where it had one.
"""

import itertools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operator)
from sparsecomp.passes.engine.ordered import is_kept
from sparsecomp.passes.engine.rule import TAG, Context, Plan, Rule, Verdict, Why, call, known_sizes, refuse
from sparsecomp.passes.graph.canonicalize import dtype_of, example_of, numel_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.spiking.exact_roundings import holds, without_exact_roundings
from sparsecomp.passes.spiking.half_precision import rounding
from sparsecomp.passes.spiking.lying import laid_as
from sparsecomp.passes.spiking.neuron_call import MAX_STEPS
from sparsecomp.passes.spiking.neuron_step import NoNeuron, NoSurrogate, Steps
from sparsecomp.passes.spiking.neurons_behind import behind_described
from sparsecomp.passes.spiking.spike_function import goes_straight_through
from sparsecomp.passes.spiking.step_operation import Columns, chain_to, fires_on, is_charge, is_last, reading
from sparsecomp.passes.spiking.steps import joins, taken_from
from sparsecomp.passes.spiking.written_neurons import paying
from sparsecomp.reference.neuron import PLACES, ROUNDINGS, Neuron
from sparsecomp.reference.precision import KERNEL_DTYPES

_STRAIGHT_THROUGH = (
    "its spikes are told from a sum, as (hard - soft).detach() + soft, which is not always 0 or 1; a "
    "torch.autograd.Function gives them their gradient and stays exact"
)
_TWO_TYPES = (
    "it computes in half precision in some steps and in float32 in others; states that are float32 from the first step "
    "on keep it in float32"
)


class _Obstacle(Exception):
    """Why a neuron, which was proved to be one, stays a chain of steps."""


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: the charge of the last step stands for a neuron."""
    if reading(node) is None or not is_charge(node) or not is_last(node):
        return None
    charges, example = chain_to(node), example_of(node)
    if len(charges) < 2 or example is None:
        return None
    try:
        cuda = ctx.device(example.device).type == "cuda"
        steps = Steps.of(charges, cuda, ctx.analysis.unchanged, ctx.gradients)
    except NoSurrogate as obstacle:
        return refuse(Why.NOT_ONE_NEURON, detail=obstacle)
    except NoNeuron:
        if len({dtype_of(one) for one in charges}) > 1:
            return refuse(Why.NOT_ONE_NEURON, detail=_TWO_TYPES)
        straight = ctx.gradients and any(map(goes_straight_through, fires_on(node)))
        return refuse(Why.NOT_ONE_NEURON, detail=_STRAIGHT_THROUGH) if straight else None
    try:
        found = _checked(steps, ctx)
    except (NoNeuron, _Obstacle) as obstacle:
        return refuse(Why.NOT_ONE_NEURON, detail=obstacle)
    passes = "one pass, and one for their gradients" if found.gradients.reached else "one pass"
    half = rounding(example.dtype)
    each = f", each operation rounded to {half}" if half else ""
    reason = f"{len(charges)} time steps in {passes}{each}: {found.neuron.formula(found.numbers)}"
    reason += f"; {found.paying}" if found.paying else ""
    return Plan(
        lambda: _build(found), reason, "fused", dead=found.dead, places=found.places, layer=charges[0]
    )  # fmt: skip


RULE = Rule("unrolled_neurons", consider, after=("fuse_steps",))


@dataclass(frozen=True, slots=True)
class _Found:
    """A neuron that can be replaced.

    Attributes:
        neuron, numbers: what a step does.
        spikes: of each step the nodes that say whether it fires and are read outside, and the step.
        lasts: the nodes that hold a state after the last step and are read outside, and which one.
        joins: the nodes that join the spikes of all steps.
        gradients: where gradients go.
        dead: what the operator stands for, readers first.
        parts: which steps one call of it takes.
        paying: why it pays, if nobody asked for it.
    """

    steps: Steps
    neuron: Neuron
    numbers: list[float]
    spikes: Mapping[fx.Node, int]
    lasts: Mapping[fx.Node, int]
    joins: "Mapping[fx.Node, _Join]"
    gradients: "_Gradients"
    dead: tuple[fx.Node, ...]
    parts: "tuple[_Part, ...]"
    paying: str = ""

    @property
    def places(self) -> tuple[fx.Node, ...]:
        """The nodes before which something is to stand."""
        return tuple(sorted(dict.fromkeys([*(part.place for part in self.parts), *self.joins])))


class _Part(NamedTuple):
    """Successive steps that one call takes, and the node before which it is to stand."""

    start: int
    stop: int
    place: fx.Node


class _Gradients(NamedTuple):
    """Where gradients go in training.

    Attributes:
        read: the nodes which others read, and that have a gradient.
        reached: places of the input, states and parameters to which that goes back.
    """

    read: frozenset[fx.Node]
    reached: frozenset[int]


class _Join(NamedTuple):
    """How the spikes of all steps are joined: `"stack"` or `"cat"`, each of them times a factor, if there is one.

    `graded`: they have a gradient.
    """

    how: str
    factor: Any
    parts: tuple[fx.Node, ...]
    graded: bool = False


def _checked(steps: Steps, ctx: Context) -> _Found:
    _check_asked(ctx)
    spike, outside = _read_outside(steps)
    neuron, numbers = steps.description(spike)
    _check_operands(steps)
    neuron = _without_exact_roundings(neuron, numbers, steps)
    gradients, order = _gradients(steps, outside), ctx.analysis.order
    joins: dict[fx.Node, _Join] = {}
    for graded in (True, False):  # what joins spikes of both kinds reads them one by one
        alike = {node: step for node, step in outside.spikes.items() if (node in gradients.read) == graded}
        found = _joins(alike, len(steps.charges))
        joins |= {node: join._replace(graded=graded) for node, join in found.items()}
    for join in joins.values():
        outside.gone.update(dict.fromkeys(join.parts) if join.factor is not None else {})
    parts = _parts(steps, _first_readers(outside, joins, len(steps.charges), order), order)
    factors = [join.factor for join in joins.values() if isinstance(join.factor, fx.Node)]
    _check_in_time(steps, factors, outside.gone, parts, ctx)
    dead = tuple(sorted(outside.gone, key=order.__getitem__, reverse=True))
    found = _Found(steps, neuron, numbers, outside.spikes, outside.lasts, joins, gradients, dead, parts)
    return found if ctx.options.neurons == "fuse" else replace(found, paying=_pays(found, outside.gone, ctx))


def _without_exact_roundings(neuron: Neuron, numbers: list[float], steps: Steps) -> Neuron:
    dtype = dtype_of(steps.inputs[0])
    half = rounding(dtype)
    if not half or neuron.is_trained or half not in {one.operation for one in neuron.code}:
        return neuron
    starts = [dtype_of(one) is dtype if isinstance(one, fx.Node) else holds(one, half) for one in _starts(steps)]
    parameters = [dtype_of(one) is dtype for one in steps.parameters]
    return without_exact_roundings(neuron, numbers, half, starts, parameters)


def _pays(found: "_Found", gone: Collection[fx.Node], ctx: Context) -> str:
    """Why a neuron pays where nobody asked for it."""
    inputs = found.steps.inputs
    source, start = taken_from(inputs)
    whole = source is not None and start == 0 and len(found.parts) == 1 and len(inputs) == example_of(source).shape[0]
    behind = behind_described(len(inputs), found.neuron)
    decision = paying(source if whole else None, found.steps.parameters, gone, behind, ctx)
    if decision is None or decision.dense:
        if decision is not None:
            raise _Obstacle(f"it would not pay: {decision.reason}")
        raise _Obstacle("neurons='fuse' makes it one operator: no gain on a CPU, not measured on a GPU")
    return f"{decision.reason}{', with the layer ahead' if decision.implementation == 'fused' else ''}"


def _gradients(steps: Steps, outside: "_Outside") -> _Gradients:
    """Of which results a gradient goes back, and to what: of none if the graph is not trained."""
    last, read = len(steps.charges) - 1, dict(outside.spikes)
    read.update(dict.fromkeys(outside.lasts, last))
    leaves = {node: steps.leaves(node, step) for node, step in read.items()} if steps.trained else {}
    reached = frozenset().union(*leaves.values())
    asking = {place for place in reached if any(map(_asks, _behind(place, steps)))}
    for node, own in leaves.items():
        if own and asking and own.isdisjoint(asking):
            raise _Obstacle(f"{node.name} has no gradient, but others of its results have")
    return _Gradients(frozenset(node for node, own in leaves.items() if own), reached)


def _behind(place: int, steps: Steps) -> Sequence[Any]:
    """What stands at a place of the input, a state or a parameter."""
    if place == PLACES["x"]:
        return steps.inputs
    parameter = place - PLACES["p0"]
    return (steps.parameters[parameter] if parameter >= 0 else _starts(steps)[place - PLACES["v0"]],)


def _asks(value: Any) -> bool:
    """Whether a value is known to ask for gradients: by its example, or, where a rule made it, by what it is of."""
    pending, seen = [value] if isinstance(value, fx.Node) else [], {value}
    for node in pending:  # grows
        if getattr(example_of(node), "requires_grad", False):
            return True
        if TAG in node.meta and node.target != "detach":
            pending += [one for one in node.all_input_nodes if one not in seen]
            seen.update(pending)
    return False


def _first_readers(
    outside: "_Outside", joins: Mapping[fx.Node, _Join], count: int, order: Mapping[fx.Node, int]
) -> list[fx.Node | None]:
    """Of each step the first node that reads what the operator gives of it, None if none does."""
    readers: list[list[fx.Node]] = [[*joins] for _ in range(count)]
    for node, step in (*outside.spikes.items(), *((last, count - 1) for last in outside.lasts)):
        readers[step] += [user for user in node.users if user not in outside.gone]
    return [min(those, key=order.__getitem__) if those else None for those in readers]


def _parts(steps: Steps, readers: list[fx.Node | None], order: Mapping[fx.Node, int]) -> tuple[_Part, ...]:
    """The steps in as few parts as one kernel unrolls, all of whose inputs are there before their first reader."""
    count = max(step for step, reader in enumerate(readers) if reader is not None) + 1
    most, cuts = -(-count // -(-count // MAX_STEPS)), [0]

    def in_time(start: int, stop: int) -> bool:
        first = min((order[reader] for reader in readers[start:stop] if reader is not None), default=math.inf)
        return stop - start <= most and max(map(order.__getitem__, _sources(steps.inputs[start:stop]))) < first

    while cuts[-1] < count:
        start = stop = cuts[-1]
        while stop < count and in_time(start, stop + 1):
            stop += 1
        if stop == start:
            raise _Obstacle(_LATE)
        cuts.append(stop)
    if len(cuts) - 1 > (count + 1) // 2:
        raise _Obstacle(_LATE)
    parts: list[_Part] = []
    place: fx.Node | None = None
    for start, stop in reversed([*itertools.pairwise(cuts)]):
        place = min((one for one in (*readers[start:stop], place) if one is not None), key=order.__getitem__)
        parts.append(_Part(start, stop, place))
    return tuple(reversed(parts))


_LATE = "its first spike is read before its last input is there"


def _sources(inputs: Columns) -> Columns:
    """What the inputs of some steps are read from."""
    source, _ = taken_from(inputs)
    return inputs if source is None else (source,)


def _read_outside(steps: Steps) -> tuple[int, "_Outside"]:
    """The place of the truth value by which the neuron fires, and what is read of it; the first that explains all."""
    obstacle = _Obstacle("nobody reads its spikes")
    for spike in steps.fires():
        try:
            outside = _Outside(steps, spike)
        except _Obstacle as found:
            obstacle = found
        else:
            if outside.spikes:
                return spike, outside
    raise obstacle


def _check_in_time(
    steps: Steps, factors: list[fx.Node], gone: Collection[fx.Node], parts: tuple[_Part, ...], ctx: Context
) -> None:  # fmt: skip
    """At its places the operator finds all that it reads, as the steps would find it."""
    order = ctx.analysis.order
    fixed = [one for one in (*steps.parameters, *factors, *_starts(steps)) if isinstance(one, fx.Node)]
    reads = {one: parts[0].place for one in fixed}
    for part in parts:
        inputs = steps.inputs[part.start : part.stop]
        if any(order[one] >= order[part.place] for one in _sources(inputs)):
            raise _Obstacle(_LATE)
        reads = {**dict.fromkeys(inputs, part.place), **reads}
    if any(order[one] >= order[parts[0].place] for one in fixed):
        raise _Obstacle(_LATE)
    for one, place in reads.items():
        first = min((order[user] for user in one.users if user in gone), default=order[place])
        written = ctx.analysis.last_writes.get(one, -1)
        if written >= min(first, order[place]) and not is_kept(one, ctx):
            raise _Obstacle(f"{one.name}, which it reads, is written to in place")
    if not all(ctx.analysis.unchanged(one, one) for one in gone):
        raise _Obstacle("its state is written to in place")


def _check_asked(ctx: Context) -> None:
    # autocast is no obstacle: what it makes of an operation shows in the operation's dtype
    if ctx.eager or ctx.switches or ctx.transformed:
        raise _Obstacle("the graph runs op by op, or switches gradients")
    if ctx.options.implementation == "dense":
        raise _Obstacle("implementation='dense' was asked for")


def _check_operands(steps: Steps) -> None:
    """All values of a step have one shape, and parameters broadcast to it."""
    first = example_of(steps.inputs[0])
    shape = known_sizes(steps.charges[-1])
    if first is None or shape is None or not shape or not all(type(size) is int for size in first.shape):
        raise _Obstacle("the shape of a step is unknown")
    if first.dtype not in KERNEL_DTYPES:
        raise _Obstacle(f"its input is of {first.dtype}")
    types = {dtype_of(one) for one in steps.inputs}
    if len(types) > 1 or any(known_sizes(one) != shape for one in (*steps.charges, *steps.inputs)):
        raise _Obstacle("what it is given, or its charge, is not of one shape and type at every step")
    for one in (*steps.parameters, *_starts(steps)):
        example = example_of(one)
        if isinstance(one, fx.Node) and (example is None or not _broadcasts(example, shape, first.device)):
            raise _Obstacle(f"{one.name} does not broadcast to a step, or is on another device")


def _broadcasts(example: torch.Tensor, shape: list[int], device: torch.device) -> bool:
    sizes = [*example.shape]
    fits = len(sizes) <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(reversed(sizes), reversed(shape), strict=False)
    )
    return fits and example.device == device and example.dtype in KERNEL_DTYPES


def _starts(steps: Steps) -> list[Any]:
    return [state[0] for state in steps.states]


# ---- what others read ---------------------------------------------------------------------------------------------


class _Outside:
    """What of a neuron's steps is read by others, which must be its spikes and last states.

    Attributes:
        spikes, lasts: as of `_Found`.
        gone: all nodes that nobody else reads.
    """

    def __init__(self, steps: Steps, spike: int) -> None:
        self._steps, self._spike = steps, spike
        self._readers: dict[fx.Node, list[fx.Node] | None] = {}
        self.spikes: dict[fx.Node, int] = {}
        self.lasts: dict[fx.Node, int] = {}
        self.gone: dict[fx.Node, None] = {}
        early = {node for node in steps.interior if steps.is_early(node)}
        pending = [node for node in steps.interior if node not in early]
        for node in pending:  # grows by the readers that belong to the neuron
            if node in self.gone:
                continue
            own = self._own_readers(node)
            if own is None:
                raise _Obstacle(f"{node.name} is read by others, and is neither a spike nor a last state")
            self.gone[node] = None
            pending += own
        for node in self.gone:
            self._deliver(node)
        # what comes before the first input stays where others read it
        for node in sorted(early, reverse=True):
            if all(user in self.gone for user in node.users):
                self.gone[node] = None

    def _own_readers(self, node: fx.Node) -> list[fx.Node] | None:
        """The readers of a node for which the operator can stand too; None if it cannot for this node.

        It can if nobody else reads it, or if it gives the value as well.
        """
        if node not in self._readers:
            others = [user for user in node.users if user not in self._steps.interior]
            own = [user for user in others if _is_unread(user) or self._is_own(user, node)]
            given = self._spike_of(node) is not None or self._steps.is_state(node) is not None
            self._readers[node] = own if given or len(own) == len(others) else None
        return self._readers[node]

    def _is_own(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether a reader computes with values of a step of the neuron alone, and the operator can stand for it."""
        places = [self._steps.place_of(user, step) for step in [*self._steps.at.get(node, {})]]
        return any(place is not None for place in places) and self._own_readers(user) is not None

    def _spike_of(self, node: fx.Node) -> int | None:
        return self._steps.is_spike(node, self._spike)

    def _deliver(self, node: fx.Node) -> None:
        """Note what of a node others read."""
        if all(user in self.gone for user in node.users):
            return
        step, state = self._spike_of(node), self._steps.is_state(node)
        if step is not None:
            self.spikes[node] = step
        elif state is not None:
            self.lasts[node] = state


def _is_unread(node: fx.Node) -> bool:
    """Whether a call has no effect at all."""
    op = op_of(node)
    plain = op is not None and op.known and op.has(Trait.ELEMENTWISE) and not op.inplace and op.out is None
    return plain and not node.users


def _joins(spikes: Mapping[fx.Node, int], count: int) -> dict[fx.Node, _Join]:
    """The nodes that join the spikes of all steps, in order."""
    found: dict[fx.Node, _Join] = {}
    for node in (one for one, step in spikes.items() if step == 0):
        for reader in node.users:
            for user in (reader, *reader.users):
                join = _join(user, spikes, count)
                if join is not None:
                    found[user] = join
    return found


def _join(node: fx.Node, spikes: Mapping[fx.Node, int], count: int) -> _Join | None:
    op = op_of(node)
    parts = op.get("tensors") if op is not None else None
    parts = tuple(parts) if isinstance(parts, tuple | list) else ()
    how = joins(node, parts) if len(parts) == count else None
    if how is None:
        return None
    if [spikes.get(part) for part in parts] == [*range(count)]:
        return _Join(how, None, parts)
    scaled = [_scaled(part, spikes) for part in parts]
    alone = all(set(part.users) == {node} for part in parts)
    if not alone or None in scaled or [one[0] for one in scaled if one] != [*range(count)]:
        return None
    factors = {(type(one[1]), one[1]) for one in scaled if one}
    return _Join(how, factors.pop()[1], parts) if len(factors) == 1 else None


def _scaled(node: fx.Node, spikes: Mapping[fx.Node, int]) -> tuple[int, Any] | None:
    """The step whose spikes a node multiplies with one number, and that."""
    found = reading(node)
    if found is None or found.operation != "mul":
        return None
    for spike, factor in (found.operands, reversed(found.operands)):
        if spike in spikes and (not isinstance(factor, fx.Node) or numel_of(factor) == 1):
            return spikes[spike], factor
    return None


# ---- building -----------------------------------------------------------------------------------------------------


def _build(found: _Found) -> Mapping[fx.Node, fx.Node]:
    """One call for each part; what others read is taken from its results."""
    states, spikes, kept = _starts(found.steps), [], _kept_in(found)
    replaced: dict[fx.Node, fx.Node] = {}
    for part in found.parts:
        with part.place.graph.inserting_before(part.place):
            keep = bool(found.lasts) or part is not found.parts[-1]
            made = _call(found, found.steps.inputs[part.start : part.stop], states, keep)
            if keep:
                states = [call(made.graph, made, operator.getitem, made, 1 + index) for index in range(len(states))]
            spikes.append(call(made.graph, made, operator.getitem, made, 0))
            for node, step in found.spikes.items():
                if part.start <= step < part.stop and _is_read_alone(node, found):
                    one = call(node.graph, node, torch.select, spikes[-1], 0, step - part.start)
                    graded = node in found.gradients.read
                    replaced[node] = _without(_own(one, node, found), graded, found)
    with found.parts[-1].place.graph.inserting_before(found.parts[-1].place):
        for node, index in found.lasts.items():
            last = states[index]
            if example_of(node).dtype is not kept:
                last = call(node.graph, node, torch.Tensor.to, last, example_of(node).dtype)
            replaced[node] = _without(last, node in found.gradients.read, found)
    for node, join in found.joins.items():
        with node.graph.inserting_before(node):
            replaced[node] = _joined(node, join, spikes, found)
    return {node: laid_as(made, node) for node, made in replaced.items()}


def _is_read_alone(spikes: fx.Node, found: _Found) -> bool:
    """Whether somebody reads the spikes of one step, rather than those of all."""
    return any(user not in found.joins and user not in found.dead for user in spikes.users)


def _call(found: _Found, inputs: Columns, states: list[Any], keep: bool) -> fx.Node:
    """The operator on some of the steps."""
    steps, like = found.steps, found.steps.charges[0]
    source, start = taken_from(inputs)
    if len({*inputs}) == 1:
        x = call(like.graph, like, torch.Tensor.expand, inputs[0], len(inputs), *[-1] * example_of(inputs[0]).dim())
    elif source is None:
        x = call(like.graph, like, torch.stack, [*inputs])
    elif len(inputs) == example_of(source).shape[0]:
        x = source
    else:
        x = call(like.graph, like, torch.narrow, source, 0, start, len(inputs))
    sizes = [*example_of(inputs[0]).shape]
    given = [_expanded(one, sizes, like) if isinstance(one, fx.Node) else None for one in states]
    starts = [0.0 if isinstance(one, fx.Node) else float(one) for one in states]
    if found.gradients.reached and example_of(inputs[0]).dtype is not _dtype(found):
        x = call(like.graph, like, torch.Tensor.float, x)
    x = _reached(x, PLACES["x"], found)
    kept = _kept_in(found)
    given = [_reached(_of_dtype(one, kept), place, found) for place, one in enumerate(given, PLACES["v0"])]
    wide = [_of_dtype(one, torch.float32) for one in steps.parameters]
    parameters = [_reached(one, place, found) for place, one in enumerate(wide, PLACES["p0"])]
    args = x, given, starts, parameters, found.numbers, str(found.neuron)
    if found.gradients.reached:
        return call(like.graph, like, torch.ops.sparsecomp.trained_neuron.default, *args, 1)
    in_half = () if kept is torch.float32 else (kept,)
    return call(like.graph, like, torch.ops.sparsecomp.neuron.default, *args, keep, *in_half)


def _dtype(found: _Found) -> torch.dtype:
    """What the operator computes on: in training on half precision where charges are of it, of which spikes are too."""
    x, charge = (example_of(one).dtype for one in (found.steps.inputs[0], found.steps.charges[-1]))
    return x if found.gradients.reached and x is charge else torch.float32


def _kept_in(found: _Found) -> torch.dtype:
    """The dtype of states: of half precision if all are, before the first step too. Trained ones are float32."""
    states = [one for state in found.steps.states for one in state if isinstance(one, fx.Node)]
    types = {dtype_of(one) for one in (*states, *found.lasts)}
    if found.gradients.reached or types.isdisjoint(ROUNDINGS.values()) or len(types) > 1:
        return torch.float32
    return types.pop() or torch.float32


def _of_dtype(value: fx.Node | None, dtype: torch.dtype) -> fx.Node | None:
    """A state or parameter in the dtype in which the operator reads it."""
    example = example_of(value)
    if value is None or example is None or example.dtype is dtype:
        return value
    return call(value.graph, value, torch.Tensor.to, value, dtype)


def _reached(value: Any, place: int, found: _Found) -> Any:
    """A value at a place, without a gradient if the steps give it none: then its gradient is None, and not zero."""
    if value is None or not found.steps.trained or place in found.gradients.reached:
        return value
    return call(value.graph, value, torch.Tensor.detach, value)


def _expanded(state: fx.Node, sizes: list[int], like: fx.Node) -> fx.Node:
    """A first state may be one number for all, or for each channel."""
    example = example_of(state)
    if example is None or [*example.shape] == sizes:
        return state
    return call(like.graph, like, torch.Tensor.expand, state, *sizes)


def _joined(node: fx.Node, join: _Join, spikes: list[fx.Node], found: _Found) -> fx.Node:
    """What takes the place of a node that joins the spikes of all steps."""
    whole = spikes[0] if len(spikes) == 1 else call(node.graph, node, torch.cat, spikes)
    if not found.gradients.reached or len(found.joins) > 1 or example_of(node).dtype is not _dtype(found):
        whole = _own(whole, node, found)
    whole = _without(whole, join.graded, found)
    if join.factor is not None:
        whole = call(node.graph, node, torch.mul, whole, join.factor)
    return whole if join.how == "stack" else call(node.graph, node, torch.flatten, whole, 0, 1)


def _own(spikes: fx.Node, like: fx.Node, found: _Found) -> fx.Node:
    """Spikes, which are bytes, or numbers in training, in the type of a node and in memory of their own."""
    example = example_of(like)
    assert example is not None
    if found.gradients.reached and example.dtype is _dtype(found):
        return call(spikes.graph, like, torch.clone, spikes)
    return call(spikes.graph, like, torch.Tensor.to, spikes, example.dtype)


def _without(value: fx.Node, graded: bool, found: _Found) -> fx.Node:
    """A result that has no gradient where what it takes the place of has none."""
    stays = graded or not found.gradients.reached
    return value if stays else call(value.graph, value, torch.Tensor.detach, value)
