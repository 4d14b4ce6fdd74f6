"""How the sparse operators take a matrix: values, index arrays, and a `Layout` that says what these are.

Operators know three layouts, by rows. ``csr``: pointers (rows + 1,) and indices (entries,), values (entries,).
``bsr``: the same of blocks, values (blocks, height, width). ``nm``: indices (rows, groups · n) uint8, values alike. A
matrix stored by columns is the transpose of one stored by rows.

Behind a layout's own arrays a pattern may carry three more, which describe the transposed matrix: pointers, indices,
and which of the values each of its entries is. Whoever multiplies by the transpose more than once keeps them; an
operator that misses them computes them in each call.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.indices import index_dtype_for, pointers_of, rows_of

OWN_ARRAYS = {"csr": 2, "bsr": 2, "nm": 1}
VALUE_DIMS = {"csr": 1, "bsr": 3, "nm": 2}


class Layout(NamedTuple):
    """What a matrix's arrays are.

    Attributes:
        format: "csr", "bsr" or "nm".
        block: (height, width) of bsr, (n, m) of nm, (1, 1) of csr.
        shape: rows and columns.
        skews: how uneven the rows are, and the columns: "even", "mixed", "skewed" or "extreme", for entries (or blocks)
            a row whose deviation over mean is below 0.5, below 2, below 16, or above. Only speed depends on it.
    """

    format: str
    block: tuple[int, int]
    shape: tuple[int, int]
    skews: tuple[str, str] = ("even", "even")

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Shape by rows, rounded up to whole blocks or groups."""
        (rows, cols), (height, width) = self.shape, self.block
        return rows + (-rows % height if self.format == "bsr" else 0), cols + -cols % width

    def written(self) -> str:
        """As one argument of an operator, such as ``"csr 1x1 512x256 even mixed"``: each one costs the host."""
        return f"{self.format} {_pair(self.block)} {_pair(self.shape)} {' '.join(self.skews)}"

    @staticmethod
    @lru_cache(maxsize=8192)
    def read(text: str) -> "Layout":
        """What was written.

        Raises:
            FormatError: nothing that `written` returns.
        """
        try:
            format, block, shape, *skews = text.split(" ")
            height, width, rows, cols = map(int, (*block.split("x"), *shape.split("x")))
            first, second = skews
        except ValueError as error:
            raise FormatError(f"{text!r} describes no layout: give what Layout.written() returns") from error
        return Layout(format, (height, width), (rows, cols), (first, second))


def _pair(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]}x{sizes[1]}"


def layout_of(format: str, block: Sequence[int], shape: Sequence[int], skews: Sequence[str]) -> Layout:
    """The layout that an operator's arguments say.

    Raises:
        FormatError: block, shape or skews do not have two entries.
    """
    if len(block) != 2 or len(shape) != 2 or len(skews) != 2:
        raise FormatError(f"block {block}, shape {shape} and skews {skews} need two entries each")
    return Layout(format, (block[0], block[1]), (shape[0], shape[1]), (skews[0], skews[1]))


class Compressed(NamedTuple):
    """A matrix by rows of entries or blocks: values (entries,) or (blocks, height, width), or a batch of these."""

    pointers: Tensor
    indices: Tensor
    values: Tensor
    shape: tuple[int, int]
    skew: str


