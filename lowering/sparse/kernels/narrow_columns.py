"""The columns of narrow CSR at length, for kernels that take CSR's."""

import triton
import triton.language as tl


@triton.jit
def narrow_columns_kernel(
    starts_ptr, chunks_ptr, bases_ptr, indices_ptr, columns_ptr, E: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """columns[entry] = base + distance; a program a row."""
    row = tl.program_id(0)
    begin = tl.load(starts_ptr + row)
    end = tl.load(starts_ptr + row + 1)
    chunk = tl.load(chunks_ptr + row)
    turn = tl.arange(0, E)
    for start in range(begin, end, E):
        at = start + turn
        ok = at < end
        distance = tl.load(indices_ptr + at, mask=ok, other=0)
        base = tl.load(bases_ptr + chunk + (at - begin) // CHUNK, mask=ok, other=0)
        columns = distance.to(columns_ptr.dtype.element_ty) + base.to(columns_ptr.dtype.element_ty)
        tl.store(columns_ptr + at, columns, mask=ok)
