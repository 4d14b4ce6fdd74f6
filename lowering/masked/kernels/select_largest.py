"""The largest of a vector by radix selection: a pass over it for each byte of a key, and one that marks the selected.

A key is an unsigned integer that is smaller the larger its score. The pass for a byte counts, by its value, the keys
that begin like the last one selected; the counts before it tell the next byte of that. Ties for the last place are told
apart by their ranks: in the last byte's pass each program also leaves its own counts, and those of the programs before
one are what its ties begin at. Every program works out from the counts what is known of the last key selected, which
costs less than a launch in between.
"""

from collections.abc import Callable

import sympy
import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.masked.select_largest import SelectLargest
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template

_INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""Its bits; those of a NaN without its sign are above."""


@triton.jit
def keys(scores_ptr, at, ok, INFINITY: tl.constexpr, WIDTH: tl.constexpr):
    """Keys of the scores at `at`: the same for both zeros, and for NaN and -infinity."""
    MOST: tl.constexpr = (1 << (WIDTH - 1)) - 1
    bits = tl.load(scores_ptr + at, mask=ok, other=0)
    magnitude = (bits & MOST).to(tl.uint32)
    negative = (bits < 0) & (magnitude != 0)
    key = tl.where(negative, magnitude + (MOST + 1), MOST - magnitude)
    return tl.where(magnitude > INFINITY, MOST + 1 + INFINITY, key)


@triton.jit
def last_selected(table_ptr, count_ptr, numel, KNOWN: tl.constexpr):
    """The first KNOWN bytes of the last key selected, and how many keys that begin so are selected."""
    value = tl.arange(0, 256)
    left = tl.minimum(tl.maximum(tl.load(count_ptr).to(tl.int64), 0), numel).to(tl.int32)
    key = tl.full((), 0, tl.uint32)
    for place in tl.static_range(KNOWN):
        through = tl.cumsum(tl.load(table_ptr + place * 256 + value), 0)
        before = through < left
        key = (key << 8) | tl.sum(before.to(tl.int32)).to(tl.uint32)
        left -= tl.max(tl.where(before, through, 0))
    return key, left


@triton.jit
def count_block(scores_ptr, at, ok, start, INFINITY: tl.constexpr, WIDTH: tl.constexpr, KNOWN: tl.constexpr):
    """How often each value has byte KNOWN of the keys that begin with `start`, the bytes before it."""
    key = keys(scores_ptr, at, ok, INFINITY, WIDTH) >> (WIDTH - 8 * (KNOWN + 1))
    return tl.histogram((key & 255).to(tl.int32), 256, mask=ok & ((key >> 8) == start))


@triton.jit
def count_kernel(
    scores_ptr, count_ptr, table_ptr, own_ptr, numel, chunk,
    INFINITY: tl.constexpr, WIDTH: tl.constexpr, KNOWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a byte's counts to row KNOWN of `table` (bytes, 256), and store this program's to `own` (programs, 256).

    `own` may be None.
    """
    start, _ = last_selected(table_ptr, count_ptr, numel, KNOWN)
    first = tl.program_id(0) * chunk
    size = tl.minimum(numel - first, chunk)
    local = tl.arange(0, BLOCK)
    # a block that is masked is not read in whole vectors
    whole = size // BLOCK * BLOCK
    every = tl.full((BLOCK,), 1, tl.int1)
    found = tl.zeros((256,), tl.int32)
    for block in range(0, whole, BLOCK):
        found += count_block(scores_ptr, first + block + local, every, start, INFINITY, WIDTH, KNOWN)
    if whole < size:
        found += count_block(scores_ptr, first + whole + local, local < size - whole, start, INFINITY, WIDTH, KNOWN)
    value = tl.arange(0, 256)
    tl.atomic_add(table_ptr + KNOWN * 256 + value, found, mask=found > 0, sem="relaxed")
    if own_ptr is not None:
        tl.store(own_ptr + tl.program_id(0) * 256 + value, found)


