"""A CSR matrix written out dense, each time or where it changed, and a dense matrix read at its places, as the gradient
of a written out weight."""

from typing import Any

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels.scramble import scrambled
from sparsecomp.lowering.sparse.stored_places import WriteOut
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template

VECTOR = 16
"""Entries are loaded from a multiple of this on, so that a thread loads several at once."""


@triton.jit
def densify_kernel(
    crow_ptr, col_ptr, values_ptr, full_ptr, M, values_b, width, whole,
    ZEROS: tl.constexpr, ENTRIES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """full (batch, M, width) = S, zero elsewhere; a program a row, which writes zeros and then what is stored.

    whole: the number of entries there is room for, rounded down to a multiple of VECTOR.
    """
    row = tl.program_id(0) % M
    batch = (tl.program_id(0) // M).to(tl.int64)
    full = full_ptr + (batch * M + row) * width
    values_ptr += batch * values_b
    begin = tl.load(crow_ptr + row)
    end = tl.load(crow_ptr + row + 1)
    turn = tl.arange(0, ENTRIES)
    first = begin // VECTOR * VECTOR
    # the first entries are on their way while zeros are written
    at = first + turn
    col = tl.load(col_ptr + at, mask=at < whole, other=0)
    value = tl.load(values_ptr + at, mask=at < whole, other=0.0)
    place = tl.arange(0, ZEROS)
    for start in range(0, width, ZEROS):
        spot = start + place
        tl.store(full + spot, tl.zeros((ZEROS,), full_ptr.dtype.element_ty), mask=spot < width)
    # the zeros of all threads lie before the entries of any
    tl.debug_barrier()
    tl.store(full + col, value.to(full_ptr.dtype.element_ty), mask=(at >= begin) & (at < tl.minimum(end, whole)))
    for start in range(first + ENTRIES, end, ENTRIES):
        at = start + turn
        col = tl.load(col_ptr + at, mask=at < whole, other=0)
        value = tl.load(values_ptr + at, mask=at < whole, other=0.0)
        tl.store(full + col, value.to(full_ptr.dtype.element_ty), mask=at < tl.minimum(end, whole))
    if end > whole:
        last = whole + tl.arange(0, VECTOR)
        ok = (last >= begin) & (last < end)
        last_col = tl.load(col_ptr + last, mask=ok, other=0)
        last_value = tl.load(values_ptr + last, mask=ok, other=0.0)
        tl.store(full + last_col, last_value.to(full_ptr.dtype.element_ty), mask=ok)


@triton.jit
def refresh_kernel(
    crow_ptr, col_ptr, values_ptr, full_ptr, seen_ptr, width, whole,
    ZEROS: tl.constexpr, ENTRIES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """What `densify_kernel` does for a row, if that is not what lies there; seen: each row's sum of what does.

    A sum of columns and values, each pair scrambled, does not hang on their order; that of an empty row is 0.
    """
    row = tl.program_id(0)
    begin = tl.load(crow_ptr + row)
    end = tl.load(crow_ptr + row + 1)
    total = tl.zeros((ENTRIES,), tl.uint64)
    for start in range(begin // VECTOR * VECTOR, end, ENTRIES):
        at = start + tl.arange(0, ENTRIES)
        col = tl.load(col_ptr + at, mask=at < whole, other=0)
        value = tl.load(values_ptr + at, mask=at < whole, other=0.0)
        total += tl.where((at >= begin) & (at < tl.minimum(end, whole)), _pair(col, value), 0)
    now = tl.sum(total, 0)
    if end > whole:
        at = whole + tl.arange(0, VECTOR)
        ok = (at >= begin) & (at < end)
        pair = _pair(tl.load(col_ptr + at, mask=ok, other=0), tl.load(values_ptr + at, mask=ok, other=0.0))
        now += tl.sum(tl.where(ok, pair, 0), 0)
    now = now.to(tl.int64, bitcast=True)
    if now != tl.load(seen_ptr + row):
        densify_kernel(
            crow_ptr, col_ptr, values_ptr, full_ptr, tl.num_programs(0), 0, width, whole, ZEROS, ENTRIES, VECTOR
        )
        # who sees the new sum on another stream sees the row
        tl.debug_barrier()
        tl.atomic_xchg(seen_ptr + row, now)


@triton.jit
def _pair(col, value):
    """A column and a value of two or four bytes in one word, scrambled."""
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.uint16, bitcast=True).to(tl.uint64)
    else:
        bits = value.to(tl.uint32, bitcast=True).to(tl.uint64)
    return scrambled((col.to(tl.uint64) << 32) | bits)


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


def usual_config(rows: int, width: int, entries: int) -> Config:
    """As many entries together as a row has, 256 to 2048: at half of 8192x8192 in float32 this takes 0.179 ms on an
    H200 and 256 by 8 warps 0.203; 10 % of it and smaller weights differ by a few percent."""
    length = min(max(triton.next_power_of_2(triton.cdiv(entries, max(rows, 1))), 256), 2048)
    return Config(ENTRIES=length, warps=16 if length > 1024 and width >= 1024 else 8 if width > 1024 else 4)


def densify_launch(
    rows: int, width: int, entries: int, batch: int = 1, values_b: int = 0, config: Config | None = None
) -> Launch:
    """The launch of `densify_kernel` in its usual configuration, or in another."""
    config = config or usual_config(rows, width, entries)
    return _by_rows(densify_kernel, batch * rows, (rows, values_b), width, entries, config)


def refresh_launch(rows: int, width: int, entries: int) -> Launch:
    """The launch of `refresh_kernel`.

    Small programs read fastest: at 8192x8192 in float16 256 entries by 2 warps take 55.3, 16.1 and 8.9 us at 50, 90 and
    98 % zeros on an H200, where what writes fastest takes 82.5, 21.1 and 13.3 and the best of 20 55.3, 15.5 and 8.8.
    """
    return _by_rows(refresh_kernel, rows, (), width, entries, Config(ENTRIES=256, warps=2))


def _by_rows(
    kernel: Any, programs: int, first: tuple[int, ...], width: int, entries: int, config: Config
) -> Launch:  # fmt: skip
    constants = {"ZEROS": min(triton.next_power_of_2(width), 4096), "ENTRIES": config["ENTRIES"], "VECTOR": VECTOR}
    numbers = (*first, width, entries // VECTOR * VECTOR)
    return Launch(kernel, (programs,), numbers, constants, num_warps=config["warps"])


def _space(problem: WriteOut, device: Device) -> list[Config]:
    """Entries taken together, up to all of a row; at most 16 of them, or of its zeros, a thread."""
    p = problem
    longest = max(triton.next_power_of_2(triton.cdiv(p.entries, max(p.rows, 1))), 256)
    return [
        Config(ENTRIES=length, warps=warps)
        for length in (256, 512, 1024, 2048, 4096) for warps in (4, 8, 16)
        if length <= 2 * longest and length <= 16 * 32 * warps and 64 * warps <= max(p.cols, 256)
    ]  # fmt: skip


def _prepare(problem: WriteOut, config: Config) -> Launch:
    p = problem
    return densify_launch(p.rows, p.cols, p.entries, config=config)


_rows, _cols, _entries, _itemsize, _length, _warps = sizes("rows cols entries itemsize ENTRIES warps")
# as `usual_config`
_row = sympy.Max(_entries / sympy.Max(_rows, 1), 1)
_usual_length = sympy.Min(sympy.Max(2 ** sympy.ceiling(sympy.log(_row, 2)), 256), 2048)
_usual_warps = sympy.Piecewise((16, (_usual_length > 1024) & (_cols >= 1024)), (8, _cols > 1024), (4, True))

WRITE_OUT = Template(
    name="write_out",
    op="write_out",
    sources=(densify_kernel,),
    space=_space,
    cost=Cost(
        bytes=_rows * _cols * _itemsize + _entries * (_itemsize + 4),
        seconds=1e-8 * (abs(sympy.log(_length / _usual_length)) + abs(sympy.log(_warps / _usual_warps))),
    ),
    prepare=_prepare,
)
