"""A layer of fixed fan-in, x read as it lies: lanes along the outputs, which gather from a row of x.

A program holds a tile of rows by outputs, so that each weight and each place is read once for all its rows. Where
neighbouring outputs read neighbouring inputs a gather is one or two cache lines; where they read anywhere it is 32.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.local.gather_dot import GatherDot, unsupported
from sparsecomp.lowering.sparse.kernels.epilogue import finish
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def gather_dot_rows_kernel(
    x_ptr, weight_ptr, index_ptr, bias_ptr, residual_ptr, out_ptr,
    ROWS, OUTPUTS, x_row, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, FAN_IN: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """A program finishes BR rows by BO outputs."""
    blocks = tl.cdiv(OUTPUTS, BO)
    rows = tl.program_id(0) // blocks * BR + tl.arange(0, BR)
    outputs = tl.program_id(0) % blocks * BO + tl.arange(0, BO)
    wanted = outputs < OUTPUTS
    mask = (rows < ROWS)[:, None] & wanted[None, :]
    x = x_ptr + rows.to(tl.int64)[:, None] * x_row
    at = outputs.to(tl.int64) * FAN_IN
    acc = tl.zeros((BR, BO), tl.float32)
    for j in range(FAN_IN):
        place = tl.load(index_ptr + at + j, mask=wanted, other=0)
        weight = tl.load(weight_ptr + at + j, mask=wanted, other=0.0).to(tl.float32)
        value = tl.load(x + place[None, :], mask=mask, other=0.0).to(tl.float32)
        acc += weight[None, :] * value
    finish(
        acc, bias_ptr, residual_ptr, out_ptr, 0, rows, outputs, mask,
        out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


def _prepare(problem: GatherDot, config: Config) -> Launch:
    p = problem
    grid = (triton.cdiv(p.rows, config["BR"]) * triton.cdiv(p.outputs, config["BO"]),)
    numbers = (p.rows, p.outputs, p.x_row, *p.output.numbers)
    constants = {**p.output.constants, "FAN_IN": p.fan_in, "BR": config["BR"], "BO": config["BO"]}
    return Launch(gather_dot_rows_kernel, grid, numbers, constants, num_warps=config["warps"])


def _space(problem: GatherDot, device: Device) -> list[Config]:
    most = triton.next_power_of_2(problem.rows)
    return [
        Config(BR=br, BO=bo, warps=warps)
        for br in (1, 2, 4, 8, 16, 32) if br <= most
        for bo in (32, 64, 128, 256, 512, 1024) for warps in (1, 2, 4, 8)
        if 1 <= br * bo // (32 * warps) <= 32 and bo >= 32 * min(warps, 2)
    ]  # fmt: skip


_rows, _inputs, _outputs, _fan_in, _lines, _itemsize = sizes("rows inputs outputs fan_in lines itemsize")
_br, _bo, _warps, _processors = sizes("BR BO warps processors")

_tiles = sympy.ceiling(_rows / _br) * sympy.ceiling(_outputs / _bo)
# an L1 cache looks one line up a cycle
_gathers = _rows * _outputs * _fan_in * (_lines / 32 + sympy.Rational(1, 16)) / (_processors * 1.7e9)
# weights and places come again for each block of rows, in lines of which each output's neighbours take a part
_beside = sympy.ceiling(_rows / _br) * _outputs * _fan_in * (4 + _itemsize) * 3 / (_processors * 3e10)
_resident = sympy.Min(32, 65536 / (32 * _warps * (24 + 3 * _br * _bo / (32 * _warps))))
_waves = sympy.Max(_tiles / (_processors * _resident), 1) * (1.5e-6 + 3e-8 * _fan_in)

GATHER_DOT_ROWS = Template(
    name="gather_dot_rows",
    op="gather_dot",
    sources=(gather_dot_rows_kernel, finish),
    refuse=lambda problem, device: unsupported(problem),
    space=_space,
    cost=Cost(
        bytes=_rows * (_inputs + _outputs) * _itemsize + _outputs * _fan_in * (4 + _itemsize),
        seconds=sympy.Max(_gathers + _beside, _waves),
    ),
    prepare=_prepare,
)
