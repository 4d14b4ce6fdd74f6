"""What a call writes to besides its first argument: torch's schemas say it for most operators, but not for all."""

from functools import cache
from typing import Any

import torch
from torch import fx

from sparsecomp.passes.graph.canonicalize import CanonicalOp

_UNANNOTATED = ("batch_norm", "instance_norm", "embedding_bag")
"""Operators that write to statistics or tables, of which their schemas say nothing."""
_READERS = frozenset({
    "ndimension", "nelement", "new_tensor", "new", "tolist", "dim_order", "unique", "__bool__", "__len__", "__int__",
    "__float__", "__index__", "__mod__", "__rmod__", "__rfloordiv__", "__rtruediv__", "__rpow__", "__rmatmul__",
    "__rand__", "__ror__", "__rxor__", "__pos__", "mod", "pos", "lshift", "rshift", "not", "is", "is_not", "index",
})  # fmt: skip
"""Methods and operators without a schema that only read."""


def also_written(op: CanonicalOp) -> list[fx.Node]:
    """What a known operator that is not in place writes to all the same."""
    update = op.record.update
    if update is None or op.get(update.unless) is update.value:
        return []
    return [node for name in update.arguments if isinstance(node := op.get(name), fx.Node)]


def may_write(op: CanonicalOp, known: bool) -> bool:
    """Whether a call that is not in place may write to what it is given; `known`: it has a transfer function."""
    if "::" in op.name:
        return not (known and not op.name.startswith("higher_order::")) and not _declares_no_write(op.node)
    told = any(value is True for value in op.node.args) or op.node.kwargs.get("max_norm") is not None
    return not op.known and (told or not is_functional(op.name))


@cache
def is_functional(name: str) -> bool:
    """Whether a function or method of torch's is known to write to no tensor that it is given, but through `out`."""
    bare = name.removeprefix("torch._C._").partition(".")[2] if name.startswith("torch._C._") else name
    if any(part in bare for part in _UNANNOTATED):
        return False
    packet: Any = getattr(torch.ops.aten, bare, None) if bare.isidentifier() else None
    if hasattr(packet, "overloads"):
        schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
        return not any(_writes(argument) for schema in schemas for argument in schema.arguments)
    return bare in _READERS or hasattr(torch.nn.functional, bare)


def _writes(argument: Any) -> bool:
    is_tensor = str(argument.type) in ("Tensor", "Optional[Tensor]")
    return is_tensor and not argument.is_out and argument.alias_info is not None and argument.alias_info.is_write


def _declares_no_write(node: fx.Node) -> bool:
    """Whether a custom operator declares that it writes to none of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable
