"""Layers of up to sixteen rows by bitmaps that read one x: a program is one of `bitmap_tiles`, of any of them."""

import sympy
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsecomp.formats.lanes import STRIP
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.bitmap_linear import BitmapLinear
from sparsecomp.lowering.sparse.kernels import bitmap_tiles
from sparsecomp.lowering.sparse.kernels.bitmap_tiles import (
    SUMS,
    completed,
    finished_layout,
    launch_of,
    space,
    turn_sums,
    walked,
)
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, finish
from sparsecomp.lowering.sparse.kernels.sibling import CHOOSING, chosen, part_programs, part_rows, sibling
from sparsecomp.lowering.tuning.cost import Cost
from sparsecomp.lowering.tuning.template import Config, Template


@gluon.jit
def bitmap_siblings_kernel(
    starts_ptr, heads_ptr, values_ptr, second_starts_ptr, second_heads_ptr, second_values_ptr,
    third_starts_ptr, third_heads_ptr, third_values_ptr, x_ptr, bias_ptr, second_bias_ptr, third_bias_ptr,
    out_ptr, second_out_ptr, third_out_ptr,
    M, second_M, third_M, N, K, turns,
    ACTIVATION: gl.constexpr, DTYPE: gl.constexpr, INDEX: gl.constexpr, GRAIN: gl.constexpr, TILES: gl.constexpr,
    CHUNK: gl.constexpr, HEAD: gl.constexpr, UNIT: gl.constexpr, SLOT: gl.constexpr, WHOLE: gl.constexpr,
    HALVES: gl.constexpr, STRIPS: gl.constexpr, DEPTH: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """STRIPS strips of 16 rows of one of the weights times up to 8 · HALVES rows of x; an out is (N, its M)."""
    layout: gl.constexpr = finished_layout(num_warps)
    place, within = sibling(gl.program_id(0), M, second_M, 16 * STRIPS)
    first = within * STRIPS
    starts_ptr = chosen(place, starts_ptr, second_starts_ptr, third_starts_ptr)
    heads_ptr = chosen(place, heads_ptr, second_heads_ptr, third_heads_ptr)
    values_ptr = chosen(place, values_ptr, second_values_ptr, third_values_ptr)
    if bias_ptr is not None:
        bias_ptr = chosen(place, bias_ptr, second_bias_ptr, third_bias_ptr)
    out_ptr = chosen(place, out_ptr, second_out_ptr, third_out_ptr)
    M = chosen(place, M, second_M, third_M)
    strips = gl.cdiv(M, 16)
    rows = first * 16 + gl.arange(0, 16 * STRIPS, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, 8 * HALVES, layout=gl.SliceLayout(0, layout))
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    found = walked(
        starts_ptr.to(gl.int64), heads_ptr.to(gl.int64), values_ptr.to(gl.int64), x_ptr, first, strips, turns, N, K,
        DTYPE, INDEX, GRAIN, HEAD, 1, DEPTH, STRIPS, HALVES, SLOT, WHOLE, num_warps,
    )  # fmt: skip
    total = completed(
        turn_sums(found, STRIPS, HALVES, num_warps), starts_ptr, heads_ptr, values_ptr, x_ptr, rows, cols, mask,
        K, turns, GRAIN, TILES, CHUNK, HEAD, UNIT,
    )  # fmt: skip
    finish(total, bias_ptr, None, out_ptr, 0, rows, cols, mask, 0, 1, M, 0, 0, 0, 1.0, True, ACTIVATION)


def _prepare(problem: BitmapLinear, config: Config) -> Launch:
    p, programs = problem, part_programs(problem, STRIP * config["STRIPS"])
    return launch_of(
        bitmap_siblings_kernel, p, config, programs, (*part_rows(p), p.n, p.k, p.turns),
        {"ACTIVATION": p.output.activation},
    )  # fmt: skip


def _template(weights: str) -> Template[BitmapLinear]:
    return Template(
        name=f"bitmap_{weights}",
        op=f"bitmap_{weights}",
        sources=(bitmap_siblings_kernel, *CHOOSING, *SUMS, *FINISH),
        refuse=bitmap_tiles.BITMAP_TILES.refuse,
        space=space,
        cost=Cost(bytes=sympy.Integer(0), seconds=bitmap_tiles.BITMAP_TILES.cost.seconds),
        prepare=_prepare,
    )


BITMAP_TWO, BITMAP_THREE = _template("two"), _template("three")
