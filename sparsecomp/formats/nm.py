"""N:M: each row holds N values in each group of M columns."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.checks import Invariant, check_shape, check_slice, check_tensor, check_values, require
from sparsecomp.formats.files import Stored
from sparsecomp.formats.indices import index_dtype_for
from sparsecomp.formats.operand import Block, ByRows, Shape
from sparsecomp.formats.through_csr import ThroughCSR
from sparsecomp.formats.triplets import Triplets, kept, to_dense, without_filler

_MAX_M = 16


class NM(ThroughCSR):
    """N values in each group of M columns of each row: 2:4 and its kin. A group with fewer is filled up with zeros.

    The last group may reach beyond the columns and holds zeros there. A zero is filler wherever it is: no element of
    the matrix, and not multiplied in products, so that an input's NaN or infinity does not reach its row.

    Attributes:
        values: (rows, groups * n) or (batch, rows, groups * n).
        indices: (rows, groups * n) uint8: each value's column within its group, ascending, each once.
        shape: rows and columns; groups = ceil(columns / m).
        n: values in a group, 1 to m.
        m: columns in a group, 1 to 16.
    """

    ARRAYS = ("values", "indices")
    OPERAND = "nm"
    INDICES = ("indices",)
    LAYOUT = ("n", "m")
    VALUE_DIMS = 2
    FILLED = True
    KERNEL = "nm"

    def __init__(self, values: Tensor, indices: Tensor, shape: tuple[int, int], n: int, m: int) -> None:
        self.values, self.indices, self.shape, self.n, self.m = values, indices, shape, n, m

    @classmethod
    def from_arrays(
        cls, values: Tensor, indices: Tensor, shape: tuple[int, int], n: int, m: int, *, check: bool = True
    ) -> Self:
        """The matrix in these arrays, which are kept and not copied.

        Args:
            values: (rows, groups * n) or (batch, rows, groups * n).
            indices: (rows, groups * n) uint8, ascending in each group, below m.
            shape: rows and columns.
            n: values in a group, 1 to m.
            m: columns in a group, 1 to 16.
            check: False skips validation; wrong arrays then give wrong results.

        Raises:
            FormatError: the first invariant that is broken.
        """
        matrix = cls(values, indices, check_shape(shape), n, m)
        if check:
            matrix.validate()
        return matrix

    @classmethod
    def from_dense(
        cls, dense: Tensor, threshold: float = 0.0, *, index_dtype: torch.dtype | None = None, **layout: Any
    ) -> Self:
        """The elements of `dense` whose magnitude exceeds `threshold`; see `SparseMatrix.from_dense`.

        Nothing is pruned: a group of `m` with more than `n` such elements is an error.

        Args:
            dense: (rows, columns) or (batch, rows, columns).
            threshold: 0 or more.
            index_dtype: nothing: indices are uint8.
            layout: `n=` and `m=`.

        Raises:
            FormatError: a group holds more than n; wrong dtype, dimensions, n or m.
        """
        check_tensor("dense", dense)
        cls._check_layout(layout)
        return cls._pack(dense, kept(dense, threshold), **layout)

    @classmethod
    def _pack(cls, dense: Tensor, mask: Tensor, n: int, m: int) -> Self:
        """The elements of `dense` under `mask` (rows, columns), and as many zeros as fill each group."""
        _check_nm(n, m)
        rows, cols = mask.shape
        groups = -(-cols // m)
        padding = (0, groups * m - cols)
        grouped = torch.nn.functional.pad(mask, padding).view(rows, groups, m)
        need = f"a group of {m} holds at most {n}: prune first, or use another format"
        free = n - grouped.sum(-1, keepdim=True, dtype=torch.int8)
        require([Invariant(need, free < 0, _place(rows, groups))])
        # the stored, and the first zeros as filler: exactly n a group, in order
        chosen = grouped | ((~grouped).cumsum(-1, dtype=torch.int8) <= free)
        places = chosen.flatten().nonzero().squeeze(1)
        values = torch.nn.functional.pad(dense.masked_fill(~mask, 0), padding).flatten(-2).index_select(-1, places)
        indices = places.remainder(m).to(torch.uint8).view(rows, groups * n)
        return cls(values.view(*dense.shape[:-1], groups * n), indices, (rows, cols), n, m)

    def _check_arrays(self) -> None:
        check_shape(self.shape)
        _check_nm(self.n, self.m)
        check_values("values", self.values, 2)
        check_tensor("indices", self.indices)
        if self.indices.dtype is not torch.uint8:
            raise FormatError(f"indices have dtype {self.indices.dtype}, need torch.uint8")
        if self.indices.device != self.device:
            raise FormatError(f"indices are on {self.indices.device}, values on {self.device}: move them to one device")
        needed = (self.shape[0], self._groups * self.n)
        for name, array in (("values", self.values), ("indices", self.indices)):
            if array.shape[-2:] != needed or (name == "indices" and array.dim() != 2):
                raise FormatError(f"{name} have shape {tuple(array.shape)}, need {needed} (rows, groups * n)")

    def _check_order(self) -> None:
        index = self.indices.view(self.shape[0], self._groups, self.n)
        beyond = (self._positions()[1] >= self.shape[1]) & (self.values != 0)
        slot = _place(self.shape[0], self._groups, self.n)
        require(
            [
                Invariant(f"indices must be below {self.m}", index >= self.m, slot),
                Invariant(
                    "indices must ascend in each group, each once",
                    (index[..., 1:] <= index[..., :-1]).any(-1),
                    _place(self.shape[0], self._groups),
                ),
                Invariant(f"values beyond the {self.shape[1]} columns must be 0", beyond, slot),
            ]
        )

    @property
    def index_dtype(self) -> torch.dtype:
        """uint8: a position within a group."""
        return self.indices.dtype

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Shape with the columns rounded up to whole groups."""
        return self.padded((self.n, self.m), self.shape)

    @property
    def _groups(self) -> int:
        return -(-self.shape[1] // self.m)

    # -- how operators take it

    @classmethod
    def padded(cls, block: Block, shape: Shape) -> Shape:
        """Shape with the columns rounded up to whole groups."""
        return shape[0], shape[1] + -shape[1] % block[1]

    @classmethod
    def value_shape(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[int, ...]:
        """(rows, groups * n)."""
        return shape[0], -(-shape[1] // block[1]) * block[0]

    @classmethod
    def entries(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[Tensor, Tensor]:
        """Pointers and columns, int32 where that does; a group's filler may lie beyond the last column."""
        indices, (n, m) = arrays[0], block
        dtype = index_dtype_for(indices.numel(), shape[1] + m)
        starts = torch.arange(indices.shape[1] // n, dtype=dtype, device=indices.device).repeat_interleave(n) * m
        pointers = torch.arange(shape[0] + 1, dtype=dtype, device=indices.device) * indices.shape[1]
        return pointers, (indices.to(dtype) + starts).flatten()

    @classmethod
    def entry_places(cls, arrays: Sequence[Tensor], block: Block, shape: Shape) -> tuple[Tensor, Tensor]:
        """Row and column, int64; they broadcast to (rows, groups * n)."""
        indices, (n, m) = arrays[0], block
        starts = torch.arange(indices.shape[1] // n, device=indices.device).repeat_interleave(n) * m
        return torch.arange(shape[0], device=indices.device)[:, None], starts + indices

    def by_rows(self) -> ByRows:
        """Its values and indices."""
        return ByRows(self.values, (self.indices,), (self.n, self.m), self.shape)

    @classmethod
    def of_rows(cls, values: Tensor, arrays: Sequence[Tensor], block: Block, shape: Shape) -> Self:
        """The matrix of these arrays, which it shares."""
        return cls(values, arrays[0], shape, *block)

    def slice_rows(self, start: int, stop: int) -> Self:
        """Rows `start` to `stop` - 1, sharing every array; nothing is copied or read.

        Raises:
            FormatError: not 0 <= start <= stop <= rows.
        """
        check_slice(start, stop, self.shape[0])
        shape = (stop - start, self.shape[1])
        return type(self)(self.values[..., start:stop, :], self.indices[start:stop], shape, self.n, self.m)

    @classmethod
    def _from_triplets(
        cls, elements: Triplets, index_dtype: torch.dtype | None, at_least: torch.dtype, **layout: Any
    ) -> Self:
        row, col = elements.row.long(), elements.col.long()
        mask = to_dense(row, col, torch.ones_like(row, dtype=torch.bool), elements.shape)
        return cls._pack(to_dense(row, col, elements.values, elements.shape), mask, **layout)

    def _triplets(self) -> Triplets:
        row, col = (index.flatten() for index in torch.broadcast_tensors(*self._positions()))
        return without_filler(Triplets(row, col, self.values.flatten(-2), self.shape))

    def _positions(self) -> tuple[Tensor, Tensor]:
        return self.entry_places((self.indices,), (self.n, self.m), self.shape)

    def _cast(self, index_dtype: torch.dtype) -> Self:
        return self

    @classmethod
    def _from_stored(cls, stored: Stored) -> Self:
        return cls(stored.arrays["values"], stored.arrays["indices"], check_shape(stored.shape), **stored.layout)

    def _with(self, **changed: Tensor) -> Self:
        arrays = {**self.arrays, **changed}
        return type(self)(arrays["values"], arrays["indices"], self.shape, self.n, self.m)


def _check_nm(n: int, m: int) -> None:
    if type(n) is not int or type(m) is not int or not 1 <= n <= m <= _MAX_M:
        raise FormatError(f"n is {n!r} and m {m!r}, need ints with 1 <= n <= m <= {_MAX_M}")


def _place(rows: int, groups: int, size: int = 1) -> Callable[[int], str]:
    """Describes a flat position in (..., rows, groups, size)."""
    return lambda at: f"not so in row {at // (groups * size) % rows}, group {at // size % groups}"
