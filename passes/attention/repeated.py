"""Heads of keys that are repeated for the queries that share them: what was there before.

Models write it as a view: `x[:, :, None].expand(…).reshape(…)`, or as `repeat_interleave`, of heads before tokens or
of heads behind them, which then change places. Torch's attention then reads a copy for each query's head; an operator
that knows heads of groups reads the cache itself.
"""

from torch import fx

from sparsecomp.passes.attention.site import View
from sparsecomp.passes.engine.rule import Context
from sparsecomp.passes.graph.canonicalize import CanonicalOp, op_of, shape_of
from sparsecomp.passes.graph.operators import Trait


def unrepeated(view: View, until: fx.Node, ctx: Context) -> tuple[View, tuple[fx.Node, ...]]:
    """Keys or values (batch, kv_heads, length, depth) of which each head is repeated, and the calls that repeat them,
    the last first; the view itself, and none, where they are not, or are written to before `until`."""
    swapped = None if view.steps else _swapped(view.node)
    node, heads_at = (view.node, 1) if swapped is None else (swapped, 2)
    found = None if view.steps else _repeated(node, heads_at)
    if found is None:
        return view, ()
    base, calls = found
    calls = calls if swapped is None else (view.node, *calls)
    same = all(ctx.analysis.unchanged(one, one, until) for one in calls)
    steps = () if swapped is None else (("transpose", (1, 2)),)
    return (View(base, steps), calls) if same and ctx.analysis.unchanged(base, view.node, until) else (view, ())


def _swapped(node: fx.Node) -> fx.Node | None:
    """What has its second and third of four dimensions swapped."""
    op = _plain(node)
    if op is None or len(shape_of(node) or ()) != 4 or not isinstance(op.input, fx.Node):
        return None
    dims = op.get("dims") if op.name == "permute" else None
    if op.name == "transpose":
        return op.input if {op.get("dim0") % 4, op.get("dim1") % 4} == {1, 2} else None
    return op.input if isinstance(dims, tuple | list) and [dim % 4 for dim in dims] == [0, 2, 1, 3] else None


def _repeated(node: fx.Node, heads_at: int) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """Of four dimensions, of which `heads_at` is that of heads, what has each of them once, and the calls between."""
    op, shape = _plain(node), shape_of(node)
    if op is None or shape is None or len(shape) != 4:
        return None
    if op.name == "repeat_interleave":
        base, repeats = op.input, op.get("repeats")
        along = op.get("dim") in (heads_at, heads_at - 4)
        whole = isinstance(repeats, int) and along and len(shape_of(base) or ()) == 4
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
    behind = heads_at + 1
    alike = middle == (*before[:behind], 1, *before[behind:]) and after[:behind] + after[behind + 1 :] == before
    repeated = (*before[:heads_at], (before[heads_at] or 0) * (after[behind] or 0), *before[behind:])
    if not alike or not _adds(single, behind) or shape != repeated:
        return None
    return single.input, (node, *(one for one in (op.input,) if one is not wide), wide, spread.input)


def _plain(node: fx.Node) -> CanonicalOp | None:
    op = op_of(node)
    return None if op is None or op.inplace or op.out is not None or op.module is not None else op


def _adds(op: CanonicalOp, place: int) -> bool:
    """Whether a view of four dimensions gets another one in a place, and stays whole."""
    if op.name == "unsqueeze":
        return op.get("dim") in (place, place - 5)
    index = op.get("index")
    if op.name != "getitem" or not isinstance(index, tuple) or index.count(None) != 1:
        return False
    whole = all(one is None or one is Ellipsis or one == slice(None) for one in index)
    behind = index[index.index(None) + 1 :]
    if Ellipsis in behind:
        return whole and index.index(None) == place
    return whole and (len(behind) == 4 - place if Ellipsis in index else index.index(None) == place)
