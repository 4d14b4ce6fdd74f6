"""What every sparse matrix does, whatever its format.

A format says how its arrays become triplets and how triplets become its arrays; conversions, dense and foreign
layouts, elementwise arithmetic, files and inspection follow from that. Matrices do not change: every method returns
a new one, which may share arrays with the old.
"""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from os import PathLike
from typing import Any, ClassVar, Self, TypeVar, cast, overload

import torch
from torch import Tensor

from sparsecomp.errors import FormatError, SparseOperatorError
from sparsecomp.formats import arithmetic, drawing, files, products, reductions, triplets
from sparsecomp.formats.checks import check_shape, check_slice, check_tensor, check_values
from sparsecomp.formats.compare import allclose
from sparsecomp.formats.indices import choose_index_dtype, index_dtype_for
from sparsecomp.formats.operand import Block, ByRows, Operand, Shape
from sparsecomp.formats.sparse_product import sparse_product
from sparsecomp.formats.statistics import Statistics, statistics_of
from sparsecomp.formats.triplets import Triplets

Matrix = TypeVar("Matrix", bound="SparseMatrix")
FORMATS: dict[str, type["SparseMatrix"]] = {}
"""Every format, by the name of its class; to define the class is to enter it."""


class SparseMatrix(Operand, ABC):
    """A matrix of `shape` that stores some of its elements; those it does not store are 0.

    With a batch, `values` have one more dimension in front and all matrices share one pattern. Values are float16,
    bfloat16, float32 or float64; indices int32, or int64 where a dimension or the number of stored elements exceeds
    2**31 - 1 or the caller says so.

    The constructors check nothing; `from_arrays` does. Arrays given to a constructor are kept, not copied.

    Attributes:
        values: the stored elements; each format says how they lie.
        shape: rows and columns, as the user sees them; blocks and groups may reach beyond and hold zeros there.
    """

    ARRAYS: ClassVar[tuple[str, ...]]
    TORCH_LAYOUT: ClassVar[torch.layout | None] = None
    SCIPY_FORMAT: ClassVar[str | None] = None

    values: Tensor
    shape: tuple[int, int]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "ARRAYS" in vars(cls):
            FORMATS[cls.__name__] = cls

    # -- what a format defines

    @abstractmethod
    def __init__(self, *arrays: Tensor, shape: tuple[int, int]) -> None:
        """Keep the arrays, in the order of `ARRAYS`; check nothing."""

    @abstractmethod
    def _check_arrays(self) -> None:
        """FormatError unless the arrays have dtypes, sizes, devices and contents within the format's ranges."""

    @abstractmethod
    def _check_order(self) -> None:
        """FormatError unless the contents are in order, each place once, and 0 beyond the shape."""

    def validate(self) -> None:
        """Check every invariant of the format.

        Raises:
            FormatError: names the first one that is broken, and where.
        """
        self._check_arrays()
        self._check_order()

    @classmethod
    @abstractmethod
    def _from_triplets(
        cls, elements: Triplets, index_dtype: torch.dtype | None, at_least: torch.dtype, **layout: Any
    ) -> Self:
        """The matrix of these elements; `index_dtype` and `at_least` as in `choose_index_dtype`."""

    @abstractmethod
    def _triplets(self) -> Triplets:
        """The stored elements in the shape, sorted; blocks and groups leave their zeros out."""

    def _terms(self) -> Triplets:
        """`_triplets` for arithmetic: with the zeros of blocks where their values want a gradient."""
        return self._triplets()

    @abstractmethod
    def _positions(self) -> tuple[Tensor, Tensor]:
        """Row and column, int64, of each value of a compact matrix: they broadcast to `values` without its batch."""

    @abstractmethod
    def by_rows(self) -> ByRows:
        """A compact matrix, or its transpose if `BY_COLUMNS`, as operators take it; may share its arrays."""

    @classmethod
    @abstractmethod
    def of_rows(cls, values: Tensor, arrays: Sequence[Tensor], block: Block, shape: Shape) -> Self:
        """The matrix that `by_rows` gave; what is computed of each is not checked."""

    @classmethod
    def _from_native_torch(cls, tensor: Tensor) -> Self:
        """The matrix in a tensor of `TORCH_LAYOUT`, unchecked; a format without one needs no such method."""
        raise NotImplementedError

    @classmethod
    def _from_native_scipy(cls, matrix: Any) -> Self:
        """The matrix in a scipy matrix of `SCIPY_FORMAT`, copied and checked, repeated positions summed; likewise."""
        raise NotImplementedError

    @property
    @abstractmethod
    def index_dtype(self) -> torch.dtype:
        """dtype of the indices."""

    @property
    @abstractmethod
    def mT(self) -> "SparseMatrix":
        """The transposed matrix; CSR, CSC, BSR and BCSC share their arrays with it, COO and N:M make new ones."""

    @property
    def T(self) -> "SparseMatrix":
        """`mT`."""
        return self.mT

    # -- properties

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the values."""
        return self.values.dtype

    @property
    def batch(self) -> int | None:
        """Number of matrices that share the pattern; None without a batch dimension."""
        return self.values.shape[0] if self.values.dim() > self.VALUE_DIMS else None

    @property
    def layout(self) -> dict[str, Any]:
        """What a conversion to this format must be told besides the format: block, or n and m."""
        return {name: getattr(self, name) for name in self.LAYOUT}

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The arrays by attribute name, in the constructor's order."""
        return {name: getattr(self, name) for name in self.ARRAYS}

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Shape rounded up to whole blocks or groups."""
        return self.shape

    @cached_property
    def nnz(self) -> int:
        """Stored elements in the shape, of one matrix of a batch; stored zeros count. Reads from the device once."""
        this = self.compact()
        if this.padded_shape == this.shape:
            return this._stored
        row, col = this._positions()
        return int(((row < self.shape[0]) & (col < self.shape[1])).sum())

    @property
    def _stored(self) -> int:
        """Values held for one matrix of a batch, spare capacity and those beyond the shape included."""
        return math.prod(self.values.shape[self.values.dim() - self.VALUE_DIMS :])

    @property
    def sparsity(self) -> float:
        """Share of elements that are not stored, 0 to 1; 0 for a matrix without elements."""
        numel = self.shape[0] * self.shape[1]
        return 1 - self.nnz / numel if numel else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, spare capacity left out."""
        return sum(array.numel() * array.element_size() for array in self.compact().arrays.values())

    # -- conversions

    @classmethod
    def from_dense(
        cls, dense: Tensor, threshold: float = 0.0, *, index_dtype: torch.dtype | None = None, **layout: Any
    ) -> Self:
        """The elements of `dense` whose magnitude exceeds `threshold`.

        NaN is kept; -0.0 is a zero and left out. In a batch, an element is stored if any matrix needs it.

        Args:
            dense: (rows, columns) or (batch, rows, columns).
            threshold: 0 or more.
            index_dtype: int32 or int64; by default chosen by size.
            layout: `block=(height, width)` for BSR and BCSC, `n=` and `m=` for N:M.

        Raises:
            FormatError: wrong dtype or dimensions, negative threshold, layout or index dtype that does not fit.
        """
        check_tensor("dense", dense)
        cls._check_layout(layout)
        return cls._from_triplets(triplets.of_dense(dense, threshold), index_dtype, torch.int32, **layout)

    @classmethod
    def from_torch(cls, tensor: Tensor, *, index_dtype: torch.dtype | None = None, **layout: Any) -> Self:
        """The matrix in a torch tensor of any layout: strided, COO, CSR, CSC, BSR, BSC. May share its memory.

        A batch of compressed tensors must share one pattern; a batch of COO ones gets the union of its patterns.

        Args:
            tensor: (rows, columns) or (batch, rows, columns).
            index_dtype: int32 or int64; by default chosen by size.
            layout: as for `from_dense`.

        Raises:
            FormatError: the tensor breaks an invariant of its layout, or has dense dimensions.
        """
        if not isinstance(tensor, Tensor) or tensor.layout is torch.strided:
            return cls.from_dense(tensor, index_dtype=index_dtype, **layout)
        native = next((kind for kind in FORMATS.values() if kind.TORCH_LAYOUT is tensor.layout), None)
        if native is None:
            raise FormatError(f"tensor has layout {tensor.layout}, needs strided or one of torch's sparse layouts")
        matrix = native._from_native_torch(tensor)
        matrix.validate()
        by_size = matrix._cast(index_dtype_for(*matrix.shape, matrix._stored))
        return by_size.to(cls, index_dtype=index_dtype, **layout)

    @classmethod
    def from_scipy(cls, matrix: Any, *, index_dtype: torch.dtype | None = None, **layout: Any) -> Self:
        """The matrix in a `scipy.sparse` array or matrix of any format, copied; repeated positions are summed.

        Args:
            matrix: of float16, float32 or float64.
            index_dtype: int32 or int64; by default chosen by size.
            layout: as for `from_dense`.

        Raises:
            FormatError: no scipy matrix, another dtype, indices out of range.
        """
        if not hasattr(matrix, "tocoo") or len(getattr(matrix, "shape", ())) != 2:
            raise FormatError(f"matrix is a {type(matrix).__name__}, needs a two-dimensional scipy.sparse matrix")
        native = next((kind for kind in FORMATS.values() if matrix.format == kind.SCIPY_FORMAT), None)
        if native is None:
            return cls.from_scipy(matrix.tocoo(), index_dtype=index_dtype, **layout)
        if matrix.dtype.name not in ("float16", "float32", "float64"):
            raise FormatError(f"matrix has dtype {matrix.dtype}, needs float16, float32 or float64: use astype")
        converted = native._from_native_scipy(matrix)
        by_size = converted._cast(index_dtype_for(*converted.shape, converted._stored))
        return by_size.to(cls, index_dtype=index_dtype, **layout)

    @overload
    def to(self, target: type[Matrix], *, index_dtype: torch.dtype | None = None, **layout: Any) -> Matrix: ...
    @overload
    def to(self, target: torch.dtype, non_blocking: bool = ..., copy: bool = ...) -> Self: ...
    @overload
    def to(self, target: "Tensor | SparseMatrix", non_blocking: bool = ..., copy: bool = ...) -> Self: ...
    @overload
    def to(self, target: str, *, index_dtype: torch.dtype | None = None, **layout: Any) -> "SparseMatrix": ...
    @overload
    def to(
        self, target: torch.device | str | None = ..., dtype: torch.dtype | None = ..., non_blocking: bool = ...,
        copy: bool = ..., *, device: torch.device | str | None = ...,
    ) -> Self: ...  # fmt: skip
    def to(self, *args: Any, **kwargs: Any) -> "SparseMatrix":
        """This matrix in another format, or of another dtype or on another device; itself if it is that already.

        Conversions run on the matrix's device. Zeros that a block or a group holds as filler are dropped on the way
        out of BSR, BCSC and N:M; zeros that COO, CSR and CSC store are kept.

        Args:
            args: a format, such as CSR or "csr"; or what `torch.Tensor.to` takes: a dtype of the values, a device, or
                both, or a tensor or matrix that has both.
            kwargs: of `torch.Tensor.to`; or, of a format, `index_dtype` (int32 or int64; by default this matrix's, or
                int64 where that is too narrow) and the layout as for `from_dense` (by default this matrix's own, if the
                format has such).

        Raises:
            FormatError: the matrix does not fit the format, layout or dtype, or the arguments are none of these.
        """
        kind, args = target_format(args, kwargs)
        if kind is not None:
            return self._converted(kind, kwargs.pop("index_dtype", None), kwargs)
        try:
            values = self.values.to(*args, **kwargs)
        except TypeError as error:
            raise FormatError(f"{args}, {sorted(kwargs)}: neither for a format nor for torch.Tensor.to") from error
        check_values("values", values, self.VALUE_DIMS)
        if values is self.values:
            return self
        others = {name: array.to(values.device) for name, array in self.arrays.items() if name != "values"}
        return self._with(**{**others, "values": values})

    def _converted(self, target: type[Matrix], index_dtype: torch.dtype | None, layout: dict[str, Any]) -> Matrix:
        known = {name: value for name, value in self.layout.items() if name in target.LAYOUT}
        wanted = {**known, **layout}
        target._check_layout(wanted)
        same = isinstance(self, target) and wanted == self.layout
        direct = cast(Matrix, self) if same else self._direct(target, wanted)
        if direct is None:
            return target._from_triplets(self._triplets(), index_dtype, self.index_dtype, **wanted)
        return direct._cast(choose_index_dtype(index_dtype, self.index_dtype, *self.shape, direct._stored))

    @classmethod
    def _check_layout(cls, layout: Mapping[str, Any]) -> None:
        if unknown := layout.keys() - set(cls.LAYOUT):
            raise FormatError(f"{cls.__name__} has no {', '.join(sorted(unknown))}: leave it out")
        if missing := set(cls.LAYOUT) - layout.keys():
            raise FormatError(f"{cls.__name__} needs {', '.join(f'{name}=' for name in sorted(missing))}")

    def _direct(self, target: type[Matrix], layout: Mapping[str, Any]) -> Matrix | None:
        """A conversion that does not go through triplets, where there is one."""
        return None

    def _cast(self, index_dtype: torch.dtype) -> Self:
        """The matrix with indices of this dtype; itself if they are."""
        if index_dtype is self.index_dtype:
            return self
        return self._with(**{name: array.to(index_dtype) for name, array in self.arrays.items() if name != "values"})

    def to_dense(self) -> Tensor:
        """Dense tensor (rows, columns), or (batch, rows, columns), of the values' dtype."""
        this = self.compact()
        dense = triplets.to_dense(*this._positions(), this.values, this.padded_shape)
        rows, cols = self.shape
        return dense if self.padded_shape == self.shape else dense[..., :rows, :cols].contiguous()

    @abstractmethod
    def to_torch(self) -> Tensor:
        """A torch tensor of the same layout.

        Torch has no N:M layout, and no blocks that do not divide the shape: those become CSR (BCSC: CSC).
        """

    @abstractmethod
    def to_scipy(self) -> Any:
        """A `scipy.sparse` array of the same format, without its batch dimension.

        scipy has no BCSC (it becomes BSR), no N:M and no blocks that do not divide the shape (they become CSR), and no
        half precision: float16 and bfloat16 become float32, which holds them exactly.

        Raises:
            FormatError: the matrix is a batch: use `unbatch`.
            ExtraError: scipy is not installed.
        """

    def to_device(self, device: torch.device | str) -> Self:
        """The matrix with its arrays on `device`; itself if they are there."""
        return self.to(device=device)

    def with_values(self, values: Tensor) -> Self:
        """The same pattern with other values.

        Args:
            values: of the shape of `self.values`, or with a batch dimension added or changed; the same device.

        Raises:
            FormatError: another shape, dtype or device.
        """
        check_values("values", values, self.VALUE_DIMS)
        needed = self.values.shape[self.values.dim() - self.VALUE_DIMS :]
        if values.shape[values.dim() - self.VALUE_DIMS :] != needed:
            raise FormatError(f"values have shape {tuple(values.shape)}, need {tuple(needed)}, or that with a batch")
        if values.device != self.device:
            raise FormatError(f"values are on {values.device}, the matrix on {self.device}: move them to one device")
        return self._with(values=values)

    def compact(self) -> Self:
        """The matrix without the spare capacity that a slice of rows carries; itself if it has none."""
        return self

    def known_compact(self) -> Self:
        """Itself, of which the caller knows that it has no spare capacity."""
        return self

    def unbatch(self) -> list[Self]:
        """The matrices of a batch, sharing arrays; a list of itself without a batch."""
        return [self] if self.batch is None else [self._with(values=values) for values in self.values.unbind()]

    # -- arithmetic

    @overload
    def __matmul__(self, dense: "SparseMatrix") -> Self: ...
    @overload
    def __matmul__(self, dense: Tensor) -> Tensor: ...
    def __matmul__(self, dense: "SparseMatrix | Tensor") -> "Self | Tensor":
        """S @ dense, for (columns,), (columns, n) or (…, columns, n); batches broadcast as in `torch.matmul`.

        With a sparse matrix the sparse product, in this one's format: stored is every place that a product of two
        stored elements reaches. It waits for the device, to know how many these are.

        Sums are float32 (float64 for float64), rounded once; gradients flow to `dense` and to `values`. A
        `SparseTensor` keeps what its later products need, and is the faster where there are many; in a graph that
        torch.compile may not break, write `torch.matmul`.

        Raises:
            SparseOperatorError: `dense` is one of torch's sparse tensors.
            FormatError: shapes, dtypes or devices do not belong together.
        """
        if isinstance(dense, SparseMatrix):
            (pointers, indices, shape), values = sparse_product(self, dense)
            by_rows = FORMATS["CSR"](pointers, indices, values, shape=shape).known_compact()
            if type(self) is type(by_rows):  # as narrow as this one's indices and its size allow
                return cast(Self, by_rows)
            dtype = choose_index_dtype(None, self.index_dtype, *shape, indices.numel())
            return by_rows._cast(dtype).known_compact().to(type(self), **self.layout)
        return products.product(self, dense, False)

    def __rmatmul__(self, dense: Tensor) -> Tensor:
        """dense @ S, for (rows,) or (…, n, rows). As `S @ dense`."""
        return products.product(self, dense, True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return products.function(func, args, kwargs or {})

    @overload
    def __add__(self, other: "SparseMatrix") -> Self: ...
    @overload
    def __add__(self, other: Tensor | float) -> Tensor: ...
    def __add__(self, other: "SparseMatrix | Tensor | float") -> "Self | Tensor":
        """With a sparse matrix the sparse sum, in this one's format; with a dense tensor or a number, which broadcast
        as in torch, the dense one.

        Raises:
            FormatError: matrices of another shape, batch or device, or a sum that does not fit the format.
        """
        if isinstance(other, SparseMatrix):
            return arithmetic.union(self, other)
        if not isinstance(other, Tensor | int | float):
            return NotImplemented
        arithmetic.check_partner(self, other)
        return self.to_dense() + other

    __radd__ = __add__

    def __neg__(self) -> Self:
        """The same pattern with the negative values."""
        return self._with(values=-self.values)

    @overload
    def __sub__(self, other: "SparseMatrix") -> Self: ...
    @overload
    def __sub__(self, other: Tensor | float) -> Tensor: ...
    def __sub__(self, other: "SparseMatrix | Tensor | float") -> "Self | Tensor":
        """As `+`."""
        return self.__add__(-other) if isinstance(other, SparseMatrix | Tensor | int | float) else NotImplemented

    def __rsub__(self, other: Tensor | float) -> Tensor:
        """As `+`."""
        return (-self).__add__(other) if isinstance(other, Tensor | int | float) else NotImplemented

    def __mul__(self, other: "SparseMatrix | Tensor | float") -> Self:
        """Elementwise product with a dense tensor that broadcasts to the shape, or a number; the pattern stays. With
        a sparse matrix, what both store is stored, in this one's format.

        Elements that are not stored stay zero, even where `other` is infinite or NaN. A `other` of (batch, rows,
        columns) makes a batch. The dtype is what torch promotes to.

        Raises:
            FormatError: `other` does not broadcast to the shape, is elsewhere, or its dtype leads out of the four; or
                it is sparse, of another shape or batch.
        """
        if isinstance(other, SparseMatrix):
            return arithmetic.intersection(self, other)
        return arithmetic.scaled(self, other) if isinstance(other, Tensor | int | float) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, other: Tensor | float) -> Self:
        """As `*`; elements that are not stored stay zero, even where `other` is."""
        if not isinstance(other, Tensor | int | float):
            return NotImplemented
        return arithmetic.scaled(self, other, operator.truediv)

    def __abs__(self) -> Self:
        """The same pattern with the magnitudes of the values."""
        return self._with(values=self.values.abs())

    abs = __abs__

    # -- reductions

    def sum(self, dim: int | None = None) -> Tensor:
        """The sum over the rows (`dim` 0), the columns (1 or -1), or both, as of the dense matrix: a dense tensor.

        Half precision sums in float32. A batch is left as it is, here and below.

        Raises:
            FormatError: another `dim`.
        """
        return reductions.total(self, dim)

    def mean(self, dim: int | None = None) -> Tensor:
        """`sum` over the number of elements, stored or not; NaN where there are none."""
        counted = self.shape if dim is None else (self.shape[reductions.axis_of(dim)],)
        return self.sum(dim) / math.prod(counted) if math.prod(counted) else self.sum(dim) * math.nan

    def amax(self, dim: int | None = None) -> Tensor:
        """The largest element, what is not stored being 0.

        Raises:
            FormatError: another `dim`, or no element.
        """
        return reductions.extreme(self, dim, "amax")

    def amin(self, dim: int | None = None) -> Tensor:
        """The smallest element; as `amax`."""
        return reductions.extreme(self, dim, "amin")

    def softmax(self, dim: int = -1) -> Self:
        """Softmax over what is stored along a dimension; what is not stored counts as minus infinity and stays zero.

        Computed in float32 at least, as `torch.sparse.softmax`.

        Raises:
            FormatError: another `dim`, or a format that stores filler (BSR, BCSC, N:M).
        """
        this = self.compact()
        return this._with(values=reductions.softmax_values(this, dim))

    # -- rows

    def __len__(self) -> int:
        """Number of rows."""
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Self:
        """The matrix of a slice of its rows, without steps; `slice_rows` says in each format what it shares.

        Raises:
            SparseOperatorError: another index.
        """
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise SparseOperatorError(
                f"a matrix is indexed by a slice of rows without steps, such as [2:5], not by {rows!r}: for columns "
                "slice mT, for others to_dense()"
            )
        start, stop, _ = rows.indices(self.shape[0])
        return self.slice_rows(start, max(start, stop))

    # it would be a sequence by the two above
    __iter__: ClassVar[None] = None

    def slice_rows(self, start: int, stop: int) -> Self:
        """Rows `start` to `stop` - 1, copied.

        Raises:
            FormatError: not 0 <= start <= stop <= rows.
        """
        check_slice(start, stop, self.shape[0])
        row, col, values, (_, cols) = self._terms()
        kept = (row >= start) & (row < stop)
        rows = Triplets(row[kept] - start, col[kept], values[..., kept], (stop - start, cols))
        return self._from_triplets(rows, None, self.index_dtype, **self.layout)

    def allclose(
        self, other: "SparseMatrix | Tensor", rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
    ) -> bool:
        """Whether all elements are equal as `torch.allclose` says, in any two formats; nothing is made dense.

        Args:
            other: a sparse matrix, or a dense tensor (rows, columns) or (batch, rows, columns).
            rtol: relative tolerance, of `other`'s magnitude.
            atol: absolute tolerance.
            equal_nan: whether NaN equals NaN.

        Raises:
            FormatError: another shape, batch or device.
        """
        if isinstance(other, Tensor):
            check_tensor("other", other)
        elements = triplets.of_dense(other, 0.0) if isinstance(other, Tensor) else other._triplets()
        return allclose(self._triplets(), elements, rtol, atol, equal_nan)

    # -- files

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file; a good file of that name is replaced only by a whole new one.

        Raises:
            OSError: the folder cannot be written.
        """
        this = self.compact()
        files.save_arrays(path, type(this).__name__, this.shape, this.layout, this.arrays)

    @classmethod
    def load(cls, path: str | PathLike[str], device: torch.device | str = "cpu") -> Self:
        """Read a file that `save` wrote, and validate it.

        Args:
            path: the file.
            device: where the arrays go.

        Raises:
            FormatError: truncated, altered, of a newer version, or of another format than this class
                (`SparseMatrix.load` reads all).
            OSError: the file cannot be read.
        """
        stored = files.load_arrays(path)
        kind = FORMATS.get(stored.format)
        if kind is None or not issubclass(kind, cls):
            raise FormatError(f"{path} holds {stored.format}, not {cls.__name__}: load it by {stored.format}.load")
        if set(stored.arrays) != set(kind.ARRAYS) or set(stored.layout) != set(kind.LAYOUT):
            raise FormatError(f"{path} does not hold what {stored.format} needs: it was altered")
        matrix = kind._from_stored(stored)
        matrix.validate()
        return matrix.to_device(device)

    @classmethod
    def _from_stored(cls, stored: files.Stored) -> Self:
        """The matrix in a file, unchecked."""
        return cls(*(stored.arrays[name] for name in cls.ARRAYS), shape=check_shape(stored.shape))

    # -- inspection

    def statistics(self) -> Statistics:
        """Size, sparsity and how the stored elements spread over the rows."""
        return statistics_of(self)

    def summary(self) -> str:
        """`statistics` as lines to read."""
        return str(self.statistics())

    def visualize(self, width: int = 64, height: int = 32) -> str:
        """A map in characters, at most `width` by `height`: the darker, the more elements are stored there."""
        return drawing.characters(self._triplets(), width, height)

    def spy(self, path: str | PathLike[str]) -> None:
        """Draw where elements are stored to an image file of any kind that matplotlib writes.

        Raises:
            ExtraError: matplotlib is not installed.
        """
        drawing.image(self._triplets(), path)

    def _row_counts(self) -> Tensor:
        """Number of stored elements of at least each row that has any: int64."""
        row, col = torch.broadcast_tensors(*self.compact()._positions())
        return row[(row < self.shape[0]) & (col < self.shape[1])].unique(return_counts=True)[1]

    def __repr__(self) -> str:
        batch = "" if self.batch is None else f"batch={self.batch}, "
        layout = "".join(f"{name}={value}, " for name, value in self.layout.items())
        return f"{type(self).__name__}({batch}shape={self.shape}, {layout}dtype={self.dtype}, device='{self.device}')"

    def _with(self, **changed: Tensor) -> Self:
        """The matrix with some of its arrays replaced."""
        return type(self)(*{**self.arrays, **changed}.values(), shape=self.shape)


def target_format(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[type[SparseMatrix] | None, tuple[Any, ...]]:
    """The format that `to` was called with; or None, and what `torch.Tensor.to` takes.

    Raises:
        FormatError: the arguments are for neither.
    """
    target = args[0] if args else None
    kind = FORMATS.get(target.upper()) if isinstance(target, str) else target
    if isinstance(kind, type) and issubclass(kind, SparseMatrix):
        if len(args) > 1:
            raise FormatError(f"{args[1:]} stand behind {kind.__name__}: name them, such as block=(16, 16)")
        return kind, ()
    if isinstance(target, SparseMatrix):
        return None, (target.values, *args[1:])
    device = kwargs.get("device", target)
    if (target is None and len(args) == 1) or not isinstance(device, torch.dtype | Tensor | None):
        _check_device(device)
    return None, args


def _check_device(name: Any) -> None:
    """Raise FormatError unless there is a device of this name."""
    try:
        torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise FormatError(
            f"{name!r} is no format ({', '.join(FORMATS)}), no dtype and no device: give one of these"
        ) from error
