"""How the sparse operators take a matrix: values, index arrays, and a `Layout` that says what these are.

A layout is by rows: a matrix stored by columns is the transpose of one stored by rows. Its format says in
`sparsecomp.formats` what its arrays mean. `csr`: pointers (rows + 1,) and indices (entries,), values (entries,).
`bsr`: the same of blocks, values (blocks, height, width). `nm`: indices (rows, groups · n) uint8, values alike.
`narrow`: starts and chunks (rows + 1,), bases (chunks,) and indices (entries,), values alike. `bitmap`: starts
(chunks + 1,) and heads (chunks, 320), values (entries,) in another order than by rows.

Behind a layout's own arrays a pattern may carry three more, which describe the transposed matrix: pointers, indices,
and which of the values each of its entries is. Whoever multiplies by the transpose more than once keeps them; an
operator that misses them computes them in each call. Who keeps them while somebody may write to the matrix's own arrays
keeps a fourth, `kept_transpose`, by which each product sees that, and makes the three anew in place.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.base import FORMATS, SparseMatrix
from sparsecomp.formats.indices import index_dtype_for, pointers_of, rows_of, spread_lines


class Layout(NamedTuple):
    """What a matrix's arrays are.

    Attributes:
        format: whose own layout it is: "csr", "bsr", "nm", "narrow", "bitmap".
        block: (height, width) of bsr, (n, m) of nm, (1, 1) of csr and narrow; of bitmap how many values a chunk has
            room for, 0 where that is not known and on which speed alone depends, and how many there are.
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
        return self.kind.padded(self.block, self.shape)

    @property
    def kind(self) -> type[SparseMatrix]:
        """The format's class.

        Raises:
            FormatError: no format has such a layout of its own.
        """
        return layout_kind(self.format)

    @property
    def entry(self) -> tuple[int, ...]:
        """Shape of an entry: (height, width), or nothing where entries are single elements."""
        return self.block if self.kind.BLOCKS else ()

    @property
    def plain(self) -> bool:
        """Whether its arrays are CSR's: torch's products and some kernels then take them as they are."""
        kind = self.kind
        return not kind.BLOCKS and kind.INDICES[0] == "pointers"

    @property
    def own(self) -> int:
        """How many of a pattern's arrays are the layout's own."""
        return len(self.kind.INDICES)

    def written(self) -> str:
        """As one argument of an operator, such as `"csr 1x1 512x256 even mixed"`: each one costs the host."""
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


def layout_kind(format: str) -> type[SparseMatrix]:
    """The format whose own layout has this name.

    Raises:
        FormatError: there is none.
    """
    kind = FORMATS.get(format.upper())
    if kind is None or format != kind.OPERAND:
        known = ", ".join(sorted({one.OPERAND for one in FORMATS.values()}))
        raise FormatError(f"format is {format!r}, needs one of {known}")
    return kind


def stored_by_rows(matrix: SparseMatrix) -> tuple[Tensor, tuple[Tensor, ...], Layout]:
    """Values, index arrays and layout of a matrix, or of its transpose if it is by columns; reads from the device."""
    values, arrays, block, shape = matrix.compact().by_rows()
    kind = layout_kind(matrix.OPERAND)
    skew = skew_of(arrays[0]) if kind.INDICES[0] == "pointers" else "even"
    return values, arrays, Layout(matrix.OPERAND, kind.measured_block(arrays, block), shape, (skew, "even"))


def layout_of(format: str, block: Sequence[int], shape: Sequence[int], skews: Sequence[str]) -> Layout:
    """The layout that an operator's arguments say.

    Raises:
        FormatError: block, shape or skews do not have two entries.
    """
    if len(block) != 2 or len(shape) != 2 or len(skews) != 2:
        raise FormatError(f"block {block}, shape {shape} and skews {skews} need two entries each")
    return Layout(format, (block[0], block[1]), (shape[0], shape[1]), (skews[0], skews[1]))


class CompressedArrays(NamedTuple):
    """A matrix by rows of entries or blocks: values (entries,) or (blocks, height, width), or a batch of these."""

    pointers: Tensor
    indices: Tensor
    values: Tensor
    shape: tuple[int, int]
    skew: str


