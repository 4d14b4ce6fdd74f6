"""The gradient of a layer of fixed fan-in by its input, the gradient of its result in slabs of rows.

A program sums for a block of inputs and the rows of a slab. Its inputs' lists are walked together, as long as the
longest of them; weights are read in the order of the lists, so that nothing is sorted or scattered in a call.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.local.gather_dot import unsupported
from sparsecomp.lowering.local.gather_dot_input import GatherDotInput
from sparsecomp.lowering.local.kernels.slabs import tiles, write_slabs_kernel, writing
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def gather_dot_input_slabs_kernel(
    slabs_ptr, weight_ptr, pointers_ptr, order_ptr, out_ptr, ROWS, INPUTS, OUTPUTS, FAN_IN,
    BR: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """out[rows, inputs] of a slab and a block of BI inputs."""
    blocks = tl.cdiv(INPUTS, BI)
    slab = (tl.program_id(0) // blocks).to(tl.int64)
    inputs = tl.program_id(0) % blocks * BI + tl.arange(0, BI)
    within = tl.arange(0, BR)
    wanted = inputs < INPUTS
    begin = tl.load(pointers_ptr + inputs, mask=wanted, other=0)
    end = tl.load(pointers_ptr + inputs + 1, mask=wanted, other=0)
    slabs = slabs_ptr + slab * OUTPUTS * BR + within[None, :]
    acc = tl.zeros((BI, BR), tl.float32)
    for j in range(tl.max(end - begin, 0)):
        more = begin + j < end
        place = tl.load(order_ptr + begin + j, mask=more, other=0)
        weight = tl.load(weight_ptr + place, mask=more, other=0.0).to(tl.float32)
        output = (place // FAN_IN).to(tl.int64)
        acc += weight[:, None] * tl.load(slabs + output[:, None] * BR, mask=more[:, None], other=0.0).to(tl.float32)
    rows = slab * BR + within
    out = out_ptr + rows[:, None] * INPUTS + inputs[None, :]
    tl.store(out, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=(rows < ROWS)[:, None] & wanted[None, :])


def _prepare(problem: GatherDotInput, config: Config) -> Launches:
    p, height, length = problem, config["BR"], config["BI"]
    copy, workspace = writing(p.rows, p.outputs, p.grad_row, height, p.dtype)
    grid = (triton.cdiv(p.rows, height) * triton.cdiv(p.inputs, length),)
    main = Launch(
        gather_dot_input_slabs_kernel, grid, p[:4], {"BR": height, "BI": length}, num_warps=config["warps"]
    )  # fmt: skip
    return Launches([workspace], [Step(copy, (0, 5)), Step(main, (5, 1, 2, 3, 4))])


def _space(problem: GatherDotInput, device: Device) -> list[Config]:
    return [Config(BR=br, BI=bi, warps=warps) for br, bi, warps in tiles(problem.dtype, (32, 64, 128, 256))]


_rows, _inputs, _outputs, _fan_in, _itemsize = sizes("rows inputs outputs fan_in itemsize")
_br, _bi, _processors, _rewritten, _bandwidth = sizes("BR BI processors rewritten bandwidth")

_padded = sympy.ceiling(_rows / _br) * _br
_copying = 2 * _padded * _outputs * _itemsize / (_rewritten * _bandwidth) + 8e-6
# as of gather_dot_slabs: lists are of uneven length, so half as many lanes again
_walk = 1.5 * _padded * _outputs * _fan_in / _br * 1.2 / (_processors * 1.7e9)

GATHER_DOT_INPUT_SLABS = Template(
    name="gather_dot_input_slabs",
    op="gather_dot_input",
    sources=(gather_dot_input_slabs_kernel, write_slabs_kernel),
    refuse=lambda problem, device: unsupported(problem),
    space=_space,
    cost=Cost(
        bytes=_rows * (_inputs + _outputs) * _itemsize + _outputs * _fan_in * (4 + _itemsize),
        launches=sympy.Integer(2),
        seconds=_copying + _walk,
    ),
    prepare=_prepare,
)
