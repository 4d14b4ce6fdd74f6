"""What is the same at every time step runs once: the layers that see a repeated image, up to what tells steps apart.

A network on static images is shown one image T times, so its first convolution and batch-norm compute T times the same.
They run on one step instead, and their result is expanded along time: a view without memory of its own where the
reader takes any strides. Every call stays where it was, so that it sees the same parameters, autocast and gradient
mode. An input that was expanded before it came here says so by its strides. A loop that calls the stem at each step, on
the same image, calls it once. Only layers make this worth while; a step of the backward pass is then a sum over time.

Batch-norm in training normalises copies as it does one of them, since mean and variance are the same. It is written
out, for its running variance is that of more elements.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx

from sparsecomp.passes.engine.ordered import is_kept
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, refuse
from sparsecomp.passes.facts.equal import equal_calls
from sparsecomp.passes.facts.repeats import Flow, OneStep, flow_from
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.spiking.lying import permuted
from sparsecomp.passes.spiking.neuron_call import NEURON_CALLS
from sparsecomp.passes.spiking.step_norm import each_normalised, is_step_norm, may_move

_STRIDED = ("batch_norm", "cat", "stack", "sum", "mean", "sparsecomp::lif", "sparsecomp::neuron", *NEURON_CALLS)
"""Readers of any strides whose results do not share memory with what they read, besides pointwise ones and layers."""
_RESHAPING = ("flatten", "view", "reshape", "unflatten")
_ONE_STEP = ("select", "unbind", "getitem")
_Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call."""


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every operator that repeats something is a candidate, and the first of equal calls."""
    expanded = _expanded(node, ctx)
    return _merged(node, ctx) if expanded is None else expanded


def _expanded(node: fx.Node, ctx: Context) -> Plan | Refusal | None:
    """What repeats because of this node is computed once."""
    if node.op == "placeholder" and not is_kept(node, ctx):
        return None
    moved: set[fx.Node] = set()
    flow = flow_from(node, ctx.analysis.order, not ctx.eager, lambda op, flow: _admits(op, flow, moved, ctx))
    if flow is None:
        return None
    if not moved:
        stays = flow.ends[0] if flow.ends else None
        return None if stays is None else refuse(Why.NOT_HOISTED, detail=_obstacle(stays, ctx))
    operators, needed = _operators(one for one in flow.steps if one in moved), _needed(flow, moved)
    ends = {one for one in moved if any(user not in moved for user in one.users)}
    # another plan may change what these read before this one is carried out
    calls = {one: (one.args, one.kwargs) for one in needed}
    return Plan(
        lambda: _build(flow, calls, ends), _reason(operators, flow.steps[node].repeats.times), "hoisted",
        dead=_dead(flow, ends), places=tuple(dict.fromkeys(map(_place, needed))), layer=_layer(operators),
    )  # fmt: skip


def _merged(node: fx.Node, ctx: Context) -> Plan | None:
    """The first of equal calls stands for all."""
    merged = equal_calls(node, ctx.analysis.order, not ctx.eager, lambda node, op: _mode(node, op, ctx))
    counts = Counter(merged.values())
    operators = _operators(counts)
    if not any(op.has(Trait.PRODUCT) for op in operators):
        return None
    reason = _reason(operators, 1 + max(counts[op.node] for op in operators))
    return Plan(lambda: merged, reason, "merged", layer=_layer(operators))


def _mode(node: fx.Node, op: CanonicalOp, ctx: Context) -> int | None:
    """How often gradients, inference mode and autocast were switched before; None if the result may not be shared."""
    kept = (op.has(Trait.ALIAS) or node not in ctx.analysis.seen_outside) and node not in ctx.transformed
    stays = kept and all(is_kept(value, ctx) for value in (node, *node.all_input_nodes))
    return bisect(ctx.modes, ctx.analysis.order[node]) if stays else None


def _operators(nodes: Iterable[fx.Node]) -> list[CanonicalOp]:
    """Those that compute something."""
    return [op for node in nodes if (op := op_of(node)) is not None and not op.has(Trait.VIEW | Trait.MOVES)]


def _layer(operators: Iterable[CanonicalOp]) -> fx.Node:
    return next(op.node for op in operators if op.has(Trait.PRODUCT))


def _reason(operators: list[CanonicalOp], times: int) -> str:
    several = f"{len(operators)} operators run" if len(operators) > 1 else "1 operator runs"
    return f"static stem: {several} once instead of {times} times ({', '.join(op.name for op in operators)})"


RULE = Rule("static_stem", consider, after=("fuse_neurons",))


def _admits(op: CanonicalOp, flow: Flow, moved: set[fx.Node], ctx: Context) -> bool:
    """Whether a value that repeats may stand for one step of it; `moved` takes those that a layer has a part in."""
    node = op.node
    if node in ctx.transformed or not is_kept(node, ctx):
        return False
    if _is_trained_norm(op) and (
        moved.isdisjoint(node.all_input_nodes) or not (is_step_norm(op) and may_move(op, ctx, beside=moved))
    ):
        return False
    if op.has(Trait.PRODUCT) or not moved.isdisjoint(node.all_input_nodes):
        if node in ctx.analysis.seen_outside:
            return False
        moved.add(node)
    return True


def _obstacle(op: CanonicalOp, ctx: Context) -> str:
    if op.node in ctx.transformed:
        return "a transform of torch.func is at work"
    if op.inplace or op.out is not None or not ctx.analysis.unchanged(op.node, op.node):
        return f"the result of {op.name} is written to in place"
    if op.node in ctx.analysis.seen_outside:
        return f"the result of {op.name} is returned, and must lie as it does now"
    return f"{op.name} reads several steps at once, or is not known to keep them apart"


def _needed(flow: Flow, moved: set[fx.Node]) -> list[fx.Node]:
    """What is moved, and what it is computed of, in order."""
    needed: set[fx.Node] = set()
    for node in reversed(flow.steps):
        if node in moved or not needed.isdisjoint(node.users):
            needed.add(node)
    return [node for node in flow.steps if node in needed]


def _dead(flow: Flow, ends: set[fx.Node]) -> tuple[fx.Node, ...]:
    """What nobody reads once the ends are replaced, users before what they use."""
    gone: dict[fx.Node, None] = {}
    for node in reversed(flow.steps):
        if node.op != "placeholder" and node not in ends and all(user in ends or user in gone for user in node.users):
            gone[node] = None
    return tuple(gone)


def _build(flow: Flow, calls: Mapping[fx.Node, _Call], ends: set[fx.Node]) -> Mapping[fx.Node, fx.Node]:
    ones: dict[fx.Node, fx.Node] = {}
    repeated: dict[fx.Node, fx.Node] = {}
    for node, given in calls.items():
        with node.graph.inserting_before(_place(node)):
            ones[node] = _one_step(node, flow.steps[node], given, ones)
            if node in ends:
                repeated[node] = _repeated(node, ones[node], flow.steps[node])
    return repeated


def _is_trained_norm(op: CanonicalOp) -> bool:
    return op.name == "batch_norm" and op.get("training") is not False


def _place(node: fx.Node) -> fx.Node:
    """Before what one step of a value is computed: of an input, behind all of them."""
    while node.op == "placeholder":
        node = node.next
    return node


def _one_step(node: fx.Node, step: OneStep, given: _Call, ones: Mapping[fx.Node, fx.Node]) -> fx.Node:
    op = op_of(node)
    if op is not None and _is_trained_norm(op):
        (x,) = (ones[one] for one in (*given[0], *given[1].values()) if isinstance(one, fx.Node) and one in ones)
        made = each_normalised(x, 1, node)
    elif step.target is None:
        made = node.graph.node_copy(node)
        made.args, made.kwargs = fx.map_arg(given, lambda one: ones.get(one, one))
    else:
        made = call(node.graph, node, step.target, *fx.map_arg(step.args, lambda one: ones.get(one, one)))
    example, (dim, times, _) = example_of(node), step.repeats
    assert example is not None
    sizes = [size // times if index == dim else size for index, size in enumerate(example.shape)]
    # of autocast's dtype, which a call made now would not have
    made.meta["example_value"] = alone = example.new_empty_strided(sizes, example.stride())
    if op is not None and op.name in _RESHAPING and example.is_contiguous():
        # of all steps this was a copy, and layers ask how one step of it lies
        made = call(node.graph, node, torch.Tensor.contiguous, made)
        made.meta["example_value"] = alone
    return made


def _repeated(node: fx.Node, one: fx.Node, step: OneStep) -> fx.Node:
    """One step, seen as all of them; copied to where all lay if a reader, or a reader of its result, could ask that."""
    (dim, times, inner), example = step.repeats, example_of(node)
    assert example is not None
    rank = example.dim()
    order = sorted(range(rank), key=example.stride().__getitem__, reverse=True)
    place, at = dim + inner, order.index(dim)
    sizes = [-1] * (rank + 1)
    sizes[place] = times
    made = call(node.graph, node, torch.Tensor.unsqueeze, one, place)
    made = call(node.graph, node, torch.Tensor.expand, made, *sizes)
    # a pointwise result lies as its operand, in which a stride of 0 fits between any two
    in_order = set(order[: dim + 1]) == set(range(dim + 1)) and at == dim
    if in_order and example.shape[dim] == times and all(map(_takes_strides, node.users)):
        return call(node.graph, node, torch.Tensor.flatten, made, dim, dim + 1)
    apart = [index for one in order for index in ((dim, dim + 1) if one == dim else (one + (one > dim),))]
    made = call(node.graph, node, torch.Tensor.contiguous, permuted(made, apart, node))
    made = call(node.graph, node, torch.Tensor.flatten, made, at, at + 1)
    return permuted(made, [order.index(index) for index in range(rank)], node)


def _takes_strides(reader: fx.Node) -> bool:
    op = op_of(reader)
    if op is None or op.inplace or op.out is not None:
        return False
    pointwise = op.known and op.has(Trait.ELEMENTWISE) and not op.has(Trait.ALIAS)
    return pointwise or op.has(Trait.PRODUCT) or op.name in (*_STRIDED, *_ONE_STEP)
