"""Rows of a matrix in slabs: a feature's numbers of a few rows side by side, (slab, feature, row in it).

Who gathers features then takes a whole sector of memory instead of one number of it.
"""

import torch
import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Workspace

_TILE = 128
"""Features that a program copies."""
VECTOR = 16
"""Bytes that a thread gathers at once: with more or fewer all problems that were measured on an H200 took longer."""


@triton.jit
def write_slabs_kernel(x_ptr, slabs_ptr, ROWS, FEATURES, x_row, BR: tl.constexpr, BF: tl.constexpr):
    """slabs[s, i, r] = x[s·BR + r, i], and 0 beyond the rows."""
    blocks = tl.cdiv(FEATURES, BF)
    slab = (tl.program_id(0) // blocks).to(tl.int64)
    within = tl.arange(0, BR)
    rows = slab * BR + within
    features = tl.program_id(0) % blocks * BF + tl.arange(0, BF)
    inside = features < FEATURES
    value = tl.load(x_ptr + rows[:, None] * x_row + features[None, :], mask=(rows < ROWS)[:, None] & inside[None, :],
                    other=0.0)  # fmt: skip
    place = (slab * FEATURES + features.to(tl.int64)[:, None]) * BR + within[None, :]
    tl.store(slabs_ptr + place, tl.trans(value), mask=inside[:, None])


@triton.jit
def summed(
    slab, weight_ptr, index_ptr, outputs, wanted, FAN_IN: tl.constexpr, UNROLL: tl.constexpr, BR: tl.constexpr,
    BO: tl.constexpr,
):  # fmt: skip
    """A layer's sums (BO, BR) in float32, from a slab of what it reads; `slab` points to its first feature's rows."""
    at = outputs.to(tl.int64) * FAN_IN
    acc = tl.zeros((BO, BR), tl.float32)
    for start in range(0, FAN_IN, UNROLL):
        for step in tl.static_range(UNROLL):
            place = tl.load(index_ptr + at + start + step, mask=wanted, other=0).to(tl.int64)
            weight = tl.load(weight_ptr + at + start + step, mask=wanted, other=0.0).to(tl.float32)
            acc += weight[:, None] * tl.load(slab + place[:, None] * BR).to(tl.float32)
    return acc


def writing(rows: int, features: int, row: int, height: int, dtype: str) -> tuple[Launch, Workspace]:
    """What writes x (rows, features), whose rows are `row` apart, as slabs of a height; and where to.

    The launch takes x and the slabs.
    """
    slabs = triton.cdiv(rows, height)
    launch = Launch(
        write_slabs_kernel, (slabs * triton.cdiv(features, _TILE),), (rows, features, row),
        {"BR": height, "BF": _TILE}, num_warps=4,
    )  # fmt: skip
    return launch, ((slabs * features * height,), getattr(torch, dtype))


def tiles(dtype: str, lengths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Heights of slabs, lengths of blocks of features, and the warps that then gather `VECTOR` bytes a thread."""
    itemsize = getattr(torch, dtype).itemsize
    found = [(br, bo, br * bo * itemsize // (32 * VECTOR)) for br in (4, 8, 16, 32, 64) for bo in lengths]
    return [tile for tile in found if 16 <= tile[0] * itemsize <= 128 and 1 <= tile[2] <= 16]
