"""Sparse products in plain torch: what the CPU runs, what every kernel is held against, and float64 on any device.

Sums are float32, or float64 for float64. Entries of S that are not stored are never multiplied, so 0 · inf cannot
arise but within a stored block, or at a stored zero of CSR. In N:M a zero is filler, and not stored.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.formats.indices import lines_of
from sparsecomp.reference.patterns import CompressedArrays, Layout, compressed, stored_shape
from sparsecomp.reference.precision import accumulator, without_autocast

CHUNK = 2**22
"""Elements of blocks gathered at a time, at least."""
_FEW, _MANY, _TILE = 2, 32, 128
"""Columns of a dense operand up to which each is a product by a vector on a CPU, from which on torch's embedding bags
are faster than its CSR product, and that these take at a time, so that the operand stays in the cache."""
_LANES = 8
"""Numbers of a CPU's vector: torch's sampled product takes ten times as long where a row is no multiple of it."""


def reference_product(
    values: Tensor, pattern: Sequence[Tensor], dense: Tensor, layout: Layout, transpose: bool, out_dtype: torch.dtype
) -> Tensor:
    """op(S) @ dense in the dtype it is summed in; shapes as in `sparsecomp.ops.spmm`."""
    wide = accumulator(values.dtype, out_dtype)
    written = _written_out(values, pattern, dense, layout)
    if written is not None:
        with without_autocast(dense):
            return (written.mT if transpose else written).to(wide) @ dense.to(wide)
    matrix = compressed(values, pattern, layout, transpose)
    if not layout.entry and not transpose and layout.padded_shape != layout.shape:
        matrix = _within(matrix)
    one = _block_product if layout.entry else _filled_product if layout.kind.FILLED else _element_product
    matrix, dense = matrix._replace(values=matrix.values.to(wide)), dense.to(wide)
    with without_autocast(dense):
        return _by_items(matrix, dense, one, layout)


def _written_out(values: Tensor, pattern: Sequence[Tensor], dense: Tensor, layout: Layout) -> Tensor | None:
    """The matrix, where a CPU writes it out sooner than it finds CSR's order; only what is not finite tells the
    difference."""
    if layout.kind.ORDERED or values.dim() > 1 or dense.is_cuda or not dense.isfinite().all():
        return None
    return layout.kind.written_out(values, pattern, layout.block, layout.shape)


def _by_items(
    matrix: CompressedArrays, dense: Tensor, one: Callable[[CompressedArrays, Tensor], Tensor], layout: Layout
) -> Tensor:
    """The product of a batch of values or dense tensors by `one`, which takes a single one of each."""
    if matrix.values.dim() == 2 + len(layout.entry):
        parts = [
            one(matrix._replace(values=part), dense[item] if dense.dim() == 3 else dense)
            for item, part in enumerate(matrix.values)
        ]
        return torch.stack(parts) if parts else dense.new_zeros((0, matrix.shape[0], dense.shape[-1]))
    if dense.dim() == 2:
        return one(matrix, dense)
    beside = dense.transpose(0, 1)  # all of the batch side by side
    out = one(matrix, beside.reshape(beside.shape[0], beside.shape[1] * beside.shape[2]))
    return out.view(matrix.shape[0], *beside.shape[1:]).transpose(0, 1)


def sampled(a: Tensor, b: Tensor, pattern: Sequence[Tensor], layout: Layout, out_dtype: torch.dtype) -> Tensor:
    """a @ b.mT at the stored places, of the shape of the values, in the dtype it is summed in."""
    wide = accumulator(a.dtype, out_dtype)
    a, b = a.to(wide), b.to(wide)
    if a.dim() == 3 or b.dim() == 3:
        batch = a.shape[0] if a.dim() == 3 else b.shape[0]
        pairs = zip(a if a.dim() == 3 else [a] * batch, b if b.dim() == 3 else [b] * batch, strict=True)
        parts = [sampled(one, other, pattern, layout, out_dtype) for one, other in pairs]
        return torch.stack(parts) if parts else a.new_zeros((0, *stored_shape(pattern, layout)))
    with without_autocast(a):
        return _sampled_once(a, b, pattern, layout)


def _sampled_once(a: Tensor, b: Tensor, pattern: Sequence[Tensor], layout: Layout) -> Tensor:
    if layout.entry:
        return sampled_blocks(a, b, pattern, layout)
    pointers, columns, order = layout.kind.ordered_entries(pattern, layout.block, layout.shape)
    if layout.padded_shape != layout.shape:
        whole = F.pad(b, (0, 0, 0, layout.padded_shape[1] - layout.shape[1]))
        found = _sampled_elements(a, whole, pointers, columns).masked_fill_(columns >= layout.shape[1], 0)
    else:
        found = _sampled_elements(a, b, pointers, columns)
    if order is not None:
        found = torch.empty_like(found).scatter_(0, order, found)
    return found.view(stored_shape(pattern, layout))


def sampled_blocks(a: Tensor, b: Tensor, pattern: Sequence[Tensor], layout: Layout) -> Tensor:
    """a @ b.mT at the stored blocks, some blocks at a time: (blocks, height, width). Beyond the shape it is 0.

    Reads nothing from the device.
    """
    height, width = layout.block
    left, right = _in_blocks(a, height), _in_blocks(b, width)
    out = a.new_zeros((pattern[1].numel(), height, width))
    if 0 in layout.shape:
        return out
    found, lines, columns, spare = _entries(*pattern[:2])
    stored = out[found]
    for part in in_parts(lines.numel(), (height + width) * a.shape[1], out.numel()):
        torch.bmm(left[lines[part]], right[columns[part]].mT, out=stored[part])
    stored.masked_fill_(spare[:, None, None], 0)
    return out


def gathered_elements(a: Tensor, b: Tensor, pointers: Tensor, indices: Tensor) -> Tensor:
    """a @ b.mT at the stored elements, some at a time: (entries,). Reads nothing from the device."""
    out = a.new_zeros(indices.numel())
    if 0 in (a.shape[0], b.shape[0]):
        return out
    found, lines, columns, spare = _entries(pointers, indices)
    stored = out[found]
    for part in in_parts(lines.numel(), 2 * a.shape[1], out.numel()):
        torch.sum(a[lines[part]] * b[columns[part]], 1, out=stored[part])
    stored.masked_fill_(spare, 0)
    return out


def _within(matrix: CompressedArrays) -> CompressedArrays:
    """A matrix of elements without those beyond its last column."""
    inside = matrix.indices < matrix.shape[1]
    pointers = F.pad(inside.cumsum(0), (1, 0))[matrix.pointers.long()].to(matrix.pointers.dtype)
    return matrix._replace(pointers=pointers, indices=matrix.indices[inside], values=matrix.values[..., inside])


def _element_product(matrix: CompressedArrays, dense: Tensor) -> Tensor:
    pointers, indices, values = _compact(matrix.pointers, matrix.indices, matrix.values)
    return compact_product(pointers, indices, values, matrix.shape, dense)


def compact_product(pointers: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int], dense: Tensor) -> Tensor:
    """S @ dense for a CSR matrix without spare capacity, in the dtype of both; its columns lie as those of `dense`.

    Reads nothing from the device.
    """
    columns = dense.shape[1]
    by_column = dense.stride(0) == 1
    if dense.is_cuda or columns < _MANY or dense.dtype is not torch.float32 or not indices.numel():
        if by_column and columns <= _FEW and not dense.is_cuda:
            return (dense.mT @ _torch_matrix(torch.sparse_csc, pointers, indices, values, (shape[1], shape[0]))).mT
        return _torch_matrix(torch.sparse_csr, pointers, indices, values, shape) @ dense.contiguous()
    arrays = indices.contiguous(), pointers.contiguous()
    values = values.contiguous()
    out = dense.new_empty((columns, shape[0])).mT if by_column else dense.new_empty((shape[0], columns))
    for start in range(0, columns, _TILE):
        tile = slice(start, min(start + _TILE, columns))
        operand = dense[:, tile].contiguous().detach()  # what needs no gradient takes a shorter way through torch
        found = torch.embedding_bag(operand, *arrays, False, 0, False, values, True)[0]
        out[:, tile].mT.copy_(found.mT)  # into contiguous rows, for which torch transposes by blocks
    return out


def without_spare(matrix: CompressedArrays) -> CompressedArrays:
    """A CSR matrix whose pointers begin at 0, without the spare capacity behind its last entry; on a CPU."""
    entries = int(matrix.pointers[-1])
    if entries == matrix.indices.numel():
        return matrix
    return matrix._replace(indices=matrix.indices[:entries], values=matrix.values[:entries])


def _filled_product(matrix: CompressedArrays, dense: Tensor) -> Tensor:
    """As `_element_product`, without the zeros that fill groups up; only what is not finite tells the difference."""
    if not dense.isfinite().all():
        stored = matrix.values != 0
        before = F.pad(stored.cumsum(0), (1, 0)).to(matrix.pointers.dtype)
        matrix = CompressedArrays(
            before[matrix.pointers.long()], matrix.indices[stored], matrix.values[stored], matrix.shape, matrix.skew
        )
    return _element_product(matrix, dense)


def _block_product(matrix: CompressedArrays, dense: Tensor) -> Tensor:
    """Some blocks at a time, so that what is gathered stays within the size of the operands."""
    _, height, width = matrix.values.shape
    right = _in_blocks(dense, width)
    lines = matrix.pointers.numel() - 1
    out = dense.new_zeros((lines + 1, height, dense.shape[1]))  # the last line takes what spare capacity gives
    if 0 not in matrix.shape:
        found, line, column, spare = _entries(matrix.pointers, matrix.indices)
        values, line = matrix.values[found], line.masked_fill(spare, lines)
        for part in in_parts(line.numel(), (height + width) * dense.shape[1], matrix.values.numel()):
            out.index_add_(0, line[part], torch.bmm(values[part], right[column[part]]))
    return out[:lines].flatten(0, 1)[: matrix.shape[0]]


def _sampled_elements(a: Tensor, b: Tensor, pointers: Tensor, indices: Tensor) -> Tensor:
    if a.is_cuda:  # torch's own needs to know where the entries end
        return gathered_elements(a, b, pointers, indices)
    out = a.new_zeros(indices.numel())
    compact, stored, part = _compact(pointers, indices, out)
    part.copy_(compact_sampled(a, b, compact, stored))
    return out


def compact_sampled(a: Tensor, b: Tensor, pointers: Tensor, indices: Tensor) -> Tensor:
    """a @ b.mT at the elements of a CSR pattern without spare capacity, on a CPU: (entries,)."""
    zeros, shape = a.new_zeros(indices.numel()), (a.shape[0], b.shape[0])
    if not zeros.numel() or not a.shape[1]:
        return zeros
    lanes = -a.shape[1] % _LANES if a.shape[1] > 1 else 0
    if lanes:
        a, b = F.pad(a, (0, lanes)), F.pad(b, (0, lanes))
    pattern = _torch_matrix(torch.sparse_csr, pointers, indices, zeros, shape)
    return torch.sparse.sampled_addmm(pattern, a.contiguous(), b.contiguous().mT, beta=0.0).values()


def _compact(pointers: Tensor, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arrays of a CSR matrix without spare capacity, the values where they lie; reads from the device."""
    first, last = torch.stack([pointers[0], pointers[-1]]).tolist()
    return pointers - first if first else pointers, indices[first:last], values[first:last]


