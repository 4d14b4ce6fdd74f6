"""A bitmap's places one by one: written out dense, read off a dense matrix, and in CSR's order.

A program has a chunk, and looks at its places by row and column: whether each is stored, and which value it is.
"""

import triton
import triton.language as tl


@triton.jit
def _ones(word):
    """How many bits of each word are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word += word >> 8
    return (word + (word >> 16)) & 63


@triton.jit
def _places(starts_ptr, heads_ptr, chunk, STRIP: tl.constexpr, CHUNK: tl.constexpr, HEAD: tl.constexpr):
    """Of a chunk: whether each place (STRIP, CHUNK) is stored, and which of all values it is."""
    row, column = tl.arange(0, STRIP)[:, None], tl.arange(0, CHUNK)[None, :]
    lane = 4 * (row % 8) + column % 32 // 8
    tile = column // 32 * 2 + column % 8 // 4
    place = tile % 4 * 8 + column % 4 // 2 * 4 + row // 8 * 2 + column % 2
    head_ptr = heads_ptr + chunk.to(tl.int64) * HEAD
    words_ptr = (head_ptr + 64).to(tl.pointer_type(tl.uint32), bitcast=True) + lane * 2
    first, second = tl.load(words_ptr), tl.load(words_ptr + 1)
    late = tile >= 4
    word = tl.where(late, second, first)
    one = tl.full((STRIP, CHUNK), 1, tl.uint32)
    before = _ones(word & ((one << place.to(tl.uint32)) - 1)) + tl.where(late, _ones(first), 0)
    begin = tl.load(head_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + lane)
    start = tl.load(starts_ptr + chunk).to(tl.int64) // 8 * 8
    return ((word >> place.to(tl.uint32)) & 1) != 0, start + begin + before.to(tl.int64)


@triton.jit
def write_bitmap_kernel(
    starts_ptr, heads_ptr, values_ptr, dense_ptr, M, K, turns,
    STRIP: tl.constexpr, CHUNK: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """dense (M, K), contiguous."""
    chunk = tl.program_id(0)
    stored, at = _places(starts_ptr, heads_ptr, chunk, STRIP, CHUNK, HEAD)
    row = (chunk // turns * STRIP + tl.arange(0, STRIP))[:, None]
    column = (chunk % turns * CHUNK + tl.arange(0, CHUNK))[None, :]
    value = tl.load(values_ptr + at, mask=stored, other=0.0)
    tl.store(dense_ptr + row.to(tl.int64) * K + column, value, mask=(row < M) & (column < K))


@triton.jit
def read_bitmap_kernel(
    starts_ptr, heads_ptr, dense_ptr, values_ptr, dense_m, dense_k, turns,
    STRIP: tl.constexpr, CHUNK: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """values = dense, of any strides, at the stored places."""
    chunk = tl.program_id(0)
    stored, at = _places(starts_ptr, heads_ptr, chunk, STRIP, CHUNK, HEAD)
    row = (chunk // turns * STRIP + tl.arange(0, STRIP))[:, None].to(tl.int64)
    column = (chunk % turns * CHUNK + tl.arange(0, CHUNK))[None, :].to(tl.int64)
    found = tl.load(dense_ptr + row * dense_m + column * dense_k, mask=stored, other=0.0)
    tl.store(values_ptr + at, found, mask=stored)


@triton.jit
def count_bitmap_kernel(
    starts_ptr, heads_ptr, counts_ptr, M, turns, STRIP: tl.constexpr, CHUNK: tl.constexpr, HEAD: tl.constexpr
):
    """counts (M, turns): how many values each row has in each turn."""
    chunk = tl.program_id(0)
    stored, _ = _places(starts_ptr, heads_ptr, chunk, STRIP, CHUNK, HEAD)
    row = chunk // turns * STRIP + tl.arange(0, STRIP)
    count = tl.sum(stored.to(tl.int32), 1)
    at = row.to(tl.int64) * turns + chunk % turns
    tl.store(counts_ptr + at, count.to(counts_ptr.dtype.element_ty), mask=row < M)


@triton.jit
def order_bitmap_kernel(
    starts_ptr, heads_ptr, ends_ptr, columns_ptr, order_ptr, M, turns,
    STRIP: tl.constexpr, CHUNK: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """CSR's columns, and which value each is; `ends` (M, turns) are sums of `counts` up to and with each."""
    chunk = tl.program_id(0)
    stored, at = _places(starts_ptr, heads_ptr, chunk, STRIP, CHUNK, HEAD)
    row = (chunk // turns * STRIP + tl.arange(0, STRIP))[:, None]
    column = (chunk % turns * CHUNK + tl.arange(0, CHUNK))[None, :]
    end = tl.load(ends_ptr + row.to(tl.int64) * turns + chunk % turns, mask=row < M, other=0).to(tl.int64)
    one = stored.to(tl.int32)
    place = end - tl.sum(one, 1)[:, None] + tl.cumsum(one, 1) - 1
    ok = stored & (row < M)
    tl.store(columns_ptr + place, (column + 0 * row).to(columns_ptr.dtype.element_ty), mask=ok)
    tl.store(order_ptr + place, at.to(order_ptr.dtype.element_ty), mask=ok)
