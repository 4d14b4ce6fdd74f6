# pyright: reportPossiblyUnbound=false
"""Layers of up to sixteen rows by a bitmap of tiles with their values, on tensor cores.

Each warp of a program takes every so many of the turns of one strip of sixteen rows, or of two, and adds them up in
`bitmap_walk`. Then the warps' sums are added. Tensor cores multiply the zeros between what is stored too: a sum that is
NaN or infinite is computed anew by what is stored alone.
"""

from typing import Any

import sympy
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsecomp.formats.lanes import CHUNK, TILES, UNIT, head_bytes
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.bitmap_linear import BitmapLinear
from sparsecomp.lowering.sparse.kernels.bitmap_walk import WALK, ring_bytes, walk
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, finish
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.limits import fits_shared
from sparsecomp.lowering.tuning.template import Config, Template


@gluon.constexpr_function
def _constraints(sums):
    return ",".join(["=f"] * sums + ["l"] * (4 * sums) + ["r"] * (5 * sums))


@gluon.constexpr_function
def ring_lines(warps, depth, strips, slot):
    """Of 128 bytes, the rings and one more."""
    return -(-ring_bytes(warps, depth, strips, slot) // 128) + 1


@gluon.constexpr_function
def of_threads(sums, warps):
    """Layout (sums, threads): a thread has all of its sums."""
    return gl.BlockedLayout([sums, 1], [1, 32], [1, warps], [0, 1])


@gluon.constexpr_function
def finished_layout(warps):
    """Layout (rows, rows of x) of a program's sums: for most configurations one a thread, where rows lie in memory."""
    return gl.BlockedLayout([1, 1], [16, 2], [1, warps], [0, 1])


@gluon.jit
def walked(
    starts, heads, values, x_ptr, first, strips, turns, N, K,
    DTYPE: gl.constexpr, INDEX: gl.constexpr, GRAIN: gl.constexpr, HEAD: gl.constexpr, WEIGHTS: gl.constexpr,
    DEPTH: gl.constexpr, STRIPS: gl.constexpr, HALVES: gl.constexpr, SLOT: gl.constexpr, WHOLE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Each thread's sums (4 · STRIPS · HALVES, threads) of its turns; starts, heads and values are addresses, by thread
    where the warps divide several WEIGHTS among them."""
    sums: gl.constexpr = 4 * STRIPS * HALVES
    # the walk finds the rings by the name of shared memory, at whose beginning they lie; a store keeps them there
    lines: gl.constexpr = ring_lines(num_warps, DEPTH, STRIPS, SLOT)
    rings = gl.allocate_shared_memory(gl.int32, [lines, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rings.index(lines - 1).store(gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [num_warps], [0])))
    everywhere = gl.zeros([sums, 32 * num_warps], gl.int32, of_threads(sums, num_warps))
    return gl.inline_asm_elementwise(
        walk(DTYPE, INDEX, GRAIN, HEAD, num_warps, WEIGHTS, DEPTH, STRIPS, HALVES, SLOT, WHOLE), _constraints(sums),
        [starts + everywhere, heads + everywhere, values + everywhere, x_ptr.to(gl.int64) + everywhere,
         first + everywhere, strips - 1 + everywhere, turns + everywhere, K + everywhere, N + everywhere],
        dtype=gl.float32, is_pure=False, pack=sums,
    )  # fmt: skip


@gluon.jit
def turn_sums(found, STRIPS: gl.constexpr, HALVES: gl.constexpr, num_warps: gl.constexpr):
    """The sums (16 · STRIPS, 8 · HALVES) of all turns."""
    total = gl.sum(gl.reshape(found, [4 * STRIPS * HALVES, num_warps, 32]), 1)
    # a thread's registers are two neighbouring rows of x by a row, and by the row eight below
    total = gl.permute(gl.reshape(total, [STRIPS, HALVES, 2, 2, 8, 4]), [0, 2, 4, 1, 5, 3])
    return gl.convert_layout(gl.reshape(total, [16 * STRIPS, 8 * HALVES]), finished_layout(num_warps))


@gluon.jit
def _ones(bits):
    """How many of eight bits are set."""
    bits -= (bits >> 1) & 0x55
    bits = (bits & 0x33) + ((bits >> 2) & 0x33)
    return (bits + (bits >> 4)) & 15


@gluon.jit
def _gathered(
    starts_ptr, heads_ptr, values_ptr, x_ptr, m, n, ok, K, turns,
    GRAIN: gl.constexpr, TILES: gl.constexpr, CHUNK: gl.constexpr, HEAD: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Sums at places (m, n) by what is stored alone."""
    WIDE: gl.constexpr = 8 // GRAIN  # bits of a lane in a tile
    total = gl.where(ok, 0.0, 0.0)
    low = m % 16 // 8 * 2
    row_ptr = x_ptr + n.to(gl.int64) * K
    for turn in range(turns):
        chunk = (m // 16).to(gl.int64) * turns + turn
        begin = gl.load(starts_ptr + chunk, mask=ok, other=0).to(gl.int64) // UNIT * UNIT
        head_ptr = heads_ptr + chunk * HEAD
        for quad in range(4):
            lane = m % 8 * 4 + quad
            before_ptr = head_ptr.to(gl.pointer_type(gl.int16), bitcast=True)
            before = begin + gl.load(before_ptr + lane, mask=ok, other=0).to(gl.int64)
            for tile in range(TILES):
                octet = gl.load(head_ptr + (64 + (lane * TILES + tile) // GRAIN), mask=ok, other=0).to(gl.int32)
                bits = octet >> (tile % GRAIN * WIDE) & ((1 << WIDE) - 1)
                column = turn * CHUNK + tile // 2 * 32 + quad * 8 + tile % 2 * 4
                for which in range(4):
                    place = which // 2 * 4 + low + which % 2
                    entry = place // GRAIN
                    stored = ok & (((bits >> entry) & 1) != 0)
                    at = before + (_ones(bits & ((1 << entry) - 1)) * GRAIN + place % GRAIN)
                    value = gl.load(values_ptr + at, mask=stored, other=0.0)
                    # what is filled in has no sign
                    stored = stored & ((GRAIN == 1) | (value.to(gl.int16, bitcast=True) != 0))
                    other = gl.load(row_ptr + (column + which), mask=stored, other=0.0).to(gl.float32)
                    total += gl.where(stored, value.to(gl.float32) * other, 0.0)
                before += _ones(bits) * GRAIN
    return total


@gluon.jit
def completed(
    total, starts_ptr, heads_ptr, values_ptr, x_ptr, rows, cols, mask, K, turns,
    GRAIN: gl.constexpr, TILES: gl.constexpr, CHUNK: gl.constexpr, HEAD: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """The sums, those of them that are not finite computed anew."""
    bad = mask & (total - total != 0.0)  # NaN too where a chunk was too long
    if gl.sum(gl.sum(bad.to(gl.int32), 1), 0) > 0:
        again = _gathered(
            starts_ptr, heads_ptr, values_ptr, x_ptr, rows[:, None], cols[None, :], bad, K, turns,
            GRAIN, TILES, CHUNK, HEAD, UNIT,
        )  # fmt: skip
        total = gl.where(bad, again, total)
    return total


@gluon.jit
def bitmap_tiles_kernel(
    starts_ptr, heads_ptr, values_ptr, x_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, K, strips, turns, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: gl.constexpr, ACTIVATION: gl.constexpr, DTYPE: gl.constexpr, INDEX: gl.constexpr, GRAIN: gl.constexpr,
    TILES: gl.constexpr, CHUNK: gl.constexpr, HEAD: gl.constexpr, UNIT: gl.constexpr, SLOT: gl.constexpr,
    WHOLE: gl.constexpr, HALVES: gl.constexpr, STRIPS: gl.constexpr, DEPTH: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """STRIPS strips of 16 rows of the weight times up to 8 · HALVES rows of x."""
    layout: gl.constexpr = finished_layout(num_warps)
    first = gl.program_id(0) * STRIPS
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
    finish(
        total, bias_ptr, residual_ptr, out_ptr, 0, rows, cols, mask,
        out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


SUMS = (walked, turn_sums, completed, _gathered, _ones, _constraints, ring_lines, of_threads, finished_layout, *WALK)
"""What gives the sums."""


def _refuse(problem: BitmapLinear, device: Device) -> str | None:
    if not device.capability:
        return "there is no CUDA device"
    if float(device.capability) < 9.0:
        return f"compute capability {device.capability} has no bulk copies: 9.0 or later is needed"
    return problem.refusal


def _usual_config(problem: BitmapLinear) -> Config:
    """The best of all that decode by lanes, or within 5 % of it, for 11008x4096, 4096x11008 and 28672x8192 (H200).

    Two strips share what is loaded of x, which takes as long as decoding where there are more than eight rows.
    """
    if problem.n > 8 and problem.most_strips >= _MANY:
        return Config(STRIPS=2, warps=4)
    warps = min(2, problem.turns)
    while 2 * warps <= min(16, problem.turns) and 2 * warps * problem.strips <= _WARPS:
        warps *= 2
    return Config(STRIPS=1, warps=warps)


def _room(strips: int, warps: int) -> tuple[int, int]:
    """Turns in a ring, and most registers of a thread, that let enough programs of so many warps run at once."""
    if strips == 2:
        return 2, 96
    return (4, 80) if warps < 8 else (2, 64)


def space(problem: BitmapLinear, device: Device, weights: int = 1) -> list[Config]:
    """The usual configuration comes first; more warps than turns would be idle.

    Args:
        weights: that a program has so many warps each for, two at least where they have two each alone.
    """
    usual = _usual_config(problem)
    if weights > 1 and usual["warps"] > 2:
        usual = Config(STRIPS=usual["STRIPS"], warps=usual["warps"] // weights)
    found = [
        Config(STRIPS=strips, warps=warps)
        for strips in (1, 2) for warps in (2, 4, 8, 16) if warps < 2 * problem.turns and warps * weights <= 16
    ]  # fmt: skip
    every = [usual, *(one for one in found if one != usual)]
    return [one for one in every if fits_shared(_shared(problem, one["STRIPS"], weights * one["warps"]), device)]


def _shared(problem: BitmapLinear, strips: int, warps: int) -> int:
    return 128 * ring_lines(warps, _room(strips, warps)[0], strips, problem.slot)


def launch_of(
    kernel: Any, problem: BitmapLinear, config: Config, programs: int, numbers: tuple[Any, ...],
    constants: dict[str, Any], weights: int = 1,
) -> Launch:  # fmt: skip
    """A launch of so many programs of a kernel that is made of `SUMS`.

    Args:
        numbers, constants: of its own.
        weights: as of `space`.
    """
    p, strips, warps = problem, config["STRIPS"], weights * config["warps"]
    depth, registers = _room(strips, warps)
    if weights > 1 or p.parts:
        depths = range(depth, 1, -1)
        depth = next((one for one in depths if _at_once(p, strips, warps, one, programs)), depth)
    constants |= {
        "DTYPE": p.dtype, "INDEX": p.index_dtype, "GRAIN": p.grain, "TILES": TILES, "CHUNK": CHUNK,
        "HEAD": head_bytes(p.grain), "UNIT": UNIT, "SLOT": p.slot, "WHOLE": p.k % CHUNK == 0, "HALVES": -(-p.n // 8),
        "STRIPS": strips, "DEPTH": depth,
    }  # fmt: skip
    return Launch(kernel, (programs,), numbers, constants, num_warps=warps, maxnreg=registers)


def _at_once(problem: BitmapLinear, strips: int, warps: int, depth: int, programs: int) -> bool:
    """Whether all programs have room in shared memory, or the last would wait for the first to end."""
    each = 128 * ring_lines(warps, depth, strips, problem.slot) + 1024  # which CUDA keeps for itself
    return -(-programs // _PROCESSORS) * each <= _SHARED


def _prepare(problem: BitmapLinear, config: Config) -> Launch:
    p, numbers = problem, (problem.m, problem.n, problem.k, problem.strips, problem.turns)
    return launch_of(
        bitmap_tiles_kernel, p, config, -(-p.strips // config["STRIPS"]), (*numbers, *p.output.numbers),
        p.output.constants,
    )  # fmt: skip


_MANY = 1024
"""Strips from which on two a program are enough programs."""
_PROCESSORS, _SHARED = 132, 228 * 1024
"""Of an H200, and the shared memory that each has."""
_WARPS = 2048
"""That all programs have together at most, unless two warps each are more."""

_m, _k, _n, _grain, _density, _processors, _bandwidth, _turns, _all, _most, _warps, _strips = sizes(
    "m k n grain density processors bandwidth turns strips most_strips warps STRIPS"
)


def _power_within(number: sympy.Expr) -> sympy.Expr:
    return 2 ** sympy.floor(sympy.log(number, 2) + 0.01)


# as `_usual_config`
_usual_strips = sympy.Piecewise((2, (_n > 8) & (_most >= _MANY)), (1, True))
_usual_warps = sympy.Min(16, _power_within(_turns), sympy.Max(2 * _usual_strips, _power_within(_WARPS / _all)))
_share = sympy.Piecewise((_density, _grain <= 1), (2 * _density - _density**2, True))
"""Of places that have room in the copy: of two neighbours both where one is stored."""
_decoding = sympy.Piecewise((11.9 + 31.4 * _share**2, _grain <= 1), (3.7 + 23.4 * _share, True))
"""Loads from shared memory are the time, one a place, or one for two of them, more where their banks are the same."""
_of_x = sympy.Piecewise((0.25 * _n, _n <= 8), (0.46 * _n, _usual_strips <= 1), (0.34 * _n, True))
_places = 45.1e6 / 132
"""Of a weight that a processor decodes, and multiplies, in so many microseconds (`bench few-rows`, an H200)."""
_walking = 1e-6 * _m * _k / _processors / _places * (_decoding + _of_x)
_reading = _m * _k * (2 * _share + 1 / (8 * _grain)) / (0.9 * _bandwidth)


_adding = 0.35e-6 * sympy.Piecewise((_warps - 2, _n > 8), (0, True))
"""To add up what many warps have of sixteen rows of x."""
_crowded = sympy.Piecewise((1.3, _n > 8), (1 + 0.15 * sympy.Max(0, _share - 0.6), True))
"""What two weights take longer side by side, whose warps share registers and room for what is copied ahead."""


def launch_seconds(weights: int = 1) -> sympy.Expr:
    """Seconds of a launch with this problem's rows of each weight."""
    usual = sympy.Piecewise((_usual_warps / weights, _usual_warps > 2), (_usual_warps, True))
    far = abs(sympy.log(_strips / _usual_strips)) + abs(sympy.log(_warps / usual))
    work, begin = weights * sympy.Max(_walking, _reading) * (1 + far / 5), 2.2e-6 + 1.5e-6 * weights
    return begin + _adding + work * (_crowded if weights > 1 else 1)


BITMAP_TILES = Template(
    name="bitmap_tiles",
    op="bitmap_linear",
    sources=(bitmap_tiles_kernel, *SUMS, *FINISH),
    refuse=_refuse,
    space=space,
    cost=Cost(bytes=sympy.Integer(0), seconds=launch_seconds()),
    prepare=_prepare,
)  # fmt: skip
