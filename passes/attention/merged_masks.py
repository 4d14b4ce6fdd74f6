"""Scores that are masked twice in a row, such as by what is causal and by padding, are masked once, by both masks.

So the rules see one mask. It is as exact as what was written: a score becomes the same number by either mask, or each
adds 0 or a number beside which nothing is left of a score.
"""

import logging
from typing import NamedTuple

import torch
from torch import Tensor, fx

from sparsecomp.passes.attention.inserted import inserted
from sparsecomp.passes.attention.kept_rows import leaves_each_query_a_key
from sparsecomp.passes.attention.mask import OF_NUMBERS
from sparsecomp.passes.attention.mask_of_numbers import is_mask_of_numbers
from sparsecomp.passes.attention.one_number import one_number
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of, shape_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.reference.attention.blocks import SURELY_ZERO

log = logging.getLogger("sparsecomp")


class _Masking(NamedTuple):
    """A call that masks scores.

    Attributes:
        scores: what it masks.
        mask: of booleans, or of numbers that are added.
        use: "keep", "drop" or "add".
        fill: what dropped scores become.
    """

    scores: fx.Node
    mask: fx.Node
    use: str
    fill: float = 0.0


def merge_masks(gm: fx.GraphModule) -> None:
    """Merge each mask of scores with the one before it, if nobody reads what lies between, and nothing is in place.

    The first two of several are merged first: what is filled in, as a number that is added, stands only beside scores
    of common size, of which nothing was filled in before.
    """
    for node in list(gm.graph.nodes):
        outer = _masking(node) if _is_for_softmax(node) else None
        inner = None if outer is None else _masking(outer.scores)
        if outer is not None and inner is not None and _may_merge(node, outer, inner):
            _merge(node, outer, inner)


def _is_for_softmax(node: fx.Node) -> bool:
    """Whether the one reader is a softmax, maybe behind casts, scales and other masks."""
    while len(node.users) == 1:
        before, node = node, next(iter(node.users))
        op, masked = op_of(node), _masking(node)
        if op is None or op.name == "softmax":
            return op is not None
        if masked is not None and masked.scores is before:
            continue
        if not _only_scales(op):
            return False
    return False


def _only_scales(op: CanonicalOp) -> bool:
    scales = op.name in ("mul", "div") and one_number(op.get("other")) is not None
    return scales or op.is_identity or op.has(Trait.CAST)


def _masking(node: fx.Node) -> _Masking | None:
    op = op_of(node)
    if op is None or op.inplace or op.out is not None or op.module is not None:
        return None
    if op.name == "masked_fill":
        fill = one_number(op.get("value"))
        found = None if fill is None else (op.input, op.get("mask"), "drop", fill)
    elif op.name == "where":
        kept, dropped = one_number(op.get("input")), one_number(op.get("other"))
        if dropped is not None:
            found = (op.get("input"), op.get("condition"), "keep", dropped)
        else:
            found = None if kept is None else (op.get("other"), op.get("condition"), "drop", kept)
    elif op.name == "add" and op.get("alpha") in (1, None):
        found = (op.input, op.get("other"), "add", 0.0)
    else:
        found = None
    masked = None if found is None or not all(isinstance(one, fx.Node) for one in found[:2]) else _Masking(*found)
    # a mask is no broader than what it masks
    return masked if masked is not None and shape_of(masked.scores) == shape_of(node) else None


def _may_merge(node: fx.Node, outer: _Masking, inner: _Masking) -> bool:
    between = outer.scores
    examples = [example_of(one) for one in (inner.scores, between, node, outer.mask, inner.mask)]
    if list(between.users) != [node] or any(not isinstance(one, Tensor) for one in examples):
        return False
    if len({one.dtype for one in examples[:3]}) > 1 or something_in_place(between, node):
        return False
    if outer.use == inner.use == "add":  # beside a mask a bias stays as it is
        return any(is_mask_of_numbers(one.mask, between) for one in (outer, inner))
    if "add" not in (outer.use, inner.use):
        return outer.fill == inner.fill and all(one.dtype is torch.bool for one in examples[3:])
    added, filled = (outer, inner) if outer.use == "add" else (inner, outer)
    low = filled.fill <= SURELY_ZERO and example_of(filled.mask).dtype is torch.bool
    alone = filled.fill == -torch.inf or _is_scaled_product(inner.scores)
    only_masks = is_mask_of_numbers(added.mask, between)
    if torch.is_grad_enabled() and example_of(node).requires_grad:
        return low and filled is outer and not only_masks and _may_merge_trained(outer, example_of(node))
    return low and alone and (filled is outer or only_masks)


def _may_merge_trained(filled: _Masking, scores: Tensor) -> bool:
    """Whether gradients are the same if a bias is -inf where it was filled in. Scores that are replaced have none,
    which numbers that are added leave them where all of a query's are."""
    each = leaves_each_query_a_key(filled.mask, filled.use == "drop", scores.shape[-2])
    return filled.fill == -torch.inf and each


def _is_scaled_product(scores: fx.Node) -> bool:
    """Whether scores are of common size, to which a number may be added in the place of being filled in."""
    node: object = scores
    while isinstance(node, fx.Node) and (op := op_of(node)) is not None:
        if op.inplace or any((user := op_of(one)) is not None and user.inplace for one in node.users):
            return False
        if op.has(Trait.PRODUCT) or op.name == "tanh":
            return True
        if not _only_scales(op):
            return False
        node = op.input
    return False


def something_in_place(first: fx.Node, last: fx.Node) -> bool:
    """Whether a call between two may write to something, or switches how calls are computed."""
    node = first.next
    while node is not last:
        if node.op not in ("placeholder", "get_attr") and not _only_computes(op_of(node)):
            return True
        node = node.next
    return False


def _only_computes(op: CanonicalOp | None) -> bool:
    if op is None or not (op.known or op.name in OF_NUMBERS):
        return False
    return not op.inplace and op.out is None and op.record.update is None


def _added(node: fx.Node, outer: _Masking, inner: _Masking) -> fx.Node:
    """What adds to scores what two masks do, of which one may fill in a number beside which nothing is left of them."""
    if outer.use == inner.use:
        return inserted(node, torch.add, inner.mask, outer.mask)
    added, filled = (outer, inner) if outer.use == "add" else (inner, outer)
    low = inserted(node, torch.add, added.mask, filled.fill) if filled is inner else filled.fill
    sides = (added.mask, low) if filled.use == "keep" else (low, added.mask)
    return inserted(node, torch.where, filled.mask, *sides)


def _merge(node: fx.Node, outer: _Masking, inner: _Masking) -> None:
    """Have a call mask by both masks; everything stays as it was where that fails."""
    before = node.prev
    try:
        if "add" in (outer.use, inner.use):
            node.args, node.kwargs = (inner.scores, _added(node, outer, inner)), {}
            node.op, node.target = "call_function", torch.add
        else:
            dropped = [one.mask if one.use == "drop" else inserted(node, torch.logical_not, one.mask)
                       for one in (inner, outer)]  # fmt: skip
            mask = inserted(node, torch.logical_or, *dropped)
            node.op, node.target = "call_method", "masked_fill"
            node.args, node.kwargs = (inner.scores, mask, outer.fill), {}
    except Exception:
        log.warning("%s stays masked twice, since to merge its masks failed", node.name, exc_info=True)
        while node.prev is not before:
            node.graph.erase_node(node.prev)
    else:
        node.graph.erase_node(outer.scores)
