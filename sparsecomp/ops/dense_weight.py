"""A sparse weight written out dense, for products that are faster so, and its gradient at the stored places."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.ops.library import TAGS, library
from sparsecomp.ops.patterns import Layout, layout_of

_REST = "Tensor[] pattern, str format, SymInt[] block, SymInt[] shape, str[] skews, bool transpose) -> Tensor"
library.define(f"stored_to_dense(Tensor values, {_REST}", tags=TAGS)
library.define(f"dense_to_stored(Tensor dense, {_REST}", tags=TAGS)


def stored_to_dense(values: Tensor, pattern: Sequence[Tensor], layout: Layout, transpose: bool = False) -> Tensor:
    """The dense matrix, or its transpose, contiguous.

    Args:
        values, pattern: as `layout` says, without a batch; see `sparsecomp.ops.patterns`.
    """
    return torch.ops.sparsecomp.stored_to_dense.default(values, pattern, *layout, transpose)


def dense_to_stored(dense: Tensor, pattern: Sequence[Tensor], layout: Layout, transpose: bool = False) -> Tensor:
    """Values, as `layout` says, of a dense matrix or of its transpose at the stored places; 0 beyond the shape."""
    return torch.ops.sparsecomp.dense_to_stored.default(dense, pattern, *layout, transpose)


def _written(values, pattern, format, block, shape, skews, transpose):
    layout = layout_of(format, block, shape, skews)
    (rows, cols), (height, width) = padded_shape(layout), layout.block
    if format == "bsr":
        line, column = _lines(pattern[0], pattern[1]), pattern[1].long()
        blocks = values.new_zeros((rows // height, cols // width, height, width))
        out = blocks.index_put_((line, column), values).transpose(1, 2).reshape(rows, cols)
    else:
        out = values.new_zeros((rows, cols))
        out.view(-1).index_copy_(0, _flat(pattern, layout), values.reshape(-1))
    out = out[: shape[0], : shape[1]]
    return (out.mT if transpose else out).contiguous()


def _read(dense, pattern, format, block, shape, skews, transpose):
    layout = layout_of(format, block, shape, skews)
    (rows, cols), (height, width) = padded_shape(layout), layout.block
    stored = dense.mT if transpose else dense
    padded = F.pad(stored, (0, cols - shape[1], 0, rows - shape[0]))
    if format == "bsr":
        blocks = padded.reshape(rows // height, height, cols // width, width).transpose(1, 2)
        return blocks[_lines(pattern[0], pattern[1]), pattern[1].long()].contiguous()
    found = padded.reshape(-1).index_select(0, _flat(pattern, layout))
    return found.view(pattern[0].shape) if format == "nm" else found


def padded_shape(layout: Layout) -> tuple[int, int]:
    """Shape by rows, rounded up to whole blocks or groups."""
    (rows, cols), (height, width) = layout.shape, layout.block
    return rows + (-rows % height if layout.format == "bsr" else 0), cols + -cols % width


def _flat(pattern: Sequence[Tensor], layout: Layout) -> Tensor:
    """Place of each element in the flat matrix of the padded shape."""
    cols = padded_shape(layout)[1]
    if layout.format == "nm":
        n, m = layout.block
        rows, width = pattern[0].shape
        starts = torch.arange(width // n, device=pattern[0].device).repeat_interleave(n) * m
        return ((torch.arange(rows, device=pattern[0].device) * cols)[:, None] + starts + pattern[0]).view(-1)
    return _lines(pattern[0], pattern[1]) * cols + pattern[1]


def _lines(pointers: Tensor, indices: Tensor) -> Tensor:
    """Row of each entry, int64; reads nothing from the device."""
    places = torch.arange(indices.numel(), dtype=pointers.dtype, device=pointers.device)
    return torch.searchsorted(pointers, places, right=True) - 1


def _fake_written(values, pattern, format, block, shape, skews, transpose):
    return values.new_empty(tuple(shape[::-1]) if transpose else tuple(shape))


def _fake_read(dense, pattern, format, block, shape, skews, transpose):
    if format == "nm":
        return dense.new_empty(pattern[0].shape)
    return dense.new_empty((pattern[1].shape[0], *(block if format == "bsr" else ())))


def _save(ctx, inputs, output):
    _, pattern, *ctx.how = inputs
    ctx.save_for_backward(*pattern)


def _backward_written(ctx, grad):
    return torch.ops.sparsecomp.dense_to_stored.default(grad, list(ctx.saved_tensors), *ctx.how), *_no_gradients(ctx)


def _backward_read(ctx, grad):
    return torch.ops.sparsecomp.stored_to_dense.default(grad, list(ctx.saved_tensors), *ctx.how), *_no_gradients(ctx)


def _no_gradients(ctx):
    return [None] * len(ctx.saved_tensors), None, None, None, None, None


for _name, _function, _fake, _gradient in (
    ("stored_to_dense", _written, _fake_written, _backward_written),
    ("dense_to_stored", _read, _fake_read, _backward_read),
):
    library.impl(_name, _function, "CPU")
    library.impl(_name, _function, "CUDA")
    torch.library.register_fake(f"sparsecomp::{_name}", _fake, lib=library)
    torch.library.register_autograd(f"sparsecomp::{_name}", _gradient, setup_context=_save, lib=library)
