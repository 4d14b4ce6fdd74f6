"""(Q Kᵀ) V of spikes is computed as Q (Kᵀ V), or the other way round, where that is less work.

The attention of spiking transformers has no softmax: it is a product of three tensors of small whole numbers. As long
as every sum is one that the dtype holds exactly, both orders give the same bits; with N tokens of width d one makes an
N x N matrix and the other a d x d one. No kernel of ours is needed, so this pays on any device.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from string import ascii_letters

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.passes.cost.decision import MIN_GAIN
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, refuse
from sparsecomp.passes.facts.transfer.pooling import sum_of
from sparsecomp.passes.graph.canonicalize import CanonicalOp, dtype_of, example_of, op_of
from sparsecomp.passes.spiking.batched_product import BatchedProduct, batched_product
from sparsecomp.passes.spiking.operand import cast
from sparsecomp.reference import facts as algebra
from sparsecomp.reference.facts import INTEGER_LIMIT, SparsityFact
from sparsecomp.reference.precision import KERNEL_DTYPES


@dataclass(frozen=True, slots=True)
class _Factor:
    """One of the three tensors: its letters in the whole, and what is known of it where it is read."""

    node: fx.Node
    term: str
    fact: SparsityFact | None


@dataclass(frozen=True, slots=True)
class _Chain:
    """A product of a product and a third tensor.

    Attributes:
        outer, inner: the products as written.
        between: what multiplies the inner result, the last first.
        numbers: with which numbers, the first first.
        near, far: the factors of the inner product, that which shares a summed letter with `third` and that which
            does not.
        third: the other operand of the outer product.
        place: of the inner product among the outer's operands.
        sizes: of the dimensions that are no batch: the far factor's own, that of the inner sum and of the outer sum,
            and the third's own.
    """

    outer: BatchedProduct
    inner: BatchedProduct
    between: tuple[fx.Node, ...]
    numbers: tuple[float, ...]
    near: _Factor
    far: _Factor
    third: _Factor
    place: int
    sizes: tuple[int, int, int, int]

    @property
    def number(self) -> float:
        """What stands between the products."""
        return math.prod(self.numbers)

    @property
    def middle(self) -> str:
        """The letters of near x third, in the order that matmul gives them."""
        (own,) = set(self.third.term) - set(self.near.term)
        (summed,) = set(self.near.term) & set(self.far.term) - set(self.third.term)
        batch = "".join(letter for letter in self.outer.result if letter in self.near.term and letter in self.far.term)
        return batch + (own + summed if self.place else summed + own)


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: a product of three tensors of which one at least is known to be sparse is a candidate."""
    chain = _chain_of(node, ctx)
    if chain is None or isinstance(chain, Refusal):
        return chain
    if ctx.options.implementation == "dense":
        return refuse(Why.FORCED_DENSE)
    reason = _unsafe(chain, ctx) or _rounds(chain, ctx)
    if reason is not None:
        return refuse(Why.NOT_REORDERED, detail=reason)
    far, inner, outer, third = chain.sizes
    works = (far * outer * (inner + third), inner * third * (outer + far))
    if works[0] < MIN_GAIN * works[1] or far * outer < inner * third:
        detail = f"the other order multiplies {works[1]} pairs of numbers a batch, this one {works[0]}"
        return refuse(Why.NOT_REORDERED, detail=detail)
    reason = (
        f"three tensors of whole numbers, exact in either order; this one multiplies {works[1]} pairs of numbers "
        f"a batch instead of {works[0]}"
    )
    return Plan(
        lambda: {node: _build(chain)}, reason, "reordered", "exact", dead=(*chain.between, chain.inner.node)
    )  # fmt: skip


RULE = Rule("reorder_products", consider, after=("fuse_neurons", "sparse_matmul"))


def _chain_of(node: fx.Node, ctx: Context) -> _Chain | Refusal | None:
    outer = batched_product(node)
    if outer is None or outer.operands[0] is outer.operands[1]:
        return None
    for place in (0, 1):
        inner, between, numbers = _inner_of(outer.operands[place])
        # of a longer chain the first three are one
        if inner is not None and not any(_inner_of(operand)[0] for operand in inner.operands):
            return _joined(outer, inner, between, numbers, place, ctx)
    return None


def _inner_of(node: fx.Node) -> tuple[BatchedProduct | None, tuple[fx.Node, ...], tuple[float, ...]]:
    """The product that a node is a multiple of, if only this one reads it; see `_Chain` for the rest."""
    between: list[tuple[fx.Node, float]] = []
    while len(node.users) == 1:
        product = batched_product(node)
        if product is not None:
            return product, tuple(one for one, _ in between), tuple(factor for _, factor in reversed(between))
        op = op_of(node)
        factor = None if op is None else _factor_of(op)
        if op is None or factor is None or not isinstance(op.input, fx.Node):
            break
        between.append((node, factor))
        node = op.input
    return None, (), ()


def _factor_of(op: CanonicalOp) -> float | None:
    """By which number an operator multiplies its first argument; None if it does something else."""
    if op.inplace or op.out is not None:
        return None
    if op.is_identity:
        return 1.0
    other = op.get("other")
    if isinstance(other, bool) or not isinstance(other, int | float) or other <= 0:
        return None
    if op.name == "mul":
        return float(other)
    return 1.0 / other if op.name == "div" and op.get("rounding_mode") is None else None


