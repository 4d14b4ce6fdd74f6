"""A sparse matrix that is a `torch.Tensor`: an operand of products, a graph's input.

It stores values and a pattern. Products with it run sparse, forward and backward; its gradient is one of the same
pattern. Elementwise operators that keep zeros at zero act on the stored values, in-place ones always do, since they
cannot store more; whatever else would have to make it dense raises instead and names `to_dense()`.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsecomp import _compat
from sparsecomp.errors import FormatError, SparseOperatorError
from sparsecomp.formats import CSR, SparseMatrix
from sparsecomp.formats.base import FORMATS, target_format
from sparsecomp.formats.checks import check_tensor
from sparsecomp.formats.files import Stored
from sparsecomp.ops.sparse.sparse_matmul import sparse_to_dense
from sparsecomp.reference.patterns import Layout
from sparsecomp.tensor import arithmetic  # noqa: F401  (enters its functions)
from sparsecomp.tensor.by_values import dense_by_values, view
from sparsecomp.tensor.dispatch import OPERATORS, elementwise
from sparsecomp.tensor.functions import FUNCTIONS
from sparsecomp.tensor.index_arrays import IndexArrays, is_traced


class SparseTensor(Tensor):
    """A matrix of one of `sparsecomp.formats` as a tensor.

    Gradients end here: none reaches the matrix's own values. `torch.load(weights_only=True)` reads one once
    `sparsecomp` has been imported.

    Args:
        matrix: without a batch; its arrays are kept, not copied, except that COO's rows become pointers.
        requires_grad: whether it takes a gradient.

    Attributes:
        pattern: which elements it stores.

    Raises:
        FormatError: the matrix is a batch, or no sparse matrix.
    """

    FUNCTIONS = FUNCTIONS
    _values: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    pattern: IndexArrays
    _transpose: bool

    @staticmethod
    def __new__(
        cls, matrix: SparseMatrix, requires_grad: bool = False
    ) -> "SparseTensor":
        if not isinstance(matrix, SparseMatrix):
            raise FormatError(f"matrix is a {type(matrix).__name__}, needs one of sparsecomp.formats: see from_dense")
        values, pattern = IndexArrays.of(matrix)
        return cls._make(values.detach(), pattern, False, requires_grad)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def _make(
        cls, values: Tensor, pattern: IndexArrays, transpose: bool, requires_grad: bool = False
    ) -> "SparseTensor":
        rows_first = transpose == pattern.kind.BY_COLUMNS
        shape = pattern.layout.shape if rows_first else pattern.layout.shape[::-1]
        self = _compat.make_wrapper(cls, shape, values.dtype, values.device, requires_grad)
        self._values, self.pattern, self._transpose = values, pattern, transpose
        return self

    @classmethod
    def from_dense(
        cls, dense: Tensor, format: type[SparseMatrix] = CSR, threshold: float = 0.0, **layout: Any
    ) -> "SparseTensor":
        """What `format.from_dense` stores of a dense (rows, columns) tensor, as a tensor that needs no gradient.

        Raises:
            FormatError: no dense tensor, no format, or settings that do not fit it.
        """
        if not (isinstance(format, type) and issubclass(format, SparseMatrix)):
            raise FormatError(f"format is {format!r}, needs a class of sparsecomp.formats, such as CSR")
        check_tensor("dense", dense)
        return cls(format.from_dense(dense.detach(), threshold, **layout))

    # -- what it holds

    @property
    def format(self) -> str:
        """Name of the format; a transposed tensor keeps it."""
        return self.pattern.format

    @property
    def matrix(self) -> SparseMatrix:
        """The matrix in `sparsecomp.formats`; shares the arrays where its format allows."""
        return self.pattern.matrix(self._values.detach(), self._transpose)

    def values(self) -> Tensor:
        """The stored values as the layout by rows has them (blocks and groups with their filler), without gradient."""
        return self._values.detach()

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes of the values and index arrays; what is kept of the transpose follows from these and is left out."""
        return sum(array.numel() * array.element_size() for array in (self._values, *self.pattern.arrays))

    def to(self, *args: Any, **kwargs: Any) -> "SparseTensor":  # pyright: ignore[reportIncompatibleMethodOverride]
        """`torch.Tensor.to`, or the matrix in another format.

        Args:
            args: as of torch; or a format, such as "bsr" or BSR, with `block=`, or `n=` and `m=`. A tensor in another
                format is a new leaf.

        Raises:
            FormatError: the matrix does not fit the format, or the arguments are for neither.
            SparseOperatorError: it takes a gradient, which no change of format passes on.
        """
        kind, args = target_format(args, kwargs)
        if kind is None:
            return cast(SparseTensor, super().to(*args, **kwargs))
        if self.requires_grad and torch.is_grad_enabled():
            raise SparseOperatorError(f"{self!r} takes a gradient, which no change of format passes on: detach() first")
        return SparseTensor(self.matrix.to(kind, **kwargs))

    def with_values(self, values: Tensor) -> "SparseTensor":
        """The same pattern with other values, of any dtype and the shape of `values()`.

        Raises:
            FormatError: values of another shape, or on another device.
        """
        check_tensor("values", values)
        if (values.shape, values.device) != (self._values.shape, self.device):
            raise FormatError(
                f"values have shape {tuple(values.shape)} on {values.device}, the pattern needs "
                f"{tuple(self._values.shape)} on {self.device}"
            )
        return type(self)._make(values, self.pattern, self._transpose)

    def same_pattern(self, other: "SparseTensor") -> bool:
        """Whether both store the same elements; reads from the device unless they share their pattern.

        Raises:
            FormatError: `other` is no SparseTensor.
        """
        if not isinstance(other, SparseTensor):
            raise FormatError(f"other is a {type(other).__name__}, needs a SparseTensor")
        return self._transpose == other._transpose and self.pattern.same_as(other.pattern)

    def to_dense(self, dtype: torch.dtype | None = None, *, masked_grad: bool | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The dense tensor (rows, columns). Its gradient comes back at the stored elements only."""
        dense = dense_by_values(self) if _compat.inside_forward_mode() else sparse_to_dense(self)
        return dense if dtype is None else dense.to(dtype)

    # -- torch's protocols

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        pattern, values = self.pattern, self._values
        if not is_traced(values, *pattern.arrays) and (
            self.requires_grad or pattern.stored_by_columns(self._transpose)
        ):
            # a compiled graph cannot keep what it computes, so the transpose is computed before it is traced
            pattern.keep_transposed()
        names = [f"_own{index}" for index in range(len(pattern.arrays))]
        names += [f"_transposed{index}" for index in range(len(pattern.transposed or ()))]
        return ["_values", *names], (pattern.format, pattern.layout, self._transpose, pattern.spare)

    def _stable_hash_for_caching(self) -> str:
        """What a compiled graph depends on; torch's cache knows nothing else of the arrays."""
        names, context = self.__tensor_flatten__()
        arrays = [_compat.described(getattr(self, name)) for name in names]
        return repr((names, context, arrays, self.requires_grad))

    @classmethod
    @torch.compiler.disable  # Dynamo would compile it wherever it runs outside of a graph, as in a backward
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> "SparseTensor":
        format, layout, transpose, spare = context
        own = tuple(inner[f"_own{index}"] for index in range(layout.own))
        kept = tuple(inner[name] for name in inner if name.startswith("_transposed")) or None
        return cls._make(inner["_values"], IndexArrays(format, layout, own, kept, spare), transpose)

    def __getattr__(self, name: str) -> Any:
        # the arrays under the names that __tensor_flatten__ gives them
        if name.startswith("_own") and name[4:].isdigit():
            return self.pattern.arrays[int(name[4:])]
        if name.startswith("_transposed") and name[11:].isdigit() and self.pattern.transposed is not None:
            return self.pattern.transposed[int(name[11:])]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        handler = FUNCTIONS.get(func)
        if handler is not None:
            return handler(cls, *args, **(kwargs or {}))
        with _compat.without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    @torch.compiler.disable  # as above: an optimizer's step that breaks the graph runs it
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if any(isinstance(value, cls) and _compat.carries_levels(value._values) for value in args):
            raise SparseOperatorError(
                f"{func} does not take a SparseTensor whose values torch.func or forward-mode AD follows, as products, "
                "transposes and to_dense() do: call to_dense() first, which makes a dense copy"
            )
        handler = OPERATORS.get(func)
        if handler is not None:
            return handler(cls, func, *args, **(kwargs or {}))
        return elementwise(cls, func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> "SparseTensor":
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only a SparseTensor that is a leaf of the graph can be copied deeply: detach() it")
        copied = self.with_values(self._values.detach().clone())
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        _as_parameter(copied, isinstance(self, nn.Parameter))
        if self.grad is not None:
            copied.grad = self.grad.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        base = self.pattern.matrix(self._values.detach(), False)
        layout = {name: list(value) if isinstance(value, tuple) else value for name, value in base.layout.items()}
        how = (self._transpose, self.requires_grad, isinstance(self, nn.Parameter), "exact")
        return rebuild, (self.format, dict(base.arrays), list(base.shape), layout, *how)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        gradient = ", requires_grad=True" if self.requires_grad else ""
        stored = f"{self._values.numel()} values"
        return f"SparseTensor({self.format}, shape={tuple(self.shape)}, {stored}, dtype={self.dtype}{gradient})"


@torch.compiler.allow_in_graph  # Dynamo cannot trace the making of a subclass
def view_of(values: Tensor, arrays: Sequence[Tensor], format: str, layout: str) -> SparseTensor:
    """A SparseTensor on a module's memory, whose gradient goes back to `values`.

    Args:
        arrays: of the pattern, perhaps with those of the transpose.
        format: name of the class in `sparsecomp.formats`.
        layout: what `Layout.written` returns.
    """
    read = Layout.read(layout)
    pattern = IndexArrays(format, read, tuple(arrays[: read.own]), tuple(arrays[read.own :]) or None)
    return view(SparseTensor, values, pattern, False)


def rebuild(
    format: str, arrays: dict[str, Tensor], shape: list[int], layout: dict[str, Any], transpose: bool,
    requires_grad: bool, parameter: bool, mode: str,
) -> SparseTensor:  # fmt: skip
    """A SparseTensor from what a file of `torch.save` holds, checked.

    Raises:
        FormatError: the arrays are no matrix of this format.
    """
    kind = FORMATS.get(format)
    if kind is None or set(arrays) != set(kind.ARRAYS) or set(layout) != set(kind.LAYOUT):
        raise FormatError(f"a SparseTensor of format {format!r} with arrays {sorted(arrays)} cannot be read")
    matrix = kind._from_stored(Stored(format, shape, layout, arrays))
    matrix.validate()
    values, pattern = IndexArrays.of(matrix)
    found = SparseTensor._make(values, pattern, transpose, requires_grad)
    return _as_parameter(found, parameter)


rebuild.__module__ = "sparsecomp.sparse_tensor"  # its name in files, wherever it stands


def _as_parameter(tensor: SparseTensor, parameter: bool) -> SparseTensor:
    if parameter:
        cast(Any, tensor)._is_param = True  # what nn.Parameter does to tensors of other classes
    return tensor
