"""Attention of spikes with a mask: a product, a mask between, and another product, without a softmax.

Products may be of any number of dimensions, by `matmul`, `bmm`, `@` or `einsum`; the mask multiplies scores, or puts 0
in their place by `masked_fill` or `where`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from string import ascii_letters

from torch import fx

from sparsecomp.passes.attention.products import moved
from sparsecomp.passes.attention.site import THREE, AttentionSite, Mask, Steps, View
from sparsecomp.passes.attention.written import masked_by, scaled_by
from sparsecomp.passes.engine.rule import Refusal, Why, refuse
from sparsecomp.passes.graph.canonicalize import CanonicalOp, numel_of, op_of, shape_of
from sparsecomp.passes.spiking.batched_product import BatchedProduct, batched_product
from sparsecomp.reference.facts import is_dyadic


@dataclass(frozen=True)
class _Way:
    """The way from the weights of the last product up to the scores.

    Attributes:
        nodes: the calls, the last first.
        mask: of the scores; None until it is met.
        scale: what they are multiplied by.
        problem: why they are left as they are.
    """

    nodes: tuple[fx.Node, ...] = ()
    mask: Mask | None = None
    scale: float = 1.0
    problem: str = ""

    def through(self, value: fx.Node, reader: fx.Node) -> "_Way":
        """With what `reader` reads."""
        others = [user.name for user in value.users if user is not reader]
        problem = f"`{others[0]}` reads its scores too" if others else ""
        return replace(self, nodes=(*self.nodes, value), problem=self.problem or problem)

    def masked(self, mask: Mask) -> "_Way":
        """With a mask."""
        problem = "its scores are masked more than once" if self.mask is not None else ""
        return replace(self, mask=mask, problem=self.problem or problem)


def spike_site(node: fx.Node) -> AttentionSite | Refusal | None:
    """The attention without a softmax that ends in a product; None where it does not end one with a mask."""
    outer = batched_product(node)
    if outer is None or outer.operands[0] is outer.operands[1]:
        return None
    for place in (0, 1):
        found = _up(outer.operands[place], node, _Way())
        if found is not None and found[0].mask is not None:
            return _site(outer, place, *found)
    return None


def _up(value: fx.Node, reader: fx.Node, way: _Way) -> tuple[_Way, BatchedProduct] | None:
    """The way up to a product, and that."""
    way = way.through(value, reader)
    inner = batched_product(value)
    if inner is not None:
        return way, inner
    op = op_of(value)
    if op is None or op.out is not None:
        return None
    return next(filter(None, (_up(above, value, more) for above, more in _above(op, way))), None)


def _above(op: CanonicalOp, way: _Way) -> Iterator[tuple[fx.Node, _Way]]:
    """What may be scores of what a call reads, and the way with the call."""
    if op.is_identity and isinstance(op.input, fx.Node):
        yield op.input, way
    elif (scaled := scaled_by(op)) is not None:
        yield scaled[0], replace(way, scale=way.scale * scaled[1])
    elif op.name == "mul":
        one, other = op.input, op.get("other")
        if isinstance(one, fx.Node) and isinstance(other, fx.Node) and one is not other:
            yield one, way.masked(Mask(other, "multiply", op.node))
            if not op.inplace:
                yield other, way.masked(Mask(one, "multiply", op.node))
    elif (masked := masked_by(op)) is not None and masked[1].use != "add" and masked[1].fill == 0:
        yield masked[0], way.masked(masked[1]._replace(fill=-inf))


def _site(outer: BatchedProduct, place: int, way: _Way, inner: BatchedProduct) -> AttentionSite | Refusal:
    mask, weights = way.mask, outer.terms[place]
    assert mask is not None
    if any(not isinstance(size, int) for size in (*outer.sizes.values(), *inner.sizes.values())):
        return _as_written("its sizes are dynamic")
    if way.problem:
        return _as_written(way.problem)
    if not is_dyadic(way.scale):
        return _as_written(f"the number {way.scale:g} between its products is no power of two")
    if numel_of(mask.node) is None or not shape_of(mask.node):
        return _as_written("its mask is one number, or of dynamic sizes")
    if len(weights) != len(inner.result):
        return _as_written("its mask is broader than its scores, and broadcasts them")
    if weights[-2:] != outer.own(place) + outer.summed:
        return _as_written("its scores are not of queries, and then keys, behind all else")
    letter = next(one for one in ascii_letters if one not in "".join(outer.terms))
    names = {**dict(zip(inner.result, weights, strict=True)), inner.summed: letter}
    first, second = ("".join(names[one] for one in term) for term in inner.terms)
    read = (inner.operands[0], first), (inner.operands[1], second)
    of_keys, of_queries = sorted(read, key=lambda one: outer.summed not in one[1])
    of_values = outer.operands[1 - place], outer.terms[1 - place]
    batch, (query, key) = weights[:-2], weights[-2:]
    (deep,) = set(of_values[1]) - set(weights)
    views = (
        _viewed(*of_queries, batch + query + letter), _viewed(*of_keys, batch + key + letter),
        _viewed(*of_values, batch + key + deep),
    )  # fmt: skip
    out = batch + query + deep
    back = (*_unfolded([outer.sizes[one] for one in batch]), *moved(tuple(map(out.index, outer.result))))
    nodes = (*way.nodes[::-1], outer.node)
    dims = 3 if len(batch) < 2 else 4
    return AttentionSite(nodes, *views, mask, dims, way.scale, back, gives_nan=False, finite=True)


def _viewed(node: fx.Node, term: str, order: str) -> View:
    """A node whose dimensions are the letters of `term` as (batch, heads, length, depth), from another order."""
    return View(node, (*moved(tuple(map(term.index, order))), *_folded(len(order) - 2)))


def _folded(leading: int) -> Steps:
    """Steps to (batch, heads, length, depth) from so many dimensions in front of length and depth."""
    few: dict[int, Steps] = {0: (("unsqueeze", (0,)),) * 2, 1: THREE, 2: ()}
    return few.get(leading, (("flatten", (0, leading - 2)),))


def _unfolded(sizes: list[int | str]) -> Steps:
    """The steps back to dimensions of these sizes."""
    few: dict[int, Steps] = {0: (("squeeze", (0,)),) * 2, 1: (("squeeze", (1,)),), 2: ()}
    return few.get(len(sizes), (("unflatten", (0, tuple(sizes[:-1]))),))


def _as_written(detail: str) -> Refusal:
    return refuse(Why.ATTENTION_AS_WRITTEN, detail=detail)
