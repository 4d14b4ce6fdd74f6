"""A sparse weight written out dense, for products that are faster so, and its gradient at the stored places."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.lowering.sparse.launcher import as_csr
from sparsecomp.ops.library import TAGS, differentiable, implement, library
from sparsecomp.reference.patterns import Layout, stored_shape

_REST = "Tensor[] pattern, str layout, bool transpose) -> Tensor"
library.define(f"stored_to_dense(Tensor values, {_REST}", tags=TAGS)
library.define(f"dense_to_stored(Tensor dense, {_REST}", tags=TAGS)


def stored_to_dense(values: Tensor, pattern: Sequence[Tensor], layout: str, transpose: bool = False) -> Tensor:
    """The dense matrix, or its transpose, contiguous.

    Args:
        values, pattern: without a batch; see `sparsecomp.reference.patterns`.
        layout: from `Layout.written`.
    """
    return torch.ops.sparsecomp.stored_to_dense.default(values, pattern, layout, transpose)


def dense_to_stored(dense: Tensor, pattern: Sequence[Tensor], layout: str, transpose: bool = False) -> Tensor:
    """Values of a dense matrix or of its transpose at the stored places.

    Beyond the shape they are 0, in spare capacity anything.
    """
    return torch.ops.sparsecomp.dense_to_stored.default(dense, pattern, layout, transpose)


def _written(values, pattern, layout, transpose):
    layout = Layout.read(layout)
    rows, cols = layout.padded_shape
    if layout.entry:
        height, width = layout.entry
        line, column = _places(pattern, layout)
        blocks = values.new_zeros((rows // height, cols // width, height, width))
        out = blocks.index_put_((line, column.long()), values).transpose(1, 2).reshape(rows, cols)
    else:
        out, flat = values.new_zeros((rows, cols)), _flat(pattern, layout)
        out.view(-1).scatter_(0, flat, values.reshape(-1)[: flat.numel()])
    if (rows, cols) != layout.shape:
        out = out[: layout.shape[0], : layout.shape[1]]
    return (out.mT if transpose else out).contiguous()


def _read(dense, pattern, layout, transpose):
    layout = Layout.read(layout)
    rows, cols = layout.padded_shape
    stored = dense.mT if transpose else dense
    if (rows, cols) == layout.shape:
        padded = stored
    else:
        padded = F.pad(stored, (0, cols - layout.shape[1], 0, rows - layout.shape[0]))
    if layout.entry:
        height, width = layout.entry
        line, column = _places(pattern, layout)
        blocks = padded.reshape(rows // height, height, cols // width, width).transpose(1, 2)
        return blocks[line, column.long()].contiguous()
    found, size = padded.reshape(-1).index_select(0, _flat(pattern, layout)), stored_shape(pattern, layout)
    spare = size[0] - found.numel() if layout.plain else 0
    return F.pad(found, (0, spare)) if spare else found.view(size)


def _written_cuda(values, pattern, layout, transpose):
    pattern, read = as_csr(pattern, Layout.read(layout))
    if not read.plain or not values.is_contiguous() or not are_contiguous(pattern):
        return _written(values, pattern, read.written(), transpose)
    from sparsecomp.lowering.sparse import stored_places  # loads Triton

    if not transpose or len(pattern) == 2:
        out = stored_places.write_out(pattern[0], pattern[1], values, read.shape)
        return out.mT.contiguous() if transpose else out
    from sparsecomp.lowering.sparse.transposed import transposed_matrix

    matrix = transposed_matrix(values, pattern, read)
    return stored_places.write_out(*matrix[:4])


def _read_cuda(dense, pattern, layout, transpose):
    pattern, read = as_csr(pattern, Layout.read(layout))
    if not read.plain or not are_contiguous(pattern):
        return _read(dense, pattern, read.written(), transpose)
    from sparsecomp.lowering.sparse import stored_places  # loads Triton

    out = dense.new_empty(pattern[1].shape)
    stored_places.read_at(dense.mT if transpose else dense, pattern[0], pattern[1], out)
    return out


def are_contiguous(arrays: Sequence[Tensor]) -> bool:
    """Whether each is, as kernels of stored places take them."""
    return all(array.is_contiguous() for array in arrays)


def _flat(pattern: Sequence[Tensor], layout: Layout) -> Tensor:
    """Place of each element in the flat matrix of the padded shape; on a CPU without spare capacity."""
    if layout.plain and not pattern[0].is_cuda and (entries := int(pattern[0][-1])) != pattern[1].numel():
        pattern = (pattern[0], pattern[1][:entries])
    row, column = _places(pattern, layout)
    return torch.add(column, row, alpha=layout.padded_shape[1]).view(-1)


def _places(pattern: Sequence[Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
    return layout.kind.entry_places(pattern, layout.block, layout.shape)


def _fake_written(values, pattern, layout, transpose):
    shape = Layout.read(layout).shape
    return values.new_empty(shape[::-1] if transpose else shape)


def _fake_read(dense, pattern, layout, transpose):
    return dense.new_empty(stored_shape(pattern, Layout.read(layout)))


def _save(ctx, inputs, output):
    _, pattern, *ctx.how = inputs
    ctx.save_for_backward(*pattern)


def _backward_written(ctx, grad):
    return torch.ops.sparsecomp.dense_to_stored.default(grad, list(ctx.saved_tensors), *ctx.how), *_no_gradients(ctx)


def _backward_read(ctx, grad):
    return torch.ops.sparsecomp.stored_to_dense.default(grad, list(ctx.saved_tensors), *ctx.how), *_no_gradients(ctx)


def _no_gradients(ctx):
    return [None] * len(ctx.saved_tensors), None, None


implement("stored_to_dense", _written, _written_cuda, _fake_written)
implement("dense_to_stored", _read, _read_cuda, _fake_read)
differentiable("stored_to_dense", _backward_written, _save)
differentiable("dense_to_stored", _backward_read, _save)