@triton.jit
def mark_block(scores_ptr, selected_ptr, at, ok, last, left, INFINITY: tl.constexpr, WIDTH: tl.constexpr):
    """Mark what is selected; the number of ties for the last place, the first `left` of which are."""
    key = keys(scores_ptr, at, ok, INFINITY, WIDTH)
    ties = (ok & (key == last)).to(tl.int32)
    selected = (key < last) | ((ties > 0) & (tl.cumsum(ties, 0) <= left))
    tl.store(selected_ptr + at, selected.to(tl.uint8), mask=ok)
    return tl.sum(ties)


@triton.jit
def mark_kernel(
    scores_ptr, count_ptr, table_ptr, own_ptr, selected_ptr, numel, chunk,
    INFINITY: tl.constexpr, WIDTH: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """selected (numel,) uint8: 1 where the score is among the largest, else 0. There are at most PROGRAMS programs."""
    last, left = last_selected(table_ptr, count_ptr, numel, WIDTH // 8)
    other = tl.arange(0, PROGRAMS)
    byte = (last & 255).to(tl.int32)
    left -= tl.sum(tl.load(own_ptr + other * 256 + byte, mask=other < tl.program_id(0), other=0))
    first = tl.program_id(0) * chunk
    size = tl.minimum(numel - first, chunk)
    local = tl.arange(0, BLOCK)
    whole = size // BLOCK * BLOCK
    every = tl.full((BLOCK,), 1, tl.int1)
    for block in range(0, whole, BLOCK):
        left -= mark_block(scores_ptr, selected_ptr, first + block + local, every, last, left, INFINITY, WIDTH)
    if whole < size:
        mark_block(
            scores_ptr, selected_ptr, first + whole + local, local < size - whole, last, left, INFINITY, WIDTH
        )  # fmt: skip


def _prepare(problem: SelectLargest, config: Config) -> Callable[..., None]:
    block, most, itemsize = config["BLOCK"], config["PROGRAMS"], getattr(torch, problem.dtype).itemsize
    chunk = triton.cdiv(triton.cdiv(problem.numel, most), block) * block
    programs = triton.cdiv(problem.numel, chunk)

    def launch(kernel: triton.JITFunction, **constants: int) -> Launch:
        common = {"INFINITY": _INFINITY[problem.dtype], "WIDTH": 8 * itemsize, "BLOCK": block}
        return Launch(kernel, (programs,), (problem.numel, chunk), common | constants, num_warps=config["warps"])

    *counts, count_last = [launch(count_kernel, KNOWN=known) for known in range(itemsize)]
    mark = launch(mark_kernel, PROGRAMS=most)

    def run(scores: Tensor, count: Tensor, selected: Tensor) -> None:
        table = torch.zeros((itemsize, 256), dtype=torch.int32, device=scores.device)
        own = torch.empty((programs, 256), dtype=torch.int32, device=scores.device)
        for count_byte in counts:
            count_byte(scores, count, table, None)
        count_last(scores, count, table, own)
        mark(scores, count, table, own, selected)

    return run


def _space(problem: SelectLargest, device: Device) -> list[Config]:
    blocks = ((2048, 4), (4096, 4), (4096, 8), (8192, 8))
    return [Config(BLOCK=b, PROGRAMS=most, warps=w) for b, w in blocks for most in (1024, 2048)]


_numel, _itemsize, _block, _programs, _processors = sizes("numel itemsize BLOCK PROGRAMS processors")

SELECT_LARGEST = Template(
    name="select_largest",
    op="select_largest",
    sources=(count_kernel, mark_kernel, count_block, mark_block, keys, last_selected),
    space=_space,
    cost=Cost(
        bytes=(_itemsize + 1) * _numel,
        launches=_itemsize + 2,
        # a byte's pass takes three times as long to count as to read four bytes
        seconds=5.6e-10 * _itemsize * _numel / _processors
        + 1e-6 * (sympy.log(_block / 2048) + sympy.log(2048 / _programs)),
    ),
    prepare=_prepare,
)
