"""Tensors made from numbers or random bits."""

from dataclasses import replace

import torch
from torch import fx

from sparsecomp.passes.facts.registry import Facts, Lost, LostKind, Result, transfer
from sparsecomp.passes.facts.transfer.pointwise import convert
from sparsecomp.passes.graph.canonicalize import CanonicalOp, dtype_of
from sparsecomp.reference import facts as algebra
from sparsecomp.reference.facts import Origin, SparsityFact


@transfer("zeros", "zeros_like", "new_zeros", "zero")
def zeros(op: CanonicalOp, facts: Facts) -> Result:
    """All zero."""
    return algebra.constant(0)


@transfer("ones", "ones_like", "new_ones")
def ones(op: CanonicalOp, facts: Facts) -> Result:
    """All one."""
    return algebra.constant(1)


@transfer("full", "full_like", "new_full")
def full(op: CanonicalOp, facts: Facts) -> Result:
    """One number everywhere."""
    return _stored(facts.of(op.get("fill_value")), dtype_of(op.node))


@transfer("tensor", "as_tensor", "scalar_tensor")
def tensor(op: CanonicalOp, facts: Facts) -> Result:
    """A tensor of one number, or of a list of numbers."""
    data = op.get("data")
    if isinstance(data, fx.Node):
        return convert(op, facts)
    if isinstance(data, list | tuple):
        return _stored(algebra.join(map(facts.of, data)), dtype_of(op.node)) if data else None
    return _stored(facts.of(data), dtype_of(op.node))


def _stored(fact: SparsityFact | None, dtype: torch.dtype | None) -> SparsityFact | None:
    """A number stored in `dtype`; integer dtypes truncate fractions."""
    if fact is None:
        return None
    fractional = fact.scale != 1.0 and (dtype is None or not dtype.is_floating_point)
    return None if fractional else algebra.fit_dtype(fact, dtype)


@transfer("empty", "empty_like", "new_empty")
def empty(op: CanonicalOp, facts: Facts) -> Result:
    """Uninitialised memory: anything."""
    return Lost(LostKind.UNSUPPORTED, f"{op.name} holds arbitrary values until all of it is written")


@transfer("rand", "rand_like", "uniform")
def uniform(op: CanonicalOp, facts: Facts) -> Result:
    """Between 0 and 1 (an in-place `uniform_` may have other bounds)."""
    if op.name == "uniform":
        return Lost(LostKind.UNSUPPORTED, "uniform_ makes random values")
    return algebra.interval(0, 1, finite=True)


@transfer("bernoulli")
def bernoulli(op: CanonicalOp, facts: Facts) -> Result:
    """Random bits."""
    return algebra.binary(op.node.name, Origin.SPIKE)


@transfer("one_hot")
def one_hot(op: CanonicalOp, facts: Facts) -> Result:
    """Bits."""
    return algebra.binary(op.node.name, Origin.MASK)


@transfer("tril", "triu")
def triangle(op: CanonicalOp, facts: Facts) -> Result:
    """Part of the tensor becomes zero."""
    fact, nothing = facts.of(op.input), algebra.constant(0)
    if fact is None:
        return SparsityFact(None, None, origin=Origin.MASK, exact_zeros=True, source=op.node.name)
    joined = algebra.join((fact, nothing))
    return None if joined is None else replace(joined, exact_zeros=True)