def _joined(
    outer: BatchedProduct, inner: BatchedProduct, between: tuple[fx.Node, ...], numbers: tuple[float, ...], place: int,
    ctx: Context,
) -> _Chain | Refusal | None:  # fmt: skip
    """The chain in the outer product's letters; None if nothing is known to be sparse in it."""
    fresh = next(letter for letter in ascii_letters if letter not in "".join(outer.terms))
    names = {**dict(zip(inner.result, outer.terms[place], strict=True)), inner.summed: fresh}
    read = zip(inner.operands, inner.terms, strict=True)
    factors = [_Factor(one, "".join(names[c] for c in term), ctx.fact(one, inner.node)) for one, term in read]
    other = outer.operands[1 - place]
    third = _Factor(other, outer.terms[1 - place], ctx.fact(other, outer.node))
    if all(one.fact is None for one in (*factors, third)):
        return None
    near, far = sorted(factors, key=lambda factor: outer.summed not in factor.term)
    (own,) = set(far.term) - set(near.term)
    sizes = {**outer.sizes, fresh: inner.sizes[inner.summed]}
    known = [size for c in (own, fresh, outer.summed, outer.own(1 - place)) if isinstance(size := sizes[c], int)]
    if len(known) != 4 or 0 in known:
        return refuse(Why.UNKNOWN_SHAPE)
    a, b, c, d = known
    return _Chain(outer, inner, between, numbers, near, far, third, place, (a, b, c, d))


def _unsafe(chain: _Chain, ctx: Context) -> str | None:
    """Why the tensors could not be multiplied in another place, or not by the same operator; None if they can."""
    first, last = chain.inner.node, chain.outer.node
    if ctx.switched(first, last):
        return "gradients are switched on or off between the products"
    factors = (chain.near, chain.far, chain.third)
    written = [one.node.name for one in factors if not ctx.analysis.unchanged(one.node, first)]
    if written:
        return f"`{written[0]}` is written to in place"
    dtype = dtype_of(last)
    results = {dtype_of(one) for one in (first, *chain.between)}
    if dtype not in KERNEL_DTYPES or results != {dtype} or len({dtype_of(one.node) for one in factors}) != 1:
        return "the products have other dtypes than float32, float16 or bfloat16, or differ in them"
    if dtype is torch.float16 and ctx.gradients:
        return "gradients of float16 could overflow in one order and not in the other"
    return None


def _rounds(chain: _Chain, ctx: Context) -> str | None:
    """Why one of the orders could round; None if every number and every sum in both is exact."""
    example = example_of(chain.outer.node)
    most = 2 ** _compat.matmul_bits(ctx.device(example.device).type) if example.dtype is torch.float32 else None
    facts: list[SparsityFact] = []
    for factor in (chain.far, chain.near, chain.third):
        fact = None if factor.fact is None else algebra.fit_dtype(factor.fact, example.dtype)
        if fact is None or not (fact.on_grid and fact.finite) or fact.lo is None or fact.hi is None:
            known = ctx.analysis.why_not(factor.node) or "too little is known of it"
            return f"`{factor.node.name}` is not proved to hold whole numbers of a known range: {known}"
        facts.append(fact)
    far, near, third = facts
    _, inner, outer, _ = chain.sizes
    for a, b, first, c, second in ((far, near, inner, third, outer), (near, third, outer, far, inner)):
        middle = _product(a, b, first, chain.numbers, example.dtype, most)
        result = middle if isinstance(middle, str) else _product(middle, c, second, chain.numbers, example.dtype, most)
        if isinstance(result, str):
            return result
    return None


def _product(
    a: SparsityFact, b: SparsityFact, count: int, numbers: tuple[float, ...], dtype: torch.dtype, most: int | None
) -> SparsityFact | str:
    """Sums of `count` products, or why these are not exact, as they are or times the numbers.

    Args:
        most: up to what float32 operands survive the precision of products; None for other dtypes.
    """
    greatest, bound = max(a.largest, b.largest), a.largest * b.largest * count
    if most is not None and greatest > most:
        return f"numbers up to {greatest} pass {most}, to which products of float32 may round their operands here"
    if bound > INTEGER_LIMIT[dtype]:
        return f"sums up to {bound} pass {INTEGER_LIMIT[dtype]}, up to which {dtype} holds every whole number"
    product = algebra.multiply_facts(a, b, torch.float64)
    total = sum_of(product, count) if product is not None and product.on_grid else None
    for number in (*numbers, *accumulate(numbers, mul, initial=1.0)):
        fact = None if total is None else algebra.rescale(total, number, dtype)
        if fact is None or not (fact.on_grid and fact.finite):
            return f"the product of the scales, and of the number {number} behind it, is no power of two of {dtype}"
    assert total is not None
    return total


def _build(chain: _Chain) -> fx.Node:
    node, dtype = chain.outer.node, dtype_of(chain.outer.node)
    assert dtype is not None
    near, far, third = (_read(factor, dtype, node) for factor in (chain.near, chain.far, chain.third))
    middle = _call(chain, (near, third), chain.middle)
    result = _call(chain, (far, (middle, chain.middle)), chain.outer.result)
    return result if chain.number == 1.0 else call(node.graph, node, torch.mul, result, chain.number)


def _read(factor: _Factor, dtype: torch.dtype, like: fx.Node) -> tuple[fx.Node, str]:
    return cast(factor.node, dtype, like), factor.term


def _call(chain: _Chain, operands: tuple[tuple[fx.Node, str], tuple[fx.Node, str]], result: str) -> fx.Node:
    """A product in the spelling, and with its operands in the order, of those that were written."""
    node = chain.outer.node
    (left, first), (right, second) = operands[::-1] if chain.place else operands
    if chain.outer.einsum or chain.inner.einsum:
        return call(node.graph, node, torch.einsum, f"{first},{second}->{result}", left, right)
    return call(node.graph, node, torch.matmul, left, right)
