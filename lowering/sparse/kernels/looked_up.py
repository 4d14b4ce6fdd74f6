"""Rows of a CSR matrix by index, written out dense, and their gradient added up at the stored places."""

import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch


@triton.jit
def write_rows_kernel(
    index_ptr, crow_ptr, col_ptr, values_ptr, out_ptr, rows, width, ZEROS: tl.constexpr, ENTRIES: tl.constexpr
):  # fmt: skip
    """out[i] = S[index[i]]; a program a row, which writes zeros and then what is stored. What is no row is NaN."""
    row = tl.load(index_ptr + tl.program_id(0))
    known = (row >= 0) & (row < rows)
    begin, end = tl.load(crow_ptr + row, mask=known, other=0), tl.load(crow_ptr + row + 1, mask=known, other=0)
    out = out_ptr + tl.program_id(0).to(tl.int64) * width
    zeros = tl.full((ZEROS,), 0.0, tl.float32) + tl.where(known, 0.0, float("nan"))
    for start in range(0, width, ZEROS):
        place = start + tl.arange(0, ZEROS)
        tl.store(out + place, zeros.to(out_ptr.dtype.element_ty), mask=place < width)
    tl.debug_barrier()  # the zeros of all threads lie before the entries of any
    for start in range(begin, end, ENTRIES):
        at = start + tl.arange(0, ENTRIES)
        col = tl.load(col_ptr + at, mask=at < end, other=-1)
        ok = (col >= 0) & (col < width)
        tl.store(out + col, tl.load(values_ptr + at, mask=ok, other=0.0), mask=ok)


@triton.jit
def add_rows_kernel(
    index_ptr, crow_ptr, col_ptr, grad_ptr, out_ptr, rows, width, ENTRIES: tl.constexpr
):  # fmt: skip
    """out[entry] += grad[i, col[entry]] for the entries of row index[i]; a program a row."""
    row = tl.load(index_ptr + tl.program_id(0))
    if (row >= 0) & (row < rows):
        begin, end = tl.load(crow_ptr + row), tl.load(crow_ptr + row + 1)
        grad = grad_ptr + tl.program_id(0).to(tl.int64) * width
        for start in range(begin, end, ENTRIES):
            at = start + tl.arange(0, ENTRIES)
            col = tl.load(col_ptr + at, mask=at < end, other=-1)
            ok = (col >= 0) & (col < width)
            found = tl.load(grad + col, mask=ok, other=0.0).to(out_ptr.dtype.element_ty)
            tl.atomic_add(out_ptr + at, found, mask=ok, sem="relaxed")


def rows_launch(count: int, rows: int, width: int, entries: int, *, gradient: bool) -> Launch:
    """The launch of either kernel for `count` looked-up rows, that read as many entries together as rows have."""
    length = min(max(triton.next_power_of_2(triton.cdiv(entries, max(rows, 1))), 32), 1024)
    constants = {"ENTRIES": length}
    if not gradient:
        constants["ZEROS"] = min(triton.next_power_of_2(width), 1024)
    kernel = add_rows_kernel if gradient else write_rows_kernel
    return Launch(kernel, (count,), (rows, width), constants, num_warps=4 if length > 128 else 1)
