"""Where a masked weight is trained: formulas that are the effective weight of a weight and a theta become one operator.

Which part of a formula that is, is found by trying (see `sparsecomp.ops.masked.merged_weight`); here it is made sure
that the formula is linear in what is trained, so that trying proves it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

import sparsecomp.ops.masked.merged_weight  # noqa: F401  (registers the operators)
from sparsecomp.ops.masked.merged_weight import MergedForm, merging
from sparsecomp.passes.cost.masked import decide_merge
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Why, call, refuse, replays
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.masked.formula import Formula, formula_of, is_view
from sparsecomp.reference.frozen import are_frozen
from sparsecomp.reference.memo import Keep


def merge_weight(
    op: CanonicalOp, masked: Formula, values: Mapping[fx.Node, torch.Tensor], ctx: Context
) -> Plan | Refusal:
    """The plan to train a layer's weight as an effective weight, or why it is trained as it was written.

    Args:
        op: the layer.
        values: of the sources that stay from call to call.
    """
    chain = _inner(masked, ctx)
    for place, core in enumerate(chain):
        part = formula_of(core, op.node, ctx)
        part = None if part is None else by_roles(part, values)
        if part is None or not is_linear(part, part.sources[:2]):
            continue
        problem = _unfit(part, op.node, masked, ctx)
        if problem is not None:
            return refuse(Why.MASKED_AS_WRITTEN, detail=problem)
        selectors = [values[node] for node in part.sources[2:]]
        keep = ctx.keep(*selectors)
        if keep is None:
            return refuse(Why.NOT_FROZEN, option="frozen='buffers'")
        name = _proved(part, selectors, keep)
        if name is not None:
            return _plan(op, masked, part, chain[:place], name, keep, ctx)
    detail = (
        f"gradients are on, and its {masked.spelled()} is elementwise, which Inductor fuses into one kernel; for "
        "inference, call the model under torch.no_grad()"
    )
    return refuse(Why.MASKED_AS_WRITTEN, detail=detail)


def _inner(masked: Formula, ctx: Context) -> list[fx.Node]:
    """The weight, and what it is a view or a cast of, from the outside in."""
    found, order = [masked.result], ctx.analysis.order
    last = max((order[node] for node in masked.nodes if (op := op_of(node)) is not None and op.inplace), default=-1)
    while (op := op_of(found[-1])) is not None and op.has(Trait.VIEW | Trait.CAST):
        # a copy may have been made of something else than what was written later
        if not isinstance(op.input, fx.Node) or order[op.node] < last:
            break
        found.append(op.input)
    return found


def by_roles(part: Formula, values: Mapping[fx.Node, torch.Tensor]) -> Formula | None:
    """The formula with its sources in the operator's order: weight, theta and the selectors; None if it has no such
    sources, or if its result is no plain array."""

    def is_trained(value: torch.Tensor) -> bool:
        return isinstance(value, torch.nn.Parameter) or value.requires_grad  # a buffer may be trained too

    trained = [node for node in part.sources if is_trained(values[node])]
    selectors = [node for node in part.sources if node not in trained]
    result, examples = example_of(part.result), [example_of(node) for node in trained]
    if len(trained) != 2 or not selectors or result is None:
        return None
    if any(one is None or one.dtype is not result.dtype for one in examples):
        return None
    # the weight, which has the result's shape, first
    trained.sort(key=lambda node: example_of(node).shape != result.shape)
    weight, theta = (example_of(node).shape == result.shape for node in trained)
    # what a convolution makes of another memory format has that too
    if not weight or theta or not result.dtype.is_floating_point or not result.is_contiguous():
        return None
    return replace(part, sources=(*trained, *selectors))


def is_linear(part: Formula, trained: Sequence[fx.Node]) -> bool:
    """Whether each step gives, of what depends on the trained, a sum of it times constants, and passes gradients."""
    moving, dtype = set(trained), example_of(part.result).dtype
    for node in part.nodes:
        op = op_of(node)
        if op is not None and op.name == "detach":
            return False  # its values tell nothing of gradients
        read = [argument for argument in node.all_input_nodes if _base(argument) in moving]
        if op is None or not read or (op.has(Trait.FILL) and read == [op.input]):
            continue
        written = op.input if op.inplace else node
        if not _holds(written, dtype) or (not is_view(node) and not _is_linear_step(op, read)):
            return False
        moving.add(_base(node))
        if op.inplace and isinstance(op.input, fx.Node):
            moving.add(_base(op.input))
    return True


def _is_linear_step(op: CanonicalOp, read: list[fx.Node]) -> bool:
    names = {name for name, argument in op.args.items() if isinstance(argument, fx.Node) and argument in read}
    nested = set(read) - {op.args[name] for name in names}
    # a product of two would be none of constants
    alone = op.name != "mul" or len(names) == 1
    rounds = op.get("rounding_mode") is not None
    return op.known and not rounds and not nested and alone and names <= op.record.linear


def _holds(node: object, dtype: torch.dtype) -> bool:
    """Whether a node's dtype has every number of another, small and large ones too, unlike integers."""
    example = example_of(node)
    return example is None or torch.promote_types(example.dtype, dtype) is example.dtype


