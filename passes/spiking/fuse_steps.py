"""A loop over time steps runs each layer once, on all steps, and each of spikingjelly's neurons as one operator.

A network that is called step by step is unrolled by Dynamo: T calls of each layer, of which each launches kernels for
one step alone. In a network without feedback no call of a layer needs the result of another call of it; only neurons
carry a state from step to step. The graph is put in an order in which all calls of a layer stand together
(`passes/graph/contract.py` proves from dataflow that they can), and one call on all steps, one behind the other along
dimension 0, takes their place. So with what else treats each row for itself, and with batch-norm in training
(`step_norm`). spikingjelly's neuron operators take all steps in one call anyway.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.passes.engine.ordered import ordered
from sparsecomp.passes.engine.rule import Context, Plan, Rule, Verdict, Why, call, known_sizes, new_meta, refuse
from sparsecomp.passes.facts.repeats import keeps_rows_apart
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.passes.graph.contract import contracted, contractible
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.spiking.neuron_call import MAX_STEPS, NEURON_CALLS, SPIKES, VOLTAGE, arguments
from sparsecomp.passes.spiking.step_norm import each_normalised, is_step_norm, statistics_alone
from sparsecomp.passes.spiking.steps import joins, taken_from

MOST_BYTES = 2**28
"""Of one call's result: a loop keeps no more than one step of it."""

