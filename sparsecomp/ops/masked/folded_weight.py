"""Weights that are a formula of other tensors, such as mask * weight: computed in each call, or once and kept."""

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor, fx

from sparsecomp.errors import FormatError
from sparsecomp.formats import CSR
from sparsecomp.reference.memo import MEMO, Keep
from sparsecomp.reference.patterns import Layout, layout_kind, stored_by_rows

_FORMULAS: dict[str, Callable[..., Tensor]] = {}


def formula(gm: fx.GraphModule) -> str:
    """A name for the function that a graph without attributes computes, the same in every process."""
    return named_formula(hashlib.sha256(gm.code.encode()).hexdigest()[:16], gm.forward)


def named_formula(name: str, function: Callable[..., Tensor]) -> str:
    """Have `name`, which stands for nothing else, mean a function of the sources; returns it."""
    _FORMULAS[name] = function
    return name


def named(name: str) -> Callable[..., Tensor]:
    """The function of the sources that a name means.

    Raises:
        FormatError: no graph of this process has that formula.
    """
    if name not in _FORMULAS:
        raise FormatError(f"formula {name!r} is unknown in this process: compile the model here")
    return _FORMULAS[name]


def computed(sources: Sequence[Tensor], name: str) -> Tensor:
    """What the formula of that name gives.

    Raises:
        FormatError: as in `named`.
    """
    with torch.no_grad():
        return named(name)(*sources)


class Packed(NamedTuple):
    """A weight as a product takes it.

    Attributes:
        values: (rows, columns) or a convolution's, if dense; else the stored values.
        pattern: index arrays; see `sparsecomp.reference.patterns`.
        layout: of a sparse matrix, None if dense.
    """

    values: Tensor
    pattern: tuple[Tensor, ...] = ()
    layout: Layout | None = None


def packed(weight: Tensor, format: str, block: tuple[int, int]) -> Packed:
    """A weight in a format: "dense", "csr", "bsr" of this (height, width) or "nm" of this (n, m).

    A weight that does not keep to the n of N:M becomes CSR: the sources may have changed since the format was chosen.

    Raises:
        FormatError: another format, or no matrix.
    """
    if format == "dense":
        return Packed(weight)
    kind = layout_kind(format)
    try:
        matrix = kind.from_dense(weight, **kind.layout_of(block))
    except FormatError:
        if not kind.FILLED:
            raise
        matrix = CSR.from_dense(weight)
    return Packed(*stored_by_rows(matrix))


class Folded(NamedTuple):
    """The function of the sources that gives a weight as a product takes it.

    Attributes:
        formula: from `formula`.
        format, block: as in `packed`.
    """

    formula: str
    format: str = "dense"
    block: tuple[int, int] = (1, 1)

    def __call__(self, *sources: Tensor) -> Packed:
        return packed(computed(sources, self.formula), self.format, self.block)


class Recipe(NamedTuple):
    """How an operator gets its weight, in one argument: each one that an operator has costs the host half a
    microsecond a call.

    Attributes:
        keep: when the folded weight is kept; else the formula is computed.
    """

    folded: Folded
    keep: Keep

    def written(self) -> str:
        """As the operator's argument."""
        formula, format, block = self.folded
        return f"{formula} {format} {block[0]}x{block[1]} {self.keep}"

    @staticmethod
    @lru_cache(maxsize=8192)
    def read(text: str) -> "Recipe":
        """What was written."""
        formula, format, block, keep = text.rsplit(" ", 3)
        height, width = map(int, block.split("x"))
        return Recipe(Folded(formula, format, (height, width)), cast(Keep, keep))


def weight_of(sources: Sequence[Tensor], recipe: str) -> Packed:
    """What a written `Recipe` gives: packed if it is kept, else dense; safe to read on the current stream.

    Raises:
        FrozenWeightError: a source was written to; see `sparsecomp.reference.memo.Memo.kept`.
    """
    folded, keep = Recipe.read(recipe)
    kept = MEMO.kept(folded, sources, keep)
    return Packed(computed(sources, folded.formula)) if kept is None else kept
