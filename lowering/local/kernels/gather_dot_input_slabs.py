"""The gradient of a layer of fixed fan-in by its input, the gradient of its result in slabs of rows.

A program sums for a block of inputs and the rows of a slab. Its inputs' lists are walked together, up to a length that
few exceed; what is left of a longer one, many entries at a time. Nothing is sorted or scattered in a call.
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

_LONG = 32
"""Entries that a list may have and be walked with its neighbours; more where most have many."""
_UNROLLED = 4


@triton.jit
def entries(order_ptr, weight_ptr, slabs, at, more, FAN_IN: tl.constexpr, BR: tl.constexpr):
    """Weights times the gradients of the outputs that they belong to, of entries of the lists."""
    place = tl.load(order_ptr + at, mask=more, other=0)
    weight = tl.load(weight_ptr + place, mask=more, other=0.0).to(tl.float32)
    output = (place // FAN_IN).to(tl.int64)
    return weight[:, None] * tl.load(slabs + output[:, None] * BR, mask=more[:, None], other=0.0).to(tl.float32)


@triton.jit
def gather_dot_input_slabs_kernel(
    slabs_ptr, weight_ptr, pointers_ptr, order_ptr, out_ptr, ROWS, INPUTS, OUTPUTS, FAN_IN: tl.constexpr,
    LONG: tl.constexpr, MANY: tl.constexpr, UNROLL: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr,
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
    longest = tl.max(end - begin, 0)
    for start in range(0, tl.minimum(longest, LONG), UNROLL):
        for step in tl.static_range(UNROLL):
            at = begin + start + step
            acc += entries(order_ptr, weight_ptr, slabs, at, at < end, FAN_IN, BR)
    if longest > LONG:
        block = tl.program_id(0) % blocks * BI
        for i in range(tl.minimum(BI, INPUTS - block)):
            last = tl.load(pointers_ptr + block + i + 1)
            rest = tl.zeros((MANY, BR), tl.float32)
            for first in range(tl.load(pointers_ptr + block + i) + LONG, last, MANY):
                at = first + tl.arange(0, MANY)
                rest += entries(order_ptr, weight_ptr, slabs, at, at < last, FAN_IN, BR)
            acc += tl.where((tl.arange(0, BI) == i)[:, None], tl.sum(rest, 0)[None, :], 0.0)
    rows = slab * BR + within
    out = out_ptr + rows[:, None] * INPUTS + inputs[None, :]
    tl.store(out, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=(rows < ROWS)[:, None] & wanted[None, :])


def _prepare(problem: GatherDotInput, config: Config) -> Launches:
    p, height, length = problem, config["BR"], config["BI"]
    copy, workspace = writing(p.rows, p.outputs, p.grad_row, height, p.dtype)
    grid = (triton.cdiv(p.rows, height) * triton.cdiv(p.inputs, length),)
    usual = triton.next_power_of_2(triton.cdiv(p.outputs * p.fan_in, p.inputs))
    constants = {"FAN_IN": p.fan_in, "LONG": max(4 * usual, _LONG), "MANY": length, "UNROLL": _UNROLLED}
    constants |= {"BR": height, "BI": length}
    main = Launch(gather_dot_input_slabs_kernel, grid, p[:3], constants, num_warps=config["warps"])
    return Launches([workspace], [Step(copy, (0, 5)), Step(main, (5, 1, 2, 3, 4))])


def _space(problem: GatherDotInput, device: Device) -> list[Config]:
    return [Config(BR=br, BI=bi, warps=warps) for br, bi, warps in tiles(problem.dtype, (32, 64, 128, 256))]


_rows, _inputs, _outputs, _fan_in, _itemsize = sizes("rows inputs outputs fan_in itemsize")
_br, _bi, _processors, _bandwidth = sizes("BR BI processors bandwidth")

_padded = sympy.ceiling(_rows / _br) * _br
_copying = 2 * _padded * _outputs * _itemsize / _bandwidth + 4e-6
# a line a cycle, as of gather_dot_slabs, and lists of uneven length; measured on an H200
_walk = 2.0 * _padded * _outputs * _fan_in / _br * 1.2 / (_processors * 1.7e9)

GATHER_DOT_INPUT_SLABS = Template(
    name="gather_dot_input_slabs",
    op="gather_dot_input",
    sources=(gather_dot_input_slabs_kernel, entries, write_slabs_kernel),
    refuse=lambda problem, device: unsupported(problem),
    space=_space,
    cost=Cost(
        bytes=_rows * (_inputs + _outputs) * _itemsize + _outputs * _fan_in * (4 + _itemsize),
        launches=sympy.Integer(2),
        seconds=_copying + _walk,
    ),
    prepare=_prepare,
)