Steps: TypeAlias = tuple[fx.Node, ...]
"""What is one and the same in the code, at successive steps."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one call on all inputs, joined along dimension 0, can stand for.

    Attributes:
        results: one a step; joined, they are what that call gives.
        inputs: one a step.
        build: makes the call, from the joined inputs and their number.
        within: what else the call stands for, which nobody else reads.
        state: what it leaves to others besides the results, and the node that reads it off the call's own result.
    """

    results: Steps
    inputs: Steps
    build: Callable[[fx.Node, int], fx.Node]
    within: Steps = ()
    state: fx.Node | None = None

    @property
    def nodes(self) -> Steps:
        """All that stands together."""
        return (*self.within, *self.results, *(() if self.state is None else (self.state,)))


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: the first that could be a step of a loop stands for all loops."""
    if not _is_step(node) or node is not next(filter(_is_step, node.graph.nodes)):
        return None
    loops = _loops(node.graph)
    if not loops or not _spikes(node.graph, ctx):
        return None
    obstacle = _obstacle(node, ctx)
    if obstacle is not None:
        return refuse(Why.NOT_BATCHED, detail=obstacle)
    norms = statistics_alone(node.graph.nodes, ctx)
    free = {one for calls in norms for one in calls}
    chain, fences = [one for one in ordered(ctx) if one not in free], [*filter(_compat.sets_autocast, node.graph.nodes)]
    batches = [part for batch in _batches(loops, frozenset(chain)) for part in _cut(batch)]
    chains = [chain, *norms]
    batches = [batches[index] for index in contractible(node.graph, [batch.nodes for batch in batches], chains, fences)]
    if not any(map(_is_loop, batches)):
        return refuse(Why.NOT_BATCHED, detail="each call of a layer needs what an earlier one gave")
    order = contracted(node.graph, [batch.nodes for batch in batches], chains, fences)
    place = {one: index for index, one in enumerate(order)}
    firsts = {batch.results: min(batch.nodes, key=place.__getitem__) for batch in batches}
    batches.sort(key=lambda batch: place[firsts[batch.results]])
    replaced = {node for batch in batches for node in batch.nodes}
    return Plan(
        lambda: _build(batches, firsts), _reason(batches), "batched",
        dead=tuple(one for one in reversed(order) if one in replaced),
        places=tuple(firsts[batch.results] for batch in batches), order=order,
        layer=next(filter(_is_loop, batches)).results[0],
    )  # fmt: skip


RULE = Rule("fuse_steps", consider, after=("masked_writes",))


def _spikes(graph: fx.Graph, ctx: Context) -> bool:
    """Whether a neuron of a known library, or a layer on whole numbers, is there; else layers are used several times
    for other reasons."""
    facts = (ctx.fact(one.args[0], one) for one in filter(_is_layer, graph.nodes))
    return any(map(_is_neuron, graph.nodes)) or any(fact is not None and fact.integral for fact in facts)


def _obstacle(node: fx.Node, ctx: Context) -> str | None:
    if ctx.eager or ctx.switches or ctx.transformed:
        return "the graph runs op by op, or switches gradients"
    if ctx.options.implementation == "dense":
        return "implementation='dense' was asked for"
    if ctx.options.implementation == "auto" and ctx.options.neurons != "fuse":
        return "neurons='fuse' runs all steps at once: little gain on a CPU, not measured on a GPU"
    return None


# ---- which calls are the same at successive steps -----------------------------------------------------------------


def _is_neuron(node: Any) -> bool:
    op = op_of(node) if isinstance(node, fx.Node) else None
    return op is not None and op.name in NEURON_CALLS


def _is_layer(node: fx.Node) -> bool:
    op = op_of(node)
    return op is not None and op.has(Trait.PRODUCT) and keeps_rows_apart(op)


def _is_step(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    return (known_sizes(node.args[0]) or [0])[0] == 1 if _is_neuron(node) else _is_layer(node)


def _loops(graph: fx.Graph) -> list[Steps]:
    """Calls of one layer on different inputs, and calls of one neuron of which each takes up the one before."""
    alike: dict[object, list[fx.Node]] = defaultdict(list)
    for node in filter(_is_step, graph.nodes):
        alike[_key(node, 1 + _is_neuron(node))].append(node)
    found: list[Steps] = []
    for calls in alike.values():
        found += _chains(calls) if _is_neuron(calls[0]) else [tuple(calls)]
    return [steps for steps in found if len(steps) > 1 and _are_apart(steps)]


def _key(node: fx.Node, free: int = 1) -> object:
    """What calls have in common that differ in nothing but their first arguments."""
    example = example_of(node.args[0]) if node.args else None
    if example is None:
        return node
    like = tuple(example.shape), example.stride(), example.dtype, example.device
    return node.op, node.target, repr(node.args[free:]), repr(sorted(node.kwargs.items())), repr(like)


def _are_apart(steps: Steps) -> bool:
    """Whether each has an input of its own, none being the result of another."""
    inputs = set(_inputs(steps))
    return len(inputs) == len(steps) and inputs.isdisjoint(steps)


def _inputs(steps: Iterable[fx.Node]) -> Steps:
    """The first arguments of calls that are of a kind."""
    return tuple(cast(fx.Node, one.args[0]) for one in steps)


def _chains(calls: Iterable[fx.Node]) -> Iterator[Steps]:
    """Neurons, every one of which starts from where the one before ended."""
    follower = {before: one for one in calls if (before := _before(one)) is not None}
    for first in calls:
        if _before(first) not in follower:
            chain = [first]
            while chain[-1] in follower:
                chain.append(follower[chain[-1]])
            yield tuple(chain)


def _before(neuron: fx.Node) -> fx.Node | None:
    """The neuron whose last membrane this one starts from, if nobody else reads it."""
    v = neuron.args[1]
    taken = isinstance(v, fx.Node) and v.target is operator.getitem and v.args[1] == VOLTAGE and len(v.users) == 1
    before = v.args[0] if taken and isinstance(v, fx.Node) else None
    return before if isinstance(before, fx.Node) and _is_neuron(before) else None


# ---- what one call on all steps is --------------------------------------------------------------------------------


def _batches(loops: Iterable[Steps], chained: frozenset[fx.Node]) -> list[Batch]:
    """One for each loop, and for what makes its inputs and reads its results, as far as that keeps the steps apart."""
    found: dict[fx.Node, Batch | None] = {}
    pending = [*loops]
    while pending:
        steps = pending.pop()
        if steps[0] in found:
            continue
        batch = _batch(steps)
        found[steps[0]] = batch if batch is not None and chained.isdisjoint(batch.nodes) else None
        if found[steps[0]] is not None and batch is not None:
            pending += [*_readers(batch.results), *_makers(batch.inputs)]
    return [batch for batch in found.values() if batch is not None]


def _readers(steps: Steps) -> Iterator[Steps]:
    """Calls that read each of these and nothing else of their step, one of a kind."""
    for first in steps[0].users:
        if not _is_neuron(first):
            key = _key(first)
            rows = [[one for one in step.users if one.args[:1] == (step,) and _key(one) == key] for step in steps]
            if all(len(row) == 1 for row in rows):
                yield tuple(row[0] for row in rows)


def _makers(steps: Steps) -> list[Steps]:
    """These, if all are of a kind; but what only computes had better do that before the steps are joined."""
    op = op_of(steps[0])
    computes = op is None or not op.has(Trait.ALIAS) and op.has(Trait.ELEMENTWISE) or op.has(Trait.CAST)
    alike = not computes and len({_key(one) for one in steps}) == 1 and _are_apart(steps)
    return [steps] if alike and steps[0].args else []


def _batch(steps: Steps) -> Batch | None:
    """What stands for these calls; None if their steps are not known to stay apart."""
    first, op = steps[0], op_of(steps[0])
    if op is None or not isinstance(first.args[0], fx.Node):
        return None
    if op.name in NEURON_CALLS:
        return _neuron(steps)
    if is_step_norm(op):
        return Batch(steps, _inputs(steps), lambda x, count: each_normalised(x, count, first))
    inputs, before = _inputs(steps), example_of(first.args[0])
    if before is None or not before.dim() or example_of(first) is None:
        return None
    rows = before.shape[0]
    if op.name in ("getitem", "select") and op.get("index") == 0 and op.get("dim", 0) == 0 and type(rows) is int:
        return Batch(steps, inputs, lambda x, _: call(x.graph, first, torch.flatten, x, 0, 1)) if rows == 1 else None
    if op.name == "unsqueeze" and op.get("dim") in (0, -1 - before.dim()):
        return Batch(steps, inputs, lambda x, count: _unflattened(x, count, first))
    if op.name in ("view", "reshape") and not op.reinterprets():
        size = op.get("size")
        if not isinstance(size, tuple | list) or len(size) < 2 or type(rows) is not int or size[0] != rows:
            return None
        return Batch(steps, inputs, lambda x, n: call(x.graph, first, torch.reshape, x, (n * rows, *size[1:])))
    start = op.get("start_dim") if op.name == "flatten" else None
    if (type(start) is int and start % before.dim() > 0) or keeps_rows_apart(op):
        return Batch(steps, inputs, lambda x, _: _again(first, x))
    return None


def _neuron(chain: Steps) -> Batch | None:
    """Neurons of one step each, of which nothing but spikes and membranes is read."""
    first, spikes, voltages = chain[0], [], []
    for one in chain:
        items = {user.args[1]: user for user in one.users if user.target is operator.getitem}
        known = len(items) == len(one.users) and SPIKES in items and items.keys() <= {SPIKES, VOLTAGE}
        if not known or arguments(one)["store_v_seq"] is not False:
            return None
        spikes.append(items[SPIKES])
        voltages.append(items.get(VOLTAGE))

    def build(x: fx.Node, _: int) -> fx.Node:
        return call(x.graph, spikes[0], operator.getitem, _again(first, x, first.args[1]), SPIKES)

    *inner, last = voltages
    within = (*chain, *(one for one in inner if one is not None))
    return Batch(tuple(spikes), _inputs(chain), build, within, last)


def _cut(batch: Batch) -> Iterator[Batch]:
    """Parts of it that are not too many steps, nor too large."""
    count, sizes, example = len(batch.results), known_sizes(batch.results[0]), example_of(batch.results[0])
    size = math.prod(sizes or [1]) * (1 if example is None else example.itemsize)
    most = max(1, min(MAX_STEPS, MOST_BYTES // max(1, size)))
    length = -(-count // -(-count // most))
    steps = batch.within[:count] or batch.results
    for start in range(0, count, length):
        part = batch if length == count else _batch(steps[start : start + length])
        if part is not None and len(part.results) > 1:
            yield part


def _again(node: fx.Node, *inputs: Any) -> fx.Node:
    """The same call on other first arguments."""
    made = node.graph.create_node(node.op, node.target, (*inputs, *node.args[len(inputs) :]), dict(node.kwargs))
    made.meta = new_meta(node)
    return made


# ---- building -----------------------------------------------------------------------------------------------------


def _build(batches: list[Batch], firsts: Mapping[Steps, fx.Node]) -> Mapping[fx.Node, fx.Node]:
    """One call for each batch, and a view of its result for each step that something else reads."""
    served = {node: batch.inputs for batch in batches for node in batch.nodes}
    joined: dict[Steps, fx.Node] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    for batch in batches:
        place, results = firsts[batch.results], batch.results
        with place.graph.inserting_before(place):
            x = joined.get(batch.inputs) or _joined(batch.inputs, place)
            made = joined[results] = batch.build(x, len(results))
            if batch.state is not None:
                replaced[batch.state] = call(place.graph, batch.state, operator.getitem, made.args[0], VOLTAGE)
            for stack in results[0].users:
                if joins(stack, results) == "stack":
                    replaced[stack], served[stack] = _unflattened(made, len(results), stack), results
            for index, one in enumerate(results):
                if any(served.get(user) != results for user in one.users):
                    apart = _unflattened(made, len(results), one)
                    replaced[one] = call(place.graph, one, torch.select, apart, 0, index)
    return replaced


def _unflattened(x: fx.Node, count: int, like: fx.Node) -> fx.Node:
    """A view of what is joined with the steps as dimension 0, the same whoever asks."""
    args = x, 0, (count, -1)
    known = next((user for user in x.users if user.target is torch.unflatten and user.args == args), None)
    return known or call(x.graph, like, torch.unflatten, *args)


def _joined(inputs: Steps, place: fx.Node) -> fx.Node:
    """The inputs of all steps, one behind the other: the tensor that they were taken from, where they are that."""
    source, start = taken_from(inputs)
    if source is None:
        return call(place.graph, place, torch.cat, [*inputs])
    if len(inputs) != example_of(source).shape[0]:
        source = call(place.graph, place, torch.narrow, source, 0, start, len(inputs))
    return call(place.graph, place, torch.flatten, source, 0, 1)


def _is_loop(batch: Batch) -> bool:
    return bool(batch.within) or _is_layer(batch.results[0])


def _reason(batches: list[Batch]) -> str:
    ops = [op for batch in batches if (op := op_of(batch.results[0])) is not None]
    names = [op.name for op in ops if op.has(Trait.PRODUCT) or is_step_norm(op)]
    neurons = sum(bool(batch.within) for batch in batches)
    steps = max(len(batch.results) for batch in batches)
    return f"loop over time: {', '.join([*names, *['neuron'] * neurons])} run once for up to {steps} steps"
