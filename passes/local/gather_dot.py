"""A layer of fixed fan-in, written as gathered inputs times weights and summed, becomes one `sparsecomp::gather_dot`.

So does a layer whose weight is sparse or masked and has as many elements in each row (`stored_rows`, `masked_rows`);
the rules on such weights come after and judge what is left. Behind a layer may stand a bias, a residual and an
activation; they become arguments of the operator.

An index may be written to where nothing tells of it, may be negative and may be out of range. So each call reads it
anew: the same operator that gathered the inputs gathers the numbers 0 to n_in - 1, n_out · k of them and not that for
each row, and so wraps and raises as the layer did as written. A gradient by the input sorts that index once in each
backward. Under the promise of the option `frozen` the index and its transposed lists are constants of the graph.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from sparsecomp.passes.cost.local import decide
from sparsecomp.passes.engine.constants import promised_node
from sparsecomp.passes.engine.ordered import is_kept
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, known_sizes, refuse
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.local.gathered import Gathered, GatheredLayer, layer_of, source_of
from sparsecomp.passes.local.masked_rows import consider_masked
from sparsecomp.passes.local.operator import fixed_fan_in, operator_of, spread_now
from sparsecomp.passes.local.own_layer import consider_own
from sparsecomp.passes.local.residual_block import consider_block
from sparsecomp.passes.local.stored_rows import consider_stored
from sparsecomp.passes.sparse.chain import Chain, ending_at
from sparsecomp.reference.local.transposed import transposed_lists


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every last node of a layer of fixed fan-in and what can be fused behind it is a site."""
    for other in (consider_block, consider_own, consider_stored, consider_masked):
        verdict = other(node, ctx)
        if verdict is not None:
            return verdict
    chain = ending_at(node, _sum, ctx)
    if chain is None:
        layer = layer_of(node)
        return layer if isinstance(layer, Refusal) else None
    layer = layer_of(chain.nodes[0])
    assert isinstance(layer, GatheredLayer)
    problem = _problem(layer, chain, ctx)
    verdict = _judged(layer, chain, ctx) if problem is None else problem
    return replace(verdict, layer=chain.nodes[0])


RULE = Rule("gather_dot", consider, after=("static_stem",))


def _sum(node: fx.Node) -> Chain | None:
    layer = layer_of(node)
    return Chain((node,), layer.weight, False, layer.gathered.x, True) if isinstance(layer, GatheredLayer) else None


def _problem(layer: GatheredLayer, chain: Chain, ctx: Context) -> Refusal | None:
    """Why the layer stays as written; None if nothing is against the operator."""
    if ctx.options.implementation == "dense":
        return refuse(Why.FORCED_DENSE)
    gathered, first = layer.gathered, layer.nodes[0]
    read = gathered.x, gathered.index, layer.weight, chain.bias, chain.residual
    if not all(is_kept(one, ctx, first) for one in read):
        return refuse(Why.GATHERED_AS_WRITTEN, detail="an operand is written to before the result is complete")
    if ctx.switched(first, chain.nodes[-1]):
        return refuse(Why.GATHERED_AS_WRITTEN, detail="gradients are switched on or off on the way")
    x, others = example_of(gathered.x), [example_of(one) for one in read if one is not None]
    if any(one.device != x.device for one in others):
        return refuse(Why.GATHERED_AS_WRITTEN, detail="its operands are on several devices")
    if not x.dtype.is_floating_point:
        return refuse(Why.DTYPE, dtype=x.dtype)
    shape = known_sizes(gathered.x)
    if shape is None:
        return refuse(Why.UNKNOWN_SHAPE)
    return refuse(Why.NO_FEATURES) if 0 in (*gathered.fan, shape[-1]) else None


