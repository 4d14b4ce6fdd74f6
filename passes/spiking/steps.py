"""Values of successive time steps: where they were taken from, and who joins them again."""

from collections.abc import Sequence

from torch import fx

from sparsecomp.passes.graph.canonicalize import example_of, op_of


def taken_from(values: Sequence[fx.Node]) -> tuple[fx.Node | None, int]:
    """What all are successive steps of along dimension 0, and the first of these; None if they are of no one tensor."""
    places, sources = [], set()
    for one in values:
        op = op_of(one)
        step = op.get("index") if op is not None and op.name in ("getitem", "select") else None
        if op is None or type(step) is not int or op.get("dim", 0) != 0 or not isinstance(op.input, fx.Node):
            return None, 0
        places.append(step)
        sources.add(_split(op.input) if op.name == "getitem" else op.input)
    source, follow = sources.pop(), places == [*range(places[0], places[0] + len(places))] and places[0] >= 0
    before = example_of(source)
    return (source, places[0]) if follow and not sources and before is not None and before.dim() > 1 else (None, 0)


def _split(value: fx.Node) -> fx.Node:
    """What a tuple of steps was made of; other values as they are."""
    op = op_of(value)
    steps = op is not None and op.name == "unbind" and op.get("dim") == 0 and isinstance(op.input, fx.Node)
    return op.input if op is not None and steps else value


def joins(node: fx.Node, values: Sequence[fx.Node]) -> str | None:
    """`"stack"` or `"cat"` if a node does that to just these, in order, along dimension 0."""
    op = op_of(node)
    if op is None or op.name not in ("stack", "cat") or op.out is not None or op.get("dim") != 0:
        return None
    parts = op.get("tensors")
    return op.name if isinstance(parts, tuple | list) and tuple(parts) == tuple(values) else None
