"""BSR and BCSC: dense blocks compressed by rows and by columns of blocks.

Blocks need not divide the shape: the last ones reach beyond it and hold zeros there.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.axes import ByColumn, ByRow
from sparsecomp.formats.checks import check_shape
from sparsecomp.formats.compressed import Compressed
from sparsecomp.formats.csr import CSC, CSR
from sparsecomp.formats.files import Stored
from sparsecomp.formats.foreign import scipy_sparse, to_numpy
from sparsecomp.formats.indices import choose_index_dtype, groups_of, sorted_pairs, take
from sparsecomp.formats.operand import Block, ByRows, Shape
from sparsecomp.formats.triplets import Triplets, without_filler


class _Blocks(Compressed):
    """Entries are blocks."""

    OPERAND = "bsr"
    LAYOUT = ("block",)
    VALUE_DIMS = 3
    BLOCKS = True
    KERNEL = "spmm_bsr"

    @classmethod
    def layout_of(cls, block: Block) -> dict[str, Any]:
        """The block's height and width."""
        return {"block": block}

    @classmethod
    def padded(cls, block: Block, shape: Shape) -> Shape:
        """Shape rounded up to whole blocks."""
        return shape[0] + -shape[0] % block[0], shape[1] + -shape[1] % block[1]

    @classmethod
    def value_shape(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[int, ...]:
        """(blocks, height, width)."""
        return (arrays[1].shape[0], *block)

    def by_rows(self) -> ByRows:
        """As `Compressed.by_rows`, with the block."""
        found = super().by_rows()
        height, width = found.values.shape[-2:]
        return found._replace(block=(height, width))

    @property
    def block(self) -> tuple[int, int]:
        """Height and width of a block."""
        height, width = self.values.shape[-2:]
        return height, width

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        (rows, cols), (height, width) = self.shape, self.block
        return -(-rows // height), -(-cols // width)

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Shape rounded up to whole blocks."""
        return self.padded(self.block, self.shape)

    def _check_blocks(self) -> None:
        if 0 in self.values.shape[-2:]:
            raise FormatError(f"values have blocks of {tuple(self.values.shape[-2:])}, need 1 or more each way")

    def _positions(self) -> tuple[Tensor, Tensor]:
        majors, minors = self._majors().long(), self.indices.long()
        line, column = (majors, minors) if self.MAJOR == 0 else (minors, majors)
        height, width = self.block
        row = (line * height)[:, None, None] + torch.arange(height, device=self.device)[:, None]
        col = (column * width)[:, None, None] + torch.arange(width, device=self.device)
        return row, col

    @classmethod
    def _from_triplets(
        cls, elements: Triplets, index_dtype: torch.dtype | None, at_least: torch.dtype, **layout: Any
    ) -> Self:
        row, col, values, shape = elements
        height, width = block = check_block(layout["block"])
        line, column = row.div(height, rounding_mode="floor"), col.div(width, rounding_mode="floor")
        majors, minors = (line, column) if cls.MAJOR == 0 else (column, line)
        n_minors = -(-shape[1 - cls.MAJOR] // block[1 - cls.MAJOR])
        n_majors = -(-shape[cls.MAJOR] // block[cls.MAJOR])
        majors, minors, order = sorted_pairs(majors, minors, (n_majors, n_minors))
        row, col = take(row, 0, order), take(col, 0, order)
        first, group = groups_of(majors, minors)
        majors, minors = take(majors, 0, first), take(minors, 0, first)
        blocks = values.new_zeros((*values.shape[:-1], majors.numel(), height, width))
        blocks[..., group, row.remainder(height).long(), col.remainder(width).long()] = take(values, -1, order)
        dtype = choose_index_dtype(index_dtype, at_least, *shape, majors.numel() * height * width)
        return cls._of_sorted(majors, minors, blocks, shape, dtype)

    def _triplets(self) -> Triplets:
        return self._sorted(without_filler(self._elements()))

    def _terms(self) -> Triplets:
        if not self.values.requires_grad:
            return self._triplets()
        row, col, values, shape = self._elements()
        inside = (row < shape[0]) & (col < shape[1])
        return self._sorted(Triplets(row[inside], col[inside], values[..., inside], shape))

    def _elements(self) -> Triplets:
        """All elements of the blocks, by blocks."""
        this = self.compact()
        row, col = (index.flatten().to(self.index_dtype) for index in torch.broadcast_tensors(*this._positions()))
        return Triplets(row, col, this.values.flatten(this._entry_dim), self.shape)

    def _sorted(self, found: Triplets) -> Triplets:
        row, col, order = sorted_pairs(found.row, found.col, self.shape)
        return Triplets(row, col, take(found.values, -1, order), self.shape)

    @classmethod
    def _from_stored(cls, stored: Stored) -> Self:
        matrix = cls(*(stored.arrays[name] for name in cls.ARRAYS), shape=check_shape(stored.shape))
        if list(matrix.values.shape[-2:]) != stored.layout["block"]:
            raise FormatError(f"the file has block {stored.layout['block']} and values {tuple(matrix.values.shape)}")
        return matrix


class BSR(_Blocks, ByRow):
    """Blocks row by row.

    Attributes:
        crow: (rows of blocks + 1,) int32 or int64: row i of blocks holds blocks crow[i] to crow[i + 1] - 1.
            0 <= crow[0] and crow[-1] <= len(col); blocks outside are spare capacity of any content.
        col: (blocks,) of the same dtype: column of blocks, ascending in each row, each once.
        values: (blocks, height, width) or (batch, blocks, height, width), of any strides; 0 beyond the shape.
        shape: rows and columns of elements.
    """

    ARRAYS = ("crow", "col", "values")
    TORCH_LAYOUT = torch.sparse_bsr
    SCIPY_FORMAT = "bsr"

    def to_torch(self) -> Tensor:
        """A torch tensor in BSR layout; in CSR layout where blocks do not divide the shape, which torch's must."""
        return super().to_torch() if self.padded_shape == self.shape else self.to(CSR).to_torch()

    def to_scipy(self) -> Any:
        """A `scipy.sparse.bsr_array`; a `csr_array` where blocks do not divide the shape, which scipy's must."""
        if self.padded_shape != self.shape or 0 in self.shape:
            return self.to(CSR).to_scipy()
        this = self.compact()
        return scipy_sparse().bsr_array(to_numpy(this.values, this.indices, this.pointers), shape=self.shape)


class BCSC(_Blocks, ByColumn):
    """Blocks column by column.

    Attributes:
        ccol: (columns of blocks + 1,) int32 or int64: column i of blocks holds blocks ccol[i] to ccol[i + 1] - 1.
            0 <= ccol[0] and ccol[-1] <= len(row); blocks outside are spare capacity of any content.
        row: (blocks,) of the same dtype: row of blocks, ascending in each column, each once.
        values: (blocks, height, width) or (batch, blocks, height, width), of any strides; 0 beyond the shape.
        shape: rows and columns of elements.
    """

    ARRAYS = ("ccol", "row", "values")
    TORCH_LAYOUT = torch.sparse_bsc

    def to_torch(self) -> Tensor:
        """A torch tensor in BSC layout; in CSC layout where blocks do not divide the shape, which torch's must."""
        return super().to_torch() if self.padded_shape == self.shape else self.to(CSC).to_torch()

    def to_scipy(self) -> Any:
        """A `scipy.sparse.bsr_array` of the same blocks: scipy has no BCSC. Otherwise as `BSR.to_scipy`."""
        return self.to(BSR).to_scipy()


BSR.TWIN, BCSC.TWIN = BCSC, BSR


def check_block(block: Any) -> tuple[int, int]:
    """`block` as (height, width).

    Raises:
        FormatError: neither an int nor two, of 1 or more.
    """
    sizes = (block, block) if type(block) is int else block
    if type(sizes) not in (tuple, list) or len(sizes) != 2 or any(type(n) is not int or n < 1 for n in sizes):
        raise FormatError(f"block is {block!r}, needs (height, width) of 1 or more")
    return sizes[0], sizes[1]
