"""Compressed by rows and by columns: the names that users know the arrays by, be entries elements or blocks."""

from typing import Self

from torch import Tensor

from sparsecomp.formats.compressed import Compressed


class ByRow(Compressed):
    """Entries row by row."""

    MAJOR = 0

    @property
    def crow(self) -> Tensor:
        """Pointers (rows of entries + 1,)."""
        return self.pointers

    @property
    def col(self) -> Tensor:
        """Columns of entries (entries,)."""
        return self.indices

    @classmethod
    def from_arrays(
        cls, crow: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int], *, coalesce: bool = False,
        check: bool = True,
    ) -> Self:  # fmt: skip
        """The matrix in these arrays, which are kept and not copied unless `coalesce` reorders them.

        Args:
            crow: (rows + 1,) int32 or int64; of blocks, rows of these.
            col: (entries,) of the same dtype.
            values: (entries,), of blocks (entries, height, width), or a batch of these.
            shape: rows and columns of elements, which blocks may exceed by less than a block.
            coalesce: sort columns that do not ascend, and sum values of repeated ones, instead of raising.
            check: False skips validation; wrong arrays then give wrong results.

        Raises:
            FormatError: the first invariant that is broken.
        """
        return cls._checked(crow, col, values, shape, coalesce, check)

    def slice_rows(self, start: int, stop: int) -> Self:
        """Rows `start` to `stop` - 1, sharing every array; nothing is copied or read.

        Raises:
            FormatError: not 0 <= start <= stop <= rows, or not at the edges of blocks.
        """
        return self._slice(start, stop)


class ByColumn(Compressed):
    """Entries column by column."""

    MAJOR = 1
    BY_COLUMNS = True

    @property
    def ccol(self) -> Tensor:
        """Pointers (columns of entries + 1,)."""
        return self.pointers

    @property
    def row(self) -> Tensor:
        """Rows of entries (entries,)."""
        return self.indices

    @classmethod
    def from_arrays(
        cls, ccol: Tensor, row: Tensor, values: Tensor, shape: tuple[int, int], *, coalesce: bool = False,
        check: bool = True,
    ) -> Self:  # fmt: skip
        """The matrix in these arrays; as `CSR.from_arrays` and `BSR.from_arrays`, with rows for columns.

        Raises:
            FormatError: the first invariant that is broken.
        """
        return cls._checked(ccol, row, values, shape, coalesce, check)

    def slice_cols(self, start: int, stop: int) -> Self:
        """Columns `start` to `stop` - 1, sharing every array; nothing is copied or read.

        Raises:
            FormatError: not 0 <= start <= stop <= columns, or not at the edges of blocks.
        """
        return self._slice(start, stop)
