"""Which format suits a matrix, by what a product moves in each, and why.

An estimate counts bytes: the arrays, the rows of the dense operand that are fetched, and the result. What is fetched
depends on the format: CSR fetches one row for each element, blocks one for each of their columns, shared by the rows of
the block, and N:M all columns of its groups, shared by the rows of a kernel's tile. It holds for any card;
`passes/cost` weighs single kernels on a given one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.base import SparseMatrix
from sparsecomp.formats.bsr import BSR
from sparsecomp.formats.csr import CSR
from sparsecomp.formats.indices import index_dtype_for
from sparsecomp.formats.nm import NM
from sparsecomp.formats.operand import Block, Shape
from sparsecomp.formats.statistics import Statistics

BLOCKS = (4, 8, 16, 32, 64)
"""Heights and widths of the blocks that are tried."""
GROUPS = (4, 8, 16)
"""Columns of the groups that are tried."""
_TILE = 64
"""Rows of a tile of the kernel for N:M."""
FULL = 0.5
"""Least share of elements in what a format stores: kernels multiply its filler like anything else."""


class StoredForm(NamedTuple):
    """A format that can hold a matrix.

    Attributes:
        format: the class.
        block: height and width, or n and m.
        counts: stored elements, or blocks, of each row of such.
        full: share of elements in what is stored, the rest being filler.
    """

    format: type[SparseMatrix]
    block: Block
    counts: Tensor
    full: float


def forms(
    row: Tensor, col: Tensor, shape: Shape, blocks: Sequence[int] = BLOCKS, groups: Sequence[int] = GROUPS
) -> Iterator[StoredForm]:
    """The formats that can hold elements at these places, with little filler or with much; reads from the device.

    Args:
        row, col: int64.
        blocks: sides that are tried, each a multiple of the one before.
        groups: columns of the groups that are tried; a format is worth it that fills at most half of them.
    """
    (rows, cols), elements = shape, row.numel()
    yield StoredForm(CSR, (1, 1), torch.bincount(row, minlength=rows), 1.0)
    line, place, last = row, col, 1
    for side in blocks if elements else ():
        lines, across = (-(-length // side) for length in shape)
        keys = torch.unique(line // (side // last) * across + place // (side // last))
        line, place, last = keys // across, keys % across, side
        yield StoredForm(BSR, (side, side), torch.bincount(line, minlength=lines), elements / (keys.numel() * side**2))
    for m in groups:
        most, slots = _most_in_a_group(row, col, cols, m), -(-cols // m)
        if 0 < most <= m // 2:
            counts = torch.full((rows,), slots * most, device=row.device)
            yield StoredForm(NM, (most, m), counts, elements / (rows * slots * most))


def _most_in_a_group(row: Tensor, col: Tensor, cols: int, m: int) -> int:
    counts = torch.unique(row * -(-cols // m) + col // m, return_counts=True)[1]
    return int(counts.max()) if counts.numel() else 0


@dataclass(frozen=True)
class FormatEstimate:
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
    estimates: tuple[FormatEstimate, ...]
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
    row, col, (_, cols) = row.long(), col.long(), matrix.shape
    groups = [m for m in GROUPS if m <= cols]
    blocks = [side for side in BLOCKS if side <= min(matrix.shape)]
    tried = [_estimate(matrix, form, columns) for form in forms(row, col, matrix.shape, blocks, groups)]
    tried.sort(key=lambda one: (one.full < FULL, one.moved))
    dense = _whole(matrix, row.numel(), columns)
    if tried[0].nbytes >= dense.nbytes:
        tried.insert(0, dense)
    first, *others = tried
    reasons = [f"{first.name}: {first.why}", *(_behind(first, one) for one in others[:1])]
    held = [one.layout["m"] for one in tried if one.format is NM]
    reasons += [_not_grouped(m, _most_in_a_group(row, col, cols, m)) for m in groups if m not in held]
    return BestFormat(first.format, first.layout, tuple(reasons), tuple(tried), matrix.statistics())


def _not_grouped(m: int, most: int) -> str:
    return f"no N:{m}: " + (f"a group of {m} columns holds {most}" if most else "nothing is stored")


def _behind(first: FormatEstimate, other: FormatEstimate) -> str:
    """Why the second best is not the best."""
    if first.format is None:
        return f"the best format, {other.name}, stores {other.nbytes / max(first.nbytes, 1):.2f} times as much"
    if other.full < FULL:
        return f"the next, {other.name}, is {other.full:.1%} full and would multiply more filler than elements"
    return f"the next, {other.name}, moves {other.moved / max(first.moved, 1):.2f} times as much"


def _estimate(matrix: SparseMatrix, form: StoredForm, columns: int) -> FormatEstimate:
    (rows, cols), (height, width) = matrix.shape, form.block
    entries = int(form.counts.sum())
    if form.format is NM:
        # positions in a group are bytes; a kernel's tile fetches all columns
        values, index_bytes, fetched = entries, entries, -(-rows // _TILE) * -(-cols // width) * width
        why = f"no group of {width} columns holds more than {height}"
    else:
        values, fetched = entries * height * width, entries * width
        index_bytes = (entries + form.counts.numel() + 1) * index_dtype_for(rows, cols, values).itemsize
        share = f"{entries} elements, {entries / max(rows * cols, 1):.1%} of the matrix"
        why = f"{entries} blocks of {height}x{width}" if form.format.BLOCKS else share
    return _counted(matrix, form.format, form.format.layout_of(form.block), values, index_bytes, fetched, columns,
                    form.full, why)  # fmt: skip


def _whole(matrix: SparseMatrix, nnz: int, columns: int) -> FormatEstimate:
    rows, cols = matrix.shape
    why = "keep it dense, which stores no more bytes than any format"
    fetched = -(-rows // _TILE) * cols
    return _counted(matrix, None, {}, rows * cols, 0, fetched, columns, nnz / max(rows * cols, 1), why)


def _counted(
    matrix: SparseMatrix, format: type[SparseMatrix] | None, layout: dict[str, Any], values: int, index_bytes: int,
    fetched: int, columns: int, full: float, why: str,
) -> FormatEstimate:  # fmt: skip
    size = matrix.dtype.itemsize
    nbytes = values * size * (1 if matrix.batch is None else matrix.batch) + index_bytes
    moved = nbytes + (fetched + matrix.shape[0]) * columns * size
    return FormatEstimate(format, layout, nbytes, moved, full, f"{why}, {full:.1%} full")
