"""A layer of fixed fan-in that is a stencil: where an output reads follows from its number, so that no index is loaded.

Only outputs at the edges of a grid read elsewhere. A first launch compares the index with the steps, as it is in this
call, and marks the outputs that go their own ways; those alone load it. So a wrong step costs time and nothing else.
"""

from dataclasses import replace

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.local.gather_dot import GatherDot, unsupported
from sparsecomp.lowering.local.kernels import gather_dot_rows
from sparsecomp.lowering.sparse.kernels.epilogue import finish
from sparsecomp.lowering.tuning.limits import fits_registers
from sparsecomp.lowering.tuning.template import Config, Template

_MARKED = 256
"""Outputs that a program marks."""
_MOST = 64
"""Steps, which are all written out in the kernel."""


@triton.jit
def mark_others_kernel(index_ptr, others_ptr, OUTPUTS, STEPS: tl.constexpr, FAN_IN: tl.constexpr, BO: tl.constexpr):
    """others[o] = whether index[o, j] is not o + STEPS[j] for some j."""
    outputs = tl.program_id(0) * BO + tl.arange(0, BO)
    wanted = outputs < OUTPUTS
    at = outputs.to(tl.int64) * FAN_IN
    others = tl.zeros((BO,), tl.int32)
    for j in tl.static_range(FAN_IN):
        place = tl.load(index_ptr + at + j, mask=wanted, other=0)
        others |= (place != outputs + STEPS[j]).to(tl.int32)
    tl.store(others_ptr + outputs, others.to(tl.int8), mask=wanted)


@triton.jit
def gather_dot_stencil_kernel(
    x_ptr, weight_ptr, index_ptr, bias_ptr, residual_ptr, out_ptr, others_ptr,
    ROWS, OUTPUTS, x_row, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, STEPS: tl.constexpr, FAN_IN: tl.constexpr, BR: tl.constexpr,
    BO: tl.constexpr,
):  # fmt: skip
    """A program finishes BR rows by BO outputs."""
    blocks = tl.cdiv(OUTPUTS, BO)
    rows = tl.program_id(0) // blocks * BR + tl.arange(0, BR)
    outputs = tl.program_id(0) % blocks * BO + tl.arange(0, BO)
    wanted = outputs < OUTPUTS
    inside = (rows < ROWS)[:, None] & wanted[None, :]
    at = outputs.to(tl.int64) * FAN_IN
    x = x_ptr + rows.to(tl.int64)[:, None] * x_row
    other = tl.load(others_ptr + outputs, mask=wanted, other=0) != 0
    acc = tl.zeros((BR, BO), tl.float32)
    for j in tl.static_range(FAN_IN):
        place = tl.where(other, tl.load(index_ptr + at + j, mask=other, other=0), outputs + STEPS[j])
        weight = tl.load(weight_ptr + at + j, mask=wanted, other=0.0).to(tl.float32)
        acc += weight[None, :] * tl.load(x + place[None, :], mask=inside, other=0.0).to(tl.float32)
    finish(
        acc, bias_ptr, residual_ptr, out_ptr, 0, rows, outputs, inside,
        out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


def _prepare(problem: GatherDot, config: Config) -> Launches:
    p, fixed = problem, {"STEPS": problem.steps, "FAN_IN": problem.fan_in}
    marking = (triton.cdiv(p.outputs, _MARKED),)
    mark = Launch(mark_others_kernel, marking, (p.outputs,), {**fixed, "BO": _MARKED}, num_warps=4)
    grid = (triton.cdiv(p.rows, config["BR"]) * triton.cdiv(p.outputs, config["BO"]),)
    numbers = (p.rows, p.outputs, p.x_row, *p.output.numbers)
    constants = {**p.output.constants, **fixed, "BR": config["BR"], "BO": config["BO"]}
    main = Launch(gather_dot_stencil_kernel, grid, numbers, constants, num_warps=config["warps"])
    workspace = (p.outputs,), torch.int8
    return Launches([workspace], [Step(mark, (2, 6)), Step(main, (0, 1, 2, 3, 4, 5, 6))])


def _space(problem: GatherDot, device: Device) -> list[Config]:
    most = triton.next_power_of_2(problem.rows)
    return [
        Config(BR=br, BO=bo, warps=warps)
        for br in (1, 4, 8, 16, 32) if br <= most
        for bo in (64, 128, 256) for warps in (2, 4, 8)
        if br * bo >= 32 * warps <= 4 * bo and br * bo <= 32 * 32 * warps and fits_registers(2 * br * bo, warps)
    ]  # fmt: skip


def _refuse(problem: GatherDot, device: Device) -> str | None:
    if not problem.steps or problem.fan_in > _MOST:
        return f"its outputs do not read at up to {_MOST} steps that most share"
    return unsupported(problem)


GATHER_DOT_STENCIL = Template(
    name="gather_dot_stencil",
    op="gather_dot",
    sources=(gather_dot_stencil_kernel, mark_others_kernel, finish),
    refuse=_refuse,
    space=_space,
    # not measured yet: as with an index and a launch more, so that it is taken only where it was measured to be faster
    cost=replace(gather_dot_rows.COST, launches=sympy.Integer(2)),
    prepare=_prepare,
)
