"""Attention written by hand: a product, a scale, maybe a cap, a mask, a softmax, maybe dropout, and another product.

Products may be `matmul`, `bmm`, `@` or `einsum`, the mask a `masked_fill`, a `where` or a sum, and the weights may be
cast on the way. Which dimension is which is read off each call, and so is that nobody else reads what is computed
between.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from sparsecomp.passes.attention.one_number import one_number
from sparsecomp.passes.attention.products import outer_product, scores_of
from sparsecomp.passes.attention.site import AttentionSite, Mask, Steps, View, shares_heads
from sparsecomp.passes.engine.rule import Refusal, Why, refuse
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of, shape_of
from sparsecomp.passes.graph.operators import Trait


@dataclass
class _Walk:
    """The way from the result up to the scores.

    Attributes:
        nodes: the calls met, the last first.
        mask: of the scores; None until it is met.
        scale: what they are multiplied by, since the cap if there is one.
        cap: what a tanh of them is multiplied by; 0 until one is met.
        dropout: the chance that a weight is dropped; 0 until it is met.
        problem: why they are left as they are, if they are an attention.
    """

    nodes: list[fx.Node]
    mask: Mask | None = None
    scale: float = 1.0
    cap: float = 0.0
    dropout: float = 0.0
    problem: str = ""

    def through(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """Take a call along, and go on with what it reads."""
        others = [user for user in value.users if user is not node]
        if others and not self.problem:
            self.problem = f"`{others[0].name}` reads its weights or scores too"
        self.nodes.append(node)
        return value


def written_site(op: CanonicalOp) -> AttentionSite | Refusal | None:
    """The attention that ends in a product; None where it does not end one with a mask."""
    outer = outer_product(op)
    if outer is None:
        return None
    weights, value, back = outer
    walk = _Walk([])
    soft = _up_to(walk.through(op.node, weights), walk, _between_weights)
    found = _plain(soft)
    if found is None or found.name != "softmax" or not _over_keys(found) or not isinstance(found.input, fx.Node):
        return None
    scores = _up_to(walk.through(soft, found.input), walk, _between_scores)
    inner = _plain(scores)
    operands = None if inner is None else scores_of(inner)
    if operands is None or walk.mask is None:
        return None
    walk.nodes.append(scores)
    return _site(walk, walk.mask, operands, value, back)


def _site(walk: _Walk, mask: Mask, operands: tuple[View, View], value: View, back: Steps) -> AttentionSite | Refusal:
    every = (*operands, value)
    shapes = [shape_of(node) for node in (*(one.node for one in every), mask.node)]
    if any(shape is None or None in shape for shape in shapes):
        return refuse(Why.ATTENTION_AS_WRITTEN, detail="its sizes are dynamic")
    if walk.problem:
        return refuse(Why.ATTENTION_AS_WRITTEN, detail=walk.problem)
    q, k, v = (one.shape for one in every)
    shared = all(shares_heads(operands[0], one) for one in (operands[1], value)) and k[1] == v[1]
    if not shared or k[2] != v[2] or q[3] != k[3]:
        return refuse(Why.ATTENTION_AS_WRITTEN, detail=f"its operands of {q}, {k} and {v} are broadcast")
    scale = walk.scale * (walk.cap or 1.0)
    if not (scale >= 0 and walk.cap >= 0 and mask.scale > 0):
        return refuse(Why.ATTENTION_AS_WRITTEN, detail="its scale is no number from 0 on")
    nodes, more, dims = tuple(walk.nodes[::-1]), (walk.cap, walk.dropout), len(shape_of(walk.nodes[0]) or ())
    return AttentionSite(nodes, *operands, value, mask, dims, scale, back, True, *more)


def _up_to(node: fx.Node, walk: _Walk, between: Callable[[CanonicalOp, _Walk], fx.Node | None]) -> fx.Node:
    """The first node upwards that is not passed on the way."""
    while (op := _plain(node)) is not None and (above := between(op, walk)) is not None:
        node = walk.through(node, above)
    return node


def _plain(node: fx.Node) -> CanonicalOp | None:
    """A call that writes to no tensor that is given to it as `out`, which others may read."""
    op = op_of(node)
    return op if op is not None and op.out is None else None


def _between_weights(op: CanonicalOp, walk: _Walk) -> fx.Node | None:
    """What the weights were before dropout or a cast."""
    value = op.input if isinstance(op.input, fx.Node) else None
    if op.is_identity or _casts(op):
        return value
    if not op.has(Trait.DROPOUT) or op.inplace:
        return None
    chance = op.get("p")
    plain = op.name == "dropout" and op.get("training") is True and not walk.dropout
    if plain and isinstance(chance, int | float) and 0 <= chance < 1:
        walk.dropout = float(chance)
    else:
        walk.problem = walk.problem or "it drops weights at random in a way of its own"
    return value


def _between_scores(op: CanonicalOp, walk: _Walk) -> fx.Node | None:
    """What the scores were before a mask, a scale, a cap or a cast."""
    if op.is_identity or _casts(op):
        return op.input if isinstance(op.input, fx.Node) else None
    scaled = scaled_by(op)
    if scaled is not None:
        walk.scale *= scaled[1]
        return scaled[0]
    if op.name == "tanh" and not walk.cap and walk.scale and isinstance(op.input, fx.Node):
        walk.cap, walk.scale = walk.scale, 1.0
        return op.input
    masked = masked_by(op)
    if masked is None or (walk.cap and walk.mask is None):  # a mask before a cap drops nothing
        return None
    if walk.mask is not None:
        walk.problem = walk.problem or "its scores are masked more than once"
    walk.mask = masked[1]._replace(scale=walk.scale)
    return masked[0]


def _casts(op: CanonicalOp) -> bool:
    """Whether a call gives the same numbers as another floating type."""
    example = example_of(op.node)
    return op.has(Trait.CAST) and example is not None and example.dtype.is_floating_point


def scaled_by(op: CanonicalOp) -> tuple[fx.Node, float] | None:
    """What is multiplied by a number, and the number."""
    one, other = op.input, op.get("other")
    if op.name == "mul" and one_number(one) is not None:
        one, other = other, one
    number = one_number(other)
    if op.name not in ("mul", "div") or op.get("rounding_mode") is not None or not isinstance(one, fx.Node):
        return None
    return (one, 1 / number if op.name == "div" else number) if number else None


def masked_by(op: CanonicalOp) -> tuple[fx.Node, Mask] | None:
    """The scores before a mask, and the mask."""
    if op.name == "masked_fill" and isinstance(op.get("mask"), fx.Node) and isinstance(op.input, fx.Node):
        value = one_number(op.get("value"))
        return None if value is None else (op.input, Mask(op.get("mask"), "drop", op.node, value))
    if op.name == "where":
        return _chosen(op)
    one, other = op.input, op.get("other")
    if op.name != "add" or op.get("alpha") != 1 or not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return None
    if _may_be_scores(one):
        return one, Mask(other, "add", op.node)
    return None if op.inplace else (other, Mask(one, "add", op.node))


def _chosen(op: CanonicalOp) -> tuple[fx.Node, Mask] | None:
    """Of `where`: scores where the condition is true, or where it is not, and a number elsewhere."""
    condition, one, other = op.get("condition"), op.get("input"), op.get("other")
    if not isinstance(condition, fx.Node):
        return None
    kept, dropped = one_number(one), one_number(other)
    if isinstance(one, fx.Node) and dropped is not None:
        return one, Mask(condition, "keep", op.node, dropped)
    if isinstance(other, fx.Node) and kept is not None:
        return other, Mask(condition, "drop", op.node, kept)
    return None


def _may_be_scores(node: fx.Node) -> bool:
    """Whether a product stands above, behind masks, scales and casts."""
    op = op_of(_up_to(node, _Walk([]), _between_scores))
    return op is not None and scores_of(op) is not None


def _over_keys(op: CanonicalOp) -> bool:
    """Whether a softmax is over the last dimension."""
    shape, dim = shape_of(op.node), op.get("dim")
    return shape is not None and dim in (-1, len(shape) - 1)
