"""A layer of fixed fan-in, x read as it lies: lanes along the outputs, which gather from a row of x.

A program keeps the places and weights of a block of outputs in registers and walks down rows of x. Where neighbouring
outputs read neighbouring inputs a gather is one or two cache lines; where they read anywhere it is 32.
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
    ROWS, OUTPUTS, FAN_IN, x_row, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """A program finishes BR rows by BO outputs, K places at a time."""
    blocks = tl.cdiv(OUTPUTS, BO)
    first = tl.program_id(0) // blocks * BR
    outputs = tl.program_id(0) % blocks * BO + tl.arange(0, BO)
    wanted = outputs < OUTPUTS
    places = tl.arange(0, K)
    at = outputs.to(tl.int64)[:, None] * FAN_IN + places[None, :]
    inside = wanted[:, None] & (places < FAN_IN)[None, :]
    place = tl.load(index_ptr + at, mask=inside, other=0)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = x_ptr + first.to(tl.int64) * x_row
    for row in range(first, tl.minimum(first + BR, ROWS)):
        acc = tl.sum(weight * tl.load(x + place, mask=inside, other=0.0).to(tl.float32), 1)
        for start in range(K, FAN_IN, K):
            more = wanted[:, None] & (start + places < FAN_IN)[None, :]
            next_place = tl.load(index_ptr + at + start, mask=more, other=0)
            next_weight = tl.load(weight_ptr + at + start, mask=more, other=0.0).to(tl.float32)
            acc += tl.sum(next_weight * tl.load(x + next_place, mask=more, other=0.0).to(tl.float32), 1)
        rows = row + tl.arange(0, 1)
        finish(
            acc[None, :], bias_ptr, residual_ptr, out_ptr, 0, rows, outputs, wanted[None, :],
            out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
        )  # fmt: skip
        x += x_row


def _prepare(problem: GatherDot, config: Config) -> Launch:
    p = problem
    grid = (triton.cdiv(p.rows, config["BR"]) * triton.cdiv(p.outputs, config["BO"]),)
    numbers = (p.rows, p.outputs, p.fan_in, p.x_row, *p.output.numbers)
    constants = {**p.output.constants, **{name: config[name] for name in ("K", "BR", "BO")}}
    return Launch(gather_dot_rows_kernel, grid, numbers, constants, num_warps=config["warps"])


def _space(problem: GatherDot, device: Device) -> list[Config]:
    k = min(triton.next_power_of_2(problem.fan_in), 32)
    most = triton.next_power_of_2(problem.rows)
    return [
        Config(BR=br, BO=bo, K=k, warps=warps)
        for br in (1, 2, 4, 8, 16, 32, 64) if br <= most
        for bo in (32, 64, 128, 256, 512) for warps in (1, 2, 4, 8)
        if 2 <= k * bo // (32 * warps) <= 32 and bo >= 32 * warps // 2
    ]  # fmt: skip


_rows, _inputs, _outputs, _fan_in, _lines, _itemsize = sizes("rows inputs outputs fan_in lines itemsize")
_br, _bo, _warps, _processors = sizes("BR BO warps processors")

_programs = sympy.ceiling(_rows / _br) * sympy.ceiling(_outputs / _bo)
_products = _rows * _outputs * _fan_in
# measured on an H200: what 32 products take a processor in cycles, and what each line more takes it
_gathers = _products * (0.5 * _lines / 32 + 0.28) / (_processors * 1.7e9)
# weights and places come again for each block of rows
_beside = sympy.ceiling(_rows / _br) * _outputs * _fan_in * (4 + _itemsize) / (_processors * 3e10)
_resident = sympy.Min(32, 65536 / (32 * _warps * (32 + 4 * _fan_in * _bo / (32 * _warps))))
_waves = sympy.Max(_programs / (_processors * _resident), 1) * (1.5e-6 + 7e-7 * _br)

COST = Cost(
    bytes=_rows * (_inputs + _outputs) * _itemsize + _outputs * _fan_in * (4 + _itemsize),
    seconds=sympy.Max(_gathers + _beside, _waves) + 1e-7 * _br,
)

GATHER_DOT_ROWS = Template(
    name="gather_dot_rows",
    op="gather_dot",
    sources=(gather_dot_rows_kernel, finish),
    refuse=lambda problem, device: unsupported(problem),
    space=_space,
    cost=COST,
    prepare=_prepare,
)
