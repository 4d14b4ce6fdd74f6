"""The inner loop of the kernels that visit each nonzero of a row: every one adds a row of the dense operand."""

import triton
import triton.language as tl


@triton.jit
def gather_rows(
    begin, end, col_ptr, values_ptr, dense_ptr, cols, N, dense_k, dense_n,
    FILLED: tl.constexpr, BR: tl.constexpr, U: tl.constexpr, E: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Float32 sums (BR, BN): for each row the entries begin to end - 1, value · dense[col, cols].

    Each step of a row loads U · E rows of the dense operand, all in flight together, while the indices and values of
    the next step are loaded; each row keeps E sums. Threads lie along E and BN, so that the sum over U stays within a
    thread. What is not stored is neither read nor multiplied, nor, where rows are FILLED up with zeros, are these.
    """
    turn = tl.arange(0, U)[:, None] * E + tl.arange(0, E)[None, :]
    n = cols.to(tl.int64) * dense_n
    inside = (cols < N)[None, None, None, :]
    acc = tl.zeros((BR, E, BN), tl.float32)
    at = begin[:, None, None] + turn[None, :, :]
    ok = at < end[:, None, None]
    k = tl.load(col_ptr + at, mask=ok, other=0)
    v = tl.load(values_ptr + at, mask=ok, other=0.0)
    for _ in range(0, tl.max(end - begin, 0), U * E):
        at += U * E
        next_ok = at < end[:, None, None]
        next_k = tl.load(col_ptr + at, mask=next_ok, other=0)
        next_v = tl.load(values_ptr + at, mask=next_ok, other=0.0)
        dense = dense_ptr + (k.to(tl.int64) * dense_k)[:, :, :, None] + n[None, None, None, :]
        if FILLED:
            ok = ok & (v != 0.0)
        d = tl.load(dense, mask=ok[:, :, :, None] & inside, other=0.0)
        acc += tl.sum(v.to(tl.float32)[:, :, :, None] * d.to(tl.float32), 1)
        k = next_k
        v = next_v
        ok = next_ok
    return tl.sum(acc, 1)
