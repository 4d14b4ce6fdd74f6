"""Which elements a SparseTensor stores: the index arrays, shared by all tensors that store the same.

A parameter, its gradients and its optimizer's states hold one pattern, so that the arrays of the transpose, which a
backward needs, are computed once and not once a tensor.
"""

import torch
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.errors import FormatError, PatternError
from sparsecomp.formats.base import FORMATS, SparseMatrix
from sparsecomp.formats.indices import searched_lines
from sparsecomp.reference.patterns import Layout, kept_transpose, skew_of, stored_by_rows


class IndexArrays:
    """Index arrays of a matrix, or of the one whose transpose it is.

    Attributes:
        format: name of the class in `sparsecomp.formats`.
        layout: of the arrays by rows: for CSC and BCSC, of the transposed matrix.
        arrays: what `sparsecomp.reference.patterns` calls the layout's own arrays.
        transposed: those of the transpose, of `kept_transpose`, None until somebody needs them.
        spare: whether a CSR pattern has entries behind those of the last row, which are no elements.
    """

    __slots__ = ("arrays", "format", "layout", "spare", "transposed")

    def __init__(
        self, format: str, layout: Layout, arrays: tuple[Tensor, ...], transposed: tuple[Tensor, ...] | None = None,
        spare: bool = False,
    ) -> None:  # fmt: skip
        self.format, self.layout, self.arrays, self.transposed = format, layout, arrays, transposed
        self.spare = spare

    @classmethod
    def of(cls, matrix: SparseMatrix) -> tuple[Tensor, "IndexArrays"]:
        """Values as the layout wants them, and the pattern; reads from the device.

        Raises:
            FormatError: the matrix is a batch.
        """
        if matrix.batch is not None:
            raise FormatError(f"{matrix!r} is a batch: make a SparseTensor of each of unbatch()")
        values, arrays, layout = stored_by_rows(matrix)
        return values, cls(type(matrix).__name__, layout, arrays)

    @property
    def kind(self) -> type[SparseMatrix]:
        """Class of the format."""
        return FORMATS[self.format]

    def matrix(self, values: Tensor, transpose: bool) -> SparseMatrix:
        """The matrix of these values, or its transpose, in `sparsecomp.formats`."""
        _, block, shape, _ = self.layout
        found = self.kind.of_rows(self.without_filler(values), self.arrays, block, shape)
        return found.mT if transpose else found

    def stored_by_columns(self, transpose: bool) -> bool:
        """Whether a product needs the arrays of the transpose, of the matrix or of its transpose."""
        return transpose != self.kind.BY_COLUMNS

    def keep_transposed(self, measured: bool = True) -> None:
        """Compute the arrays of the transpose, once, and how uneven its rows are if that is to be `measured`, which
        alone reads from a GPU."""
        if self.transposed is None:
            # they outlive a transform, and a backward may need them later
            with _compat.outside_transforms(), torch.inference_mode(False):
                self.transposed = kept_transpose(self.arrays, self.layout)
            if measured:
                self.layout = self.layout._replace(skews=(self.layout.skews[0], skew_of(self.transposed[0])))

    def operands(self) -> tuple[Tensor, ...]:
        """The index arrays for an operator."""
        return self.arrays + (self.transposed or ())

    def to(self, device: torch.device) -> "IndexArrays":
        """The pattern on a device; itself if it is there."""
        if self.arrays[0].device == device:
            return self
        kept = None if self.transposed is None else tuple(array.to(device) for array in self.transposed)
        arrays = tuple(array.to(device) for array in self.arrays)
        return IndexArrays(self.format, self.layout, arrays, kept, self.spare)

    def same_as(self, other: "IndexArrays") -> bool:
        """Whether both store the same elements in the same order.

        Arrays that are not the same memory are compared, which reads from the device.

        Raises:
            PatternError: a graph is being traced, in which arrays have no contents to compare.
        """
        if self is other:
            return True
        mine, its = self.layout[:3], other.layout[:3]
        if (self.format, mine) != (other.format, its) or len(self.arrays) != len(other.arrays):
            return False
        return all(_equal(one, another) for one, another in zip(self.arrays, other.arrays, strict=True))

    def places(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column, int64, of each of the values in the layout by rows, spare ones in a row behind the last; they
        broadcast to the values."""
        if self.spare:
            pointers, indices = self.arrays
            place = torch.arange(indices.shape[0], device=indices.device)
            row = searched_lines(pointers, 0, indices.shape[0]).long()
            return row.where(place < pointers[-1], self.layout.shape[0]), indices.long()
        _, block, shape, _ = self.layout
        return self.layout.kind.of_rows(values, self.arrays, block, shape)._positions()

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Shape within which all `places` lie."""
        rows, cols = self.layout.padded_shape
        return rows + self.spare, cols

    def without_filler(self, values: Tensor) -> Tensor:
        """The values with 0 where blocks and groups reach beyond the shape, and in spare entries."""
        if self.padded_shape == self.layout.shape:
            return values
        return values.masked_fill(self._filler(values), 0)

    def clear_filler(self, values: Tensor) -> None:
        """`without_filler` in place."""
        if self.padded_shape != self.layout.shape:
            values.masked_fill_(self._filler(values), 0)

    def _filler(self, values: Tensor) -> Tensor:
        (row, col), (rows, cols) = self.places(values), self.layout.shape
        return (row >= rows) | (col >= cols)


def _equal(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if is_traced(one, other):
        raise PatternError(
            "within a compiled graph it cannot be told whether two SparseTensors store the same elements: do this, "
            "such as an optimizer's step, outside of torch.compile"
        )
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def is_traced(*tensors: Tensor) -> bool:
    """Whether some of these stand for tensors in a graph that is being traced."""
    return any(type(tensor) is not Tensor for tensor in tensors)
