"""A sparse weight written out dense, for products that are faster so, and its gradient at the stored places."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.formats.indices import lines_of
from sparsecomp.lowering.sparse.launcher import as_csr, writer_of
from sparsecomp.ops.library import TAGS, differentiable, implement, library
from sparsecomp.reference.patterns import Layout, stored_shape
from sparsecomp.reference.sparse import entry_range

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
        kept, line, column = _places(pattern, layout)
        blocks = values.new_zeros((rows // height + 1, cols // width, height, width))  # the last are of spare capacity
        out = blocks.index_put_((line, column.long()), values[kept])[:-1].transpose(1, 2).reshape(rows, cols)
    elif (found := layout.kind.written_out(values, pattern, layout.block, layout.shape)) is not None:
        out = found
    else:
        kept, flat = _flat(pattern, layout)
        out = values.new_zeros((rows + 1, cols))
        out.view(-1).scatter_(0, flat, values.reshape(-1)[kept])
        out = out[:-1]
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
    size = torch.Size(stored_shape(pattern, layout))
    if layout.entry:
        height, width = layout.entry
        kept, line, column = _places(pattern, layout)
        blocks = padded.reshape(rows // height, height, cols // width, width).transpose(1, 2)
        found = blocks[line.clamp(max=rows // height - 1), column.long()].contiguous()
    else:
        kept, flat = _flat(pattern, layout)
        flat = flat.clamp(max=rows * cols - 1) if flat.is_cuda else flat
        found = padded.reshape(-1).index_select(0, flat)
    if found.numel() == size.numel():
        return found.view(size)
    out = found.new_zeros(size)
    out[kept] = found
    return out


def _written_cuda(values, pattern, layout, transpose):
    read = Layout.read(layout)
    if (writer := writer_of(read)) is not None and values.is_contiguous() and are_contiguous(pattern):
        out = writer.written_dense(values, pattern, read)
        return out.mT.contiguous() if transpose else out
    values, pattern, read = as_csr(values, pattern, read)
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
    read, stored = Layout.read(layout), dense.mT if transpose else dense
    out = dense.new_empty(stored_shape(pattern, read))
    if (writer := writer_of(read)) is not None and are_contiguous(pattern):
        writer.read_dense(stored, pattern, read, out)
        return out
    if read.kind.ORDERED:
        _, pattern, read = as_csr(out, pattern, read)
    if not read.plain or not are_contiguous(pattern):
        return _read(dense, pattern, read.written(), transpose)
    from sparsecomp.lowering.sparse import stored_places  # loads Triton

    stored_places.read_at(stored, pattern[0], pattern[1], out)
    return out


def are_contiguous(arrays: Sequence[Tensor]) -> bool:
    """Whether each is, as kernels of stored places take them."""
    return all(array.is_contiguous() for array in arrays)


def _flat(pattern: Sequence[Tensor], layout: Layout) -> tuple[slice, Tensor]:
    """Which values to look at, and the place of each in the flat matrix of the padded shape."""
    kept, row, column = _places(pattern, layout)
    return kept, torch.add(column, row, alpha=layout.padded_shape[1]).view(-1)


def _places(pattern: Sequence[Tensor], layout: Layout) -> tuple[slice, Tensor, Tensor]:
    """Which values to look at, and their rows and columns, of entries. Those are the pointers' on a CPU, and all on a
    GPU, from which nothing is read; spare capacity is in a row behind the last then."""
    if layout.kind.INDICES[0] != "pointers":  # it has no spare capacity
        return slice(None), *layout.kind.entry_places(pattern, layout.block, layout.shape)
    pointers, indices = pattern[:2]
    kept = slice(*entry_range(pointers, indices))
    row, column = lines_of(pointers, kept.start, kept.stop), indices[kept]
    if pointers.is_cuda:
        places = torch.arange(indices.numel(), device=pointers.device)
        spare = (places < pointers[0]) | (places >= pointers[-1])
        row, column = row.masked_fill(spare, pointers.numel() - 1), column.masked_fill(spare, 0)
    return kept, row, column


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
