"""The product of two sparse matrices in memory of a size given beforehand.

On a GPU kernels count each row's elements and fill as much room as there is. Elsewhere every pair of stored elements
that meet has a slot; slots are sorted by place, and those of one place are summed. All sizes are the capacity's, so
that nothing is read from the device, and a graph holds it without a break.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.base import SparseMatrix
from sparsecomp.formats.csr import CSR
from sparsecomp.formats.dots import StoredRows, are_loaded, everywhere
from sparsecomp.formats.indices import index_dtype_for, searched_lines
from sparsecomp.formats.sparse_product import check_operands, of_tensors


def bounded_matmul(one: SparseMatrix, other: SparseMatrix, capacity: int) -> CSR:
    """one @ other with room for `capacity` entries, those that it does not need being spare, behind the last row's.

    It can be captured in a CUDA graph, and stands in a compiled one. Sums are float32 for half precision, rounded once.
    Gradients flow to the values of both.

    Args:
        one: in CSR or COO, without a batch; or both are SparseTensors, and so is the result.
        other: likewise, of its dtype.
        capacity: pairs of stored elements that meet, or more: `other.crow.diff()[one.col].sum()`, at least as many as
            the result stores. Where it is less, every value is NaN.

    Raises:
        FormatError: shapes, dtypes or devices do not belong together, another format, a batch, a capacity that is no
            positive number, or a result of more than 2**63 - 1 places.
    """
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return of_tensors(bounded_matmul, one, other, capacity)
    check_operands(one, other)
    for matrix in (one, other):
        if matrix.OPERAND != "csr" or matrix.BY_COLUMNS or matrix.batch is not None:
            raise FormatError(f"{matrix!r}: bounded_matmul takes CSR or COO, without a batch: convert by to(CSR)")
    if not isinstance(capacity, int | torch.SymInt) or isinstance(capacity, bool) or capacity < 1:
        raise FormatError(f"capacity is {capacity!r}, needs a positive whole number")
    shape = (one.shape[0], other.shape[1])
    if math.prod(shape) > 2**63 - 1:
        raise FormatError(f"a product of shape {shape} has more than 2**63 - 1 places, which are not sorted")
    a_values, a, *_ = one.by_rows()
    b_values, b, *_ = other.by_rows()
    if one.device.type == "cuda" and (are_loaded() or not torch.compiler.is_compiling()):
        left, right = StoredRows(a[0], a[1], one.shape), StoredRows(b[0], b[1], other.shape)
        values, found = everywhere(left, a_values, right, b_values, capacity)
        return CSR(found.pointers, found.indices, values, shape)
    dtype = index_dtype_for(*shape, capacity)
    values, pointers, indices = by_slots(a_values, a, b_values, b, shape[1], capacity, dtype)
    return CSR(pointers, indices, values, shape)


def by_slots(
    a_values: Tensor, a: Sequence[Tensor], b_values: Tensor, b: Sequence[Tensor], cols: int, capacity: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The product by torch's own operators: values (capacity,), and pointers and indices of `dtype`.

    Args:
        a_values, b_values: (entries,).
        a, b: pointers and indices; b has `cols`.
    """
    (a_pointers, a_indices), (b_pointers, b_indices) = a, b
    rows, device = a_pointers.shape[0] - 1, a_values.device
    if not (rows and cols and a_indices.shape[0] and b_indices.shape[0]):
        nothing = torch.zeros(rows + 1 + capacity, dtype=dtype, device=device)
        values = a_values.new_zeros(capacity) + (a_values[:0].sum() + b_values[:0].sum())  # which may want gradients
        return values, nothing[: rows + 1], nothing[rows + 1 :]
    # what lies outside of the pointers, of any content, meets nothing
    place = torch.arange(a_indices.shape[0], device=device)
    stored = (place >= a_pointers[0]) & (place < a_pointers[-1])
    inner = a_indices.long().where(stored, 0)
    counts = b_pointers.diff()[inner].long().where(stored, 0)
    ends = counts.cumsum(0)

    slot = torch.arange(capacity, device=device)
    entry = torch.searchsorted(ends, slot, right=True).clamp(max=place.shape[0] - 1)
    used = slot < ends[-1]
    found = (b_pointers[inner[entry]] + slot - ends[entry] + counts[entry]).where(used, 0)
    row = searched_lines(a_pointers, 0, place.shape[0]).long()[entry]
    keys, order = (row * cols + b_indices[found]).where(used, rows * cols).sort(stable=True)
    group = torch.cat([keys.new_zeros(1), (keys[1:] != keys[:-1]).long()]).cumsum(0)

    wide = torch.promote_types(a_values.dtype, torch.float32)
    products = (a_values[entry].to(wide) * b_values[found].to(wide)).where(used, 0)
    sums = products.new_zeros(capacity).index_add(0, group, products[order])
    values = sums.where(ends[-1] <= capacity, math.nan).to(a_values.dtype)
    places = torch.full_like(keys, rows * cols).scatter(0, group, keys)
    pointers = torch.searchsorted(places, torch.arange(rows + 1, device=device) * cols)
    return values, pointers.to(dtype), places.remainder(cols).to(dtype)
