"""What a SparseTensor does below autograd: products through its arrays, elementwise operators on its values.

Out of place, only operators that map zero to zero are taken, so that a result means the same as the dense one. In
place, every elementwise operator acts on the stored values.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsecomp import _compat
from sparsecomp.errors import PatternError, SparseOperatorError
from sparsecomp.ops.sparse.linear import sampled_by_rows
from sparsecomp.ops.sparse.sddmm import run_sddmm
from sparsecomp.ops.sparse.sparse_matmul import multiplied, product_gradients, save_product
from sparsecomp.ops.sparse.spmm import run_spmm
from sparsecomp.tensor.index_arrays import is_traced

aten, ours = torch.ops.aten, torch.ops.sparsecomp
OPERATORS: dict[Any, Callable[..., Any]] = {}
"""By overload: what takes the class SparseTensor, the overload and its arguments."""

_PLAIN = (Tensor, nn.Parameter, type(None))
_KEEPS_ZERO = {
    aten.abs.default, aten.neg.default, aten.sqrt.default, aten.sign.default, aten.tanh.default, aten.relu.default,
    aten.clone.default, aten.mul.Scalar, aten.div.Scalar, aten.zeros_like.default, aten.empty_like.default,
    aten.nan_to_num.default, aten.square.default, aten.sgn.default,
}  # fmt: skip
_OF_TWO = {aten.add.Tensor, aten.sub.Tensor, aten.maximum.default, aten.minimum.default, aten.lerp.Scalar}
_OF_THREE = {aten.addcmul.default}
_IN_PLACE = {
    aten.zero_.default, aten.uniform_.default, aten.normal_.default, aten.fill_.Scalar, aten.fill_.Tensor,
    aten.masked_fill_.Scalar,
}  # fmt: skip


def _implements(*overloads: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS.update(dict.fromkeys(overloads, handler))
        return handler

    return register


def elementwise(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """An operator on the stored values of one pattern.

    Raises:
        SparseOperatorError: one that would store more, or that is not known.
        PatternError: other operands store other elements.
    """
    if func is aten.mul.Tensor and not isinstance(args[0], cls):
        args = args[::-1]
    first = args[0] if args else None
    in_place = func in _IN_PLACE or (torch.Tag.pointwise in func.tags and func._schema.name.endswith("_"))
    sparse = [value for value in (*args, *kwargs.values()) if isinstance(value, cls)]
    dense = [value for value in args if isinstance(value, Tensor) and not isinstance(value, cls) and value.dim()]
    if dense or not isinstance(first, cls) or not (in_place or _keeps_zero(cls, func, args)):
        # inference mode hands over whole what is made of other operators
        composed = func.decompose(*args, **kwargs)
        if composed is NotImplemented:
            raise no_such_operator(cls, func, args)
        return composed
    for other in sparse[1:]:
        _agree(first, other)
    plain = [value._values if isinstance(value, cls) else value for value in args]
    named = {name: value._values if isinstance(value, cls) else value for name, value in kwargs.items()}
    named.pop("memory_format", None)
    result = func(*plain, **named)
    assert first is not None
    if in_place:
        # what lies beyond the shape meets zeros in products, which only finite numbers survive
        first.pattern.clear_filler(first._values)
        written(first._values)
    return first if in_place else first.with_values(result)


def no_such_operator(cls: Any, func: Any, args: Any) -> SparseOperatorError:
    """The error for an operator that no SparseTensor takes."""
    found = next((value for value in args if isinstance(value, cls)), None)
    what = f"{found.format} SparseTensor of shape {tuple(found.shape)}" if found is not None else "SparseTensor"
    return SparseOperatorError(
        f"{func} does not take a {what} with these operands: call to_dense() first, which makes a dense copy"
    )


def _keeps_zero(cls: Any, func: Any, args: Any) -> bool:
    if func in _KEEPS_ZERO:
        return True
    if func in (aten.mul.Tensor, aten.div.Tensor):
        return not isinstance(args[1], cls) or func is aten.mul.Tensor
    if func is aten.pow.Tensor_Scalar:
        return args[1] > 0
    needed = 2 if func in _OF_TWO else 3 if func in _OF_THREE else None
    return needed is not None and all(isinstance(value, cls) for value in args[:needed])


def _agree(first: Any, other: Any) -> None:
    """Raise PatternError unless both store the same elements."""
    if not first.same_pattern(other):
        raise PatternError(f"{first!r} and {other!r} store different elements: give both one pattern, or add matrices")


@_implements(aten.detach.default, aten.alias.default)
def _detach(cls: Any, func: Any, tensor: Any) -> Any:
    with _as_view_of(tensor):
        return tensor.with_values(func(tensor._values))


@_implements(aten._unsafe_view.default)
def _same_view(cls: Any, func: Any, tensor: Any, size: Any) -> Any:
    """What a compiled graph makes of a transpose that it returns."""
    if tuple(size) != tuple(tensor.shape):
        raise no_such_operator(cls, func, (tensor,))
    return _detach(cls, aten.alias.default, tensor)


def _as_view_of(tensor: Any) -> AbstractContextManager[Any]:
    """In inference mode, a view of a tensor made outside of it must be no inference tensor."""
    outside = torch.is_inference_mode_enabled() and not tensor.is_inference()
    return torch.inference_mode(False) if outside else nullcontext()


@_implements(aten.t.default)
def _t(cls: Any, func: Any, tensor: Any) -> Any:
    with _as_view_of(tensor):
        return cls._make(tensor._values, tensor.pattern, not tensor._transpose)


@_implements(aten.transpose.int)
def _transpose(cls: Any, func: Any, tensor: Any, one: int, other: int) -> Any:
    return _t(cls, func, tensor) if one % 2 != other % 2 else _detach(cls, aten.alias.default, tensor)


@_implements(aten.permute.default)
def _permute(cls: Any, func: Any, tensor: Any, dims: Any) -> Any:
    return _transpose(cls, func, tensor, 0, dims[0])


@_implements(aten._to_copy.default)
def _to_copy(cls: Any, func: Any, tensor: Any, *, device: Any = None, memory_format: Any = None, **kwargs: Any) -> Any:
    values = func(tensor._values, device=device, **kwargs)
    return cls._make(values, tensor.pattern.to(values.device), tensor._transpose)


@_implements(aten.copy_.default)
def _copy(cls: Any, func: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, cls) or not isinstance(source, cls):
        raise no_such_operator(cls, func, (target, source))
    here = source if source.device == target.device else source.to(target.device)
    _agree(target, here)
    target._values.copy_(here._values, non_blocking)
    written(target._values)
    return target


def written(values: Tensor) -> None:
    """Have a version counter tell of a write below autograd, which counts none."""
    if not values.is_inference() and not is_traced(values):
        torch.autograd.graph.increment_version(values)


@_implements(aten.is_same_size.default)
def _is_same_size(cls: Any, func: Any, one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape


@_implements(aten.linalg_vector_norm.default)
def _vector_norm(
    cls: Any, func: Any, tensor: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Tensor:
    if dim is not None or keepdim or ord <= 0:
        raise no_such_operator(cls, func, (tensor,))
    stored = tensor.pattern.without_filler(tensor._values)
    # torch has no largest of nothing, but zeros are not nothing
    stored = stored if stored.numel() or not tensor.numel() else stored.new_zeros(1)
    return func(stored, ord, **kwargs)


@_implements(aten.sum.default)
def _sum(cls: Any, func: Any, tensor: Any, **kwargs: Any) -> Tensor:
    return func(tensor.pattern.without_filler(tensor._values), **kwargs)


@_implements(ours.sparse_matmul.default)
def _sparse_matmul(
    cls: Any, func: Any, sparse: Any, dense: Any, bias: Any, residual: Any, linear: bool, bias_axis: str,
    activation: str, scale: float, dtype: Any,
) -> Tensor:  # fmt: skip
    others = [value for value in (dense, bias, residual) if isinstance(value, cls)]
    if not isinstance(sparse, cls) or others:
        raise no_such_operator(cls, func, (sparse, dense, bias, residual))
    return _multiplied(ours.spmm.default, sparse, dense, bias, residual, linear, bias_axis, activation, scale, dtype)


def _multiplied(
    spmm: Callable[..., Tensor], sparse: Any, dense: Tensor, bias: Tensor | None, residual: Tensor | None,
    linear: bool, bias_axis: str, activation: str, scale: float, dtype: Any,
) -> Tensor:  # fmt: skip
    """`sparse_matmul` by the operator `spmm`."""
    values, pattern, layout, transpose = _operands(sparse)
    return multiplied(
        spmm, values, pattern, layout, transpose, dense, bias, residual, linear, bias_axis, activation, scale, dtype
    )


class _Product(torch.autograd.Function):
    """`sparse_matmul` with its gradients, without the ways of torch's dispatcher through Python."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        # a setup_context of its own would have torch inspect the signature in each call
        out = _computed(*arguments)
        save_product(ctx, arguments, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return product_gradients(ctx, grad, _by_sparse, _by_dense)


def _by_sparse(sparse: Any, grad: Tensor, dense: Tensor, linear: bool, scale: float) -> Any:
    if torch.is_grad_enabled() or not _is_plain(sparse, grad, dense):
        return ours.sparse_sampled.default(sparse, grad, dense, linear, scale)
    with _compat.below_autograd(), _compat.without_torch_function():
        return _sampled(partial(run_sddmm, grad.device.type), sparse, grad, dense, linear, scale)


def _by_dense(sparse: Any, grad: Tensor, linear: bool, scale: float) -> Tensor:
    flipped = sparse.t() if torch.is_grad_enabled() else _t(type(sparse), None, sparse)
    return tensor_product(flipped, grad, None, None, linear, "column", "none", scale, None)


def _computed(*arguments: Any) -> Tensor:
    with _compat.below_autograd():
        return _multiplied(partial(run_spmm, arguments[1].device.type), *arguments)


def tensor_product(sparse: Any, dense: Tensor, bias: Tensor | None, residual: Tensor | None, *rest: Any) -> Tensor:
    """The operator `sparse_matmul` with a SparseTensor; where nobody is to see the operator, at less host time.

    Args:
        rest: the operator's other arguments, in order.
    """
    arguments = (sparse, dense, bias, residual, *rest)
    if not _is_plain(sparse, dense, bias, residual):
        return ours.sparse_matmul.default(*arguments)
    if not torch.is_grad_enabled():
        return _computed(*arguments)
    with _compat.without_torch_function():
        return cast(Tensor, _Product.apply(*arguments))


def _is_plain(sparse: Any, dense: Tensor, *others: Tensor | None) -> bool:
    """Whether operators on these compute at once, and nobody looks on."""
    if dense.device.type not in ("cpu", "cuda") or not _compat.plain_eager():
        return False
    return all(type(operand) in _PLAIN for operand in (sparse._values, dense, *others))


@_implements(ours.sparse_sampled.default)
def _sparse_sampled(cls: Any, func: Any, sparse: Any, grad: Tensor, dense: Tensor, linear: bool, scale: float) -> Any:
    return _sampled(ours.sddmm.default, sparse, grad, dense, linear, scale)


def _sampled(
    sddmm: Callable[..., Tensor], sparse: Any, grad: Tensor, dense: Tensor, linear: bool, scale: float
) -> Any:  # fmt: skip
    """`sparse_sampled` by the operator `sddmm`."""
    _, pattern, layout, transpose = _operands(sparse)
    if linear:
        found = sampled_by_rows(sddmm, dense, grad, pattern, layout, transpose, scale)
        return sparse.with_values(found.to(sparse._values.dtype))
    if dense.dim() == 2:
        a, b = grad, dense
    else:  # a sum over the batch is a product over all its columns
        a, b = (matrix.movedim(-2, 0).flatten(1) for matrix in (grad, dense))
    a, b = (b, a) if transpose else (a, b)
    return sparse.with_values(sddmm(a, b, pattern, *layout, scale).to(sparse._values.dtype))


@_implements(ours.sparse_to_dense.default)
def _sparse_to_dense(cls: Any, func: Any, sparse: Any) -> Tensor:
    return written_out(sparse, sparse._values)


def written_out(sparse: Any, values: Tensor) -> Tensor:
    """The dense tensor of these values at the places of `sparse`."""
    row, col = sparse.pattern.places(values)
    rows, cols = sparse.pattern.layout.shape
    whole = values.new_zeros(sparse.pattern.padded_shape)
    dense = whole.index_put((row, col), values)[:rows, :cols]
    return (dense.mT if _by_columns(sparse) else dense).contiguous()


@_implements(ours.sparse_gather.default)
def _sparse_gather(cls: Any, func: Any, sparse: Any, dense: Tensor) -> Any:
    row, col = sparse.pattern.places(sparse._values)
    rows, cols = sparse.pattern.layout.shape
    stored = dense.mT if _by_columns(sparse) else dense
    if 0 in (rows, cols):
        return sparse.with_values(torch.zeros_like(sparse._values))
    found = stored[row.clamp(max=rows - 1), col.clamp(max=cols - 1)]
    return sparse.with_values(sparse.pattern.without_filler(found))


@_implements(ours.sparse_rows.default)
def _sparse_rows(cls: Any, func: Any, sparse: Any, index: Tensor) -> Tensor:
    values, arrays, _ = by_row_elements(cls, func, sparse, sparse._values)
    return torch.ops.sparsecomp.stored_rows.default(values, index, *arrays, sparse.shape[1])


@_implements(ours.sparse_rows_gradient.default)
def _sparse_rows_gradient(cls: Any, func: Any, sparse: Any, index: Tensor, grad: Tensor) -> Any:
    _, arrays, order = by_row_elements(cls, func, sparse, sparse._values)
    found = torch.ops.sparsecomp.stored_rows_gradient.default(grad, index, *arrays, sparse.shape[1])
    found = found if order is None else torch.empty_like(found).index_copy_(0, order, found)
    return sparse.with_values(found.view(sparse._values.shape))


def _operands(sparse: Any) -> tuple[Tensor, tuple[Tensor, ...], Any, bool]:
    """Values, pattern, layout and whether to transpose it; the transpose is kept from its first use on."""
    pattern = sparse.pattern
    transpose = _by_columns(sparse)
    if transpose and not is_traced(sparse._values, *pattern.arrays):
        pattern.keep_transposed()
    return sparse._values, pattern.operands(), pattern.layout, transpose


def _by_columns(sparse: Any) -> bool:
    return sparse.pattern.stored_by_columns(sparse._transpose)


def by_row_elements(
    cls: Any, func: Any, sparse: Any, values: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor | None]:  # fmt: skip
    """Values of elements by rows, their pointers and columns, and which of `values` each is; None where as they lie."""
    pattern, layout = sparse.pattern, sparse.pattern.layout
    if _by_columns(sparse) or layout.entry:
        raise no_such_operator(cls, func, (sparse,))
    pointers, columns, order = layout.kind.ordered_entries(pattern.arrays, layout.block, layout.shape)
    return values.flatten() if order is None else values.index_select(0, order), (pointers, columns), order
