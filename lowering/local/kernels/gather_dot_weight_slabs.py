"""The gradient of a layer of fixed fan-in by its weight, x and the gradient of its result in slabs of rows.

A program sums a block of weights over all rows, so that each input is gathered once for each weight that multiplies it
and nothing is added up afterwards.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.local.gather_dot import unsupported
from sparsecomp.lowering.local.gather_dot_weight import GatherDotWeight
from sparsecomp.lowering.local.kernels.slabs import tiles, write_slabs_kernel, writing
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def gather_dot_weight_slabs_kernel(
    x_ptr, grad_ptr, index_ptr, out_ptr, SLABS, WEIGHTS, FAN_IN, x_slab, grad_slab, BR: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """out[o, j] of BW weights, counted row by row."""
    weights = tl.program_id(0).to(tl.int64) * BW + tl.arange(0, BW)
    wanted = weights < WEIGHTS
    place = tl.load(index_ptr + weights, mask=wanted, other=0).to(tl.int64)
    output = tl.where(wanted, weights // FAN_IN, 0)
    within = tl.arange(0, BR)
    x = x_ptr + place[:, None] * BR + within[None, :]
    grad = grad_ptr + output[:, None] * BR + within[None, :]
    acc = tl.zeros((BW, BR), tl.float32)
    for _ in range(SLABS):
        acc += tl.load(x).to(tl.float32) * tl.load(grad).to(tl.float32)
        x += x_slab
        grad += grad_slab
    tl.store(out_ptr + weights, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), mask=wanted)


def _prepare(problem: GatherDotWeight, config: Config) -> Launches:
    p, height, length = problem, config["BR"], config["BW"]
    copies, workspaces = zip(
        writing(p.rows, p.inputs, p.x_row, height, p.dtype), writing(p.rows, p.outputs, p.grad_row, height, p.dtype),
        strict=True,
    )  # fmt: skip
    weights = p.outputs * p.fan_in
    numbers = (triton.cdiv(p.rows, height), weights, p.fan_in, p.inputs * height, p.outputs * height)
    grid, constants = (triton.cdiv(weights, length),), {"BR": height, "BW": length}
    main = Launch(gather_dot_weight_slabs_kernel, grid, numbers, constants, num_warps=config["warps"])
    return Launches(workspaces, [Step(copies[0], (0, 4)), Step(copies[1], (1, 5)), Step(main, (4, 5, 2, 3))])


def _space(problem: GatherDotWeight, device: Device) -> list[Config]:
    return [Config(BR=br, BW=bw, warps=warps) for br, bw, warps in tiles(problem.dtype, (16, 32, 64, 128))]


_rows, _inputs, _outputs, _fan_in, _itemsize = sizes("rows inputs outputs fan_in itemsize")
_br, _processors, _bandwidth = sizes("BR processors bandwidth")

_padded = sympy.ceiling(_rows / _br) * _br
_copying = 2 * _padded * (_inputs + _outputs) * _itemsize / _bandwidth + 6e-6
# as of gather_dot_slabs: a line a cycle, of x and of the gradient
_walk = 2 * _padded * _outputs * _fan_in / _br * 1.2 / (_processors * 1.7e9)

GATHER_DOT_WEIGHT_SLABS = Template(
    name="gather_dot_weight_slabs",
    op="gather_dot_weight",
    sources=(gather_dot_weight_slabs_kernel, write_slabs_kernel),
    refuse=lambda problem, device: unsupported(problem),
    space=_space,
    cost=Cost(
        bytes=_rows * (_inputs + _outputs) * _itemsize + _outputs * _fan_in * (4 + _itemsize),
        launches=sympy.Integer(3),
        seconds=_copying + _walk,
    ),
    prepare=_prepare,
)
