"""Reductions and matrix products."""

import math
from typing import Any

import torch
from torch import fx

from sparsecomp.passes.facts.registry import Facts, Items, Kept, Lost, LostKind, Result, transfer
from sparsecomp.passes.facts.transfer.pointwise import cast, either, relu_of_unknown
from sparsecomp.passes.facts.transfer.pooling import average, sum_of
from sparsecomp.passes.graph.canonicalize import CanonicalOp, dtype_of, shape_of
from sparsecomp.passes.graph.operators import OWN_PRODUCTS
from sparsecomp.reference import facts as algebra
from sparsecomp.reference.facts import SparsityFact

_REDUCED_PRECISION_EXACT = 256
"""Integers up to here survive bfloat16 and TF32 rounding of a product's operands, whatever precision is switched on."""


@transfer("mean")
def mean(op: CanonicalOp, facts: Facts) -> Result:
    """The average over known dimensions."""
    fact = _addend(op, facts)
    return average(op, fact, _reduced_size(op)) if isinstance(fact, SparsityFact) else fact


@transfer("sum")
def total(op: CanonicalOp, facts: Facts) -> Result:
    """Intervals times the number of elements."""
    fact, count = _addend(op, facts), _reduced_size(op)
    if not isinstance(fact, SparsityFact):
        return fact
    summed = sum_of(fact, count) if count is not None and fact.on_grid else None
    if summed is not None:
        return algebra.fit_dtype(summed, dtype_of(op.node))
    lo = 0 if fact.non_negative and (dtype := dtype_of(op.node)) is not None and dtype.is_floating_point else None
    kept = SparsityFact(lo, None, origin=fact.origin, exact_zeros=fact.exact_zeros, source=fact.source)
    return Kept(kept, Lost(LostKind.MIXES, "sum over an unknown or too large number of elements ends the domain"))


def _addend(op: CanonicalOp, facts: Facts) -> SparsityFact | Lost | None:
    """The fact of the elements that are added: with `dtype`, they are converted first."""
    fact, dtype = facts.of(op.input), op.get("dtype")
    return fact if fact is None or dtype is None else cast(fact, dtype_of(op.input), dtype)


def _reduced_size(op: CanonicalOp) -> int | None:
    """How many elements one result element covers."""
    shape, dims = shape_of(op.input), op.get("dim")
    if shape is None:
        return None
    if dims is None or dims == () or dims == []:
        chosen = list(range(len(shape)))
    elif isinstance(dims, int):
        chosen = [dims]
    elif isinstance(dims, tuple | list) and all(isinstance(dim, int) for dim in dims):
        chosen = list(dims)
    else:
        return None
    sizes = [shape[dim] for dim in chosen] if shape else [1]
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


@transfer("max", "min", "amax", "amin")
def extremum(op: CanonicalOp, facts: Facts) -> Result:
    """Picks elements; `max(x, dim)` also gives indices and `max(x, y)` compares two tensors."""
    fact, dim = facts.of(op.input), op.get("dim")
    if isinstance(dim, fx.Node):
        return either(op, facts, op.input, dim)
    if op.name.startswith("a") or dim is None:
        return fact
    return Items((fact,))


@transfer("argmax", "argmin")
def arg_extremum(op: CanonicalOp, facts: Facts) -> Result:
    """Indices."""
    return Lost(LostKind.UNSUPPORTED, f"{op.name} gives indices")


@transfer("cumsum")
def cumsum(op: CanonicalOp, facts: Facts) -> Result:
    """Partial sums reach from zero elements to all of the dimension."""
    fact, shape, dim = _addend(op, facts), shape_of(op.input), op.get("dim")
    if not isinstance(fact, SparsityFact):
        return fact
    size = shape[dim] if shape and isinstance(dim, int) else None
    summed = sum_of(fact, size) if size and fact.on_grid else None
    joined = algebra.join((summed, fact)) if summed is not None else None
    return None if joined is None else algebra.fit_dtype(joined, dtype_of(op.node))


@transfer("matmul")
def matmul(op: CanonicalOp, facts: Facts) -> Result:
    """Spikes times spikes count coincidences: 0 … d. With a dense operand the domain ends."""
    a, b = facts.of(op.input), facts.of(op.get("other"))
    if a is None and b is None:
        return None
    if a is None or b is None or not (_countable(a) and _countable(b)):
        return mixes(op, facts)
    depth = _contracted_size(op.input)
    product = algebra.multiply_facts(a, b, torch.float64)
    if depth is None or product is None or not product.integral:
        return Lost(LostKind.MIXES, "matmul over an unknown number of elements ends the domain")
    summed = sum_of(product, depth)
    return mixes(op, facts) if summed is None else algebra.fit_dtype(summed, dtype_of(op.node))


def _countable(fact: SparsityFact) -> bool:
    return fact.on_grid and fact.within(-_REDUCED_PRECISION_EXACT, _REDUCED_PRECISION_EXACT)


def _contracted_size(left: Any) -> int | None:
    shape = shape_of(left)
    return shape[-1] if shape else None


@transfer(
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "addmm", "baddbmm", "scaled_dot_product_attention", "bilinear", "embedding",
)  # fmt: skip
def mixes(op: CanonicalOp, facts: Facts) -> Result:
    """Weights mix values."""
    return Lost(LostKind.MIXES, f"{op.name} ends the domain: it mixes values through weights")


@transfer(*OWN_PRODUCTS)
def own_product(op: CanonicalOp, facts: Facts) -> Result:
    """Our products mix values as torch's do; what follows them within is an activation."""
    names = [argument.name for argument in op.node.target._schema.arguments]  # pyright: ignore
    given = {**dict(zip(names, op.node.args, strict=False)), **op.node.kwargs}
    fuses_relu = op.name.endswith("_relu") or given.get("activation") == "relu"
    return relu_of_unknown(op) if fuses_relu else mixes(op, facts)