def check_pattern(values: Tensor, pattern: Sequence[Tensor], layout: Layout) -> None:
    """Raise FormatError if arrays, values and layout do not belong together; looks at no contents."""
    if layout.format not in OWN_ARRAYS:
        raise FormatError(f"format is {layout.format!r}, needs one of {', '.join(OWN_ARRAYS)}")
    own, dims = OWN_ARRAYS[layout.format], VALUE_DIMS[layout.format]
    if len(pattern) not in (own, own + 3):
        raise FormatError(
            f"the pattern has {len(pattern)} arrays, needs {own} of {layout.format}, or {own + 3} with the transpose's"
        )
    needed = _value_shape(pattern, layout)
    if values.dim() - dims not in (0, 1) or tuple(values.shape[values.dim() - dims :]) != needed:
        raise FormatError(f"values have shape {tuple(values.shape)}, need {needed}, or that with a batch in front")
    if own == 2 and pattern[0].shape[0] != -(-layout.shape[0] // layout.block[0]) + 1:
        raise FormatError(
            f"{pattern[0].shape[0]} pointers do not fit {layout.shape[0]} rows of height {layout.block[0]}: one more "
            "than rows of entries is needed"
        )


def _value_shape(pattern: Sequence[Tensor], layout: Layout) -> tuple[int, ...]:
    if layout.format == "nm":
        n, m = layout.block
        return layout.shape[0], -(-layout.shape[1] // m) * n
    return stored_shape(pattern, layout)


def stored_shape(pattern: Sequence[Tensor], layout: Layout) -> tuple[int, ...]:
    """Shape of one matrix's values at a pattern's places."""
    if layout.format == "nm":
        return tuple(pattern[0].shape)
    return (pattern[1].shape[0], *(layout.block if layout.format == "bsr" else ()))


def transposed_arrays(pattern: Sequence[Tensor], layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Pointers, indices and order of the transposed matrix: kept ones, or computed now."""
    kept = pattern[OWN_ARRAYS[layout.format] :]
    if kept:
        return kept[0], kept[1], kept[2]
    pointers, indices = elements_of(pattern, layout)[:2] if layout.format == "nm" else pattern[:2]
    columns = -(-layout.shape[1] // layout.block[1]) if layout.format == "bsr" else layout.shape[1]
    first, last = torch.stack([pointers[0], pointers[-1]]).tolist()
    by_column = torch.sort(indices[first:last], stable=True)
    rows = rows_of(pointers - first, last - first, indices.dtype)
    order = by_column.indices + first
    stored = by_column.values
    if layout.format == "nm" and layout.shape[1] % layout.block[1]:
        inside = int((stored < columns).sum())  # filler beyond the last column sorts last
        stored, order = stored[:inside], order[:inside]
    order = order.to(index_dtype_for(indices.numel()))
    return pointers_of(stored, columns, indices.dtype), rows.index_select(0, by_column.indices[: order.numel()]), order


def elements_of(pattern: Sequence[Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
    """Pointers and columns, int32, of each element of an nm matrix; filler may lie beyond the last column."""
    indices, (rows, _), (n, m) = pattern[0], layout.shape, layout.block
    dtype = index_dtype_for(indices.numel(), layout.shape[1] + m)
    starts = torch.arange(indices.shape[1] // n, dtype=dtype, device=indices.device).repeat_interleave(n) * m
    pointers = torch.arange(rows + 1, dtype=dtype, device=indices.device) * indices.shape[1]
    return pointers, (indices.to(dtype) + starts).flatten()


def compressed(values: Tensor, pattern: Sequence[Tensor], layout: Layout, transpose: bool) -> Compressed:
    """The matrix, or its transpose, by rows; not for nm as it is."""
    rows, cols = layout.shape
    if not transpose:
        return Compressed(pattern[0], pattern[1], values, layout.shape, layout.skews[0])
    pointers, indices, order = transposed_arrays(pattern, layout)
    flat = values.flatten(-2) if layout.format == "nm" else values
    entries = flat.index_select(flat.dim() - (3 if layout.format == "bsr" else 1), order)
    entries = entries.mT if layout.format == "bsr" else entries
    return Compressed(pointers, indices, entries, (cols, rows), layout.skews[1])


def skew_of(pointers: Tensor) -> str:
    """How uneven rows are, for `Layout.skews`; reads from the device."""
    counts = pointers.diff().double()
    if not counts.numel():
        return "even"
    mean, deviation = torch.stack([counts.mean(), counts.std(correction=0)]).tolist()
    return evenness(deviation / mean if mean else 0.0)


_EVENNESS = {"even": 0.5, "mixed": 2, "skewed": 16}


def evenness(variation: float) -> str:
    """How uneven rows are whose entries have this deviation over mean: even, mixed, skewed or extreme."""
    return next((name for name, below in _EVENNESS.items() if variation < below), "extreme")
