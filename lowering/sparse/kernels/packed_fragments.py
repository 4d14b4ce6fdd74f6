# pyright: reportPossiblyUnbound=false
"""Layers of up to eight rows by a 2:4 weight on sparse tensor cores, or pairs of them, loaded from memory to registers.

Triton has no such products, which take values and positions as they are: to write the weight out on chip for ordinary
ones takes a processor longer than the memory's time that is saved. Gluon says which thread holds what, so that the
instruction (`mma.sp` of the PTX ISA, shape m16n8k32) can be written down. Which columns of the weight its depth stands
for is free as long as x follows: a thread loads values of four neighbouring groups, 16 bytes, and of x what belongs to
its places in the products.

A warp takes every so many of the turns, 64 groups, of a block's rows. In the end the warps' sums are added. A sum that
is NaN or infinite is computed anew without filler, which the instruction multiplies by what x has there.
"""

import sympy
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, FINISH_PAIR, finish, finish_pair
from sparsecomp.lowering.sparse.kernels.packed_row import number_of
from sparsecomp.lowering.sparse.packed_linear import TILE, TURN, PackedLinear
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template

_WARPS = 2000
"""That all blocks together have in the fastest configurations (H200)."""


@gluon.constexpr_function
def _in_ptx(step, dtype):
    """Both products of a step in PTX; what its operands are by number says the first comment."""
    # 0-3 sums, 4-7 values of rows g, 8-11 of rows g + 8, 12-15 x of the first, 16-19 of the second, 20-23 positions,
    # 24-27 the sums before
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    name = f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{kind}.{kind}.f32"
    lines = []
    for half in range(2):
        number = 2 * step + half
        values = f"{{${4 + 2 * half}, ${8 + 2 * half}, ${5 + 2 * half}, ${9 + 2 * half}}}"
        x = "{" + ", ".join(f"${12 + 4 * half + register}" for register in range(4)) + "}"
        sums = "{" + ", ".join(f"${24 * (1 - half) + register}" for register in range(4)) + "}"
        lines.append(f"{name} {{$0, $1, $2, $3}}, {values}, {x}, {sums}, ${20 + number % 4}, {number // 4};")
    return "\n".join(lines)


@gluon.constexpr_function
def _fragments(num_warps, tiles):
    """Layout (4, threads, tiles): a thread has the four registers of an operand, for each tile."""
    return gl.BlockedLayout([4, 1, tiles], [1, 32, 1], [1, num_warps, 1], [0, 1, 2])


@gluon.constexpr_function
def fragment_rows(num_warps):
    """Layout (rows, 8) of a block's sums."""
    return gl.BlockedLayout([1, 1], [32, 1], [num_warps, 1], [0, 1])


@gluon.constexpr_function
def _along(dim, layout):
    """Layout of one axis of three."""
    first, second = [other for other in range(3) if other != dim]
    return gl.SliceLayout(first, gl.SliceLayout(second, layout))


@gluon.jit
def _axis(size: gl.constexpr, dim: gl.constexpr, layout: gl.constexpr):
    """0 to size - 1 along one axis of three."""
    line = gl.arange(0, size, layout=_along(dim, layout))
    if dim == 0:
        found = gl.expand_dims(gl.expand_dims(line, 1), 2)
    elif dim == 1:
        found = gl.expand_dims(gl.expand_dims(line, 0), 2)
    else:
        found = gl.expand_dims(gl.expand_dims(line, 0), 1)
    return found


@gluon.jit
def _load(places, ok, group, groups, WHOLE: gl.constexpr):
    """Words of groups under `ok`; of a turn that is not WHOLE some may not be there."""
    if not WHOLE:
        ok = ok & (group < groups)
    return gl.load(places, mask=ok, other=0)


