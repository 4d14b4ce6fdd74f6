"""Sampled dense-dense product: scale · (a @ b.mT) at the stored places of a pattern, and nowhere else.

It is the gradient of `sparsecomp.ops.spmm` by its values.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.ops.library import TAGS, differentiable, implement, library
from sparsecomp.ops.sparse.spmm import is_by_column, spmm
from sparsecomp.reference import sparse as sparse_reference
from sparsecomp.reference.patterns import Layout, layout_of, stored_shape
from sparsecomp.reference.precision import KERNEL_DTYPES

library.define(
    "sddmm(Tensor a, Tensor b, Tensor[] pattern, str format, SymInt[] block, SymInt[] shape, str[] skews, "
    "float scale) -> Tensor",
    tags=TAGS,
)


def sddmm(a: Tensor, b: Tensor, pattern: Sequence[Tensor], layout: Layout, *, scale: float = 1.0) -> Tensor:
    """scale · (a @ b.mT) at the stored places, summed in float32 (float64 for float64).

    Args:
        a: (rows, d) or (batch, rows, d), of any strides.
        b: (columns, d) or (batch, columns, d), of the same dtype.
        pattern: index arrays; see `sparsecomp.reference.patterns`.

    Returns:
        Values as `layout` says, with a batch if `a` or `b` has one; 0 in spare capacity and beyond the shape.
        Gradients flow to a and b.

    Raises:
        FormatError: operands that do not belong together.
    """
    return torch.ops.sparsecomp.sddmm.default(a, b, pattern, *layout, scale)


def run_sddmm(device: str, *arguments: Any) -> Tensor:
    """The operator's implementation for "cpu" or "cuda", as `run_spmm`."""
    return _IMPLEMENTATIONS[device](*arguments)


def _check(a: Tensor, b: Tensor, pattern: Sequence[Tensor], layout: Layout) -> tuple[int, ...]:
    """Shape of the values."""
    # sizes that are symbols are compared, and go into no set
    batches = [matrix.shape[0] for matrix in (a, b) if matrix.dim() == 3]
    fits = all(matrix.dim() in (2, 3) for matrix in (a, b)) and all(size == batches[0] for size in batches)
    if not fits or (a.shape[-2], b.shape[-2]) != layout.shape or a.shape[-1] != b.shape[-1]:
        raise FormatError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} do not give a {layout.shape} matrix: (rows, d) and (columns, "
            "d) are needed, or these with one batch"
        )
    if a.dtype != b.dtype or a.device != b.device or any(array.device != a.device for array in pattern):
        raise FormatError(f"a is {a.dtype} on {a.device}, b {b.dtype} on {b.device}: one dtype and device are needed")
    return *batches[:1], *stored_shape(pattern, layout)


def _reference(a, b, pattern, format, block, shape, skews, scale):
    layout = layout_of(format, block, shape, skews)
    _check(a, b, pattern, layout)
    return (sparse_reference.sampled(a, b, pattern, layout, a.dtype) * scale).to(a.dtype)


def _cuda(a, b, pattern, format, block, shape, skews, scale):
    layout = layout_of(format, block, shape, skews)
    size = _check(a, b, pattern, layout)
    if a.dtype not in KERNEL_DTYPES or layout.entry:
        return _reference(a, b, pattern, format, block, shape, skews, scale)
    from sparsecomp.lowering.sparse import sddmm as lowered  # loads Triton

    out = a.new_zeros(size)
    if layout.plain:
        pointers, columns = pattern[0].contiguous(), pattern[1].contiguous()
        lowered.sddmm(pointers, columns, a, b, out, scale=scale, skew=layout.skews[0])
        return out
    pointers, columns, order = layout.kind.ordered_entries(pattern, layout.block, layout.shape)
    inside = columns < layout.shape[1]
    flat = out.flatten(-layout.kind.VALUE_DIMS)
    lowered.sddmm(pointers, columns.clamp(max=max(layout.shape[1] - 1, 0)), a, b, flat, scale=scale)
    flat.masked_fill_(~inside, 0)
    return flat.view(size) if order is None else out.index_copy(-1, order, flat)


def _fake(a, b, pattern, format, block, shape, skews, scale):
    return a.new_empty(_check(a, b, pattern, layout_of(format, block, shape, skews)))


def _save(ctx, inputs, output):
    a, b, pattern, *layout, scale = inputs
    ctx.save_for_backward(a, b, *pattern)
    ctx.how = layout_of(*layout), scale


def _backward(ctx, grad):
    a, b, *pattern = ctx.saved_tensors
    layout, scale = ctx.how
    grads: list[Tensor | None] = []
    for transpose, one, other in ((False, a, b), (True, b, a)):
        if not ctx.needs_input_grad[int(transpose)]:
            grads.append(None)
            continue
        found = spmm(
            grad, pattern, other, layout, transpose=transpose, scale=scale, by_column=is_by_column(one)
        )  # fmt: skip
        batched = grad.dim() > layout.kind.VALUE_DIMS
        grads.append(found.sum(0) if batched and one.dim() == 2 else found)
    return *grads, [None] * len(pattern), None, None, None, None, None


_IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {"cpu": _reference, "cuda": _cuda}
implement("sddmm", _reference, _cuda, _fake)
differentiable("sddmm", _backward, _save)
