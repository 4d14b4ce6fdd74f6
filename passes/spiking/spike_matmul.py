"""A batched product of two tensors of spikes becomes `sparsecomp::spike_matmul`, on bytes."""

import math

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp.lowering.cache.signature import NO_TRITON, has_triton
from sparsecomp.lowering.tuning.ceilings import target_of
from sparsecomp.passes.cost import spike_matmul as gate
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, known_sizes, refuse, replays
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.spiking.batched_product import BatchedProduct, batched_product
from sparsecomp.passes.spiking.operand import cast, trains
from sparsecomp.reference.facts import SparsityFact, is_dyadic
from sparsecomp.reference.precision import KERNEL_DTYPES

Facts = tuple[SparsityFact, SparsityFact]


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: a product of which something is known of both operands is a candidate."""
    product = batched_product(node)
    facts = None if product is None else facts_of_both(product, ctx)
    if product is None or facts is None:
        return None
    illegal = _illegal(product, facts, ctx)
    if illegal is not None:
        return illegal
    decision = _decide(product, ctx)
    if isinstance(decision, Refusal):
        return decision
    if decision.dense:
        return Refusal(Why.GATE, {"detail": decision.reason}, decision.estimate)
    precision = "exact" if example_of(node).dtype is torch.float32 else "half"
    reason = f"the operands are {' and '.join(fact.described() for fact in facts)}; {decision.reason}"
    return Plan(
        lambda: {node: _build(product, facts)}, reason, decision.implementation, precision, estimate=decision.estimate
    )  # fmt: skip


RULE = Rule("spike_matmul", consider, after=("fuse_neurons", "reorder_products", "sparse_matmul", "spike_attention"))


def facts_of_both(product: BatchedProduct, ctx: Context) -> Facts | None:
    """What is known of both operands where they are read; None if nothing is of one."""
    left, right = (ctx.fact(operand, product.node) for operand in product.operands)
    return None if left is None or right is None else (left, right)


def _illegal(product: BatchedProduct, facts: Facts, ctx: Context) -> Refusal | None:
    for operand, fact in zip(product.operands, facts, strict=True):
        if not fact.fits_int8:
            return refuse(Why.WRONG_DOMAIN, detail=f"`{operand.name}` is {fact.described()}")
        if not is_dyadic(fact.scale):
            return refuse(Why.SCALED, scale=fact.scale)
    out, depth = example_of(product.node), product.sizes[product.summed]
    if out is None or not isinstance(depth, int):
        return refuse(Why.UNKNOWN_SHAPE)
    if out.dtype not in KERNEL_DTYPES:
        return refuse(Why.DTYPE, dtype=out.dtype)
    if 0 in product.sizes.values():
        return refuse(Why.NO_FEATURES)
    if ctx.gradients and not all(ctx.analysis.unchanged(operand, product.node) for operand in product.operands):
        # for its backward matmul keeps copies of some layouts, which no write reaches
        return refuse(Why.UNSUPPORTED_OP, op="a trained product of what is written to later")
    if depth * math.prod(fact.largest for fact in facts) >= 2**31:
        return refuse(Why.TOO_DEEP, depth=depth)
    return None


def _decide(product: BatchedProduct, ctx: Context) -> Decision | Refusal:
    """What the gate, or the user, picks."""
    forced, out = ctx.options.implementation, example_of(product.node)
    if forced == "dense":
        return refuse(Why.FORCED_DENSE)
    if forced == "binary":
        return Decision(forced, "implementation='binary' was asked for")
    if forced != "auto":
        return refuse(Why.UNSUPPORTED_OP, op=f"matmul with implementation={forced!r}")
    if ctx.device(out.device).type != "cuda" or (ctx.target is None and not torch.cuda.is_available()):
        return refuse(Why.GATE, detail="no CUDA device: dense is faster on the CPU")
    if not has_triton():
        return refuse(Why.GATE, detail=NO_TRITON)
    sizes = known_sizes(product.node)
    depth = product.sizes[product.summed]
    if sizes is None or not isinstance(depth, int):
        return refuse(Why.UNKNOWN_SHAPE)
    m, n = (sizes[product.result.index(product.own(index))] for index in (0, 1))
    # as other layers on spikes: in half precision most readers stay dense, and the bytes come on top
    fused = not ctx.eager and out.dtype is torch.float32
    hosted = ctx.eager or not replays(ctx.options, ctx.device(out.device))
    site = gate.SpikeProduct(math.prod(sizes) // (m * n), m, n, depth, out.dtype, fused, trains(ctx), hosted)
    return gate.decide(site, *(ctx.target or target_of(out.device)))


def _build(product: BatchedProduct, facts: Facts) -> fx.Node:
    node, dtype = product.node, example_of(product.node).dtype
    batch = "".join(letter for letter in product.result if letter in product.terms[0] and letter in product.terms[1])
    # einsum too multiplies the other way round where that is how the result is laid out
    first, second = sorted((0, 1), key=lambda index: product.result.index(product.own(index)))
    orders = batch + product.own(first) + product.summed, batch + product.summed + product.own(second)
    left, right = (
        _ordered(cast(product.operands[index], dtype, node), product.terms[index], order, node)
        for index, order in zip((first, second), orders, strict=True)
    )
    scales = facts[first].scale, facts[second].scale
    out = call(node.graph, node, torch.ops.sparsecomp.spike_matmul.default, left, right, *scales)
    return _ordered(out, batch + product.own(first) + product.own(second), product.result, node)


def _ordered(value: fx.Node, term: str, order: str, like: fx.Node) -> fx.Node:
    """`value`, whose dimensions are the letters of `term`, with these in another order."""
    if term == order:
        return value
    return call(like.graph, like, torch.permute, value, tuple(term.index(letter) for letter in order))
