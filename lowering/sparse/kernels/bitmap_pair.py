"""A gated pair of layers of up to sixteen rows by bitmaps: half of a program's warps for each weight.

They walk the same strips of both as `bitmap_tiles` walks those of one, so that a thread needs no more registers.
"""

import sympy
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.bitmap_linear import BitmapLinear
from sparsecomp.lowering.sparse.kernels import bitmap_tiles
from sparsecomp.lowering.sparse.kernels.bitmap_tiles import (
    SUMS,
    completed,
    finished_layout,
    launch_of,
    launch_seconds,
    of_threads,
    space,
    turn_sums,
    walked,
)
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH_PAIR, finish_pair
from sparsecomp.lowering.tuning.cost import Cost
from sparsecomp.lowering.tuning.template import Config, Template


@gluon.jit
def bitmap_pair_kernel(
    starts_ptr, heads_ptr, values_ptr, other_starts_ptr, other_heads_ptr, other_values_ptr, x_ptr, bias_ptr,
    other_bias_ptr, out_ptr,
    M, N, K, strips, turns, out_m, out_n,
    ACTIVATION: gl.constexpr, DTYPE: gl.constexpr, INDEX: gl.constexpr, GRAIN: gl.constexpr, TILES: gl.constexpr,
    CHUNK: gl.constexpr, HEAD: gl.constexpr, UNIT: gl.constexpr, SLOT: gl.constexpr, WHOLE: gl.constexpr,
    HALVES: gl.constexpr, STRIPS: gl.constexpr, DEPTH: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """STRIPS strips of 16 rows of either weight, times up to 8 · HALVES rows of x; see `finish_pair`."""
    sums: gl.constexpr = 4 * STRIPS * HALVES
    layout: gl.constexpr = finished_layout(num_warps)
    first = gl.program_id(0) * STRIPS
    rows = first * 16 + gl.arange(0, 16 * STRIPS, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, 8 * HALVES, layout=gl.SliceLayout(0, layout))
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    threads = gl.arange(0, 32 * num_warps, layout=gl.SliceLayout(0, of_threads(sums, num_warps)))[None, :]
    is_other = threads >= 16 * num_warps
    found = walked(
        gl.where(is_other, other_starts_ptr.to(gl.int64), starts_ptr.to(gl.int64)),
        gl.where(is_other, other_heads_ptr.to(gl.int64), heads_ptr.to(gl.int64)),
        gl.where(is_other, other_values_ptr.to(gl.int64), values_ptr.to(gl.int64)),
        x_ptr, first, strips, turns, N, K,
        DTYPE, INDEX, GRAIN, HEAD, 2, DEPTH, STRIPS, HALVES, SLOT, WHOLE, num_warps,
    )  # fmt: skip
    gate = completed(
        turn_sums(gl.where(is_other, 0.0, found), STRIPS, HALVES, num_warps), starts_ptr, heads_ptr, values_ptr, x_ptr,
        rows, cols, mask, K, turns, GRAIN, TILES, CHUNK, HEAD, UNIT,
    )  # fmt: skip
    up = completed(
        turn_sums(gl.where(is_other, found, 0.0), STRIPS, HALVES, num_warps), other_starts_ptr, other_heads_ptr,
        other_values_ptr, x_ptr, rows, cols, mask, K, turns, GRAIN, TILES, CHUNK, HEAD, UNIT,
    )  # fmt: skip
    finish_pair(gate, up, bias_ptr, other_bias_ptr, out_ptr, rows, cols, mask, out_m, out_n, ACTIVATION)


def _space(problem: BitmapLinear, device: Device) -> list[Config]:
    return space(problem, device, 2)


def _prepare(problem: BitmapLinear, config: Config) -> Launch:
    p, numbers = problem, (problem.m, problem.n, problem.k, problem.strips, problem.turns)
    return launch_of(
        bitmap_pair_kernel, p, config, -(-p.strips // config["STRIPS"]), (*numbers, *p.output.strides[1:]),
        {"ACTIVATION": p.output.activation}, 2,
    )  # fmt: skip


BITMAP_PAIR_TILES = Template(
    name="bitmap_pair",
    op="bitmap_pair",
    sources=(bitmap_pair_kernel, *SUMS, *FINISH_PAIR),
    refuse=bitmap_tiles.BITMAP_TILES.refuse,
    space=_space,
    cost=Cost(bytes=sympy.Integer(0), seconds=launch_seconds(2)),
    prepare=_prepare,
)
