"""torch's functions that multiply, for SparseTensors: each becomes `sparsecomp::sparse_matmul`.

This happens above autograd, because torch's own gradients of products are dense. Dynamo traces through it, so that a
captured graph holds one operator for every spelling. A product of two SparseTensors is that of their matrices.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.errors import PatternError, SparseOperatorError
from sparsecomp.formats.products import check_dense, check_dimensions
from sparsecomp.ops.sparse.linear import autocast
from sparsecomp.ops.sparse.rows import sparse_rows
from sparsecomp.tensor.by_values import by_matrices, flipped, product_by_values, rows_by_values
from sparsecomp.tensor.dispatch import tensor_product
from sparsecomp.tensor.index_arrays import is_traced

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""By torch's function: what takes the class SparseTensor and the function's arguments."""


def handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that enters a function in `FUNCTIONS`."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS.update(dict.fromkeys(functions, handler))
        return handler

    return register


@handles(F.linear)
def _linear(cls: type, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, cls):
        raise SparseOperatorError("linear takes a SparseTensor as its weight, not as its input: use to_dense()")
    return _product(weight, input, bias, None, True, "column", 1.0)


@handles(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _matmul(cls: type, input: Tensor, other: Tensor) -> Tensor:
    if isinstance(input, cls) and isinstance(other, cls):
        return by_matrices(operator.matmul, input, other)
    if isinstance(other, cls):
        return _product(other.t(), input, None, None, True, "column", 1.0)
    return _product(input, other, None, None, isinstance(other, Tensor) and other.dim() == 1, "column", 1.0)


@handles(torch.mm, Tensor.mm)
def _mm(cls: type, input: Tensor, mat2: Tensor) -> Tensor:
    check_dimensions("mm", input, mat2)
    return _matmul(cls, input, mat2)


@handles(torch.mv, Tensor.mv)
def _mv(cls: type, input: Tensor, vec: Tensor) -> Tensor:
    check_dimensions("mv", input, vec)
    with torch.autocast("cpu", enabled=False):  # torch's does not know mv, though it does on a GPU
        return _matmul(cls, input, vec)


@handles(Tensor.__rmatmul__)
def _rmatmul(cls: type, input: Tensor, other: Tensor) -> Tensor:
    return _matmul(cls, other, input)


@handles(torch.addmm, Tensor.addmm)
def _addmm(cls: type, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if isinstance(input, cls):
        raise SparseOperatorError("addmm takes a SparseTensor as a factor, not to be added: use to_dense()")
    check_dimensions("addmm", mat1, mat2)
    linear = isinstance(mat2, cls)
    sparse, dense = (mat2.t(), mat1) if linear else (mat1, mat2)
    shape = (mat1.shape[0], mat2.shape[1])
    bias, residual, axis = None, None, "column"
    if beta != 0:  # as torch: otherwise the input is not read
        scaled = input if beta == 1 else input * beta
        if scaled.dim() < 2 or (scaled.shape[0] == 1 and shape[0] != 1):
            bias = scaled.expand(1, shape[1])[0] if scaled.dim() == 2 else scaled.expand(shape[1])
        elif scaled.shape[1] == 1 and shape[1] != 1:
            bias, axis = scaled.expand(shape[0], 1)[:, 0], "row"
        else:
            residual = scaled.expand(shape)
    return _product(sparse, dense, bias, residual, linear, axis, float(alpha))


@handles(F.embedding)
def _embedding(
    cls: type, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    if not isinstance(weight, cls) or not isinstance(input, Tensor):
        given = f"{type(input).__name__} and {type(weight).__name__}"
        raise SparseOperatorError(f"embedding takes a tensor of indices and a SparseTensor as its weight, not {given}")
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        raise SparseOperatorError("embedding of a SparseTensor takes no options: leave them out, or use to_dense()")
    return rows_by_values(weight, input) if _compat.inside_forward_mode() else sparse_rows(weight, input)


def _transposing(function: Callable[..., Any]) -> Callable[..., Any]:
    def handler(cls: type, input: Tensor, *dims: int) -> Tensor:
        if _compat.inside_forward_mode() and (not dims or dims[0] % 2 != dims[1] % 2):
            return flipped(input)
        with _compat.without_torch_function():
            return function(input, *dims)

    return handler


FUNCTIONS.update({
    function: _transposing(function) for function in (
        torch.t, Tensor.t, torch.transpose, Tensor.transpose, Tensor.T.__get__, Tensor.mT.__get__,  # pyright: ignore
    )
})  # fmt: skip


@handles(Tensor.grad.__set__)  # pyright: ignore
def _set_grad(cls: type, tensor: Any, grad: Any) -> None:
    if isinstance(tensor, cls) and grad is not None:
        if not isinstance(grad, cls):
            raise PatternError("the gradient of a SparseTensor must be a SparseTensor, not a dense tensor")
        # a tracer's copies are of what was checked when it was set
        if not is_traced(tensor._values, grad._values) and not tensor.same_pattern(grad):
            raise PatternError(f"the gradient stores other elements than {tensor!r}: give it the tensor's pattern")
    with _compat.without_torch_function():
        Tensor.grad.__set__(tensor, grad)  # pyright: ignore


def _product(
    sparse: Tensor, dense: Tensor, bias: Tensor | None, residual: Tensor | None, linear: bool, axis: str, scale: float
) -> Tensor:
    check_dense(sparse, dense)
    if not dense.dim():
        raise SparseOperatorError("a SparseTensor multiplies with one dimension or more: write * for a number")
    if _compat.inside_forward_mode():
        return product_by_values(sparse, dense, bias, residual, linear, axis, scale)
    dense, sparse = autocast(dense, sparse)
    return tensor_product(sparse, dense, bias, residual, linear, axis, "none", scale, None)
