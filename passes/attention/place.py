"""What stands in the place of an attention as written: whether an operator of ours can, and how its result lies."""

import math

from torch import Tensor, fx

from sparsecomp.ops.attention.operands import MOST_BYTES
from sparsecomp.passes.attention.site import AttentionSite, stepped, viewed
from sparsecomp.passes.engine.rule import Context, Refusal, Why, call, refuse
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.reference.attention.dropout import ALWAYS
from sparsecomp.reference.precision import KERNEL_DTYPES

_COPIES = ("contiguous", "reshape", "flatten")
_SWAPS = ("transpose", "permute")


def may_be_trained(site: AttentionSite, ctx: Context) -> bool:
    """Whether gradients of its result may be asked for."""
    return ctx.gradients and example_of(site.result).requires_grad


def unfit(site: AttentionSite, ctx: Context) -> Refusal | None:
    """Why no operator of ours can stand in the site's place, whatever its mask is; None if one can."""
    if ctx.options.implementation == "dense":
        return refuse(Why.FORCED_DENSE)
    out, examples = example_of(site.result), [example_of(one.node) for one in site.operands]
    device, first = ctx.device(out.device).type, site.nodes[0]
    # gradients read all operands, where those of what is written by hand may not
    until = None if may_be_trained(site, ctx) else site.result
    if not out.dtype.is_floating_point or (device == "cuda" and out.dtype not in KERNEL_DTYPES):
        return refuse(Why.DTYPE, dtype=out.dtype)
    problem = ""
    if ctx.options.precision == "exact" and not site.finite:
        problem = "precision='exact' multiplies what the mask drops too, be it NaN or infinite"
    elif device == "cuda" and max(site.query.shape[3], site.value.shape[3]) * out.dtype.itemsize > MOST_BYTES:
        problem = f"kernels take heads of {MOST_BYTES // out.dtype.itemsize} numbers at most"
    elif not math.isfinite(site.scale):
        problem = f"its scale is {site.scale:g}"
    elif any(0 in example.shape for example in examples):
        problem = "it has no elements"
    elif not _fits(site):
        problem = "its mask is broader than its scores, and broadcasts them"
    elif site.dropout > 1 - 1 / ALWAYS:
        problem = f"dropout of {site.dropout:g} keeps fewer weights than one in {ALWAYS}"
    elif any(example.device != out.device for example in examples):
        problem = "its operands are on several devices"
    elif not all(ctx.analysis.unchanged(one.node, first, until) for one in site.operands):
        problem = "an operand is written to before the result is complete, or its gradients are"
    elif ctx.mode_changes(first, site.result):
        problem = "gradients or autocast are switched on the way"
    return refuse(Why.ATTENTION_AS_WRITTEN, detail=problem) if problem else None


def _fits(site: AttentionSite) -> bool:
    """Whether scores keep their shape when they are masked."""
    batch, heads, queries, _ = site.query.shape
    leading = {3: (), 4: (heads,), 5: (1, 1)}
    scores = (batch, *leading[site.dims], queries, site.key.shape[2])
    mask = example_of(site.mask.node).shape
    sizes = zip(reversed(mask), reversed(scores), strict=False)
    return len(mask) <= len(scores) and all(one in (1, size) for one, size in sizes)


def in_place(site: AttentionSite, result: fx.Node, *lying: Tensor) -> fx.Node:
    """What takes the place of the site's result.

    Args:
        result: (batch, heads, queries, depth).
        lying: as it does, on the device meta, or each way in which it may.
    """
    node, found = site.result, viewed(result, site.back, site.result)
    if all(_only_copied(node, stepped(one, site.back)) for one in lying):
        return found
    return _lying_as(example_of(node), found, node)


def _only_copied(node: fx.Node, lying: Tensor) -> bool:
    """Whether nobody can tell that a result lies otherwise: its one reader makes it contiguous, maybe with dimensions
    swapped before. Two readers could tell, if one writes to what is no copy for the other.

    Args:
        lying: as the result will, on the device meta.
    """
    users = list(node.users)
    op = op_of(users[0]) if len(users) == 1 else None
    if op is None or op.inplace or op.name not in (*_COPIES, *_SWAPS):
        return False
    args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), lambda _: lying)
    function = getattr(Tensor, op.node.target) if isinstance(op.node.target, str) else op.node.target
    there = function(*args, **kwargs)
    if op.name in _SWAPS:
        return _only_copied(op.node, there)
    return there.is_contiguous() and example_of(op.node).is_contiguous()


def _lying_as(out: Tensor, found: fx.Node, like: fx.Node) -> fx.Node:
    """The result as it lay where it was written: whoever takes a view of it relies on that."""
    order = sorted(range(out.dim()), key=lambda dim: -out.stride(dim))
    if not out.permute(order).is_contiguous():
        return found
    if order == list(range(out.dim())):
        return call(like.graph, like, Tensor.contiguous, found)
    inside = call(like.graph, like, Tensor.contiguous, call(like.graph, like, Tensor.permute, found, order))
    return call(like.graph, like, Tensor.permute, inside, [order.index(dim) for dim in range(out.dim())])