@gluon.jit
def _products(
    sums, low, high, positions, x_ptr, ok, register, quad, turn, groups,
    STEP: gl.constexpr, DTYPE: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """sums + the products of a step with eight rows of x, of which a thread has two numbers of a group a register."""
    group = 8 * (register % 2) + register // 2 + 16 * STEP
    place = turn * 64 + 4 * (quad // 2) + group
    first = _load(x_ptr + 2 * group, ok, place, groups, WHOLE)
    second = _load(x_ptr + 2 * (group + 2), ok, place + 2, groups, WHOLE)
    return gl.inline_asm_elementwise(
        _in_ptx(STEP, DTYPE), "=f,=f,=f,=f" + ",r" * 20 + ",f,f,f,f", [low, high, first, second, positions, sums],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _sums(
    values_ptr, positions_ptr, x_ptr, first, M, N, groups, turns,
    DTYPE: gl.constexpr, WHOLE: gl.constexpr, TILES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Each warp's share of the sums of TILES tiles from the `first` on."""
    layout: gl.constexpr = _fragments(num_warps, TILES)
    register = _axis(4, 0, layout)
    thread = _axis(32 * num_warps, 1, layout)
    lane = thread % 32
    quad = lane % 4
    n = lane // 4
    tile = first + _axis(TILES, 2, layout)
    row = tile * 16 + n
    pairs_ptr = values_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (4 * quad + register)
    low_ptr = pairs_ptr + gl.minimum(row, M - 1).to(gl.int64) * groups
    high_ptr = pairs_ptr + gl.minimum(row + 8, M - 1).to(gl.int64) * groups
    words_ptr = positions_ptr + gl.minimum(tile, (M - 1) // 16).to(gl.int64) * (turns * 128) + (lane * 4 + register)
    x_pairs_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (8 * (quad // 2) + quad % 2)
    x_pairs_ptr = x_pairs_ptr + n.to(gl.int64) * (2 * groups)
    sums = gl.zeros([4, 32 * num_warps, TILES], gl.float32, layout)
    for start in range(0, turns, num_warps):
        turn = start + thread // 32
        ok = turn < turns
        positions = gl.load(words_ptr + turn * 128, mask=ok, other=0x44444444)
        for step in gl.static_range(4):
            group = turn * 64 + (16 * step + 4 * quad + register)
            low = _load(low_ptr + turn * 64 + 16 * step, ok, group, groups, WHOLE)
            high = _load(high_ptr + turn * 64 + 16 * step, ok, group, groups, WHOLE)
            sums = _products(
                sums, low, high, positions, x_pairs_ptr + turn * 128, ok & (n < N), register, quad, turn, groups,
                step, DTYPE, WHOLE,
            )  # fmt: skip
    return sums


@gluon.jit
def _gathered(values_ptr, positions_ptr, x_ptr, m, n, ok, groups, turns):
    """Sums at places (m, n) by what is stored alone."""
    pairs_ptr = values_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + m.to(gl.int64) * groups
    fours_ptr = x_ptr.to(gl.pointer_type(gl.int64), bitcast=True) + n.to(gl.int64) * groups
    words_ptr = positions_ptr + ((m // 16).to(gl.int64) * (turns * 128) + m % 8 * 16)
    total = gl.where(ok, 0.0, 0.0)
    for group in range(groups):
        # as `packed_positions` puts them
        product = group % 64 // 16 * 2 + group % 4 // 2
        word = group // 64 * 128 + (product // 4 * 2 + group % 2) * 4 + product % 4
        both = gl.load(words_ptr + word, mask=ok, other=0) >> (group % 16 // 4 * 4 + m % 16 // 8 * 16)
        values = gl.load(pairs_ptr + group, mask=ok, other=0)
        x = gl.load(fours_ptr + group, mask=ok, other=0)
        for which in gl.static_range(2):
            value = number_of(values >> 16 * which, values_ptr)
            other = number_of(x >> (((both >> 2 * which) & 3) * 16).to(gl.int64), values_ptr)
            total += value * gl.where(value != 0.0, other, 0.0)
    return total


@gluon.jit
def _total(
    sums, values_ptr, positions_ptr, x_ptr, rows, cols, M, N, groups, turns,
    TILES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The sums of all warps (rows, 8), right where they are NaN or infinite too."""
    total = gl.sum(gl.reshape(sums, [4, num_warps, 32, TILES]), 1)
    # a thread's registers are two neighbouring columns of a row, and of the row eight below
    total = gl.permute(gl.reshape(total, [2, 2, 8, 4, TILES]), [4, 0, 2, 3, 1])
    total = gl.convert_layout(gl.reshape(total, [16 * TILES, 8]), fragment_rows(num_warps))
    bad = (rows < M)[:, None] & (cols < N)[None, :] & (total - total != 0.0)
    if gl.sum(gl.sum(bad.to(gl.int32), 1), 0) > 0:
        again = _gathered(values_ptr, positions_ptr, x_ptr, rows[:, None], cols[None, :], bad, groups, turns)
        total = gl.where(bad, again, total)
    return total


@gluon.jit
def tile_sums(
    values_ptr, positions_ptr, x_ptr, first, rows, cols, M, N, groups, turns,
    DTYPE: gl.constexpr, WHOLE: gl.constexpr, TILES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The sums (rows, 8) of TILES tiles from the `first` on."""
    sums = _sums(values_ptr, positions_ptr, x_ptr, first, M, N, groups, turns, DTYPE, WHOLE, TILES, num_warps)
    return _total(sums, values_ptr, positions_ptr, x_ptr, rows, cols, M, N, groups, turns, TILES, num_warps)


TILE_SUMS = (tile_sums, _in_ptx, _fragments, fragment_rows, _along, _axis, _load, _products, _sums, _gathered, _total,
             number_of)  # fmt: skip
"""What gives the sums."""


@gluon.jit
def packed_fragments_kernel(
    values_ptr, positions_ptr, other_values_ptr, other_positions_ptr, x_ptr, bias_ptr, other_bias_ptr, residual_ptr,
    out_ptr, M, N, groups, turns, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: gl.constexpr, ACTIVATION: gl.constexpr, DTYPE: gl.constexpr, WHOLE: gl.constexpr, PAIR: gl.constexpr,
    TILES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """TILES tiles of 16 rows of the weight, or of each of a PAIR, times up to eight rows of x."""
    layout: gl.constexpr = fragment_rows(num_warps)
    first = gl.program_id(0) * TILES
    rows = first * 16 + gl.arange(0, 16 * TILES, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, 8, layout=gl.SliceLayout(0, layout))
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    total = tile_sums(
        values_ptr, positions_ptr, x_ptr, first, rows, cols, M, N, groups, turns, DTYPE, WHOLE, TILES, num_warps
    )
    if PAIR:
        other = tile_sums(
            other_values_ptr, other_positions_ptr, x_ptr, first, rows, cols, M, N, groups, turns, DTYPE, WHOLE, TILES,
            num_warps,
        )  # fmt: skip
        finish_pair(
            total, other, bias_ptr, other_bias_ptr, out_ptr, rows, cols, mask, out_m, out_n, ACTIVATION
        )
    else:
        finish(
            total, bias_ptr, residual_ptr, out_ptr, 0, rows, cols, mask,
            out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
        )  # fmt: skip


def _refuse(problem: PackedLinear, device: Device) -> str | None:
    if problem.order != "fragments":
        return f"its positions lie by {problem.order}, not by fragments"
    if not device.capability:
        return "there is no CUDA device"
    if float(device.capability) < 8.0:
        return f"compute capability {device.capability} has no sparse tensor cores: 8.0 or later is needed"
    return problem.refusal


def _space(problem: PackedLinear, device: Device) -> list[Config]:
    """More warps than turns would be idle."""
    return [
        Config(TILES=tiles, warps=warps)
        for tiles in (1, 2) for warps in (1, 2, 4, 8, 16) if warps == 1 or warps < 2 * problem.turns
    ]  # fmt: skip


def _prepare(problem: PackedLinear, config: Config) -> Launch:
    p, tiles = problem, config["TILES"]
    constants = {
        **p.output.constants, "DTYPE": p.dtype, "WHOLE": p.groups % TURN == 0, "PAIR": p.pair, "TILES": tiles,
    }  # fmt: skip
    numbers = (p.m, p.n, p.groups, p.turns, *p.output.numbers)
    return Launch(
        packed_fragments_kernel, (-(-p.m // (TILE * tiles)),), numbers, constants, num_warps=config["warps"]
    )  # fmt: skip


_m, _n, _stored, _pair, _tiles, _warps = sizes("m n stored_bytes pair TILES warps")
_far = sympy.Max(0, abs(sympy.log(sympy.ceiling(_m / TILE) * _warps / _WARPS)) - 0.35) + sympy.log(_tiles)

PACKED_FRAGMENTS = Template(
    name="packed_fragments",
    op="packed_linear",
    sources=(
        packed_fragments_kernel, *TILE_SUMS, *FINISH, *FINISH_PAIR,
    ),
    refuse=_refuse,
    space=_space,
    # of the bandwidth three quarters and less with each row of x; 19.8 and 23.3 us for 48 MiB and 89 us for 252 MiB
    # with two, 24.5, 25.8 and 98 us with eight; of a pair of 48 and 252 MiB each 35.2 and 194 us (H200)
    cost=Cost(
        bytes=_stored * (1 + 0.05 * _pair) * (1 + 0.035 * _n) / 0.78 * (1 + _far / 10), seconds=sympy.Float(3e-6),
    ),
    prepare=_prepare,
)  # fmt: skip
