"""Operators that move elements without changing them."""

from sparsecomp.passes.facts.registry import Facts, Items, Lost, LostKind, Result, transfer
from sparsecomp.passes.graph.canonicalize import CanonicalOp, dtype_of
from sparsecomp.passes.graph.operators import Trait, spelled_as
from sparsecomp.reference import facts as algebra


@transfer(*spelled_as(Trait.MOVES))
def move(op: CanonicalOp, facts: Facts) -> Result:
    """The same elements in another place, order or number."""
    if op.reinterprets():
        return Lost(LostKind.UNSUPPORTED, "view as another dtype reinterprets the bits")
    return facts.of(op.input)


@transfer("repeat_interleave")
def repeat_interleave(op: CanonicalOp, facts: Facts) -> Result:
    """Elements repeated in place; of counts alone it makes indices."""
    if op.get("repeats") is None:
        return Lost(LostKind.UNSUPPORTED, "repeat_interleave of counts gives indices")
    return facts.of(op.input)


@transfer("getattr")
def attribute(op: CanonicalOp, facts: Facts) -> Result:
    """Transposes and `.data` hold the same elements; other attributes are not tensors."""
    return facts.of(op.input) if op.get("name") in ("T", "mT", "H", "mH", "data", "real") else None


@transfer("cat", "stack", "hstack", "vstack")
def concatenate(op: CanonicalOp, facts: Facts) -> Result:
    """Elements of every part."""
    parts = op.get("tensors")
    if not isinstance(parts, list | tuple):
        return None
    known = [facts.of(part) for part in parts]
    joined = algebra.join(known)
    if joined is None:
        if all(fact is None for fact in known):
            return None
        unknown = parts[known.index(None)]
        return Lost(LostKind.UNKNOWN_OPERAND, f"{op.name} with `{unknown}`, whose values are unknown, ends the domain")
    alike = len({dtype_of(part) for part in parts}) == 1
    # parts of different dtypes are promoted, which may round
    return joined if alike else algebra.fit_dtype(joined, dtype_of(op.node))


@transfer(*spelled_as(Trait.PARTS))
def divide(op: CanonicalOp, facts: Facts) -> Result:
    """A tuple of parts, all alike."""
    return Items(rest=facts.of(op.input))


@transfer("getitem")
def getitem(op: CanonicalOp, facts: Facts) -> Result:
    """An item of a tuple-valued result, or a part of a tensor."""
    value, index = facts.value(op.input), op.get("index")
    if not isinstance(value, Items):
        return value
    if not isinstance(index, int):
        return Lost(LostKind.UNSUPPORTED, "slicing a tuple of results is not analysed")
    fact = value.at(index)
    return facts.lost(op.input) if fact is None else fact
