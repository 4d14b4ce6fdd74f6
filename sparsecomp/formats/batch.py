"""Several matrices as one: with one shared pattern, or of any patterns and shapes along a diagonal."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sparsecomp.errors import FormatError
from sparsecomp.formats.base import Matrix, SparseMatrix
from sparsecomp.formats.coo import COO
from sparsecomp.formats.csr import CSR
from sparsecomp.formats.reductions import axis_of
from sparsecomp.formats.triplets import Triplets, coalesced


def stack(matrices: Sequence[Matrix]) -> Matrix:
    """One matrix with a batch dimension from matrices of one format and one pattern; `unbatch` takes it apart.

    Args:
        matrices: at least one, without a batch dimension, equal in everything but their values.

    Raises:
        FormatError: they differ (`ragged` takes other patterns), or there are none.
    """
    first, *others = _checked([matrix.compact() for matrix in matrices])
    for place, other in enumerate(others, 1):
        for what in ("shape", "layout", "dtype", "index_dtype"):
            one, two = getattr(first, what), getattr(other, what)
            if one != two:
                raise FormatError(f"{what} of matrix 0 is {one}, of matrix {place} {two}: they need the same")
        pairs = [(first.arrays[name], other.arrays[name]) for name in first.ARRAYS if name != "values"]
        if type(first) is not type(other) or not all(torch.equal(one, two) for one, two in pairs):
            raise FormatError(f"matrix {place} has another format or pattern than matrix 0: use ragged")
    return first.with_values(torch.stack([first.values, *(other.values for other in others)]))


def cat(matrices: Sequence[Matrix], dim: int = 0) -> Matrix:
    """Matrices below one another (`dim` 0) or side by side (1), in the format and layout of the first.

    Args:
        matrices: at least one, without a batch dimension, of one dtype and device, as wide or as high as the first.
        dim: 0, 1, -1 or -2.

    Raises:
        FormatError: they do not fit one another, there are none, or the whole does not fit the format.
    """
    axis, first = axis_of(dim), _checked(matrices)[0]
    position: list[list[torch.Tensor]] = [[], []]
    values, size = [], 0
    for place, matrix in enumerate(matrices):
        if matrix.shape[1 - axis] != first.shape[1 - axis] or matrix.dtype != first.dtype:
            raise FormatError(f"matrix {place} is {matrix!r}, matrix 0 {first!r}: they differ beyond dimension {axis}")
        found = matrix._terms()
        for other, index in enumerate((found.row.long(), found.col.long())):
            position[other].append(index + size if other == axis else index)
        values.append(found.values)
        size += matrix.shape[axis]
    shape = (size, first.shape[1]) if axis == 0 else (first.shape[0], size)
    whole = coalesced(torch.cat(position[0]), torch.cat(position[1]), torch.cat(values), shape)
    return type(first)._from_triplets(whole, None, first.index_dtype, **first.layout)


class Ragged(NamedTuple):
    """Matrices of any shapes and patterns as the diagonal of one.

    A product with the whole is all products at once, on right-hand sides laid one below the other.

    Attributes:
        matrix: the block-diagonal matrix.
        shapes: rows and columns of each.
    """

    matrix: SparseMatrix
    shapes: tuple[tuple[int, int], ...]

    def unbatch(self) -> list[SparseMatrix]:
        """The single matrices, in the format of the whole; reads two offsets a matrix from the device, at once."""
        whole = self.matrix.to(COO)
        rows, cols = [0], [0]
        for height, width in self.shapes:
            rows.append(rows[-1] + height)
            cols.append(cols[-1] + width)
        edges = torch.tensor(rows, dtype=whole.row.dtype, device=whole.device)
        places = torch.searchsorted(whole.row, edges).tolist()
        singles = []
        for item, shape in enumerate(self.shapes):
            own = slice(places[item], places[item + 1])
            row, col = whole.row[own] - rows[item], whole.col[own] - cols[item]
            singles.append(COO(row, col, whole.values[own], shape).to(type(self.matrix), **self.matrix.layout))
        return singles


def ragged(matrices: Sequence[SparseMatrix], target: type[SparseMatrix] = CSR, **layout: Any) -> Ragged:
    """Matrices of any formats, shapes and patterns along the diagonal of one.

    Args:
        matrices: at least one, without a batch dimension, of one dtype and device.
        target: format of the whole; its blocks may span two matrices.
        layout: as for `SparseMatrix.to`.

    Raises:
        FormatError: dtypes or devices differ, there are none, or the whole does not fit `target`.
    """
    parts = [matrix.to(COO) for matrix in _checked(matrices)]
    if len({part.dtype for part in parts}) > 1:
        raise FormatError(f"dtypes are {[part.dtype for part in parts]}: convert to one")
    row, col, height, width = [], [], 0, 0
    for part in parts:
        row.append(part.row.long() + height)
        col.append(part.col.long() + width)
        height, width = height + part.shape[0], width + part.shape[1]
    values = torch.cat([part.values for part in parts])
    whole = COO._from_triplets(Triplets(torch.cat(row), torch.cat(col), values, (height, width)), None, torch.int32)
    return Ragged(whole.to(target, **layout), tuple(part.shape for part in parts))


def _checked(matrices: Sequence[Matrix]) -> Sequence[Matrix]:
    if not matrices:
        raise FormatError("no matrices were given, needs at least one")
    for place, matrix in enumerate(matrices):
        if matrix.batch is not None:
            raise FormatError(f"matrix {place} is a batch of {matrix.batch}: unbatch it first")
        if matrix.device != matrices[0].device:
            raise FormatError(f"matrix {place} is on {matrix.device}, matrix 0 on {matrices[0].device}: move one")
    return matrices
