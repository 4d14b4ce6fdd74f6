"""A linear layer with a sparse weight takes in what follows it, or runs dense where that is faster.

Behind a `sparsecomp::sparse_linear`, the node of `sparsecomp.nn.SparseLinear`, may stand an added residual and an
activation; they become its arguments. On CUDA, where the estimate says that dense is faster, the weight is written out:
in training in each call; in inference where it changed, since a copy is kept that each call compares; under the promise
that it stays as it is once, as a constant of the graph. That is for finite inputs: a NaN or an infinity times a zero
that was written out is NaN. Under the promise a CSR weight is multiplied in its narrow form, and one of 2:4 by packed
positions, where few rows make that the fastest. Under precision='exact' the layer stays sparse.
"""

from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import sparsecomp.ops.sparse.dense_linear  # noqa: F401  (registers the operators)
from sparsecomp import _compat
from sparsecomp.errors import FormatError
from sparsecomp.formats import CSR, NARROW
from sparsecomp.lowering.sparse.siblings import MOST_SIBLINGS
from sparsecomp.ops.sparse.dense_copy import has_room, keep_dense_copy
from sparsecomp.ops.sparse.dense_weight import stored_to_dense
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.cost.sparse import Product, beside_the_layer, fuses_relu
from sparsecomp.passes.engine.constants import promised_node, promised_nodes
from sparsecomp.passes.engine.rule import (
    Context,
    Plan,
    Refusal,
    Rule,
    Verdict,
    Why,
    call,
    is_static,
    known_sizes,
    refuse,
    writes_one_row,
)
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.sparse.bitmap import COPIED, bitmap_plan
from sparsecomp.passes.sparse.chain import (
    Chain,
    circumstances,
    copied_behind,
    decided,
    ending_at,
    extended,
    problem_of_writes,
)
from sparsecomp.passes.sparse.packed import packed_plan
from sparsecomp.reference.patterns import Layout
from sparsecomp.report.site import COMPARED_COPY, WRITTEN_ONCE

_LINEAR = torch.ops.sparsecomp.sparse_linear.default
_LINEAR_RELU = torch.ops.sparsecomp.dense_linear_relu.default
_COPY = torch.ops.sparsecomp.dense_copy.default
_TO_DENSE = torch.ops.sparsecomp.stored_to_dense.default
_KEPT_ONCE = ": written out once, under the promise that it stays"


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every last node of a sparse layer and what can be fused behind it is a site."""
    chain = ending_at(node, sparse_layer, ctx)
    return None if chain is None else replace(_judged(chain, node, ctx), layer=chain.nodes[0])


RULE = Rule("sparse_linear", consider, after=("gather_dot", "static_stem"))


def _judged(chain: Chain, node: fx.Node, ctx: Context) -> Plan | Refusal:
    if ctx.options.implementation == "dense":
        return refuse(Why.FORCED_DENSE)
    problem = numbers_of(chain, ctx)
    return problem if isinstance(problem, Refusal) else _plan(chain, problem, node, ctx)


def sparse_layer(node: fx.Node) -> Chain | None:
    """The sparse layer that a node is, if nothing is fused behind it yet."""
    if node.target is not _LINEAR:
        return None
    arguments: Any = node.args
    x, values, _, bias, residual, *_, transpose, activation, _ = arguments
    if residual is not None or activation != "none":
        return None  # its caller has fused what there is
    return Chain((node,), values, transpose, x, True, bias)


def arrays_of(chain: Chain) -> tuple[list[fx.Node], Layout]:
    """Index arrays of a sparse layer, and what they are."""
    arguments: Any = chain.nodes[0].args
    return list(arguments[2]), Layout.read(arguments[5])


def numbers_of(chain: Chain, ctx: Context) -> Product | Refusal:
    """The product's numbers, or why it stays as written."""
    pattern, layout = arrays_of(chain)
    problem = problem_of_writes(chain, ctx, *pattern)
    if problem is not None:
        return problem
    out, shape, stored = example_of(chain.nodes[-1]), known_sizes(chain.dense), known_sizes(chain.sparse)
    if out is None or shape is None or stored is None:
        return refuse(Why.UNKNOWN_SHAPE)
    if out.shape[-1] == 0:
        return refuse(Why.NO_FEATURES)
    entries = torch.Size(stored).numel() // torch.Size(layout.entry).numel()
    fused = (chain.bias is not None, chain.residual is not None, chain.activation)
    how = {**circumstances(chain, ctx, out.device), "tuned": writes_one_row(ctx.options)}
    return Product.of(layout, entries, chain.flip, shape, True, out, *fused, **how)


