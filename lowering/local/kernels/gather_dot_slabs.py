"""A layer of fixed fan-in whose outputs read anywhere: rows of x in slabs, in which an input's rows are neighbours.

A first launch writes x as slabs. One that fits is read from the L1 cache of the processor that works on it.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.local.gather_dot import GatherDot, unrolled, unsupported
from sparsecomp.lowering.local.kernels.slabs import summed, tiles, write_slabs_kernel, writing
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, finish
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def gather_dot_slabs_kernel(
    slabs_ptr, weight_ptr, index_ptr, bias_ptr, residual_ptr, out_ptr,
    ROWS, INPUTS, OUTPUTS, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, FAN_IN: tl.constexpr, UNROLL: tl.constexpr, BR: tl.constexpr,
    BO: tl.constexpr,
):  # fmt: skip
    """out[rows, outputs] of a slab and a block of BO outputs."""
    blocks = tl.cdiv(OUTPUTS, BO)
    slab = (tl.program_id(0) // blocks).to(tl.int64)
    outputs = tl.program_id(0) % blocks * BO + tl.arange(0, BO)
    within = tl.arange(0, BR)
    wanted = outputs < OUTPUTS
    slabs = slabs_ptr + slab * INPUTS * BR + within[None, :]
    acc = summed(slabs, weight_ptr, index_ptr, outputs, wanted, FAN_IN, UNROLL, BR, BO)
    rows = slab * BR + within
    mask = (rows < ROWS)[:, None] & wanted[None, :]
    finish(
        tl.trans(acc), bias_ptr, residual_ptr, out_ptr, 0, rows, outputs, mask,
        out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


def _prepare(problem: GatherDot, config: Config) -> Launches:
    p, height = problem, config["BR"]
    copy, workspace = writing(p.rows, p.inputs, p.x_row, height, p.dtype)
    grid = (triton.cdiv(p.rows, height) * triton.cdiv(p.outputs, config["BO"]),)
    numbers = (p.rows, p.inputs, p.outputs, *p.output.numbers)
    fixed = {"FAN_IN": p.fan_in, "UNROLL": unrolled(p.fan_in), "BR": height, "BO": config["BO"]}
    constants = {**p.output.constants, **fixed}
    main = Launch(gather_dot_slabs_kernel, grid, numbers, constants, num_warps=config["warps"])
    return Launches([workspace], [Step(copy, (0, 6)), Step(main, (6, 1, 2, 3, 4, 5))])


def _space(problem: GatherDot, device: Device) -> list[Config]:
    return [Config(BR=br, BO=bo, warps=warps) for br, bo, warps in tiles(problem.dtype, (32, 64, 128, 256))]


def _refuse(problem: GatherDot, device: Device) -> str | None:
    return unsupported(problem) or ("one row has no neighbours" if problem.rows < 4 else None)


_rows, _inputs, _outputs, _fan_in, _itemsize = sizes("rows inputs outputs fan_in itemsize")
_br, _bo, _warps, _processors, _bandwidth, _gathered = sizes("BR BO warps processors bandwidth gathered")

_slabs = sympy.ceiling(_rows / _br)
_padded = _slabs * _br
_elements = _padded * _outputs * _fan_in
_copying = 2 * _padded * _inputs * _itemsize / _bandwidth + 4e-6
_width = _br * _itemsize
# measured on an H200: a line takes 2.8 cycles whatever its width, from L1 or L2 alike; sectors from L2 beyond that
_near = _elements / _br * 2.8 / (_processors * 1.7e9)
_l2 = _elements / _br * (sympy.Max(_width, 32) + 32) / (_gathered * _processors)
_fits = sympy.Min(1, 1.8e5 / (_inputs * _width))
_walk = sympy.Max(_near, 0.45 * (1 - _fits) * _l2)
_programs = _slabs * sympy.ceiling(_outputs / _bo)
_resident = sympy.Max(sympy.floor(sympy.Min(32, 65536 / (32 * _warps * (32 + 3 * _br * _bo / (32 * _warps))))), 1)
_step = 1.2e-6 + 6e-8 * _fan_in
_waves = sympy.Max(_programs / (_processors * _resident), 1) * _step
# the fewer threads, the less of a line's way is hidden
_thin = sympy.Max(1, 2 * 1024 * _processors / (_programs * 32 * _warps))

GATHER_DOT_SLABS = Template(
    name="gather_dot_slabs",
    op="gather_dot",
    sources=(gather_dot_slabs_kernel, write_slabs_kernel, summed, *FINISH),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=_rows * (_inputs + _outputs) * _itemsize + _outputs * _fan_in * (4 + _itemsize),
        launches=sympy.Integer(2),
        seconds=_copying + sympy.Max(_walk * _thin, _waves),
    ),
    prepare=_prepare,
)
