"""The gradient by a table: a block of its rows, some features and a part of the places a program, and parts added."""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.attention.bias_table import TableGradient
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.sparse.kernels.epilogue import dot, precision
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template

_PROGRAMS = 4096
"""From which on places lie in no more parts."""
_PARTS, _NUMBERS = 32, 64
"""Of a tile that a program adds up behind."""


@triton.jit
def table_gradient_kernel(
    grad_ptr, index_ptr, out_ptr, PLACES, ROWS, FEATURES, padding, place_stride, feature_stride, EACH, ROW_BLOCKS,
    FEATURE_TILES, BR: tl.constexpr, BP: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[part, rows, features] of BR rows and BF features, over EACH places, a multiple of BP."""
    # programs of the same places are neighbours, and read them from L2
    row_block = tl.program_id(0) % ROW_BLOCKS
    tile = tl.program_id(0) // ROW_BLOCKS % FEATURE_TILES
    part = (tl.program_id(0) // (ROW_BLOCKS * FEATURE_TILES)).to(tl.int64)
    rows, features = row_block * BR + tl.arange(0, BR), tile * BF + tl.arange(0, BF)
    acc = tl.zeros((BR, BF), tl.float32)
    for step in range(0, EACH, BP):
        places = part * EACH + step + tl.arange(0, BP)
        inside = places < PLACES
        index = tl.load(index_ptr + places, mask=inside, other=ROWS)
        index = tl.where(index < 0, index + ROWS, index)
        own = (index >= row_block * BR) & (index < tl.minimum(row_block * BR + BR, ROWS)) & (index != padding)
        if tl.max(own.to(tl.int32), 0) != 0:
            grad_ptrs = grad_ptr + places[:, None] * place_stride + features.to(tl.int64)[None, :] * feature_stride
            # those of other rows too: whole vectors are loaded
            grad = tl.load(grad_ptrs, mask=inside[:, None] & (features < FEATURES)[None, :], other=0.0)
            own_row = tl.where(own, index, -1).to(tl.int32)
            acc = with_rows(acc, grad, rows[:, None] == own_row[None, :], PRECISION)
    at = (part * ROWS + rows[:, None]) * FEATURES + features[None, :]
    stored = (rows < ROWS)[:, None] & (features < FEATURES)[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def with_rows(acc, grad, reads, PRECISION: tl.constexpr):
    """acc (rows, features) and the sum of grad (places, features) over the places that read (rows, places) each row.

    float32 is three numbers of bfloat16, without a rest. A number that is not finite reaches its own row alone, though
    0 times it is NaN.
    """
    wide = grad.to(tl.float32)
    odd = (wide - wide) != 0.0
    clean = tl.where(odd, 0.0, wide)
    narrow: tl.constexpr = tl.bfloat16 if grad.dtype == tl.float32 else grad.dtype
    read, none = tl.where(reads, 1.0, 0.0).to(narrow), tl.zeros_like(acc)
    if grad.dtype == tl.float32:
        high = upper_bits(clean)
        middle = upper_bits(clean - high)
        found = dot(read, (clean - high - middle).to(narrow), none, PRECISION)
        found = dot(read, middle.to(narrow), found, PRECISION)
        # tensor cores cut sums off: long ones are not theirs
        acc += dot(read, high.to(narrow), found, PRECISION)
    else:
        acc = dot(read, clean.to(narrow), acc, PRECISION)
    if tl.max(tl.max(odd.to(tl.int32), 1), 0) != 0:
        # NaN counts as both, and infinities of both signs give NaN
        above = tl.where(odd & (wide != float("-inf")), 1.0, 0.0).to(narrow)
        below = tl.where(odd & (wide != float("inf")), 1.0, 0.0).to(narrow)
        acc += tl.where(dot(read, above, none, PRECISION) > 0.0, float("inf"), 0.0)
        acc += tl.where(dot(read, below, none, PRECISION) > 0.0, float("-inf"), 0.0)
    return acc


@triton.jit
def upper_bits(x):
    """float32 x cut off, towards 0, to the eight bits of which bfloat16 is exact."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def merge_table_kernel(part_ptr, out_ptr, PARTS, SIZE, BP: tl.constexpr, BN: tl.constexpr):
    """BN of the SIZE numbers of the table, each the sum of its PARTS, BP at once."""
    at = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    acc = tl.zeros((BP, BN), tl.float32)
    for first in range(0, PARTS, BP):
        part = first + tl.arange(0, BP)
        inside = (part < PARTS)[:, None] & (at < SIZE)[None, :]
        acc += tl.load(part_ptr + part.to(tl.int64)[:, None] * SIZE + at[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + at, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=at < SIZE)


def _prepare(problem: TableGradient, config: Config) -> Launches | Launch:
    """Tensors are the gradient, the index and the result."""
    p, height, step, width = problem, config["BR"], config["BP"], config["BF"]
    row_blocks, tiles, steps = triton.cdiv(p.rows, height), triton.cdiv(p.features, width), triton.cdiv(p.places, step)
    # no empty part behind the last
    each = triton.cdiv(steps, triton.cdiv(_PROGRAMS, row_blocks * tiles)) * step
    parts, size = triton.cdiv(p.places, each), p.rows * p.features
    numbers = (*p[:3], p.padding, p.place_stride, p.feature_stride, each, row_blocks, tiles)
    fixed = {"BR": height, "BP": step, "BF": width, "PRECISION": precision(_multiplied(p.dtype))}
    adding = Launch(
        table_gradient_kernel, (row_blocks * tiles * parts,), numbers, fixed, num_warps=config["warps"], num_stages=1
    )  # fmt: skip
    if parts == 1:
        return adding
    grid, tile = (triton.cdiv(size, _NUMBERS),), {"BP": _PARTS, "BN": _NUMBERS}
    merging = Launch(merge_table_kernel, grid, (parts, size), tile)
    return Launches([((parts * size,), torch.float32)], [Step(adding, (0, 1, 3)), Step(merging, (3, 2))])


def _multiplied(dtype: str) -> str:
    """In which tensor cores multiply."""
    return "bfloat16" if dtype == "float32" else dtype


def _space(problem: TableGradient, device: Device) -> list[Config]:
    width = min(max(triton.next_power_of_2(problem.features), 16), 64)
    tallest = max(triton.next_power_of_2(problem.rows), 16)
    return [Config(BR=height, BP=step, BF=width, warps=4)
            for height in (16, 64, 128) if height <= tallest for step in (64, 128)]  # fmt: skip


_places, _rows, _features, _index_bytes, _itemsize = sizes("places rows features index_bytes itemsize")
_br, _bp, _bf, _half, _processors = sizes("BR BP BF half processors")
_STEP = 2.5e-7
"""Seconds that a processor takes for a block of places beside what it multiplies, its programs side by side."""
_blocks, _tiles = sympy.ceiling(_rows / _br), sympy.ceiling(_features / _bf)
_products = sympy.Piecewise((1, sympy.Eq(_itemsize, 2)), (3, True))
_each = 2 * _bp * _br * _bf * _products * _processors / _half
_parts = sympy.Min(sympy.ceiling(_places / _bp), sympy.ceiling(_PROGRAMS / (_blocks * _tiles)))
_all_steps = sympy.ceiling(_places / _bp) * _blocks * _tiles

TABLE_GRADIENT = Template(
    name="table_gradient",
    op="table_gradient",
    sources=(table_gradient_kernel, with_rows, upper_bits, merge_table_kernel, dot),
    space=_space,
    # as if each block of places read rows of every block of rows
    cost=Cost(
        bytes=_places * _blocks * (_tiles * _index_bytes + _features * _itemsize)
        + 8 * _rows * _features * _parts,
        launches=sympy.Integer(2),
        seconds=sympy.ceiling(_all_steps / _processors) * sympy.Max(_each, _STEP),
    ),
    prepare=_prepare,
)
