"""Products of matrices with dense tensors.

Operators do them, a floor above, where `SparseTensor` multiplies by the same code. They enter themselves here, and are
loaded with the first product, since they bring Dynamo with them: whoever only stores matrices does not wait for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.errors import FormatError, SparseOperatorError

if TYPE_CHECKING:
    from sparsecomp.formats.base import SparseMatrix

Multiply = Callable[["SparseMatrix", Tensor, bool, bool], Tensor]

_PROVIDER = "sparsecomp.ops.sparse.matrices"
_multiply: Multiply | None = None


def provide(multiply: Multiply) -> None:
    """Enter what computes `product` of a tensor that is dense."""
    global _multiply
    _multiply = multiply


def product(matrix: SparseMatrix, dense: Tensor, from_right: bool, transpose: bool = False) -> Tensor:
    """op(S) @ dense, or dense @ op(S) if `from_right`, op(S) being the transpose of S if `transpose`.

    Raises:
        SparseOperatorError: `dense` is no dense tensor.
        FormatError: shapes, dtypes or devices do not belong together.
    """
    check_dense(matrix, dense)
    if _multiply is None:
        importlib.import_module(_PROVIDER)
    assert _multiply is not None
    return _multiply(matrix, dense, from_right, transpose)


def check_dense(sparse: Any, dense: Any) -> None:
    """Raise SparseOperatorError unless what a matrix or a SparseTensor is to be multiplied with is a dense tensor."""
    if not isinstance(dense, Tensor) or dense.layout is not torch.strided or isinstance(dense, type(sparse)):
        layout = f" of layout {dense.layout}" if isinstance(dense, Tensor) else ""
        raise SparseOperatorError(
            f"a {type(sparse).__name__} multiplies with dense tensors, not with a {type(dense).__name__}{layout}: make "
            "one of both dense by to_dense()"
        )


def function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of torch's gives that was called with a matrix, such as by ``tensor @ matrix``.

    Raises:
        SparseOperatorError: no product, and no elementwise sum or product of two.
    """
    handler = _FUNCTIONS.get(func)
    if handler is None or kwargs or len(args) != 2:
        raise SparseOperatorError(
            f"{getattr(func, '__name__', func)} does not take a matrix of sparsecomp.formats with these arguments: use "
            "SparseTensor(matrix), which takes more, or to_dense()"
        )
    return handler(*args)


def _matmul(left: Any, right: Any) -> Tensor:
    return product(right, left, True) if isinstance(left, Tensor) else left.__matmul__(right)


def _operator(left: Any, right: Any) -> Tensor:
    if torch.compiler.is_compiling():
        # Dynamo makes one call of S @ x and of x @ S, with the tensor first
        raise SparseOperatorError(
            "@ with a matrix of sparsecomp.formats in a compiled graph: write torch.matmul, or use SparseTensor(matrix)"
        )
    return _matmul(left, right)


def _linear(x: Tensor, weight: Any) -> Tensor:
    if weight.batch is not None:
        raise FormatError(f"linear takes one matrix as its weight, not {weight!r}: use torch.matmul(x, weight.mT)")
    return product(weight, x, True, transpose=True)


def check_dimensions(name: str, left: Any, right: Any) -> None:
    """Raise FormatError where torch's `mm`, `mv` or `bmm` does not take operands of these dimensions."""
    given = tuple(_sizes(operand) for operand in (left, right))
    needed = _DIMENSIONS[name]
    if tuple(map(len, given)) != needed or (name == "bmm" and given[0][0] != given[1][0]):
        raise FormatError(
            f"{name} takes operands of {needed[0]} and {needed[1]} dimensions and one batch, not of {given[0]} and "
            f"{given[1]}: use torch.matmul, which broadcasts"
        )


def _sizes(operand: Any) -> tuple[int, ...]:
    """Sizes of a tensor or a matrix, with its batch."""
    batch = getattr(operand, "batch", None)
    return (*(() if batch is None else (batch,)), *getattr(operand, "shape", ()))


_DIMENSIONS = {"mm": (2, 2), "addmm": (2, 2), "mv": (2, 1), "bmm": (3, 3)}


def _mm(left: Any, right: Any) -> Tensor:
    check_dimensions("mm", left, right)
    return _matmul(left, right)


def _mv(left: Any, right: Any) -> Tensor:
    check_dimensions("mv", left, right)
    return _matmul(left, right)


def _bmm(left: Any, right: Any) -> Tensor:
    check_dimensions("bmm", left, right)
    return _matmul(left, right)


# by methods of the matrix: in a compiled graph an operator is the function that came here
def _sum(one: Any, other: Any) -> Any:
    return other.__radd__(one) if isinstance(one, Tensor) else one.__add__(other)


def _difference(one: Any, other: Any) -> Any:
    return other.__rsub__(one) if isinstance(one, Tensor) else one.__sub__(other)


def _times(one: Any, other: Any) -> Any:
    return other.__rmul__(one) if isinstance(one, Tensor) else one.__mul__(other)


_FUNCTIONS: dict[Any, Callable[[Any, Any], Any]] = {
    torch.matmul: _matmul,
    **dict.fromkeys((Tensor.matmul, Tensor.__matmul__), _operator),
    **dict.fromkeys((torch.mm, Tensor.mm), _mm),
    **dict.fromkeys((torch.mv, Tensor.mv), _mv),
    **dict.fromkeys((torch.bmm, Tensor.bmm), _bmm),
    F.linear: _linear,
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__), _sum),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__), _difference),
    Tensor.__rsub__: lambda one, other: _difference(other, one),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__), _times),
}
