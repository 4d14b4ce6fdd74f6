"""A batched product of two matrices, read off matmul, `@`, mm, bmm or einsum: its dimensions by letter."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters

from torch import fx

from sparsecomp.passes.graph.canonicalize import example_of, op_of, target_name

_EQUATION = re.compile(r"(?P<left>[A-Za-z.]+),(?P<right>[A-Za-z.]+)->(?P<result>[A-Za-z.]+)")


@dataclass(frozen=True, slots=True)
class BatchedProduct:
    """One letter is summed over, each operand has one of its own, and all others are of the batch.

    Attributes:
        node: what computes it.
        operands, terms: two nodes, and the letters of their dimensions.
        result: the letters of the result's.
        sizes: by letter; text where one is symbolic.
        einsum: it is spelled as one.
    """

    node: fx.Node
    operands: tuple[fx.Node, fx.Node]
    terms: tuple[str, str]
    result: str
    sizes: dict[str, int | str]
    einsum: bool

    @property
    def summed(self) -> str:
        """The letter that is summed over."""
        left, right = self.terms
        return next(letter for letter in left if letter in right and letter not in self.result)

    def own(self, index: int) -> str:
        """The letter that one operand has for itself."""
        return next(letter for letter in self.terms[index] if letter not in self.terms[1 - index])


def batched_product(node: fx.Node) -> BatchedProduct | None:
    """The product that a node computes; None where it is none, broadcasts, or a shape is unknown."""
    if target_name(node) == "einsum":
        return _of_einsum(node)
    op = op_of(node)
    if op is None or op.name != "matmul" or not op.known or op.inplace or op.out is not None:
        return None
    left, right = op.input, op.get("other")
    shapes = _shapes(left, right)
    if shapes is None or len(shapes[0]) < 2:
        return None
    batch = ascii_letters[: len(shapes[0]) - 2]
    return _checked(node, (left, right), (f"{batch}XY", f"{batch}YZ"), f"{batch}XZ", shapes, einsum=False)


def _of_einsum(node: fx.Node) -> BatchedProduct | None:
    equation, *rest = node.args
    operands = rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
    if not isinstance(equation, str) or len(operands) != 2 or node.kwargs:
        return None
    first, second = operands
    form, shapes = _EQUATION.fullmatch(equation.replace(" ", "")), _shapes(first, second)
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    if form is None or shapes is None:
        return None
    terms = (form["left"], form["right"], form["result"])
    if any(dots := ["..." in term for term in terms]):
        batch = len(shapes[0]) - len(terms[0].replace("...", ""))
        spare = "".join(letter for letter in ascii_letters if letter not in equation)
        if not all(dots) or not 0 <= batch <= len(spare):
            return None
        terms = tuple(term.replace("...", spare[:batch], 1) for term in terms)
    left, right, result = terms
    return _checked(node, (first, second), (left, right), result, shapes, einsum=True)


def _checked(
    node: fx.Node, operands: tuple[fx.Node, fx.Node], terms: tuple[str, str], result: str,
    shapes: tuple[Sequence[int | str], Sequence[int | str]], *, einsum: bool,
) -> BatchedProduct | None:  # fmt: skip
    left, right, out = map(set, (*terms, result))
    distinct = all(len(set(term)) == len(term) and term.isalpha() for term in (*terms, result))
    summed = (left & right) - out
    one_each = len(summed) == len(left - right) == len(right - left) == 1 and out == (left | right) - summed
    if not distinct or not one_each or any(len(term) != len(shape) for term, shape in zip(terms, shapes, strict=True)):
        return None
    sizes: dict[str, int | str] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for letter, size in zip(term, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return None  # one of the two is broadcast
    return BatchedProduct(node, operands, terms, result, sizes, einsum)


def _shapes(left: object, right: object) -> tuple[list[int | str], list[int | str]] | None:
    """The shapes of two nodes of equal rank; a symbolic size is its text, since to compare two adds a guard."""
    examples = [example_of(operand) for operand in (left, right) if isinstance(operand, fx.Node)]
    if len(examples) != 2 or any(example is None for example in examples):
        return None
    first, second = ([size if type(size) is int else str(size) for size in example.shape] for example in examples)
    return (first, second) if len(first) == len(second) else None
