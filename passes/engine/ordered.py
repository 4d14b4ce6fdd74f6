"""Which nodes of a graph have to stay in their order, apart from who reads whom."""

from typing import Any

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.passes.engine.rule import Context
from sparsecomp.passes.graph.canonicalize import CanonicalOp, op_of
from sparsecomp.passes.graph.functions import APPLY, body_at
from sparsecomp.passes.graph.operators import Trait


def ordered(ctx: Context) -> list[fx.Node]:
    """Those that touch memory which is written to, that draw random numbers, or of which nothing is known."""
    return [
        node for node in ctx.gm.graph.nodes
        if node.op.startswith("call_")
        and not (_is_plain(node) and all(is_kept(one, ctx) for one in (node, *node.all_input_nodes)))
    ]  # fmt: skip


def is_kept(node: Any, ctx: Context, since: fx.Node | None = None) -> bool:
    """Whether nobody writes to a value, through whatever name, after `since` has run, or ever.

    Inputs share memory as they did in the example: one that is written to in each call, such as statistics in training
    or a cache of keys, is no other input for that.
    """
    if ctx.analysis.unchanged(node, node if since is None else since):
        return True
    base = node
    while (op := op_of(base)) is not None and op.has(Trait.ALIAS) and isinstance(op.input, fx.Node):
        base = op.input
    return base.op in ("placeholder", "get_attr") and base not in ctx.written


def _is_plain(node: fx.Node) -> bool:
    """Whether a call depends on nothing but its arguments, apart from what it may write to."""
    op = op_of(node)
    if op is None or node.op == "call_module":
        return False
    if op.name == APPLY:
        bodies = [body for one in node.all_input_nodes if (body := body_at(one)) is not None]
        return all(_is_plain(one) for body in bodies for one in body.graph.nodes if _calls(one))
    if op.is_identity:
        return True
    return (op.known or "::" in op.name) and not op.has(Trait.DROPOUT) and not _is_random(op)


def _calls(node: fx.Node) -> bool:
    return node.op.startswith("call_") and not _compat.sets_grad_mode(node)


def _is_random(op: CanonicalOp) -> bool:
    namespace, _, name = op.name.rpartition("::")
    packet: Any = getattr(getattr(torch.ops, namespace or "aten"), name, None) if name.isidentifier() else None
    overloads = [getattr(packet, one) for one in packet.overloads()] if hasattr(packet, "overloads") else []
    return any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads)
