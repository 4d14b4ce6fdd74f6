"""Bitmap: one bit says of each place whether it is stored, and the stored values lie side by side by rows.

For weights of 40 to 90 % zeros, whose bytes are the time of a product with few rows: a place takes a bit and half a bit
to find its value by, where CSR takes 32 bits for each value that is stored. A kernel that spreads a row's values
over its places counts the bits below (as SpInfer does in blocks, Fan et al., EuroSys 2025); the values are CSR's own.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.base import SparseMatrix
from sparsecomp.formats.checks import Invariant, check_shape, check_tensor, check_values, require
from sparsecomp.formats.compressed import Compressed
from sparsecomp.formats.csr import CSR
from sparsecomp.formats.indices import choose_index_dtype, pointers_of
from sparsecomp.formats.operand import Block, ByRows, Shape
from sparsecomp.formats.triplets import Triplets

WORD = 32
"""Places of a word of bits."""
_LONGEST_ROW = 2**15 - 1
"""Values that a row may store: offsets are int16."""


class BITMAP(SparseMatrix):
    """A bit for each place, values by rows.

    Attributes:
        starts: (rows + 1,) int32 or int64: row i's values are those from starts[i] to starts[i + 1] - 1.
        offsets: (rows, words) int16, words = ceil(columns / 32): how many values of its row lie before each word's.
        indices: (rows, words) int32: bit j of word w of a row is set if column 32 w + j is stored.
        values: (entries,) or (batch, entries), by rows and columns: those of CSR.
        shape: rows and columns.
    """

    ARRAYS = ("starts", "offsets", "indices", "values")
    OPERAND = "bitmap"
    INDICES = ("starts", "offsets", "indices")
    KERNEL = "bitmap"

    def __init__(
        self, starts: Tensor, offsets: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]
    ) -> None:  # fmt: skip
        self.starts, self.offsets, self.indices, self.values, self.shape = starts, offsets, indices, values, shape

    @classmethod
    def from_arrays(
        cls, starts: Tensor, offsets: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int], *,
        check: bool = True,
    ) -> Self:  # fmt: skip
        """The matrix in these arrays, which are kept and not copied.

        Args:
            starts: (rows + 1,) int32 or int64.
            offsets: (rows, ceil(columns / 32)) int16.
            indices: (rows, ceil(columns / 32)) int32, bits.
            values: (entries,) or (batch, entries).
            shape: rows and columns.
            check: False skips validation; wrong arrays then give wrong results.

        Raises:
            FormatError: the first invariant that is broken.
        """
        matrix = cls(starts, offsets, indices, values, check_shape(shape))
        if check:
            matrix.validate()
        return matrix

    def _check_arrays(self) -> None:
        check_shape(self.shape)
        check_values("values", self.values, 1)
        rows, words = self.shape[0], words_of(self.shape[1])
        kinds = (
            ("starts", self.starts, (rows + 1,), (torch.int32, torch.int64)),
            ("offsets", self.offsets, (rows, words), (torch.int16,)),
            ("indices", self.indices, (rows, words), (torch.int32,)),
        )
        for name, array, shape, dtypes in kinds:
            check_tensor(name, array)
            if tuple(array.shape) != shape or array.dtype not in dtypes or array.device != self.device:
                raise FormatError(
                    f"{name} is {tuple(array.shape)} {array.dtype} on {array.device}, needs {shape} "
                    f"{' or '.join(map(str, dtypes))} on {self.device}"
                )

    def _check_order(self) -> None:
        offsets, counts = _offsets_of(self.indices)
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        beyond = unpacked(self.indices)[:, self.shape[1] :].any(1)
        require(
            [
                Invariant(f"no bit beyond the {self.shape[1]} columns may be set", beyond, lambda at: f"row {at} has"),
                Invariant(
                    "offsets must count the bits of a row before each word", (offsets != self.offsets).any(1),
                    lambda at: f"not so in row {at}",
                ),
                Invariant(
                    "starts must count the bits of the rows before", starts != self.starts,
                    lambda at: f"starts[{at}] is {int(self.starts[at])}, {int(starts[at])} bits are set before",
                ),
                Invariant(
                    "there must be a value for each bit", starts[-1:] != self.values.shape[-1],
                    lambda _: f"{int(starts[-1])} bits are set, there are {self.values.shape[-1]} values",
                ),
            ]
        )  # fmt: skip

    @property
    def index_dtype(self) -> torch.dtype:
        """dtype of `starts`."""
        return self.starts.dtype

    # -- how operators take it

    @classmethod
    def block_of(cls, values: Tensor, block: Block) -> Block:
        """Places of a word, and how many values there are: no array's shape tells."""
        return WORD, values.shape[-1]

    @classmethod
    def value_shape(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[int, ...]:
        """(entries,)."""
        return (block[1],)

    @classmethod
    def entries(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[Tensor, Tensor]:
        """CSR's pointers and columns, made of the bits; nothing is read from a GPU."""
        return arrays[0], cls.entry_places(arrays, block, shape)[1].to(arrays[0].dtype)

    @classmethod
    def entry_places(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[Tensor, Tensor]:
        """Row and column of each value, int64."""
        bits = unpacked(arrays[2])
        flat = torch.nonzero_static(bits.flatten(), size=block[1]).squeeze(1)
        width = max(bits.shape[1], 1)
        return flat // width, flat % width

    def by_rows(self) -> ByRows:
        """Its arrays; see `block_of`."""
        return ByRows(
            self.values, (self.starts, self.offsets, self.indices), self.block_of(self.values, (1, 1)), self.shape
        )

    @classmethod
    def of_rows(cls, values: Tensor, arrays: Sequence[Tensor], block: Block, shape: Shape) -> Self:
        """The matrix of these arrays, which it shares."""
        starts, offsets, indices = arrays
        return cls(starts, offsets, indices, values, shape)

    @property
    def mT(self) -> Compressed:
        """The transposed matrix as CSC, which shares the values: words run along rows only."""
        return self.to(CSR).mT

    def to_torch(self) -> Tensor:
        """A torch tensor in CSR layout: torch has no bitmaps."""
        return self.to(CSR).to_torch()

    def to_scipy(self) -> Any:
        """A `scipy.sparse.csr_array`; otherwise as `CSR.to_scipy`."""
        return self.to(CSR).to_scipy()

    @classmethod
    def _from_triplets(
        cls, elements: Triplets, index_dtype: torch.dtype | None, at_least: torch.dtype, **layout: Any
    ) -> Self:
        row, col, values, (rows, cols) = elements
        places = torch.zeros(rows, words_of(cols) * WORD, dtype=torch.bool, device=row.device)
        places.view(-1)[row.long() * places.shape[1] + col] = True
        indices = packed(places)
        offsets, counts = _offsets_of(indices)
        if counts.numel() and int(counts.max()) > _LONGEST_ROW:
            raise FormatError(
                f"row {int(counts.argmax())} stores {int(counts.max())} values, a bitmap holds {_LONGEST_ROW} a row: "
                "use CSR"
            )
        starts = pointers_of(row, rows, choose_index_dtype(index_dtype, at_least, rows, cols, row.numel()))
        return cls(starts, offsets, indices, values, (rows, cols))

    def _triplets(self) -> Triplets:
        row, col = self._positions()
        return Triplets(row.to(self.index_dtype), col.to(self.index_dtype), self.values, self.shape)

    def _positions(self) -> tuple[Tensor, Tensor]:
        _, arrays, block, shape = self.by_rows()
        return self.entry_places(arrays, block, shape)

    def _row_counts(self) -> Tensor:
        return self.starts.diff().long()

    def _cast(self, index_dtype: torch.dtype) -> Self:
        return self if index_dtype is self.index_dtype else self._with(starts=self.starts.to(index_dtype))


def words_of(columns: int) -> int:
    """Words of a row."""
    return -(-columns // WORD)


def packed(places: Tensor) -> Tensor:
    """Words (rows, words) int32 of bool (rows, words · 32): bit j of word w is place 32 w + j."""
    powers = 1 << torch.arange(8, dtype=torch.uint8, device=places.device)
    octets = places.view(places.shape[0], places.shape[1] // WORD, WORD // 8, 8).to(torch.uint8) * powers
    return octets.sum(-1, dtype=torch.uint8).view(torch.int32).squeeze(-1)


def unpacked(words: Tensor) -> Tensor:
    """Bool (rows, words · 32) of words (rows, words) int32."""
    bit = torch.arange(8, dtype=torch.uint8, device=words.device)
    octets = words.contiguous()[..., None].view(torch.uint8)
    return ((octets[..., None] >> bit) & 1).bool().flatten(1)


def _offsets_of(words: Tensor) -> tuple[Tensor, Tensor]:
    """For words (rows, words): how many bits of a row are set before each, int16, and in each row, int64."""
    counts = unpacked(words).view(*words.shape, WORD).sum(-1, dtype=torch.int32)
    upto = counts.cumsum(1, dtype=torch.int32)
    return (upto - counts).to(torch.int16), counts.sum(1, dtype=torch.int64)