def _judged(layer: GatheredLayer, chain: Chain, ctx: Context) -> Plan | Refusal:
    gathered, last = layer.gathered, chain.nodes[-1]
    outputs, fan_in = gathered.fan
    x, inputs = example_of(gathered.x), (known_sizes(gathered.x) or [0])[-1]
    source = source_of(gathered.index)
    held = None if source in ctx.written or type(x.shape[-1]) is not int else ctx.constant(source)
    reading = Reading("index", gathered.by, inputs, gathered.fan)
    if held is not None and not _can_be_read(held, reading):
        return refuse(Why.GATHERED_AS_WRITTEN, detail=f"its index `{source.target}` reads beyond its {inputs} inputs")
    spread = spread_now(source, gathered.fan, ctx)
    decision = decide(fixed_fan_in(chain, gathered.fan, spread, held is not None, ctx))
    called = f"{gathered.by} of {fan_in} inputs for each of {outputs} outputs"
    if decision.dense:
        return Refusal(Why.GATE, {"detail": f"{called}: {decision.reason}"}, decision.estimate)

    def build() -> dict[fx.Node, fx.Node]:
        read = [_index(gathered, last)] if held is None else _constants(reading, source, held, last)
        index, *lists = read
        weight = _shaped(layer.weight, gathered.fan, last)
        return {last: operator_of(chain, gathered.x, weight, index, chain.bias, lists, spread)}

    once = "read once, under the promise that it stays" if held is not None else "read in each call"
    reason = f"{called}{chain.fused}, its index {once}; {decision.reason}"
    dead = (*chain.dead, *layer.nodes[-2::-1])
    return Plan(build, reason, "gather_dot", "", dead, decision.estimate)


_READS: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], tuple[Any, ...]]]] = {
    "getitem": (operator.getitem, lambda numbers, index: (numbers, index)),
    "index_select": (torch.index_select, lambda numbers, index: (numbers, 0, index)),
    "gather": (torch.gather, lambda numbers, index: (numbers, 0, index)),
    "take_along_dim": (torch.take_along_dim, lambda numbers, index: (numbers, index, 0)),
}
"""By what gathers: how it takes its arguments, along the only dimension."""


class Reading(NamedTuple):
    """What a call works out of an index.

    Attributes:
        what: "index", as (n_out, k) of int32 in range, or "pointers" or "order" of its transpose.
        by: the operator that gathers by it.
        inputs, fan: n_in, and n_out and k.
    """

    what: str
    by: str
    inputs: int
    fan: tuple[int, int]

    def __call__(self, index: Tensor) -> Tensor:
        numbers, flat = torch.arange(self.inputs, dtype=torch.int32, device=index.device), index.reshape(-1)
        function, order = _READS[self.by]
        read = function(*order(numbers, flat)).reshape(self.fan)
        if self.what == "index":
            return read
        pointers, order = transposed_lists(read, self.inputs)
        return pointers if self.what == "pointers" else order


def _can_be_read(held: Tensor, reading: Reading) -> bool:
    """On the host: on a device it would be no error, but the end of its context."""
    try:
        reading(held.cpu())
    except (IndexError, RuntimeError):
        return False
    return True


def _constants(reading: Reading, source: fx.Node, held: Tensor, like: fx.Node) -> list[fx.Node]:
    """The index and its transposed lists, as they are now."""
    names = [f"the index `{source.target}`"]
    parts = (reading._replace(what=what) for what in ("index", "pointers", "order"))
    return [promised_node(like, part, [source], [held], names) for part in parts]


def _index(gathered: Gathered, like: fx.Node) -> fx.Node:
    """Nodes that read the index in each call."""
    graph, flat = like.graph, call(like.graph, like, torch.Tensor.reshape, gathered.index, -1)
    inputs = example_of(gathered.x).shape[-1]
    if type(inputs) is not int:
        inputs = call(graph, like, torch.Tensor.size, gathered.x, -1)
    device = call(graph, like, getattr, gathered.x, "device")
    numbers = call(graph, like, torch.arange, inputs)
    # by name: what `optimize` made may be moved
    numbers.kwargs = {"dtype": torch.int32, "device": device}
    function, order = _READS[gathered.by]
    read = call(graph, like, function, *order(numbers, flat))
    return call(graph, like, torch.Tensor.reshape, read, gathered.fan)


def _shaped(weight: fx.Node, fan: tuple[int, int], like: fx.Node) -> fx.Node:
    same = tuple(example_of(weight).shape) == fan
    return weight if same else call(like.graph, like, torch.Tensor.reshape, weight, fan)
