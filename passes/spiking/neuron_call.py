"""How spikingjelly's neuron operators are called, for every rule that reads them: names, arguments and results."""

import operator
from typing import Any

from torch import fx

from sparsecomp.passes.graph.canonicalize import op_of

NEURON_CALLS = ("sj_if::forward", "sj_lif::forward", "sj_plif::forward")
SPIKES, VOLTAGE = range(2)
"""Places of what they give."""
MAX_STEPS = 64
"""Our kernels unroll time; longer sequences would take minutes to compile."""


def arguments(node: fx.Node) -> dict[str, Any]:
    """The call's arguments by the names of its schema, and the first two, which differ between releases, by ours."""
    schema = node.target._schema.arguments  # pyright: ignore
    names = [argument.name for argument in schema]
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    bound = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    bound["x_seq"], bound["v_init"] = bound[names[0]], bound[names[1]]
    return bound


def gives_more(node: fx.Node) -> bool:
    """Whether more than its spikes and last membrane is read."""
    return any(user.target is not operator.getitem or user.args[1] not in (SPIKES, VOLTAGE) for user in node.users)


def starting_number(v: fx.Node) -> float | None:
    """The number that a first membrane is everywhere; None if it is none that the graph shows."""
    op = op_of(v)
    if op is not None and op.name == "zeros_like":
        return 0.0
    value = op.get("fill_value") if op is not None and op.name == "full_like" else None
    return float(value) if isinstance(value, int | float) else None