def _plan(chain: Chain, product: Product, node: fx.Node, ctx: Context) -> Plan:
    kept = _kept(chain, product, ctx)
    product = _as_it_stands(chain, product, kept, ctx)
    decision = decided(product, ctx)
    if kept is not None:
        fewer = _fewer_bytes(chain, product, decision, kept, node, ctx)
        if fewer is not None:
            return fewer
    dead, estimate = chain.dead, beside_the_layer(product, decision)
    if decision.dense:
        kept = kept if product.constant else None
        followed = product.compared and keep_dense_copy(_stored(chain, ctx), arrays_of(chain)[1])
        once = _KEPT_ONCE if kept is not None else _compared(product) if followed else ""
        promise = "" if kept is not None or product.trained or ctx.options.frozen is True else f"; {WRITTEN_ONCE}"
        reason = f"{product.described}{once}: {decision.reason}{promise}"
        name = "dense copy" if kept is not None else COMPARED_COPY if followed else "dense"
        build = lambda: {node: _build_dense(chain, node, product, kept, followed)}  # noqa: E731
        return Plan(build, reason, name, "", dead, estimate)
    reason = f"{product.described} by {decision.implementation}{chain.fused}; {decision.reason}"
    # without a CUDA graph the fewest launches may be the best, which the device's time alone does not tell
    chosen = decision.implementation if product.device.type == "cuda" and not product.replayed else ""
    build = lambda: {node: _build(chain, node, chosen)}  # noqa: E731
    return Plan(build, reason, product.layout.format, "", dead, estimate)


def _fewer_bytes(
    chain: Chain, product: Product, rivals: Decision, kept: list[Tensor], node: fx.Node, ctx: Context
) -> Plan | None:  # fmt: skip
    """The layer by the fastest copy that has fewer bytes, if one is faster than what was decided without."""
    pattern, layout = arrays_of(chain)
    own, held = pattern[: layout.own], kept[: 1 + layout.own]
    pattern_alone = _narrow_plan(chain, product, rivals, kept, node, ctx)
    pattern_alone = pattern_alone or packed_plan(chain, product, rivals, pattern, kept)
    whole = bitmap_plan(chain, product, rivals, own, layout, held, _beside(chain, product, ctx))
    found = [plan for plan in (pattern_alone, whole) if plan is not None]
    return min(found, key=lambda plan: 0.0 if plan.estimate is None else plan.estimate.seconds, default=None)


def _beside(chain: Chain, product: Product, ctx: Context) -> list[tuple[Product, Decision]]:
    """The layers with which one could share a launch if all run by bitmaps, and what is decided of each without."""
    if product.device.type != "cuda" or chain.residual is not None or "shared_input" in ctx.options.disable:
        return []
    found = [sparse_layer(user) for user in chain.dense.users]
    every = [extended(one, ctx) for one in found if one is not None and one.dense is chain.dense]
    alike = [one for one in every if _launch_kind(one) == _launch_kind(chain)]
    alike.sort(key=lambda one: ctx.analysis.order[one.nodes[0]])
    place = next(place for place, one in enumerate(alike) if one.nodes[0] is chain.nodes[0])
    begin, beside = place - place % MOST_SIBLINGS, []
    for one in (*alike[begin:place], *alike[place + 1 : begin + MOST_SIBLINGS]):
        numbers = numbers_of(one, ctx)
        if not isinstance(numbers, Refusal):
            other = _as_it_stands(one, numbers, _kept(one, numbers, ctx), ctx)
            beside += [(other, decided(other, ctx))] if other.constant else []
    return beside


