"""Which format suits a matrix, by what a product moves in each, and why.

An estimate counts bytes: the arrays, the rows of the dense operand that are fetched, and the result. What is fetched
depends on the format: CSR fetches one row for each element, blocks one for each of their columns, shared by the rows of
the block, and N:M all columns of its groups, shared by the rows of a kernel's tile. It holds for any card;
`passes/cost` weighs single kernels on a given one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.base import SparseMatrix
from sparsecomp.formats.bsr import BSR
from sparsecomp.formats.csr import CSR
from sparsecomp.formats.indices import index_dtype_for
from sparsecomp.formats.nm import NM
from sparsecomp.formats.statistics import Statistics

BLOCKS = (4, 8, 16, 32, 64)
"""Heights and widths of the blocks that are tried."""
GROUPS = (4, 8, 16)
"""Columns of the groups that are tried."""
_TILE = 64
"""Rows of a tile of the kernel for N:M."""
_FULL = 0.5
"""Least share of elements in what a format stores: kernels multiply its filler like anything else."""


@dataclass(frozen=True)
class Estimate:
    """What a matrix takes in a format.

    Attributes:
        format: the class; None for a dense tensor.
        layout: block, or n and m.
        nbytes: of the arrays.
        moved: bytes that a product moves.
        full: share of elements in what is stored, the rest being filler.
        why: what of the matrix decides it.
    """

    format: type[SparseMatrix] | None
    layout: dict[str, Any]
    nbytes: int
    moved: int
    full: float
    why: str

    def __str__(self) -> str:
        layout = "".join(f" {name} {value}" for name, value in self.layout.items())
        return f"{self.name}{layout}: {self.nbytes} bytes stored, {self.moved} moved; {self.why}"

    @property
    def name(self) -> str:
        """Of the format."""
        return "dense" if self.format is None else self.format.__name__


@dataclass(frozen=True)
class BestFormat:
    """The format that moves the fewest bytes of those at least half full, or none.

    ``matrix.to(best.format, **best.layout)``, unless ``best.format`` is None: then keep the matrix dense.

    Attributes:
        format: the class; None where the dense tensor takes no more bytes than the best of them.
        layout: block, or n and m.
        reasons: for the choice, and against what was not tried.
        estimates: of every format that was tried, the choice first, those with more filler than elements last.
        statistics: of the matrix.
    """

    format: type[SparseMatrix] | None
    layout: dict[str, Any]
    reasons: tuple[str, ...]
    estimates: tuple[Estimate, ...]
    statistics: Statistics

    def __str__(self) -> str:
        return "\n".join((*map(str, self.estimates), *self.reasons))


def best(matrix: SparseMatrix | Tensor, columns: int = 64) -> BestFormat:
    """The format, at least half full of elements, of fewest bytes moved in a product with a dense (k, `columns`).

    Reads from the device.

    Args:
        matrix: in any format, or dense.
        columns: of the product, 1 or more.

    Raises:
        FormatError: no matrix, one on the meta device, or a number of columns that is none.
    """
    matrix = matrix if isinstance(matrix, SparseMatrix) else CSR.from_torch(matrix)
    if matrix.values.is_meta:
        raise FormatError(f"{matrix!r} has no numbers to look at: give one on another device")
    if type(columns) is not int or columns < 1:
        raise FormatError(f"columns is {columns!r}, needs an int of 1 or more")
    row, col, _, _ = matrix._triplets()
    row, col = row.long(), col.long()
    groups = [_grouped(matrix, row, col, m, columns) for m in GROUPS if m <= matrix.shape[1]]
    tried = [_by_elements(matrix, row.numel(), columns)]
    if row.numel():
        tried += [_by_blocks(matrix, row, col, size, columns) for size in BLOCKS if size <= min(matrix.shape)]
    tried += [one for one in groups if isinstance(one, Estimate)]
    tried.sort(key=lambda one: (one.full < _FULL, one.moved))
    dense = _whole(matrix, row.numel(), columns)
    if tried[0].nbytes >= dense.nbytes:
        tried.insert(0, dense)
    first, *others = tried
    reasons = [f"{first.name}: {first.why}", *(_behind(first, one) for one in others[:1])]
    reasons += [one for one in groups if isinstance(one, str)]
    return BestFormat(first.format, first.layout, tuple(reasons), tuple(tried), matrix.statistics())


def _behind(first: Estimate, other: Estimate) -> str:
    """Why the second best is not the best."""
    if first.format is None:
        return f"the best format, {other.name}, stores {other.nbytes / max(first.nbytes, 1):.2f} times as much"
    if other.full < _FULL:
        return f"the next, {other.name}, is {other.full:.1%} full and would multiply more filler than elements"
    return f"the next, {other.name}, moves {other.moved / max(first.moved, 1):.2f} times as much"


def _estimate(
    matrix: SparseMatrix, format: type[SparseMatrix] | None, layout: dict[str, Any], values: int, index_bytes: int,
    fetched: int, columns: int, full: float, why: str,
) -> Estimate:  # fmt: skip
    size = matrix.dtype.itemsize
    nbytes = values * size * (1 if matrix.batch is None else matrix.batch) + index_bytes
    moved = nbytes + (fetched + matrix.shape[0]) * columns * size
    return Estimate(format, layout, nbytes, moved, full, f"{why}, {full:.1%} full")


def _whole(matrix: SparseMatrix, nnz: int, columns: int) -> Estimate:
    rows, cols = matrix.shape
    why = "keep it dense, which stores no more bytes than any format"
    fetched = -(-rows // _TILE) * cols
    return _estimate(matrix, None, {}, rows * cols, 0, fetched, columns, nnz / max(rows * cols, 1), why)


def _by_elements(matrix: SparseMatrix, nnz: int, columns: int) -> Estimate:
    rows, cols = matrix.shape
    index = index_dtype_for(rows, cols, nnz).itemsize
    share = nnz / max(rows * cols, 1)
    why = f"{nnz} elements, {share:.1%} of the matrix"
    return _estimate(matrix, CSR, {}, nnz, (nnz + rows + 1) * index, nnz, columns, 1.0, why)


def _by_blocks(matrix: SparseMatrix, row: Tensor, col: Tensor, size: int, columns: int) -> Estimate:
    lines, across = (-(-length // size) for length in matrix.shape)
    blocks = int(torch.unique(row // size * across + col // size).numel())
    values = blocks * size * size
    index = index_dtype_for(*matrix.shape, values).itemsize
    occupied = row.numel() / max(values, 1)
    return _estimate(
        matrix, BSR, {"block": (size, size)}, values, (blocks + lines + 1) * index, blocks * size, columns,
        occupied, f"{blocks} blocks of {size}x{size}",
    )  # fmt: skip


def _grouped(matrix: SparseMatrix, row: Tensor, col: Tensor, m: int, columns: int) -> Estimate | str:
    """The estimate for N:M with groups of `m`, or why it is none."""
    rows, cols = matrix.shape
    groups = -(-cols // m)
    counts = torch.unique(row * groups + col // m, return_counts=True)[1]
    most = int(counts.max()) if counts.numel() else 0
    if not 0 < most <= m // 2:
        return f"no N:{m}: " + ("nothing is stored" if not most else f"a group of {m} columns holds {most}")
    slots, fetched = rows * groups * most, -(-rows // _TILE) * groups * m
    return _estimate(
        matrix, NM, {"n": most, "m": m}, slots, slots, fetched, columns,
        row.numel() / slots, f"no group of {m} columns holds more than {most}",
    )  # fmt: skip
