"""What products with bitmaps share: values spread over their places, and sums of splits with what follows them.

Four neighbouring places, a quad, are spread together: the values below a quad are counted once, from its word's bits
and how many values lie before the word, and those within by adding its bits.
"""

import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.bitmap import SpmmBitmap
from sparsecomp.lowering.sparse.kernels.epilogue import finish

QUADS = 8
"""Of a word."""


@triton.jit
def count_bits(words):
    """How many bits are set in each of int32 or uint32 words, in the form that LLVM knows as one instruction."""
    v = words.to(tl.uint32, bitcast=True)
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    return (v * 0x01010101) >> 24


@triton.jit
def quad_words(offsets_ptr, bits_ptr, line, ok, quad, words):
    """The word of each quad, and how many values of its row lie before that; `line` is where a row's words begin."""
    at = quad // 8
    ok = ok & (at < words)
    word = tl.load(bits_ptr + line + at, mask=ok, other=0)
    offset = tl.load(offsets_ptr + line + at, mask=ok, other=0)
    return word, offset


@triton.jit
def spread_quads(values, word, offset, quad):
    """The values at the four places of each quad, 0 where nothing is stored, and their bits.

    values: pointers to the first value of each row; they broadcast with `quad`.
    """
    shift = ((quad % 8) * 4).to(tl.uint32)
    low = word.to(tl.uint32, bitcast=True)
    below = low & ((tl.full(shift.shape, 1, tl.uint32) << shift) - 1)
    bits = low >> shift
    # addresses of unsigned numbers take a processor one instruction, of signed ones three
    b0 = bits & 1
    b1 = (bits >> 1) & 1
    b2 = (bits >> 2) & 1
    b3 = (bits >> 3) & 1
    values += offset.to(tl.uint16, bitcast=True).to(tl.uint32) + count_bits(below)
    v0 = tl.load(values, mask=b0 != 0, other=0.0)
    values += b0
    v1 = tl.load(values, mask=b1 != 0, other=0.0)
    values += b1
    v2 = tl.load(values, mask=b2 != 0, other=0.0)
    values += b2
    v3 = tl.load(values, mask=b3 != 0, other=0.0)
    return v0, v1, v2, v3, b0, b1, b2, b3


@triton.jit
def stored_sum(
    starts_ptr, offsets_ptr, bits_ptr, values_ptr, dense_ptr, row, cols, col_ok, words, K, dense_k, dense_n,
    BN: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """What S stores in one row times columns of dense, (BN,): where nothing is stored nothing is multiplied."""
    values = values_ptr + tl.load(starts_ptr + row)
    b_cols = dense_ptr + cols.to(tl.int64)[None, :] * dense_n
    acc = tl.zeros((Q, BN), tl.float32)
    for first in range(0, words * 8, Q):
        quad = first + tl.arange(0, Q)
        word, offset = quad_words(offsets_ptr, bits_ptr, row.to(tl.int64) * words, quad >= 0, quad, words)
        v0, v1, v2, v3, b0, b1, b2, b3 = spread_quads(values, word, offset, quad)
        acc += _stored_terms(v0, b0, b_cols, quad * 4, col_ok, K, dense_k)
        acc += _stored_terms(v1, b1, b_cols, quad * 4 + 1, col_ok, K, dense_k)
        acc += _stored_terms(v2, b2, b_cols, quad * 4 + 2, col_ok, K, dense_k)
        acc += _stored_terms(v3, b3, b_cols, quad * 4 + 3, col_ok, K, dense_k)
    return tl.sum(acc, 0)


@triton.jit
def _stored_terms(value, bit, b_cols, k, col_ok, K, dense_k):
    stored = ((bit != 0) & (k < K))[:, None] & col_ok
    b = tl.load(b_cols + k.to(tl.int64)[:, None] * dense_k, mask=stored, other=0.0)
    return value.to(tl.float32)[:, None] * b.to(tl.float32)


@triton.jit
def bitmap_finish_kernel(
    starts_ptr, offsets_ptr, bits_ptr, values_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr, sums_ptr,
    M, N, K, words, splits, dense_k, dense_n, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    Q: tl.constexpr,
):  # fmt: skip
    """out = activation(scale · Σ sums[split, n, m] + bias + residual); rows with a sum that is not finite anew.

    SPLITS is `splits` or more, a power of two.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    place = cols.to(tl.int64)[None, :] * M + rows[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for split in tl.static_range(SPLITS):
        here = mask & (split < splits)
        acc += tl.load(sums_ptr + place + tl.cast(split, tl.int64) * M * N, mask=here, other=0.0)
    # NaN and infinity alone are not equal to themselves less themselves
    odd = tl.where((acc - acc == 0.0) | ~mask, 0, 1)
    if tl.max(tl.max(odd, 1), 0) != 0:
        for at in range(0, BM):
            row = tl.program_id(0) * BM + at
            if row < M:
                found = stored_sum(
                    starts_ptr, offsets_ptr, bits_ptr, values_ptr, dense_ptr, row, cols, (cols < N)[None, :], words, K,
                    dense_k, dense_n, BN, Q,
                )  # fmt: skip
                acc = tl.where((rows == row)[:, None], found[None, :], acc)
    finish(
        acc, bias_ptr, residual_ptr, out_ptr, 0, rows, cols, mask, out_b, out_m, out_n, res_b, res_m, res_n, scale,
        BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


FINISHING = (bitmap_finish_kernel, stored_sum, _stored_terms, spread_quads, quad_words, count_bits, finish)
"""Sources."""


def finishing(problem: SpmmBitmap, splits: int) -> Launch:
    """The launch behind a product: takes all of the operation's tensors and the sums (splits, n, m) float32."""
    p = problem
    bn = min(triton.next_power_of_2(p.n), 16)
    bm = max(256 // bn, 32)
    numbers = (p.m, p.n, p.k, p.words, splits, *p.dense[1:], *p.output.numbers)
    constants = {
        **p.output.constants, "SPLITS": triton.next_power_of_2(splits), "BM": bm, "BN": bn, "Q": max(256 // bn, 16),
    }  # fmt: skip
    return Launch(
        bitmap_finish_kernel, (triton.cdiv(p.m, bm), triton.cdiv(p.n, bn)), numbers, constants, num_warps=4
    )  # fmt: skip