def check_pattern(values: Tensor, pattern: Sequence[Tensor], layout: Layout) -> None:
    """Raise FormatError if arrays, values and layout do not belong together; looks at no contents."""
    kind = layout.kind
    own, dims = len(kind.INDICES), kind.VALUE_DIMS
    if len(pattern) not in (own, own + 3, own + 4):
        raise FormatError(
            f"the pattern has {len(pattern)} arrays, needs {own} of {layout.format}, or {own + 3} or {own + 4} with "
            "those of the transpose"
        )
    needed = kind.value_shape(pattern, layout.block, layout.shape)
    if values.dim() - dims not in (0, 1) or tuple(values.shape[values.dim() - dims :]) != needed:
        raise FormatError(f"values have shape {tuple(values.shape)}, need {needed}, or that with a batch in front")
    height = layout.block[0] if kind.BLOCKS else 1
    if kind.INDICES[0] == "pointers" and pattern[0].shape[0] != -(-layout.shape[0] // height) + 1:
        raise FormatError(
            f"{pattern[0].shape[0]} pointers do not fit {layout.shape[0]} rows of height {height}: one more than rows "
            "of entries is needed"
        )


def stored_shape(pattern: Sequence[Tensor], layout: Layout) -> tuple[int, ...]:
    """Shape of one matrix's values at a pattern's places."""
    return layout.kind.value_shape(pattern, layout.block, layout.shape)


def entry_count(pattern: Sequence[Tensor], layout: Layout) -> int:
    """How many elements or blocks the values of one matrix are."""
    shape = stored_shape(pattern, layout)
    return shape[0] if layout.entry else torch.Size(shape).numel()


def transposed_arrays(pattern: Sequence[Tensor], layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Pointers, indices and order of the transposed matrix: kept ones, or computed now.

    Whether kept ones are still the matrix's is seen here on a CPU only; on a GPU `lowering.sparse.transposed` sees it.
    """
    kept = guarded(pattern, layout)
    if kept is not None:
        own = pattern[: layout.own]
        if not kept[-1].is_cuda and not made_of(kept[-1], _compared(own, layout)):
            renew(kept, kept_transpose(own, layout))
        return kept[:3]
    if len(pattern) == layout.own + 3:
        return pattern[-3], pattern[-2], pattern[-1]
    pointers, indices = elements_of(pattern, layout)
    columns = _columns_of_entries(layout)
    first, last = torch.stack([pointers[0], pointers[-1]]).tolist()
    by_column = torch.sort(indices[first:last], stable=True)
    rows = rows_of(pointers - first, last - first, indices.dtype)
    # filler beyond the last column sorts last, and so does what somebody wrote there
    inside = slice(*torch.searchsorted(by_column.values, by_column.values.new_tensor([0, columns])).tolist())
    stored, order = by_column.values[inside], by_column.indices[inside]
    rows, order = rows.index_select(0, order), (order + first).to(index_dtype_for(indices.numel()))
    return pointers_of(stored, columns, indices.dtype), rows, order


def kept_transpose(own: Sequence[Tensor], layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`transposed_arrays` to be kept, and what they were made of; reads nothing from a GPU.

    There is room for as many entries as in the matrix's own arrays, whichever of these are spare or filler. The last
    array is a copy of pointers and indices, or of N:M's indices, flat, and two numbers that a kernel counts with, 0
    between its launches.
    """
    pointers, indices = elements_of(own, layout)
    columns = _columns_of_entries(layout)
    place = torch.arange(indices.numel(), dtype=pointers.dtype, device=indices.device)
    # spare entries and filler sort behind the last column, and so does what somebody wrote there
    stored = (place >= pointers[0]) & (place < pointers[-1]) & (indices >= 0) & (indices < columns)
    by_column = indices.where(stored, columns).sort(stable=True)
    edges = torch.searchsorted(by_column.values, torch.arange(columns + 1, dtype=indices.dtype, device=indices.device))
    spare = by_column.values == columns
    rows = spread_lines(pointers, indices.numel()).to(indices.dtype)[by_column.indices].masked_fill_(spare, 0)
    order = by_column.indices.to(index_dtype_for(indices.numel())).masked_fill_(spare, 0)
    copies = [array.flatten().to(pointers.dtype) for array in _compared(own, layout)]
    return edges.to(indices.dtype), rows, order, torch.cat([*copies, pointers.new_zeros(2)])


def _compared(own: Sequence[Tensor], layout: Layout) -> Sequence[Tensor]:
    """What tells whether a kept transpose still is the matrix's; its kernels take formats of other arrays as CSR."""
    return own if len(own) == 1 else elements_of(own, layout)


def _columns_of_entries(layout: Layout) -> int:
    """Columns, or of blocks how many lie side by side."""
    return layout.padded_shape[1] // layout.entry[1] if layout.entry else layout.shape[1]


def guarded(pattern: Sequence[Tensor], layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The arrays of `kept_transpose` in a pattern; None where there are none, or of another number of entries."""
    if len(pattern) != layout.own + 4 or pattern[-2].numel() != entry_count(pattern, layout):
        return None
    return pattern[-4], pattern[-3], pattern[-2], pattern[-1]


def made_of(source: Tensor, own: Sequence[Tensor]) -> bool:
    """Whether what is kept beside this source was made of such arrays; waits for the device."""
    parts = source[:-2].split([array.numel() for array in own])
    return all(torch.equal(part, array.flatten().to(part.dtype)) for part, array in zip(parts, own, strict=True))


def renew(kept: Sequence[Tensor], fresh: Sequence[Tensor]) -> None:
    """Write to kept arrays in place, whoever made them and whatever records writes."""
    with torch.inference_mode():  # which lets everybody's tensors be written to
        for array, new in zip(kept, fresh, strict=True):
            array.data.copy_(new)


def elements_of(pattern: Sequence[Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
    """Pointers, and the column of each element or block; elements that are filler may lie beyond the last column."""
    return layout.kind.entries(pattern, layout.block, layout.shape)


def compressed(values: Tensor, pattern: Sequence[Tensor], layout: Layout, transpose: bool) -> CompressedArrays:
    """The matrix, or its transpose, by rows of entries; filler may lie beyond the last column of the matrix itself."""
    rows, cols = layout.shape
    kind = layout.kind
    entry = 2 if kind.BLOCKS else 0
    flat = values.flatten(-kind.VALUE_DIMS, -1 - entry)
    if not kind.ORDERED:
        flat, pattern, layout = ordered_by_rows(flat, pattern, layout)
    if not transpose:
        found = layout.kind.entries(pattern, layout.block, layout.shape)
        return CompressedArrays(*found, flat, layout.shape, layout.skews[0])
    pointers, indices, order = transposed_arrays(pattern, layout)
    entries = flat.index_select(flat.dim() - 1 - entry, order)
    entries = entries.mT if entry else entries
    return CompressedArrays(pointers, indices, entries, (cols, rows), layout.skews[1])


def ordered_by_rows(
    values: Tensor, pattern: Sequence[Tensor], layout: Layout
) -> tuple[Tensor, list[Tensor], Layout]:  # fmt: skip
    """The same matrix in CSR where its values lie in another order; what is kept of its transpose stays."""
    if layout.kind.ORDERED:
        return values, list(pattern), layout
    pointers, columns, order = layout.kind.ordered_entries(pattern, layout.block, layout.shape)
    assert order is not None
    plain = layout._replace(format="csr", block=(1, 1))
    return values.index_select(-1, order), [pointers, columns, *pattern[layout.own :]], plain


def skew_of(pointers: Tensor) -> str:
    """How uneven rows are, for `Layout.skews`; reads from the device."""
    return skew_of_counts(pointers.diff())


def skew_of_counts(counts: Tensor) -> str:
    """`skew_of` for rows of so many entries."""
    if not counts.numel():
        return "even"
    counts = counts.double()
    mean, deviation = torch.stack([counts.mean(), counts.std(correction=0)]).tolist()
    return evenness(deviation / mean if mean else 0.0)


_EVENNESS = {"even": 0.5, "mixed": 2, "skewed": 16}


def evenness(variation: float) -> str:
    """How uneven rows are whose entries have this deviation over mean: even, mixed, skewed or extreme."""
    return next((name for name, below in _EVENNESS.items() if variation < below), "extreme")
