"""Narrow: CSR whose columns take a byte each, as distances from a column that sixteen neighbours share.

For weights of 60 to 90 % zeros, whose bytes are the time of a product with few rows: with half precision CSR takes six
bytes a value, this three. A kernel's work is by value that is stored, where a bitmap's is by place.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.checks import Invariant, check_shape, check_tensor, check_values, require
from sparsecomp.formats.indices import choose_index_dtype, lines_of, pointers_of
from sparsecomp.formats.operand import Block, ByRows, Shape
from sparsecomp.formats.through_csr import ThroughCSR
from sparsecomp.formats.triplets import Triplets

CHUNK = 16
"""Neighbouring values of a row that share a base."""
_WIDTHS = (torch.uint8, torch.int16, torch.int32)


class NARROW(ThroughCSR):
    """Values by rows, columns as distances from a base that 16 values of a row share.

    Attributes:
        starts: (rows + 1,) int32 or int64: row i's values are those from starts[i] to starts[i + 1] - 1.
        chunks: (rows + 1,) of the same dtype: its bases are those from chunks[i] on, one for each 16 values.
        bases: (entries // 16 + rows,) int16, or int32 for more columns: the column of the first value of each chunk.
            What lies behind chunks[-1] is not read: as many values of any pattern have room.
        indices: (entries,) uint8, or int16 or int32 where a distance is greater: column less base of each value.
        values: (entries,) or (batch, entries), by rows and columns: those of CSR.
        shape: rows and columns.
    """

    ARRAYS = ("starts", "chunks", "bases", "indices", "values")
    OPERAND = "narrow"
    INDICES = ("starts", "chunks", "bases", "indices")
    KERNEL = "narrow"

    def __init__(
        self, starts: Tensor, chunks: Tensor, bases: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]
    ) -> None:  # fmt: skip
        self.starts, self.chunks, self.bases, self.indices = starts, chunks, bases, indices
        self.values, self.shape = values, shape

    @classmethod
    def from_arrays(
        cls, starts: Tensor, chunks: Tensor, bases: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int], *,
        check: bool = True,
    ) -> Self:  # fmt: skip
        """The matrix in these arrays, which are kept and not copied.

        Args:
            starts, chunks, bases, indices, values, shape: see the class.
            check: False skips validation; wrong arrays then give wrong results.

        Raises:
            FormatError: the first invariant that is broken.
        """
        matrix = cls(starts, chunks, bases, indices, values, check_shape(shape))
        if check:
            matrix.validate()
        return matrix

    def _check_arrays(self) -> None:
        check_shape(self.shape)
        check_values("values", self.values, 1)
        line, index = (self.shape[0] + 1,), (torch.int32, torch.int64)
        kinds = (
            ("starts", self.starts, line, index), ("chunks", self.chunks, line, (self.starts.dtype,)),
            ("bases", self.bases, None, (_base_dtype(self.shape[1]),)),
            ("indices", self.indices, self.values.shape[-1:], _WIDTHS),
        )  # fmt: skip
        for name, array, shape, dtypes in kinds:
            check_tensor(name, array)
            fits = array.dim() == 1 if shape is None else array.shape == shape
            if not fits or array.dtype not in dtypes or array.device != self.device:
                raise FormatError(
                    f"{name} is {tuple(array.shape)} {array.dtype} on {array.device}, needs "
                    f"{'one dimension' if shape is None else tuple(shape)}, {' or '.join(map(str, dtypes))} on "
                    f"{self.device}"
                )
        counts = self.starts.diff()
        bad = torch.cat([self.starts[:1] != 0, counts < 0, self.starts[-1:] != self.values.shape[-1]])
        require([Invariant("starts must ascend from 0 to the number of values", bad, lambda at: f"not so at {at}")])
        bad = torch.cat([self.chunks[:1] != 0, self.chunks.diff() != _chunk_counts(counts)])
        require([Invariant("chunks must count one for each 16 values of a row", bad, lambda at: f"not so at {at}")])
        if self.bases.numel() != (needed := self._most_chunks(self.values.shape[-1], self.shape[0])):
            raise FormatError(f"there are {self.bases.numel()} bases, needs {needed}, values // 16 + rows")

    def _check_order(self) -> None:
        row, col = self._positions()
        require(
            [
                Invariant(
                    f"columns must be from 0 to {self.shape[1] - 1}", (col < 0) | (col >= self.shape[1]),
                    lambda at: f"that of value {at} is {int(col[at])}",
                ),
                Invariant(
                    "columns must ascend within each row, each once", (col[1:] <= col[:-1]) & (row[1:] == row[:-1]),
                    lambda at: f"in row {int(row[at])}, {int(col[at + 1])} follows {int(col[at])}",
                ),
            ]
        )  # fmt: skip

    @property
    def index_dtype(self) -> torch.dtype:
        """dtype of `starts` and `chunks`."""
        return self.starts.dtype

    # -- how operators take it

    @classmethod
    def value_shape(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[int, ...]:
        """(entries,)."""
        return (arrays[3].shape[0],)

    @classmethod
    def entries(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[Tensor, Tensor]:
        """CSR's pointers and columns; nothing is read from a GPU."""
        return arrays[0], cls.entry_places(arrays, block, shape)[1].to(arrays[0].dtype)

    @classmethod
    def entry_places(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[Tensor, Tensor]:
        """Row and column of each value, int64."""
        starts, chunks, bases, indices = arrays[:4]
        row = lines_of(starts, 0, indices.numel())
        place = torch.arange(indices.numel(), device=indices.device) - starts[row]
        return row, bases[chunks[row] + place // CHUNK].long() + indices

    def by_rows(self) -> ByRows:
        """Its arrays."""
        return ByRows(self.values, (self.starts, self.chunks, self.bases, self.indices), (1, 1), self.shape)

    @classmethod
    def of_rows(cls, values: Tensor, arrays: Sequence[Tensor], block: Block, shape: Shape) -> Self:
        """The matrix of these arrays, which it shares."""
        starts, chunks, bases, indices = arrays
        return cls(starts, chunks, bases, indices, values, shape)

    @classmethod
    def _from_triplets(
        cls, elements: Triplets, index_dtype: torch.dtype | None, at_least: torch.dtype, **layout: Any
    ) -> Self:
        row, col, values, (rows, cols) = elements
        dtype = choose_index_dtype(index_dtype, at_least, rows, cols, row.numel())
        starts = pointers_of(row, rows, dtype)
        counts = _chunk_counts(starts.diff())
        chunks = torch.nn.functional.pad(counts.cumsum(0, dtype=dtype), (1, 0))
        # place in its row, then the first value of each value's chunk
        first = torch.arange(row.numel(), device=row.device)
        first -= (first - starts[row.long()]) % CHUNK
        base = col[first]
        distance = col - base
        most = int(distance.max()) if distance.numel() else 0
        width = next(one for one in _WIDTHS if most <= torch.iinfo(one).max)
        begins = first == torch.arange(row.numel(), device=row.device)
        bases = base[begins].to(_base_dtype(cols))
        spare = cls._most_chunks(row.numel(), rows) - bases.numel()
        bases = torch.nn.functional.pad(bases, (0, spare))
        return cls(starts, chunks, bases, distance.to(width), values, (rows, cols))

    @staticmethod
    def _most_chunks(entries: int, rows: int) -> int:
        return entries // CHUNK + rows

    def _triplets(self) -> Triplets:
        row, col = self._positions()
        return Triplets(row.to(self.index_dtype), col.to(self.index_dtype), self.values, self.shape)

    def _positions(self) -> tuple[Tensor, Tensor]:
        _, arrays, block, shape = self.by_rows()
        return self.entry_places(arrays, block, shape)

    def _row_counts(self) -> Tensor:
        return self.starts.diff().long()

    def _cast(self, index_dtype: torch.dtype) -> Self:
        if index_dtype is self.index_dtype:
            return self
        return self._with(starts=self.starts.to(index_dtype), chunks=self.chunks.to(index_dtype))


def _base_dtype(columns: int) -> torch.dtype:
    return torch.int16 if columns <= torch.iinfo(torch.int16).max else torch.int32


def _chunk_counts(counts: Tensor) -> Tensor:
    return (counts + CHUNK - 1) // CHUNK
