"""A dense matrix read at a CSR pattern's places: the gradient of a weight that is written out dense."""

import triton
import triton.language as tl


@triton.jit
def read_kernel(dense_ptr, crow_ptr, col_ptr, out_ptr, dense_m, dense_n, ENTRIES: tl.constexpr):
    """out[entry] = dense[row, col[entry]] for each entry of a row; a program a row."""
    row = tl.program_id(0)
    begin = tl.load(crow_ptr + row)
    end = tl.load(crow_ptr + row + 1)
    turn = tl.arange(0, ENTRIES)
    line = dense_ptr + tl.cast(row, tl.int64) * dense_m
    for start in range(begin, end, ENTRIES):
        at = start + turn
        ok = at < end
        col = tl.load(col_ptr + at, mask=ok, other=0).to(tl.int64)
        tl.store(out_ptr + at, tl.load(line + col * dense_n, mask=ok, other=0.0), mask=ok)
