"""What operators must know of a format: how its matrices lie by rows, and which kernel multiplies them.

Operators take index arrays, values, a block and a shape, all by rows. A format either is such a layout itself, as CSR,
BSR and N:M are, or is taken in the layout of another: COO and CSC in that of CSR. What a layout's arrays mean is said
here for CSR; a format that differs overrides it, and nothing else in the package knows it by name.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from sparsecomp.formats.indices import lines_of

Block = tuple[int, int]
Shape = tuple[int, int]


class ByRows(NamedTuple):
    """A matrix as operators take it; one that is stored by columns is given as its transpose."""

    values: Tensor
    arrays: tuple[Tensor, ...]
    block: Block
    shape: Shape


class Operand:
    """The part of a format that operators read."""

    OPERAND: ClassVar[str] = "csr"
    """The layout in which operators take it: the name, in small letters, of the format that has it as its own."""
    BY_COLUMNS: ClassVar[bool] = False
    """Whether that layout is of the transpose."""

    # of a format that is taken in its own layout
    INDICES: ClassVar[tuple[str, ...]] = ("pointers", "indices")
    """Index arrays, in order; layers name their buffers so."""
    LAYOUT: ClassVar[tuple[str, ...]] = ()
    """What a conversion to the format must be told besides: names of attributes."""
    VALUE_DIMS: ClassVar[int] = 1
    """Dimensions of the values of one matrix."""
    BLOCKS: ClassVar[bool] = False
    """Whether entries are blocks, of the last two dimensions of the values; else they are single elements."""
    FILLED: ClassVar[bool] = False
    """Whether a stored zero is no element of the matrix, and not multiplied."""
    ORDERED: ClassVar[bool] = True
    """Whether values lie in the order of `entries`, by rows."""
    ALIGNED: ClassVar[bool] = False
    """Whether its kernel wants its arrays, and x, to begin at a multiple of 16 bytes."""
    KERNEL: ClassVar[str] = "spmm_csr"
    """The launcher in `sparsecomp.lowering.sparse` that multiplies it: its own, or that of CSR or BSR, which take
    `entries`, all within the shape. The transpose, sorted by rows, goes to one of these."""

    @classmethod
    def layout_of(cls, block: Block) -> dict[str, Any]:
        """What a conversion must be told for matrices of this block."""
        return dict(zip(cls.LAYOUT, block, strict=False))

    @classmethod
    def padded(cls, block: Block, shape: Shape) -> Shape:
        """Shape within which entries lie; those beyond `shape` hold zeros."""
        return shape

    @classmethod
    def value_shape(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[int, ...]:
        """Shape of one matrix's values."""
        return (arrays[1].shape[0],)

    @classmethod
    def block_for(cls, block: Block, entries: int) -> Block:
        """The block of a layout for so many entries, in place of one for others."""
        return block

    @classmethod
    def measured_block(cls, arrays: Sequence[Tensor], block: Block) -> Block:
        """The block with what it says of the contents of these arrays, which is read from the device."""
        return block

    @classmethod
    def entries(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[Tensor, Tensor]:
        """Pointers and column of each entry, flat, by rows of entries."""
        return arrays[0], arrays[1]

    @classmethod
    def ordered_entries(
        cls, arrays: Sequence[Tensor], block: Block, shape: Shape
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """`entries`, and which of the flat values each is, int64; None where they lie in that order."""
        return *cls.entries(arrays, block, shape), None

    @classmethod
    def written_out(cls, values: Tensor, arrays: Sequence[Tensor], block: Block, shape: Shape) -> Tensor | None:
        """The dense matrix of values without a batch; None where it is made by `entry_places`."""
        return None

    @classmethod
    def entry_places(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[Tensor, Tensor]:
        """Row and column of each entry, as they lie in the values."""
        return lines_of(arrays[0], 0, arrays[1].numel()), arrays[1]
