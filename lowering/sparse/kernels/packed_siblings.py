"""Layers by 2:4 weights with packed positions that read one x: a program is one of `packed_row` or of
`packed_fragments`, of any of them."""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels import packed_fragments, packed_row
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, finish
from sparsecomp.lowering.sparse.kernels.packed_fragments import TILE_SUMS, fragment_rows, tile_sums
from sparsecomp.lowering.sparse.kernels.packed_row import ROW_SUMS, row_sums
from sparsecomp.lowering.sparse.kernels.sibling import CHOOSING, chosen, part_programs, part_rows, sibling
from sparsecomp.lowering.sparse.packed_linear import LANES, STEPS, TILE, TURN, PackedLinear
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def packed_row_siblings_kernel(
    values_ptr, positions_ptr, second_values_ptr, second_positions_ptr, third_values_ptr, third_positions_ptr, x_ptr,
    bias_ptr, second_bias_ptr, third_bias_ptr, out_ptr, second_out_ptr, third_out_ptr,
    M, second_M, third_M, groups, words, turns,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one of the weights times one row of x."""
    place, program = sibling(tl.program_id(0), M, second_M, ROWS)
    rows = program * ROWS + tl.arange(0, ROWS)
    many = chosen(place, M, second_M, third_M)
    total = row_sums(
        chosen(place, values_ptr, second_values_ptr, third_values_ptr),
        chosen(place, positions_ptr, second_positions_ptr, third_positions_ptr), x_ptr, rows, many, groups, words,
        turns, EVEN, ROWS, BLOCKS, LANES, STEPS,
    )  # fmt: skip
    if bias_ptr is not None:
        bias_ptr = chosen(place, bias_ptr, second_bias_ptr, third_bias_ptr)
    finish(
        total[:, None], bias_ptr, None, chosen(place, out_ptr, second_out_ptr, third_out_ptr), 0, rows,
        tl.zeros((1,), tl.int32), (rows < many)[:, None], 0, 1, many, 0, 0, 0, 1.0, True, ACTIVATION,
    )  # fmt: skip


@gluon.jit
def packed_fragments_siblings_kernel(
    values_ptr, positions_ptr, second_values_ptr, second_positions_ptr, third_values_ptr, third_positions_ptr, x_ptr,
    bias_ptr, second_bias_ptr, third_bias_ptr, out_ptr, second_out_ptr, third_out_ptr,
    M, second_M, third_M, N, groups, turns,
    ACTIVATION: gl.constexpr, DTYPE: gl.constexpr, WHOLE: gl.constexpr, TILES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """TILES tiles of 16 rows of one of the weights times up to eight rows of x."""
    layout: gl.constexpr = fragment_rows(num_warps)
    place, program = sibling(gl.program_id(0), M, second_M, 16 * TILES)
    many = chosen(place, M, second_M, third_M)
    first = program * TILES
    rows = first * 16 + gl.arange(0, 16 * TILES, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, 8, layout=gl.SliceLayout(0, layout))
    total = tile_sums(
        chosen(place, values_ptr, second_values_ptr, third_values_ptr),
        chosen(place, positions_ptr, second_positions_ptr, third_positions_ptr), x_ptr, first, rows, cols, many, N,
        groups, turns, DTYPE, WHOLE, TILES, num_warps,
    )  # fmt: skip
    if bias_ptr is not None:
        bias_ptr = chosen(place, bias_ptr, second_bias_ptr, third_bias_ptr)
    finish(
        total, bias_ptr, None, chosen(place, out_ptr, second_out_ptr, third_out_ptr), 0, rows, cols,
        (rows < many)[:, None] & (cols < N)[None, :], 0, 1, many, 0, 0, 0, 1.0, True, ACTIVATION,
    )  # fmt: skip


def _by_rows(problem: PackedLinear, config: Config) -> Launch:
    p, blocks = problem, config["BLOCKS"]
    numbers = (*part_rows(p), p.groups, LANES * p.turns, triton.cdiv(p.turns, blocks))
    constants = {
        "ACTIVATION": p.output.activation, "EVEN": p.groups % (blocks * LANES * STEPS) == 0, "ROWS": config["ROWS"],
        "BLOCKS": blocks, "LANES": LANES, "STEPS": STEPS,
    }  # fmt: skip
    grid = (part_programs(p, config["ROWS"]),)
    return Launch(packed_row_siblings_kernel, grid, numbers, constants, num_warps=config["warps"])


def _by_tiles(problem: PackedLinear, config: Config) -> Launch:
    p, tiles = problem, config["TILES"]
    constants = {
        "ACTIVATION": p.output.activation, "DTYPE": p.dtype, "WHOLE": p.groups % TURN == 0, "TILES": tiles,
    }  # fmt: skip
    numbers, grid = (*part_rows(p), p.n, p.groups, p.turns), (part_programs(p, TILE * tiles),)
    return Launch(packed_fragments_siblings_kernel, grid, numbers, constants, num_warps=config["warps"])


def _template(
    weights: str, alone: Template[PackedLinear], sources: tuple[Any, ...],
    prepare: Callable[[PackedLinear, Config], Launch],
) -> Template[PackedLinear]:  # fmt: skip
    return Template(
        name=f"{alone.name}_{weights}",
        op=f"packed_{weights}",
        sources=(*sources, *CHOOSING, *FINISH),
        refuse=alone.refuse,
        space=alone.space,
        cost=alone.cost,
        prepare=prepare,
    )


PACKED_ROW_TWO, PACKED_ROW_THREE = (
    _template(weights, packed_row.PACKED_ROW, (packed_row_siblings_kernel, *ROW_SUMS), _by_rows)
    for weights in ("two", "three")
)
PACKED_FRAGMENTS_TWO, PACKED_FRAGMENTS_THREE = (
    _template(weights, packed_fragments.PACKED_FRAGMENTS, (packed_fragments_siblings_kernel, *TILE_SUMS), _by_tiles)
    for weights in ("two", "three")
)
