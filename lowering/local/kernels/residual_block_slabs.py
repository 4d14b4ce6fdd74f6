"""A residual block of two layers of fixed fan-in, a slab of rows at a time.

Layers read anywhere in a row, but in no other row. So one program can do all of its rows' block in one launch: it
writes them normalised, then what lies between the layers, and gathers from both in its processor's cache. Where there
are too few slabs to fill a GPU each step is a launch, in which more programs share a slab.
"""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.local.gather_dot import unrolled, unsupported
from sparsecomp.lowering.local.kernels.slabs import summed, tiles
from sparsecomp.lowering.local.residual_block import ResidualBlock
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template
from sparsecomp.reference.local.residual_block import FAR

_FAR = tl.constexpr(FAR)
_AHEAD = 4
"""Loads that a thread has under way while a row is normalised, each of which waits for nothing else."""


@triton.jit
def write_normalised(
    x, weight_ptr, bias_ptr, slab, inside, FEATURES, eps, NORM: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """slab[i, r] = x[r, i], normalised; `x` and `slab` point to the first feature of each row."""
    columns = tl.arange(0, BN)
    mean = tl.zeros((BR,), tl.float32)
    rate = tl.full((BR,), 1.0, tl.float32)
    if NORM == "layer":
        total = tl.zeros((BR, BN), tl.float32)
        for start in range(0, FEATURES, BN):
            there = inside & (start + columns < FEATURES)[None, :]
            total += tl.load(x + start + columns[None, :], mask=there, other=0.0).to(tl.float32)
        mean = tl.sum(total, 1) / FEATURES
    if NORM != "none":
        squares = tl.zeros((BR, BN), tl.float32)
        for start in range(0, FEATURES, BN):
            there = inside & (start + columns < FEATURES)[None, :]
            value = tl.load(x + start + columns[None, :], mask=there, other=0.0).to(tl.float32) - mean[:, None]
            squares += tl.where(there, value * value, 0.0)
        rate = 1.0 / tl.sqrt(tl.sum(squares, 1) / FEATURES + eps)
    for start in range(0, FEATURES, BN):
        at = start + columns
        there = inside & (at < FEATURES)[None, :]
        value = (tl.load(x + at[None, :], mask=there, other=0.0).to(tl.float32) - mean[:, None]) * rate[:, None]
        if weight_ptr is not None:
            value *= tl.load(weight_ptr + at, mask=at < FEATURES, other=0.0).to(tl.float32)[None, :]
        if bias_ptr is not None:
            value += tl.load(bias_ptr + at, mask=at < FEATURES, other=0.0).to(tl.float32)[None, :]
        value = tl.trans(value).to(slab.dtype.element_ty)
        tl.store(slab + at.to(tl.int64)[:, None] * BR, value, mask=(at < FEATURES)[:, None])


@triton.jit
def with_bias(
    slab, weight_ptr, index_ptr, bias_ptr, outputs, wanted, FAN_IN: tl.constexpr, UNROLL: tl.constexpr,
    BR: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """`summed` and a bias."""
    acc = summed(slab, weight_ptr, index_ptr, outputs, wanted, FAN_IN, UNROLL, BR, BO)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs, mask=wanted, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def activate(
    value, amplitude_ptr, frequency_ptr, decay_ptr, phase_ptr, outputs, wanted, ACTIVATION: tl.constexpr
):  # fmt: skip
    """One of `sparsecomp.reference.local.residual_block.ACTIVATIONS`, of float32 (BO, BR)."""
    if ACTIVATION == "relu":
        value = tl.where(value < 0.0, 0.0, value)  # NaN stays
    elif ACTIVATION == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACTIVATION == "tanh":
        square = value * value  # a difference from 1 would leave few digits of a small tangent
        series = 1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * (62 / 2835))))
        value = tl.where(square < 0.0625, value * series, 2.0 * tl.sigmoid(2.0 * value) - 1.0)
    else:
        value = tl.minimum(tl.maximum(value, -_FAR, tl.PropagateNan.ALL), _FAR, tl.PropagateNan.ALL)
        amplitude = tl.load(amplitude_ptr + outputs, mask=wanted, other=0.0).to(tl.float32)[:, None]
        angle = tl.load(frequency_ptr + outputs, mask=wanted, other=0.0).to(tl.float32)[:, None] * value
        if phase_ptr is not None:
            angle += tl.load(phase_ptr + outputs, mask=wanted, other=0.0).to(tl.float32)[:, None]
        damped = amplitude * tl.sin(angle)
        if ACTIVATION != "sine_none":
            by = tl.abs(value) if ACTIVATION == "sine_abs" else tl.where(value < 0.0, 0.0, value)
            decay = tl.load(decay_ptr + outputs, mask=wanted, other=0.0).to(tl.float32)[:, None]
            damped *= tl.exp(-decay * by)
        value = damped
    return value