def _launch_kind(chain: Chain) -> tuple[object, ...]:
    """Equal for layers on one input that could share a launch."""
    dtypes = [None if one is None else example_of(one).dtype for one in (chain.sparse, chain.bias)]
    return (arrays_of(chain)[1].format in COPIED, chain.flip, chain.activation, chain.residual, *dtypes)


def _narrow_plan(
    chain: Chain, product: Product, rivals: Decision, kept: list[Tensor], node: fx.Node, ctx: Context
) -> Plan | None:  # fmt: skip
    """The layer by a narrow copy of a CSR weight's columns, where that is faster than what was decided without."""
    pattern, layout = arrays_of(chain)
    if product.device.type != "cuda" or chain.flip or layout.format != "csr":
        return None
    product = product._replace(layout=product.layout._replace(format=NARROW.OPERAND))
    decision, best = decided(product, ctx), min(rivals.seconds.values(), default=0.0)
    if decision.dense or decision.seconds.get(decision.implementation, inf) >= best:
        return None
    if kept[1][[0, -1]].tolist() != [0, kept[2].numel()]:
        return None  # a narrow form has no spare capacity
    make, size = Narrowed(product.layout.shape), kept[2].numel() * 2 / 2**20
    reason = (
        f"{product.described} by {decision.implementation}{chain.fused}; {decision.reason}; narrow columns are kept, "
        f"about {size:.3g} MiB, under the promise that the pattern stays"
    )

    def build() -> dict[fx.Node, fx.Node]:
        names = [f"the index array `{getattr(one, 'target', one)}`" for one in pattern[:2]]
        parts = promised_nodes(node, make, len(NARROW.INDICES), pattern[:2], kept[1:3], names)
        return {node: call(
            node.graph, node, _LINEAR, chain.dense, chain.sparse, parts, chain.bias, chain.residual,
            product.layout.written(), False, chain.activation, decision.implementation,
        )}  # fmt: skip

    return Plan(build, reason, "narrow copy", "", chain.dead, beside_the_layer(product, decision))


