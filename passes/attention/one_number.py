"""Numbers that a graph holds as tensors of one element, such as `torch.tensor(8.0)` or `torch.full([], -inf)`."""

import math

import torch
from torch import fx

from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.graph.operators import Trait

_MADE = ("tensor", "scalar_tensor", "full")
_ROOTS = {"sqrt": 0.5, "rsqrt": -0.5}


def one_number(value: object) -> float | None:
    """The number that a value is, rounded as its tensor holds it; None if it is none, or may be written to."""
    if isinstance(value, int | float):
        return float(value)
    op = op_of(value) if isinstance(value, fx.Node) else None
    if op is None or op.inplace or op.out is not None or op.module is not None or not _stays(op):
        return None
    number = _number(op)
    try:
        return None if number is None else float(torch.tensor(number, dtype=example_of(op.node).dtype, device="cpu"))
    except (OverflowError, RuntimeError):  # a number that this dtype has not
        return None


def _number(op: CanonicalOp) -> float | None:
    if op.name in _MADE:
        data = op.get("data", op.get("fill_value"))
        return float(data) if isinstance(data, int | float) else None
    inner = one_number(op.input) if op.name in _ROOTS or op.has(Trait.CAST) else None
    if inner is None or op.name not in _ROOTS:
        return inner
    return inner ** _ROOTS[op.name] if inner > 0 else math.nan


def _stays(op: CanonicalOp) -> bool:
    """Whether a tensor has one element, and nobody writes to it or takes a view of it."""
    example = example_of(op.node)
    if not isinstance(example, torch.Tensor) or example.dim() or example.dtype.is_complex:
        return False
    users = [op_of(user) for user in op.node.users]
    return not any(
        user is not None and user.input is op.node and (user.inplace or user.has(Trait.VIEW | Trait.ALIAS))
        for user in users
    ) and not any(user is not None and user.out is op.node for user in users)
