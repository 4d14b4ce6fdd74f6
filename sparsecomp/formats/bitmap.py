"""Bitmap: values in the order in which a kernel decodes them, and a bit for each place.

For weights of 40 to 90 % zeros, whose bytes are the time of a product with few rows: with half precision CSR takes six
bytes a value and NARROW three; this takes two and, at 70 % zeros, half a byte.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.checks import Invariant, check_shape, check_tensor, check_values, require
from sparsecomp.formats.indices import choose_index_dtype, index_dtype_for, pointers_of, sorted_keys, sorted_pairs, take
from sparsecomp.formats.lanes import (
    SIZE,
    begins_of,
    bits_of,
    chunk_count,
    chunks_at,
    entries_of,
    head_bytes,
    laid_by_rows,
    lane_elements,
    lane_places,
)
from sparsecomp.formats.operand import Block, ByRows, Shape
from sparsecomp.formats.through_csr import ThroughCSR
from sparsecomp.formats.triplets import Triplets


class BITMAP(ThroughCSR):
    """Values by chunks of 16 rows and 128 columns, in each as `sparsecomp.formats.lanes` says, with a bit a place.

    Attributes:
        starts: (chunks + 1,) int32 or int64: chunk c's values are those from starts[c] to starts[c + 1] - 1.
        heads: (chunks, 320) uint8: where the values of its 32 lanes begin, int16, and a bit for each of its places.
        values: (entries,) or (batch, entries), by chunk, lane, tile and place.
        shape: rows and columns; chunks = ceil(rows / 16) · ceil(columns / 128).

    A kernel copies whole units of 16 bytes, the last with up to 14 behind `values`, within the memory's pages.
    """

    ARRAYS = ("starts", "heads", "values")
    OPERAND = "bitmap"
    INDICES = ("starts", "heads")
    ORDERED = False
    ALIGNED = True
    KERNEL = "bitmap"

    def __init__(self, starts: Tensor, heads: Tensor, values: Tensor, shape: tuple[int, int]) -> None:
        self.starts, self.heads, self.values, self.shape = starts, heads, values, shape

    @classmethod
    def from_arrays(
        cls, starts: Tensor, heads: Tensor, values: Tensor, shape: tuple[int, int], *, check: bool = True
    ) -> Self:
        """The matrix in these arrays, which are kept and not copied.

        Args:
            starts, heads, values, shape: see the class.
            check: False skips validation; wrong arrays then give wrong results.

        Raises:
            FormatError: the first invariant that is broken.
        """
        matrix = cls(starts, heads, values, check_shape(shape))
        if check:
            matrix.validate()
        return matrix

    def _check_arrays(self) -> None:
        check_shape(self.shape)
        check_values("values", self.values, 1)
        chunks, entries = chunk_count(self.shape), self.values.shape[-1]
        index = (torch.int32, torch.int64) if index_dtype_for(entries) is torch.int32 else (torch.int64,)
        kinds = (
            ("starts", self.starts, (chunks + 1,), index), ("heads", self.heads, (chunks, head_bytes()), (torch.uint8,))
        )  # fmt: skip
        for name, array, shape, dtypes in kinds:
            check_tensor(name, array)
            if array.shape != shape or array.dtype not in dtypes or array.device != self.device:
                raise FormatError(
                    f"{name} is {tuple(array.shape)} {array.dtype} on {array.device}, needs {shape}, "
                    f"{' or '.join(map(str, dtypes))} on {self.device}"
                )
        bad = torch.cat([self.starts[:1] != 0, self.starts.diff() < 0, self.starts[-1:] != entries])
        require([Invariant("starts must ascend from 0 to the number of values", bad, lambda at: f"not so at {at}")])

    def _check_order(self) -> None:
        places = entries_of(self.heads)
        row, col = lane_elements(places, self.shape[1])
        starts, heads = chunks_at(places, self.heads.shape[0])
        begins = (begins_of(heads) != begins_of(self.heads)).any(1)
        require(
            [
                Invariant(
                    "a chunk must have a bit for each of its values", starts.diff() != self.starts.diff(),
                    lambda at: f"{int(starts.diff()[at])} for {int(self.starts.diff()[at])} in chunk {at}",
                ),
                Invariant("heads must say where each lane begins", begins, lambda at: f"not so in chunk {at}"),
                Invariant(
                    f"what is stored must lie in the shape {self.shape}",
                    (row >= self.shape[0]) | (col >= self.shape[1]),
                    lambda at: f"value {at} is in row {int(row[at])} and column {int(col[at])}",
                ),
            ]
        )  # fmt: skip

    @property
    def index_dtype(self) -> torch.dtype:
        """dtype of `starts`."""
        return self.starts.dtype

    # -- how operators take it

    @classmethod
    def value_shape(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[int, ...]:
        """(entries,), which the block says."""
        return (block[1],)

    @classmethod
    def block_for(cls, block: Block, entries: int) -> Block:
        """The same room for a chunk."""
        return block[0], entries

    @classmethod
    def measured_block(cls, arrays: Sequence[Tensor], block: Block) -> Block:
        """With room for the longest chunk, or somewhat more, so that weights that are alike have one layout."""
        starts = arrays[0]
        longest = SIZE if starts.is_meta else int(starts.diff().max()) if starts.numel() > 1 else 0
        return min(max(-(-longest // _STEP), 1) * _STEP, SIZE), block[1]

    @classmethod
    def entries(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[Tensor, Tensor]:
        """CSR's pointers and columns; nothing is read from a GPU."""
        return cls.ordered_entries(arrays, block, shape)[:2]

    @classmethod
    def ordered_entries(
        cls, arrays: Sequence[Tensor], block: Block, shape: Shape
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """CSR's pointers and columns, and which of the values each is; nothing is read from a GPU."""
        (starts, heads), (rows, columns) = arrays[:2], shape
        if not rows * columns:
            return starts.new_zeros(rows + 1), starts.new_zeros(0), starts.new_zeros(0).long()
        bits = bits_of(heads)
        stored, rank = (laid_by_rows(one, shape).flatten() for one in (bits, _ranks(bits, starts.dtype)))
        at = torch.nonzero_static(stored, size=block[1], fill_value=0).squeeze(1)
        row = at // columns
        return pointers_of(row, rows, starts.dtype), (at - row * columns).to(starts.dtype), rank[at].long()

    @classmethod
    def written_out(cls, values: Tensor, arrays: Sequence[Tensor], block: Block, shape: Shape) -> Tensor:
        """By places in the order of lanes."""
        bits = bits_of(arrays[1])
        if not values.numel():
            return values.new_zeros(shape)
        places = values[_ranks(bits, torch.int64)].masked_fill_(bits == 0, 0)
        return laid_by_rows(places, shape)

    @classmethod
    def entry_places(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[Tensor, Tensor]:
        """Row and column of each value, int64; nothing is read from a GPU."""
        return lane_elements(entries_of(arrays[1], block[1]), shape[1])

    def by_rows(self) -> ByRows:
        """Its arrays, and how many values there are; the longest chunk is not looked for."""
        return ByRows(self.values, (self.starts, self.heads), (0, self.values.shape[-1]), self.shape)

    @classmethod
    def of_rows(cls, values: Tensor, arrays: Sequence[Tensor], block: Block, shape: Shape) -> Self:
        """The matrix of these arrays, which it shares."""
        starts, heads = arrays
        return cls(starts, heads, values, shape)

    @classmethod
    def _from_triplets(
        cls, elements: Triplets, index_dtype: torch.dtype | None, at_least: torch.dtype, **layout: Any
    ) -> Self:
        row, col, values, shape = elements
        if (chunks := chunk_count(shape)) * SIZE > torch.iinfo(torch.int64).max:
            raise FormatError(f"a bitmap of shape {shape} has more than 2**63 - 1 places: convert to CSR")
        places, order = sorted_keys(lane_places(row, col, shape[1]), chunks * SIZE)
        starts, heads = chunks_at(places, chunks)
        dtype = choose_index_dtype(index_dtype, at_least, *shape, row.numel())
        return cls(starts.to(dtype), heads, values.index_select(-1, order), shape)

    def _triplets(self) -> Triplets:
        row, col = (one.to(self.index_dtype) for one in self._positions())
        row, col, order = sorted_pairs(row, col, self.shape)
        return Triplets(row, col, take(self.values, -1, order), self.shape)

    def _positions(self) -> tuple[Tensor, Tensor]:
        return self.entry_places((self.starts, self.heads), (0, self.values.shape[-1]), self.shape)

    def _cast(self, index_dtype: torch.dtype) -> Self:
        return self if index_dtype is self.index_dtype else self._with(starts=self.starts.to(index_dtype))


def _ranks(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Which value a place has that is stored, and of others any."""
    return bits.cumsum(0, dtype=dtype).sub_(1).clamp_(min=0)


_STEP = 64
"""Values that a chunk has room for, or a multiple: 128 bytes of half precision."""
