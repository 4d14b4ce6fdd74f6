"""The part of a graph that computes a layer's weight, and whether it masks one.

A masked weight has many spellings: mask * weight, torch.where, masked_fill, a blend of two weights, values written at
indices, a parametrization. All are a few pure operators on parameters and buffers, so they are not told apart: the
operators in front of the weight are taken as they are, as a formula.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn.utils import prune

from sparsecomp import _compat
from sparsecomp.passes.engine.ordered import is_kept
from sparsecomp.passes.engine.rule import Context, is_static
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.passes.graph.operators import Trait

_CONVOLUTIONS = tuple(f"conv{transposed}{dims}d" for transposed in ("", "_transpose") for dims in (1, 2, 3))
LAYERS: dict[str, str | None] = {
    "linear": "weight", "matmul": "other", "embedding": "weight", **dict.fromkeys(_CONVOLUTIONS, "weight"),
    **dict.fromkeys(("addmm", "baddbmm", "multi_head_attention_forward")),
}  # fmt: skip
"""By operator that has a weight: the argument that is it; None where it may be any."""


@dataclass(frozen=True, slots=True)
class Formula:
    """How a weight is computed.

    Attributes:
        result: the weight.
        nodes: the calls, in order; writes to their results included.
        sources: what they read: parameters, buffers, inputs, and what other operators gave.
    """

    result: fx.Node
    nodes: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]

    def spelled(self) -> str:
        """The operators that mask, for people to read."""
        ops = [op for node in self.nodes if (op := op_of(node)) is not None]
        return ", ".join(dict.fromkeys(op.name for op in ops if op.has(Trait.SELECTS) or op.name == "mul"))

    def by_torchs_pruning(self) -> bool:
        """Whether a hook of `torch.nn.utils.prune` computes it, which leaves it behind as an attribute of its module,
        so that the graph gives it out."""
        return any(str(prune.__file__) in (node.meta.get("stack_trace") or "") for node in self.nodes)

    def base(self) -> fx.Node:
        """What the result is a view of: itself, if it is none."""
        node = self.result
        while node in self.nodes and is_view(node):
            node = node.all_input_nodes[0]
        return node

    def readers(self) -> list[fx.Node]:
        """Who reads intermediate results or the weight, besides the formula."""
        return [user for node in self.nodes for user in node.users if user not in self.nodes]

    def outside(self, layer: fx.Node) -> list[fx.Node]:
        """The readers that are neither `layer` nor another layer, which may get its weight otherwise too."""
        return [user for user in self.readers() if user is not layer and not is_layer(user)]

    def values(self, known: Mapping[fx.Node, torch.Tensor]) -> dict[fx.Node, Any]:
        """What every node gives for these values of the sources, which stay as they are."""
        writes = any(op.inplace for node in self.nodes if (op := op_of(node)) is not None)
        found: dict[fx.Node, Any] = {one: known[one].clone() if writes else known[one] for one in self.sources}
        with torch.no_grad():
            for node in self.nodes:
                args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
                is_method = node.op == "call_method"
                function: Any = getattr(torch.Tensor, str(node.target)) if is_method else node.target
                found[node] = function(*args, **kwargs)
        return found

    def module(self, dtype: torch.dtype | None) -> fx.GraphModule:
        """The formula as a function of its sources, its result in a dtype if one is given."""
        graph, copies = fx.Graph(), {}
        for index, source in enumerate(self.sources):
            copies[source] = graph.placeholder(f"source_{index}")
        for index, node in enumerate(self.nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda old: copies[old])
            # named by its place, so that the same formula elsewhere reads the same
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, f"value_{index}")
        result = copies[self.result]
        as_it_is = dtype is None or getattr(example_of(self.result), "dtype", None) is dtype
        graph.output(result if as_it_is else graph.call_method("to", (result, dtype)))
        return fx.GraphModule(torch.nn.Module(), graph)


def formula_of(weight: fx.Node, layer: fx.Node, ctx: Context) -> Formula | None:
    """The formula of what `layer` reads as its weight; None if the weight is no result of pure operators."""
    found = computed_by(weight, layer, is_pure, ctx)
    return found if found.nodes and found.sources else None


def computed_by(value: fx.Node, reader: fx.Node, pure: Callable[[fx.Node], bool], ctx: Context) -> Formula:
    """The formula of what `reader` reads, as far as calls are `pure`."""
    order, found = ctx.analysis.order, set()
    pending = [value]
    while pending:
        node = pending.pop()
        if node in found or not pure(node):
            continue
        found.add(node)
        pending += node.all_input_nodes
        pending += (user for user in _writers(node) if order[user] < order[reader])
    nodes = tuple(sorted(found, key=order.__getitem__))
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in found)
    return Formula(value, nodes, tuple(read or (() if nodes else (value,))))


def is_no_layer(user: fx.Node, read: fx.Node) -> bool:
    """Whether `user` is none of those which surely only read."""
    return not is_layer(user)


def writes_elsewhere(
    formula: Formula, layer: fx.Node, ctx: Context, may_write: Callable[[fx.Node, fx.Node], bool] = is_no_layer
) -> fx.Node | None:
    """A source that is written to, or an intermediate result that something else may write to; None if there is none.

    The analysis knows the last write only. So where the formula writes itself, nobody may read on the way who might
    write.

    Args:
        layer: the reader of the result; what comes after it does not count.
        may_write: whether a call might write to a node that it reads, or give it on to somebody who does.
    """
    order = ctx.analysis.order
    inside = {order[node] for node in formula.nodes} | {-1}
    for node in formula.nodes:
        last = ctx.analysis.last_writes.get(node, -1)
        if last not in inside and last < order[layer] and not is_kept(node, ctx):
            return node
    if any(op.inplace for node in formula.nodes if (op := op_of(node)) is not None):
        meanwhile = ((user, node) for node in formula.nodes for user in node.users if order[user] < order[layer])
        if any(user not in formula.nodes and may_write(user, node) for user, node in meanwhile):
            return formula.result
    return next((source for source in formula.sources if not is_kept(source, ctx)), None)


def constants_of(masked: Formula, ctx: Context) -> dict[fx.Node, torch.Tensor]:
    """The values of the sources that stay from call to call, as far as they are known."""
    return {node: value for node in masked.sources if (value := _constant(node, ctx)) is not None}


def _constant(node: fx.Node, ctx: Context) -> torch.Tensor | None:
    value = ctx.values.get(node)
    if value is None or type(value) not in (torch.Tensor, torch.nn.Parameter):  # such as stand-ins
        return None
    return value if is_static(node) or is_parameter(node, ctx) or node.op == "get_attr" else None


def is_parameter(node: fx.Node, ctx: Context) -> bool:
    """Whether a source is a parameter of a module."""
    return isinstance(ctx.values.get(node), torch.nn.Parameter)


def varies(masked: Formula, layer: fx.Node, values: Mapping[fx.Node, torch.Tensor], ctx: Context) -> str | None:
    """Why the weight is no constant in this graph; None if it is."""
    for source in masked.sources:
        if source.op not in ("placeholder", "get_attr"):
            return f"it depends on `{source.name}`, which is computed in each call"
        if source not in values:
            return f"`{source.target}` is no parameter or buffer, but an input of the graph"
    written = writes_elsewhere(masked, layer, ctx)
    return None if written is None else f"`{written.name}` may be written to in this graph"


def is_view(node: fx.Node) -> bool:
    """Whether a call may give its first argument's memory again."""
    op = op_of(node)
    return op is not None and op.has(Trait.VIEW)


