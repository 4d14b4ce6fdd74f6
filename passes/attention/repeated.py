"""Heads of keys that are repeated for the queries that share them: what was there before.

Models write it as a view: `x[:, :, None].expand(…).reshape(…)`, or as `repeat_interleave`. Torch's attention then reads
a copy for each query's head; an operator that knows heads of groups reads the cache itself.
"""

from torch import fx

from sparsecomp.passes.attention.site import View
from sparsecomp.passes.engine.rule import Context
from sparsecomp.passes.graph.canonicalize import CanonicalOp, op_of, shape_of
from sparsecomp.passes.graph.operators import Trait


def unrepeated(view: View, until: fx.Node, ctx: Context) -> tuple[View, tuple[fx.Node, ...]]:
    """Keys or values (batch, kv_heads, length, depth) of which each head is repeated, and the calls that repeat them,
    the last first; the view itself, and none, where they are not, or are written to before `until`."""
    found = None if view.steps else _repeated(view.node)
    if found is None:
        return view, ()
    base, calls = found
    same = all(ctx.analysis.unchanged(one, one, until) for one in calls)
    return (View(base), calls) if same and ctx.analysis.unchanged(base, view.node, until) else (view, ())


def _repeated(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    op, shape = _plain(node), shape_of(node)
    if op is None or shape is None or len(shape) != 4:
        return None
    if op.name == "repeat_interleave":
        base, repeats = op.input, op.get("repeats")
        whole = isinstance(repeats, int) and op.get("dim") in (1, -3) and len(shape_of(base) or ()) == 4
        return (base, (node,)) if whole and isinstance(base, fx.Node) else None
    if not (op.has(Trait.ROW_MAJOR) and op.has(Trait.MOVES)) or not isinstance(op.input, fx.Node):
        return None
    wide = op.input
    while (copied := _plain(wide)) is not None and copied.has(Trait.SAME) and isinstance(copied.input, fx.Node):
        wide = copied.input
    spread = _plain(wide)
    if spread is None or spread.name not in ("expand", "broadcast_to") or not isinstance(spread.input, fx.Node):
        return None
    single = _plain(spread.input)
    if single is None or not isinstance(single.input, fx.Node):
        return None
    before, middle, after = (shape_of(one) for one in (single.input, spread.input, wide))
    if before is None or middle is None or after is None or len(before) != 4 or len(middle) != 5:
        return None
    batch, heads, length, depth = before
    alike = middle == (batch, heads, 1, length, depth) and after[:2] + after[3:] == before
    if not alike or not _adds_third(single) or shape != (batch, (heads or 0) * (after[2] or 0), length, depth):
        return None
    return single.input, (node, *(one for one in (op.input,) if one is not wide), wide, spread.input)


def _plain(node: fx.Node) -> CanonicalOp | None:
    op = op_of(node)
    return None if op is None or op.inplace or op.out is not None or op.module is not None else op


def _adds_third(op: CanonicalOp) -> bool:
    """Whether a view of four dimensions gets another one in the third place, and stays whole."""
    if op.name == "unsqueeze":
        return op.get("dim") in (2, -3)
    index = op.get("index")
    if op.name != "getitem" or not isinstance(index, tuple) or index.count(None) != 1:
        return False
    whole = all(one is None or one is Ellipsis or one == slice(None) for one in index)
    behind = index[index.index(None) + 1 :]
    if Ellipsis in behind:
        return whole and index.index(None) == 2
    return whole and (len(behind) == 2 if Ellipsis in index else index.index(None) == 2)
