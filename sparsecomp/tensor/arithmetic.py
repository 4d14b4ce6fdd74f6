"""torch's sums, elementwise products, reductions, comparisons and slices, for SparseTensors.

With a dense tensor or a number a sum is dense and a product is sparse. Of two SparseTensors that store the same
elements the values are combined, which a compiled graph takes; where they store others, it is the arithmetic of their
matrices, at which a graph breaks, since what the result stores depends on contents.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.errors import SparseOperatorError
from sparsecomp.formats.batch import cat
from sparsecomp.formats.bounded_product import bounded_matmul
from sparsecomp.formats.dots import untraced
from sparsecomp.formats.masked_product import masked_matmul
from sparsecomp.formats.pattern import Pattern
from sparsecomp.formats.reductions import axis_of
from sparsecomp.tensor.by_values import bounded, by_matrices, masked, reduced, softmax_of_stored, times
from sparsecomp.tensor.functions import handles
from sparsecomp.tensor.index_arrays import is_traced


@handles(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
def _plus(cls: Any, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    if isinstance(input, cls) and isinstance(other, cls):
        if _elementwise(input, other):
            with _compat.without_torch_function():
                return torch.add(input, other, alpha=alpha)
        return by_matrices(operator.add, input, other if alpha == 1 else other * alpha)
    one, two = (operand.to_dense() if isinstance(operand, cls) else operand for operand in (input, other))
    return one + (two if alpha == 1 else two * alpha)


@handles(torch.sub, torch.subtract, Tensor.sub, Tensor.__sub__)
def _minus(cls: Any, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    return _plus(cls, input, other, alpha=-alpha)


@handles(torch.rsub, Tensor.__rsub__)
def _subtracted_from(cls: Any, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    return _plus(cls, other, input, alpha=-alpha)


@handles(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply)
def _times(cls: Any, input: Any, other: Any) -> Tensor:
    """With a dense tensor: at the stored places, so that what is not stored stays zero."""
    sparse, factor = (input, other) if isinstance(input, cls) else (other, input)
    if isinstance(factor, cls) and not _elementwise(sparse, factor):
        return by_matrices(operator.mul, sparse, factor)
    if isinstance(factor, Tensor) and not isinstance(factor, cls) and factor.dim():
        if torch.broadcast_shapes(factor.shape, sparse.shape) != sparse.shape:
            raise SparseOperatorError(
                f"times a dense {tuple(factor.shape)} it is no matrix of {tuple(sparse.shape)}: call to_dense() first"
            )
        factor = torch.ops.sparsecomp.sparse_gather.default(sparse.detach(), factor.expand(sparse.shape))
    if isinstance(factor, cls):
        return times(sparse, factor)
    with _compat.without_torch_function():
        return torch.mul(sparse, factor)


def _elementwise(one: Any, other: Any) -> bool:
    """Whether two store the same elements. A graph knows it of one pattern only, and breaks for others."""
    if is_traced(*one.pattern.arrays, *other.pattern.arrays):
        return one.pattern is other.pattern and one._transpose == other._transpose
    return one.same_pattern(other)


def _reducing(name: str) -> Callable[..., Tensor]:
    def handler(
        cls: Any, input: Any, dim: int | Sequence[int] | None = None, keepdim: bool = False, *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        axes = {axis_of(one) for one in (dim if isinstance(dim, Sequence) else () if dim is None else (dim,))}
        single = axes.pop() if len(axes) == 1 else None
        given = input if dtype is None else input.to(dtype)
        if given.pattern.spare:  # how much is not stored is known of the matrix without its spare entries
            found = by_matrices(operator.methodcaller(name, single), given)
        else:
            found = reduced(given, name, single)
        if not keepdim:
            return found
        return found.view(1, 1) if single is None else found.unsqueeze(single)

    return handler


for _name in ("sum", "mean", "amax", "amin"):
    handles(getattr(torch, _name), getattr(Tensor, _name))(_reducing(_name))


@handles(torch.sparse.softmax)
def _softmax(cls: Any, input: Any, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    given = input if dtype is None else input.to(dtype)
    if given.pattern.spare:
        return by_matrices(operator.methodcaller("softmax", dim), given)
    return softmax_of_stored(given, dim)


@handles(torch.cat, torch.concat, torch.concatenate)
def _cat(cls: Any, tensors: Any, dim: int = 0) -> Tensor:
    if not all(isinstance(tensor, cls) for tensor in tensors):
        raise SparseOperatorError("cat takes SparseTensors alone, or dense tensors alone: use to_dense()")
    return by_matrices(lambda *matrices: cat(matrices, dim), *tensors)


@handles(masked_matmul)
def _masked_matmul(cls: Any, one: Any, other: Any, at: Any) -> Tensor:
    if isinstance(at, cls):
        return masked(one, other, at)
    return by_matrices(lambda left, right: masked_matmul(left, right, at), one, other)


@handles(bounded_matmul)
def _bounded_matmul(cls: Any, one: Any, other: Any, capacity: int) -> Tensor:
    return bounded(one, other, capacity)


@handles(Tensor.__getitem__)
def _rows(cls: Any, input: Any, index: Any) -> Tensor:
    if not isinstance(index, slice):
        raise SparseOperatorError(
            f"{input!r} is indexed by a slice of rows: use torch.nn.functional.embedding(rows, tensor), or to_dense()"
        )
    return by_matrices(operator.itemgetter(index), input)


def _comparing(compare: Callable[[Any, Any], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def handler(cls: Any, input: Any, other: Any) -> Any:
        """With a dense tensor the dense mask, else the pattern of where it holds."""
        operands = input, other
        if any(isinstance(one, Tensor) and not isinstance(one, cls) and one.dim() for one in operands):
            return compare(*(one.to_dense() if isinstance(one, cls) else one for one in operands))
        if isinstance(input, cls) and isinstance(other, cls | int | float | Tensor):
            return _where(compare, input, other)
        with _compat.without_torch_function():
            return function(*operands)

    return handler


@untraced
def _where(compare: Callable[[Any, Any], Any], one: Any, other: Any) -> Pattern:
    if is_traced(one._values):
        raise _compat.BreaksGraph("where a comparison holds")
    partner = other.matrix if isinstance(other, type(one)) else float(other)
    return Pattern.where(compare, one.matrix, partner)


for _name in ("gt", "ge", "lt", "le", "eq", "ne"):
    for _function in {getattr(torch, _name), getattr(Tensor, _name), getattr(Tensor, f"__{_name}__")}:
        handles(_function)(_comparing(getattr(operator, _name), _function))