@triton.jit
def residual_block_slabs_kernel(
    x_ptr, norm_weight_ptr, norm_bias_ptr, first_ptr, first_bias_ptr, amplitude_ptr, frequency_ptr, decay_ptr,
    phase_ptr, second_ptr, second_bias_ptr, first_index_ptr, second_index_ptr, scale_ptr, out_ptr, before_ptr,
    slabs_ptr, ROWS, FEATURES, x_row, alike, eps,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, FIRST: tl.constexpr, UNROLL_FIRST: tl.constexpr,
    SECOND: tl.constexpr, UNROLL_SECOND: tl.constexpr, STEP: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """One step of the block, "norm", "first" or "second", or "all".

    slabs: of normalised x, and then of what the second layer reads.
    """
    within = tl.arange(0, BR)
    rows = tl.program_id(0).to(tl.int64) * BR + within
    inside = (rows < ROWS)[:, None]
    slab = slabs_ptr + tl.program_id(0).to(tl.int64) * FEATURES * BR + within[None, :]
    hidden = slab + tl.num_programs(0).to(tl.int64) * FEATURES * BR
    x = x_ptr + rows[:, None] * x_row
    blocks = tl.cdiv(FEATURES, BO)
    if STEP == "all" or STEP == "norm":
        write_normalised(x, norm_weight_ptr, norm_bias_ptr, slab, inside, FEATURES, eps, NORM, BR, BN)
    if STEP == "all":
        tl.debug_barrier()
    if STEP == "all" or STEP == "first":
        for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
            outputs = block * BO + tl.arange(0, BO)
            wanted = outputs < FEATURES
            acc = with_bias(
                slab, first_ptr, first_index_ptr, first_bias_ptr, outputs, wanted, FIRST, UNROLL_FIRST, BR, BO
            )
            before = acc.to(hidden.dtype.element_ty)  # a backward knows no more of it
            if before_ptr is not None:
                place = rows[:, None] * FEATURES + outputs[None, :]
                tl.store(before_ptr + place, tl.trans(before), mask=inside & wanted[None, :])
            value = activate(
                before.to(tl.float32), amplitude_ptr, frequency_ptr, decay_ptr, phase_ptr, outputs, wanted, ACTIVATION
            )  # fmt: skip
            tl.store(hidden + outputs.to(tl.int64)[:, None] * BR, value.to(before.dtype), mask=wanted[:, None])
    if STEP == "all":
        tl.debug_barrier()
    if STEP == "all" or STEP == "second":
        scale = tl.load(scale_ptr + rows // alike, mask=rows < ROWS, other=0.0).to(tl.float32)[:, None]
        for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
            outputs = block * BO + tl.arange(0, BO)
            wanted = outputs < FEATURES
            acc = with_bias(
                hidden, second_ptr, second_index_ptr, second_bias_ptr, outputs, wanted, SECOND, UNROLL_SECOND, BR, BO
            )
            there = inside & wanted[None, :]
            value = tl.load(x + outputs[None, :], mask=there, other=0.0).to(tl.float32) + scale * tl.trans(acc)
            place = rows[:, None] * FEATURES + outputs[None, :]
            tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=there)


def _prepare(problem: ResidualBlock, config: Config) -> Launches:
    p, height, length = problem, config["BR"], config["BO"]
    slabs = triton.cdiv(p.rows, height)
    numbers = (p.rows, p.features, p.x_row, p.alike, p.eps)
    constants = {
        "NORM": p.norm, "ACTIVATION": p.activation, "FIRST": p.first, "UNROLL_FIRST": unrolled(p.first),
        "SECOND": p.second, "UNROLL_SECOND": unrolled(p.second), "BR": height, "BO": length,
        "BN": min(_AHEAD * length, triton.next_power_of_2(p.features)),
    }  # fmt: skip

    def step(name: str, shared: int) -> Step:
        fixed = {**constants, "STEP": name}
        launch = Launch(residual_block_slabs_kernel, (slabs, shared), numbers, fixed, num_warps=config["warps"])
        return Step(launch, tuple(range(17)))

    blocks = triton.cdiv(p.features, length)
    apart = [step("norm", 1), step("first", blocks), step("second", blocks)]
    workspace = (2 * slabs * p.features * height,), getattr(torch, p.dtype)
    return Launches([workspace], [step("all", 1)] if config["together"] else apart)


def _space(problem: ResidualBlock, device: Device) -> list[Config]:
    return [
        Config(BR=br, BO=bo, warps=warps, together=together)
        for together in (0, 1) for br, bo, warps in tiles(problem.dtype, (64, 128, 256, 512))
    ]  # fmt: skip


_rows, _features, _first, _second, _itemsize = sizes("rows features first second itemsize")
_br, _bo, _warps, _together, _processors, _gathered = sizes("BR BO warps together processors gathered")
(_fill,) = sizes("fill")

# the constants were fitted to an H200's times: 11 to 860 us of 90 configurations, within a third mostly
_slabs = sympy.ceiling(_rows / _br)
_width = _br * _itemsize
_share = sympy.ceiling(_slabs / _processors)
_registers = 48 + 3 * _br * _bo / (32 * _warps)
_resident = sympy.Max(sympy.floor(sympy.Min(64 / _warps, 65536 / (32 * _warps * _registers))), 1)
# a line a cycle from L1 while the slabs that a processor is at fit there, else sectors from L2
_mixed = sympy.Max(1, _slabs / _processors)
_held = sympy.Min(_resident, _together * _share + (1 - _together) * _mixed)
_lines = _slabs * _features * (_first + _second)
_near = _lines * 1.2 / (_processors * 1.7e9)
_l2 = _lines * (sympy.Max(_width, 32) + 32) / (_gathered * _processors)
_fits = sympy.Min(1, 2.1e5 / (_features * _width * _held))
_walk = 0.85 * (_fits * _near + (1 - _fits) * 2 * sympy.Max(_near, _l2))
_blocks = sympy.ceiling(_features / _bo)
_tiles = sympy.ceiling(_features / (_AHEAD * _bo))
_loads = 6e-8 * (_first + _second)
# the busiest processor's slabs; three passes over a row, whose tiles wait for one another
_turns = sympy.ceiling(_share / _resident)
_norm = sympy.Max(_share * 3 * _features * _width / _fill, _turns * _tiles * 1.6e-6)
_alone = sympy.Max(_walk * _share * _processors / _slabs, _turns * _blocks * (1.6e-6 + _loads))
_waves = sympy.Max(_slabs * _blocks / (_processors * _resident), 1) * (7.5e-6 + _loads)
# the fewer threads, the less of a line's way is hidden
_thin = sympy.Max(1, 2 * 1024 * _processors / (_slabs * _blocks * 32 * _warps))
_apart = 1.07 * sympy.Max(_walk * _thin, _waves)

RESIDUAL_BLOCK_SLABS = Template(
    name="residual_block_slabs",
    op="residual_block",
    sources=(residual_block_slabs_kernel, write_normalised, summed, with_bias, activate),
    refuse=lambda problem, device: unsupported(problem),
    space=_space,
    cost=Cost(
        bytes=2 * _rows * _features * _itemsize + _features * (_first + _second) * (4 + _itemsize),
        launches=3 - 2 * _together,
        seconds=5.6e-6 + _norm + _together * _alone + (1 - _together) * _apart,
    ),
    prepare=_prepare,
)
