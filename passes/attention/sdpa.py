"""`F.scaled_dot_product_attention` with a mask, in every spelling of its arguments."""

import torch
from torch import fx

from sparsecomp.passes.attention.site import GROUPS, THREE, AttentionSite, Mask, View, by_groups, shares_heads
from sparsecomp.passes.engine.rule import Refusal, Why, refuse
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, numel_of, shape_of


def sdpa_site(op: CanonicalOp) -> AttentionSite | Refusal | None:
    """The attention that a call computes; None without a mask, where torch's own kernels skip what is causal."""
    mask, node = op.get("attn_mask"), op.node
    operands = [op.get(name) for name in ("query", "key", "value")]
    if not isinstance(mask, fx.Node) or op.get("is_causal") or not all(isinstance(one, fx.Node) for one in operands):
        return None
    dropout = op.get("dropout_p")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        return refuse(Why.ATTENTION_AS_WRITTEN, detail="the chance of its dropout is no number from 0 on and below 1")
    scale, shapes = op.get("scale"), [shape_of(one) for one in operands]
    if any(shape is None or None in shape for shape in shapes) or numel_of(mask) is None:
        return refuse(Why.ATTENTION_AS_WRITTEN, detail="its sizes are dynamic")
    q, k, v = (tuple(shape or ()) for shape in shapes)
    dims = len(q)
    if dims not in (3, 4, 5) or not len(k) == len(v) == dims:
        return refuse(Why.ATTENTION_AS_WRITTEN, detail=f"its operands have {dims} dimensions, not 3 to 5")
    query, key, value = _views(operands, dims)
    same = all(shares_heads(query, one) for one in (key, value)) and key.shape[1] == value.shape[1]
    grouped = op.get("enable_gqa") is True and dims == 4 and q[0] == k[0] == v[0] and k[1] == v[1]
    if not (same or grouped):
        return refuse(Why.ATTENTION_AS_WRITTEN, detail=f"its operands of {q}, {k} and {v} are broadcast")
    if scale is None:
        scale = max(q[-1] or 0, 1) ** -0.5
    if not isinstance(scale, int | float) or not scale >= 0:
        return refuse(Why.ATTENTION_AS_WRITTEN, detail="its scale is no number from 0 on")
    use = "keep" if example_of(mask).dtype is torch.bool else "add"
    back = (("squeeze", (1,)),) if dims == 3 else (("unflatten", (1, q[1:3])),) if dims == 5 else ()
    return AttentionSite(
        (node,), query, key, value, Mask(mask, use, node), dims, float(scale), back, gives_nan=False,
        dropout=float(dropout),
    )  # fmt: skip


def _views(operands: list[fx.Node], dims: int) -> list[View]:
    """Queries, keys and values of four dimensions."""
    if dims < 5:
        return [View(one, THREE if dims == 3 else ()) for one in operands]
    query, *shared = operands
    return [View(query, GROUPS), *(View(one, by_groups(one)) for one in shared)]