class Narrowed(NamedTuple):
    """Index arrays of the narrow form of a CSR matrix of this shape."""

    shape: tuple[int, int]

    def __call__(self, pointers: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        values = indices.new_zeros(indices.shape, dtype=torch.float16)
        found = CSR(pointers, indices, values, self.shape).to(NARROW)
        if found.indices.shape != indices.shape:
            raise FormatError(
                f"{indices.numel()} entries were promised to stay, and {found.indices.numel()} are left between the "
                "first pointer and the last; fill the others with zeros, or compile without the option frozen"
            )
        # of a width that does not hang on the pattern: another one is written into the same arrays
        return found.starts, found.chunks, found.bases, found.indices.to(found.bases.dtype)


def way_of(chain: Chain, product: Product, ctx: Context) -> Decision:
    """What runs the layer by estimate."""
    return decided(_as_it_stands(chain, product, _kept(chain, product, ctx), ctx), ctx)


def _as_it_stands(chain: Chain, product: Product, kept: list[Tensor] | None, ctx: Context) -> Product:
    """The product, with what can be kept of its weight."""
    constant = kept is not None and ctx.options.memory != "low"
    return product._replace(constant=constant, compared=not constant and _can_have_copy(chain, product, ctx))


def _kept(chain: Chain, product: Product, ctx: Context) -> list[Tensor] | None:
    """Values and index arrays, if nothing trains and it is promised that they stay as they are."""
    if product.trained:
        return None
    pattern, _ = arrays_of(chain)
    found = [ctx.constant(read) for read in (chain.sparse, *pattern)]
    return None if any(value is None for value in found) else [value for value in found if value is not None]


def _can_have_copy(chain: Chain, product: Product, ctx: Context) -> bool:
    """Whether there can be a dense copy for each call to compare with a weight that stays in its memory.

    None is made where a step trains, which writes to the weight each time, nor for an estimate for another card.
    """
    if product.trained or chain.flip or ctx.eager or ctx.options.memory == "low" or not product.layout.plain:
        return False
    values = _stored(chain, ctx)
    if values is None or _compat.is_fake(values) or values.device.type != product.device.type:
        return False
    stays = is_static(chain.sparse) or isinstance(values, torch.nn.Parameter)
    return stays and _is_alone(chain, ctx) and has_room(values, arrays_of(chain)[1])


def _stored(chain: Chain, ctx: Context) -> Any:
    """The values of the weight as they are now; None where there are none."""
    return ctx.values.get(chain.sparse) if isinstance(chain.sparse, fx.Node) else None


def _is_alone(chain: Chain, ctx: Context) -> bool:
    """Whether the graph has one matrix of these values.

    Copies of two, or of one that it writes to, are one memory, and a product by one may be moved behind the other.
    """
    pattern, layout = arrays_of(chain)
    own, places = pattern[: layout.own], {_LINEAR: 2, _COPY: 1}
    readers: list[Any] = [reader for reader in chain.sparse.users if reader.target in places]
    patterns = [list(reader.args[places[reader.target]])[: layout.own] for reader in readers]
    return ctx.written.isdisjoint((chain.sparse, *own)) and all(one == own for one in patterns)


def _compared(product: Product) -> str:
    size = product.m * product.k * product.dtype.itemsize / 2**20
    return f": its dense copy, {size:.3g} MiB, is kept and compared with it in each call"


def _build(chain: Chain, node: fx.Node, kernel: str) -> fx.Node:
    arguments: Any = chain.nodes[0].args
    pattern, layout, transpose = list(arguments[2]), *arguments[5:7]
    return call(
        node.graph, node, _LINEAR, chain.dense, chain.sparse, pattern, chain.bias, chain.residual, layout, transpose,
        chain.activation, kernel,
    )  # fmt: skip


def _build_dense(
    chain: Chain, node: fx.Node, product: Product, kept: list[Tensor] | None, followed: bool
) -> fx.Node:  # fmt: skip
    """The layer with its weight written out, and behind it the rest as written."""
    arguments: Any = chain.nodes[0].args
    pattern, layout = list(arguments[2]), arguments[5]
    if followed:
        weight = call(node.graph, node, _COPY, chain.sparse, pattern[: Layout.read(layout).own], layout)
    elif kept is None:
        # what else a transpose needs would be kept for the backward, which reads nothing of it
        pattern = pattern if chain.flip else pattern[: Layout.read(layout).own]
        weight = call(node.graph, node, _TO_DENSE, chain.sparse, pattern, layout, chain.flip)
    else:
        weight = _constant_weight(chain, node, kept)
    if _has_fused_form(chain, product):
        return call(node.graph, node, _LINEAR_RELU, chain.dense, weight, chain.bias)
    return copied_behind(chain, call(node.graph, node, F.linear, chain.dense, weight, arguments[3]), {})


def _has_fused_form(chain: Chain, product: Product) -> bool:
    """Whether torch's product can do what follows it."""
    if product.device.type != "cuda" or chain.residual is not None:
        return False
    if not fuses_relu(product, product.card):
        return False
    bias = example_of(chain.bias) if isinstance(chain.bias, fx.Node) else None
    return chain.activation == "relu" and bias is not None and bias.dtype is product.dtype


class WrittenOut(NamedTuple):
    """The dense weight of stored values and index arrays."""

    layout: str
    transpose: bool

    def __call__(self, values: Tensor, *pattern: Tensor) -> Tensor:
        return stored_to_dense(values, pattern, self.layout, self.transpose)


def _constant_weight(chain: Chain, node: fx.Node, kept: list[Tensor]) -> fx.Node:
    arguments: Any = chain.nodes[0].args
    name = f"the weight `{getattr(chain.sparse, 'target', chain.sparse)}`"
    made = WrittenOut(arguments[5], chain.flip)
    return promised_node(node, made, [chain.sparse, *arguments[2]], kept, [name] * len(kept))