def is_layer(node: fx.Node) -> bool:
    """Whether a call can have a folded weight."""
    op = op_of(node)
    return op is not None and op.name in LAYERS


def has_writes(formula: Formula) -> bool:
    """Whether an operator takes some of the weight's elements from elsewhere, or multiplies by truth values."""
    return any(op.has(Trait.SELECTS) for node in formula.nodes if (op := op_of(node)) is not None)


def factors(formula: Formula) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The operands of each product of two tensors."""
    for node in formula.nodes:
        op = op_of(node)
        if op is not None and op.name == "mul":
            one, other = op.input, op.get("other")
            if isinstance(one, fx.Node) and isinstance(other, fx.Node):
                yield one, other


def is_mask(value: object) -> bool:
    """Whether a tensor holds truth values, or nothing but 0 and 1; reads from the device."""
    if not isinstance(value, torch.Tensor) or _compat.is_fake(value):
        return False
    return value.dtype is torch.bool or bool(((value == 0) | (value == 1)).all())


def is_pure(node: fx.Node) -> bool:
    """Whether a call gives the same for the same arguments, element by element."""
    op = op_of(node)
    return op is not None and op.out is None and op.module is None and op.has(Trait.ELEMENTWISE)


def _writers(node: fx.Node) -> Iterator[fx.Node]:
    """Users that write to a node's memory, or that may share it with somebody who does."""
    for user in node.users:
        op = op_of(user)
        if op is not None and op.input is node and (op.inplace or op.has(Trait.VIEW)):
            yield user
