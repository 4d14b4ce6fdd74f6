"""A masked weight that keeps k elements of each row is a layer of fixed fan-in: it multiplies those, and no others.

The mask must be promised to stay: its list of kept places becomes a constant of the graph, and where a change of it
that is seen leaves uneven rows, Dynamo compiles anew. The kept weights are gathered in each call, with a
gradient of 0 at pruned places as the formula has it; once, where the weight is promised to stay too. Which formula
masks is found by trying, as for `sparsecomp.passes.masked.merged_weight`. All this is for finite values: a pruned place
multiplies nothing, be it NaN or infinite there.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, fx

from sparsecomp import _compat
from sparsecomp.ops.masked.folded_weight import computed, formula
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.cost.sparse import Product, beside_the_layer, dense_layer_seconds
from sparsecomp.passes.engine.constants import promised_node
from sparsecomp.passes.engine.proofs import take_for_granted
from sparsecomp.passes.engine.rule import Context, Plan, call, known_sizes
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.passes.local.operator import beside, fixed_fan_in, operator_of
from sparsecomp.passes.masked.fold import choose_fold
from sparsecomp.passes.masked.formula import Formula, constants_of, formula_of, is_parameter, varies
from sparsecomp.passes.masked.merged_weight import is_linear
from sparsecomp.passes.sparse.chain import Chain, circumstances, ending_at, problem_of_writes
from sparsecomp.passes.spiking.operand import cast
from sparsecomp.reference.local.spread import spread_of
from sparsecomp.reference.local.transposed import transposed_lists
from sparsecomp.reference.patterns import Layout
from sparsecomp.reference.precision import KERNEL_DTYPES

_PROBES = 4
"""Sets of random numbers that a formula is tried on."""


class MaskedRows(NamedTuple):
    """What is worked out of a mask.

    Attributes:
        what: "index", as (n_out, k) of int32, "pointers" or "order" of its transpose; or "weight", of the weight and
            the mask.
        formula: of the weight and the mask.
        shape, dtype: of the weight.
        fan_in: k.
    """

    what: str
    formula: str
    shape: tuple[int, int]
    dtype: torch.dtype
    fan_in: int

    def __call__(self, *sources: Tensor) -> Tensor:
        index = self._places(self._ones(sources[-1]))
        if self.what == "weight":
            return computed(sources, self.formula).gather(1, index)
        if self.what == "index":
            return index.int()
        pointers, order = transposed_lists(index.int(), self.shape[1])
        return pointers if self.what == "pointers" else order

    def _ones(self, mask: Tensor) -> Tensor:
        """What the formula makes of a weight of ones."""
        return computed([torch.ones(self.shape, dtype=self.dtype, device=mask.device), mask], self.formula)

    def _places(self, kept: Tensor) -> Tensor:
        return (kept != 0).nonzero()[:, 1].reshape(-1, self.fan_in)


class KeepsRows(NamedTuple):
    """The claim that a formula masks its weight, and leaves as many elements of each row, of the mask."""

    kept: MaskedRows

    def __call__(self, mask: Tensor) -> bool:
        kept = self.kept._ones(mask)
        even = (kept.count_nonzero(1) == self.kept.fan_in).all()
        return bool(even & ((kept == 0) | (kept == 1)).all()) and self._masks(kept, mask)

    def _masks(self, kept: Tensor, mask: Tensor) -> bool:
        random = torch.Generator(mask.device).manual_seed(0)
        for _ in range(_PROBES):
            weight = torch.randn(kept.shape, generator=random, dtype=kept.dtype, device=mask.device)
            if not torch.equal(computed([weight, mask], self.kept.formula), weight * kept):
                return False
        return True


def consider_masked(node: fx.Node, ctx: Context) -> Plan | None:
    """The plan for a layer with a masked weight and what can be fused behind it; None where `masked_weight` judges."""
    if ctx.options.implementation == "dense" or ctx.options.precision == "exact" or not _compat.asks_in_each_call():
        return None
    chain = ending_at(node, partial(_layer, ctx=ctx), ctx)
    masked = None if chain is None else _of_two(chain, ctx)
    if chain is None or masked is None:
        return None
    chain = replace(chain, sparse=masked.sources[0])
    kept = None if problem_of_writes(chain, ctx) is not None else _proved(masked, ctx)
    return None if kept is None else _plan(chain, masked, kept, ctx)


def _layer(node: fx.Node, ctx: Context) -> Chain | None:
    op = op_of(node)
    if op is None or op.name != "linear" or op.module is not None or known_sizes(op.input) is None:
        return None
    fact, weight = ctx.fact(op.input, node), op.get("weight")
    if (fact is not None and fact.integral) or not isinstance(weight, fx.Node):
        return None  # spikes gain more
    masked = formula_of(weight, node, ctx)
    return None if masked is None else Chain((node,), weight, False, op.input, True, op.get("bias"))


def _of_two(chain: Chain, ctx: Context) -> Formula | None:
    """The formula of a weight and of a mask that is promised to stay, in this order; None if it reads anything else."""
    layer = chain.nodes[0]
    masked = formula_of(chain.sparse, layer, ctx)
    if masked is None or len(masked.sources) != 2:
        return None
    weight, mask = sorted(masked.sources, key=lambda source: not _is_weight(source, ctx))
    if varies(masked, layer, constants_of(masked, ctx), ctx) or ctx.constant(mask) is None:
        return None
    alike = example_of(weight), example_of(masked.result)
    same = alike[0].shape == alike[1].shape and alike[0].dtype is alike[1].dtype and alike[0].is_floating_point()
    static = all(type(size) is int for size in alike[0].shape)
    switched = ctx.switched(masked.nodes[0], chain.nodes[-1])
    if switched or not (same and static and _is_weight(weight, ctx) and is_linear(masked, [weight])):
        return None
    return replace(masked, sources=(weight, mask))


def _is_weight(source: fx.Node, ctx: Context) -> bool:
    return is_parameter(source, ctx) and ctx.values[source].is_floating_point()


def _proved(masked: Formula, ctx: Context) -> MaskedRows | None:
    """What the mask keeps, if that is as much of each row; reads from the device."""
    weight, mask = masked.sources
    held, example = ctx.constant(mask), example_of(weight)
    if held is None or example.dim() != 2 or 0 in example.shape:
        return None
    kept = MaskedRows("index", formula(masked.module(None)), tuple(example.shape), example.dtype, 0)
    kept = kept._replace(fan_in=int(kept._ones(held)[0].count_nonzero()))
    return kept if kept.fan_in and KeepsRows(kept)(held) else None


def _plan(chain: Chain, masked: Formula, kept: MaskedRows, ctx: Context) -> Plan | None:
    weight, mask = (ctx.constant(source) for source in masked.sources)
    if mask is None:
        return None
    product, spread = _product(chain, kept, ctx), spread_of(kept(mask))
    once = weight is not None and not product.trained
    layer = fixed_fan_in(chain, (kept.shape[0], kept.fan_in), spread, True, ctx)
    decision = beside(layer, _otherwise(chain, masked, product, once, ctx))
    if decision.dense:
        return None

    def build() -> dict[fx.Node, fx.Node]:
        last = chain.nodes[-1]
        dtype = example_of(chain.nodes[0]).dtype
        take_for_granted(last, masked.sources[1], mask, KeepsRows(kept))
        index, *lists = (
            promised_node(last, kept._replace(what=what), masked.sources[1:], [mask], _names(masked)[1:])
            for what in ("index", *(("pointers", "order") if product.trained else ()))
        )
        values = _values(masked, kept, index, [weight, mask] if once and weight is not None else None, last)
        bias = None if chain.bias is None else cast(chain.bias, dtype, last)
        x = cast(chain.dense, dtype, last)
        return {last: operator_of(chain, x, cast(values, dtype, last), index, bias, lists, spread)}

    gathered = "once" if once else "in each call"
    reason = (
        f"{masked.spelled()} keeps {kept.fan_in} of {kept.shape[1]} elements in each of {kept.shape[0]} rows, gathered "
        f"{gathered}{chain.fused}, under the promise that its mask stays; {decision.reason}; for finite inputs"
    )
    dead = (*chain.dead, *masked.nodes[::-1])
    return Plan(build, reason, "gather_dot", "", dead, beside_the_layer(product, decision), chain.nodes[0])


def _names(masked: Formula) -> list[str]:
    return [f"`{source.target}`" for source in masked.sources]


def _values(masked: Formula, kept: MaskedRows, index: fx.Node, held: list[Tensor] | None, like: fx.Node) -> fx.Node:
    """The kept weights, as a constant of what weight and mask hold, or gathered in each call."""
    if held is not None:
        return promised_node(like, kept._replace(what="weight"), masked.sources, held, _names(masked))
    wide = call(like.graph, like, Tensor.to, index, torch.int64)
    return call(like.graph, like, torch.gather, masked.sources[0], 1, wide)


def _product(chain: Chain, kept: MaskedRows, ctx: Context) -> Product:
    """The layer as one of a sparse weight in CSR."""
    out, entries = example_of(chain.nodes[-1]), kept.shape[0] * kept.fan_in
    fused = (chain.bias is not None, chain.residual is not None, chain.activation)
    how = circumstances(chain, ctx, out.device)
    return Product.of(
        Layout("csr", (1, 1), kept.shape), entries, False, known_sizes(chain.dense) or [], True, out, *fused, **how
    )


def _otherwise(chain: Chain, masked: Formula, product: Product, once: bool, ctx: Context) -> Decision:
    """What runs the layer otherwise: a dense product, or one of a weight that is folded `once`, in its best format."""
    op = op_of(chain.nodes[0])
    if once and op is not None:
        folded = masked.values({node: ctx.values[node] for node in masked.sources})[masked.result]
        decision = choose_fold(op, folded.to(product.dtype), ctx).decision
        if decision.seconds:
            return decision
    estimated = product.device.type == "cpu" or (product.device.type == "cuda" and product.dtype in KERNEL_DTYPES)
    return Decision("dense", "", {"dense": dense_layer_seconds(product)} if estimated else {})