def _base(node: fx.Node) -> fx.Node:
    """What a node's memory may be that of."""
    while (op := op_of(node)) is not None and isinstance(op.input, fx.Node):
        if not (op.inplace or op.has(Trait.VIEW | Trait.CAST)):
            break
        node = op.input
    return node


def _unfit(part: Formula, layer: fx.Node, masked: Formula, ctx: Context) -> str | None:
    """Why merging would not pay, or cannot be expressed; None if it may."""
    example = example_of(part.result)
    if ctx.eager:
        return "it may need a gradient where the graph runs op by op"
    if any(type(size) is not int for size in example.shape):
        return "its sizes are dynamic"
    if ctx.switched(masked.nodes[0], layer):
        return "gradients are switched on or off on the way"
    # the promise is what a graph is captured with, be it by hand
    where = ctx.device(example.device)
    replayed, size = replays(ctx.options, where) or are_frozen(), example.numel() * example.dtype.itemsize
    decision = decide_merge(size, where.type, scatters_by_mask(part), replayed)
    if decision.dense:
        return decision.reason
    outside = masked.outside(layer)
    return f"`{outside[0].name}` reads it too, so it is computed all the same" if outside else None


def scatters_by_mask(part: Formula) -> bool:
    calls = ((node, op.name) for node in part.nodes if (op := op_of(node)) is not None)
    return any(
        name == "masked_scatter"
        or (name in ("setitem", "index_put") and any(_is_bool(read) for read in node.all_input_nodes[1:]))
        for node, name in calls
    )


def _is_bool(node: fx.Node) -> bool:
    example = example_of(node)
    return example is not None and example.dtype is torch.bool


def _proved(part: Formula, selectors: list[torch.Tensor], keep: Keep) -> str | None:
    """What the operator knows the formula by; None if it is not the effective weight."""
    weight, theta = (example_of(node) for node in part.sources[:2])
    form = MergedForm(tuple(weight.shape), tuple(theta.shape), weight.dtype, weight.device)
    names = [node.target for node in part.sources[2:]]
    return merging(part.module(None), form, selectors, keep, names)


def _plan(
    op: CanonicalOp, masked: Formula, part: Formula, outer: list[fx.Node], name: str, keep: Keep, ctx: Context
) -> Plan:  # fmt: skip
    """`outer` are the views and casts between the part's result and the layer, from the outside in."""
    weight, theta, *selectors = part.sources

    def build() -> dict[fx.Node, fx.Node]:
        graph, target = op.node.graph, torch.ops.sparsecomp.merged_weight.default
        args = (weight, theta, selectors, name, keep)
        # another layer on the same weight may have it already, with its gradients unless they were switched off there
        others = () if ctx.switches else weight.users
        made = next((user for user in others if user.target is target and user.args == args), None)
        copies = {part.result: made or call(graph, part.result, target, *args)}
        for node in reversed(outer):
            copies[node] = graph.node_copy(node, lambda old: copies.get(old, old))
        return {op.node: graph.node_copy(op.node, lambda old: copies.get(old, old))}

    size = "x".join(map(str, example_of(part.result).shape))
    reason = (
        f"with gradients the {size} {masked.spelled()} of `{weight.target}` and `{theta.target}` is one pass, and its "
        f"gradients another; proved for the masks and positions as they are, which are promised to stay; for finite "
        f"values"
    )
    return Plan(build, reason, "merged", dead=masked.nodes[::-1])
