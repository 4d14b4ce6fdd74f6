"""A layer of fixed fan-in, x read as it lies: lanes along the outputs, which gather from rows of x.

A program keeps the place and the weight of a block of outputs while it gathers from several rows. Where neighbouring
outputs read neighbouring inputs a gather is one or two cache lines, and loading the index costs little beside them;
where they read anywhere it is 32.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.local.gather_dot import GatherDot, unrolled, unsupported
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, finish
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def gather_dot_rows_kernel(
    x_ptr, weight_ptr, index_ptr, bias_ptr, residual_ptr, out_ptr,
    ROWS, OUTPUTS, x_row, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, FAN_IN: tl.constexpr, UNROLL: tl.constexpr, BR: tl.constexpr,
    BO: tl.constexpr,
):  # fmt: skip
    """A program finishes BR rows by BO outputs."""
    blocks = tl.cdiv(OUTPUTS, BO)
    rows = tl.program_id(0) // blocks * BR + tl.arange(0, BR)
    # said not to be neighbours, or the store's vectors would give a thread four outputs side by side: a gather would
    # then touch four lines, and each weight would go through shared memory
    outputs = tl.max_contiguous(tl.program_id(0) % blocks * BO + tl.arange(0, BO), 1)
    wanted = (outputs < OUTPUTS)[None, :]
    inside = (rows < ROWS)[:, None] & wanted
    at = outputs.to(tl.int64)[None, :] * FAN_IN
    x = x_ptr + rows.to(tl.int64)[:, None] * x_row
    acc = tl.zeros((BR, BO), tl.float32)
    for start in range(0, FAN_IN, UNROLL):
        for step in tl.static_range(UNROLL):
            place = tl.load(index_ptr + at + start + step, mask=wanted, other=0)
            weight = tl.load(weight_ptr + at + start + step, mask=wanted, other=0.0).to(tl.float32)
            acc += weight * tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    finish(
        acc, bias_ptr, residual_ptr, out_ptr, 0, rows, outputs, inside,
        out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


def _prepare(problem: GatherDot, config: Config) -> Launch:
    p = problem
    grid = (triton.cdiv(p.rows, config["BR"]) * triton.cdiv(p.outputs, config["BO"]),)
    numbers = (p.rows, p.outputs, p.x_row, *p.output.numbers)
    fixed = {"FAN_IN": p.fan_in, "UNROLL": unrolled(p.fan_in), "BR": config["BR"], "BO": config["BO"]}
    constants = {**p.output.constants, **fixed}
    return Launch(gather_dot_rows_kernel, grid, numbers, constants, num_warps=config["warps"])


def _space(problem: GatherDot, device: Device) -> list[Config]:
    most = triton.next_power_of_2(problem.rows)
    return [
        Config(BR=br, BO=bo, warps=warps)
        for br in (1, 2, 4) if br <= most  # the same columns of more rows crowd each other out of L1
        for bo in (32, 64, 128, 256) for warps in (1, 2, 4) if 32 * warps <= bo <= 64 * warps
    ]  # fmt: skip


_rows, _inputs, _outputs, _fan_in, _lines, _itemsize = sizes("rows inputs outputs fan_in lines itemsize")
_br, _bo, _warps, _processors = sizes("BR BO warps processors")

_programs = sympy.ceiling(_rows / _br) * sympy.ceiling(_outputs / _bo)
_gathers = _rows * _outputs * _fan_in / 32
# a line a cycle: of x for each gather, of weights and places for each of BR of them
_cycles = _gathers * (_lines + 1 + 2 * sympy.Min(_fan_in, 32) / _br)
_resident = sympy.Min(32, 65536 / (32 * _warps * (40 + 2 * _br * _bo / (32 * _warps))))
_waves = sympy.Max(_programs / (_processors * _resident), 1) * (1.5e-6 + 1e-7 * _fan_in)

GATHER_DOT_ROWS = Template(
    name="gather_dot_rows",
    op="gather_dot",
    sources=(gather_dot_rows_kernel, *FINISH),
    refuse=lambda problem, device: unsupported(problem),
    space=_space,
    cost=Cost(
        bytes=_rows * (_inputs + _outputs) * _itemsize + _outputs * _fan_in * (4 + _itemsize),
        seconds=sympy.Max(_cycles / (_processors * 1.7e9), _waves),
    ),
    prepare=_prepare,
)