def _torch_matrix(
    layout: torch.layout, pointers: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]
) -> Tensor:
    """torch's own matrix."""
    _quiet()
    # its products take arrays as contiguous, whatever their strides
    arrays = pointers.contiguous(), indices.contiguous(), values.contiguous()
    return torch.sparse_compressed_tensor(*arrays, shape, layout=layout, device=values.device, check_invariants=False)


@cache
def _quiet() -> None:
    """Have torch say once, to nobody, that its CSR matrices are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), device="cpu")


def _entries(pointers: Tensor, indices: Tensor) -> tuple[slice, Tensor, Tensor, Tensor]:
    """Which entries to look at, their rows and columns, and which are spare capacity, of any row and column."""
    first, last = entry_range(pointers, indices)
    places = torch.arange(first, last, dtype=pointers.dtype, device=pointers.device)
    spare = (places < pointers[0]) | (places >= pointers[-1])
    columns = indices[first:last].masked_fill(spare, 0)
    return slice(first, last), lines_of(pointers, first, last), columns, spare


def entry_range(pointers: Tensor, indices: Tensor) -> tuple[int, int]:
    """Where to look for entries: where they are, but all over on a GPU, from which that is not read."""
    return (0, indices.numel()) if indices.is_cuda else (int(pointers[0]), int(pointers[-1]))


def _in_blocks(dense: Tensor, size: int) -> Tensor:
    """Rows in groups of `size`, padded with zeros: (groups, size, columns)."""
    padded = F.pad(dense, (0, 0, 0, -dense.shape[0] % size))
    return padded.reshape(padded.shape[0] // size, size, dense.shape[1])


def in_parts(count: int, each: int, budget: int) -> list[slice]:
    """0..count in slices that hold `budget` elements of `each`, or a chunk."""
    step = max(max(budget, CHUNK) // max(each, 1), 1)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
