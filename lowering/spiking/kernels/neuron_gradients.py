"""The gradients of a described neuron over all time steps, in one pass over memory.

The states of all steps are computed again and stay in registers; then the steps are gone back through, each done again
by the instructions of the forward and followed by those of its gradient (`sparsecomp.reference.neuron_gradient`). Few
inputs stay in registers too, many are read twice.
"""

import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.kernels.neuron import (
    do_instruction,
    parameter_of,
    state_before,
    to_bfloat16,
    what_stays,
)
from sparsecomp.lowering.spiking.neuron_gradients import NeuronGradients
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template

_HELD = tl.constexpr(8)
"""Steps up to which inputs stay in registers."""


@triton.jit
def results_of(values, CODE: tl.constexpr):
    """Values, and behind them the results of the instructions."""
    for at in tl.static_range(len(CODE)):
        one = do_instruction(CODE[at][0], values[CODE[at][1]], values[CODE[at][2]], values[CODE[at][3]])
        values = values + (one,)
    return values


@triton.jit
def store_if(pointer, offset, value, mask):
    """Store, where there is a place to."""
    if pointer is not None:
        tl.store(pointer + offset, value, mask=mask)


@triton.jit
def neuron_gradients_kernel(
    x_ptr, v0_ptr, v1_ptr, p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, spikes_ptr, last0_ptr, last1_ptr,
    by_x_ptr, by_v0_ptr, by_v1_ptr, by_p0_ptr, by_p1_ptr, by_p2_ptr, by_p3_ptr, by_p4_ptr, by_p5_ptr,
    numel, x_step, spikes_step, size0, stride0, size1, stride1, size2, stride2, size3, stride3,
    size4, stride4, size5, stride5, start0, start1, n0, n1, n2, n3, n4, n5, n6, n7,
    STEPS: tl.constexpr, CODE: tl.constexpr, AFTER: tl.constexpr, BACK: tl.constexpr, OF_X: tl.constexpr,
    OF: tl.constexpr, WIDE: tl.constexpr, ALIKE: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One element of the states a lane. spikes, last0, last1: gradients of those; by_…: gradients for what is read.

    Inputs lie x_step apart from step to step, their gradients and those of spikes spikes_step. A parameter's gradient
    is one for each element of the states, which others add up. CODE and AFTER are the forward's; BACK is `StepBack`'s
    code, OF_X and OF are its places. SUMMED: all steps are given the same, whose gradient is the sum of theirs.
    """
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < numel
    zero = tl.full((BLOCK,), 0.0, tl.float32)
    states = (state_before(v0_ptr, start0, offset, mask, zero), state_before(v1_ptr, start1, offset, mask, zero))
    fixed = what_stays(
        p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, size0, stride0, size1, stride1, size2, stride2,
        size3, stride3, size4, stride4, size5, stride5, n0, n1, n2, n3, n4, n5, n6, n7, offset, mask, zero, WIDE,
        ALIKE,
    )  # fmt: skip
    # offsets of later steps pass 2^31 where a whole layer does
    x_step = tl.cast(x_step, tl.int64)
    spikes_step = tl.cast(spikes_step, tl.int64)
    before = ()
    inputs = ()
    for step in tl.static_range(STEPS):
        before = before + states
        x = tl.load(x_ptr + step * x_step + offset, mask=mask, other=0.0).to(tl.float32)
        inputs = inputs + (x,)
        if step + 1 < STEPS:
            values = results_of((x,) + states + fixed, CODE)
            if len(AFTER) == 2:
                states = (values[AFTER[0]], values[AFTER[1]])
            else:
                states = (values[AFTER[0]], zero)
    by_states = (state_before(last0_ptr, 0.0, offset, mask, zero), state_before(last1_ptr, 0.0, offset, mask, zero))
    sums = (zero, zero, zero, zero, zero, zero)
    of_all = zero
    for back in tl.static_range(STEPS):
        x = inputs[STEPS - 1 - back]
        if STEPS > _HELD:
            x = tl.load(x_ptr + (STEPS - 1 - back) * x_step + offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(spikes_ptr + (STEPS - 1 - back) * spikes_step + offset, mask=mask, other=0.0).to(tl.float32)
        now = (before[2 * (STEPS - 1 - back)], before[2 * (STEPS - 1 - back) + 1])
        values = results_of((x,) + now + fixed + (grad,) + by_states + (zero,), BACK)
        if SUMMED:
            of_all += values[OF_X]
        else:
            by_x = values[OF_X].to(by_x_ptr.dtype.element_ty)
            tl.store(by_x_ptr + (STEPS - 1 - back) * spikes_step + offset, by_x, mask=mask)
        by_states = (values[OF[0]], values[OF[1]])
        sums = (
            sums[0] + values[OF[2]], sums[1] + values[OF[3]], sums[2] + values[OF[4]], sums[3] + values[OF[5]],
            sums[4] + values[OF[6]], sums[5] + values[OF[7]],
        )  # fmt: skip
    if SUMMED:
        tl.store(by_x_ptr + offset, of_all.to(by_x_ptr.dtype.element_ty), mask=mask)
    store_if(by_v0_ptr, offset, by_states[0], mask)
    store_if(by_v1_ptr, offset, by_states[1], mask)
    store_if(by_p0_ptr, offset, sums[0], mask)
    store_if(by_p1_ptr, offset, sums[1], mask)
    store_if(by_p2_ptr, offset, sums[2], mask)
    store_if(by_p3_ptr, offset, sums[3], mask)
    store_if(by_p4_ptr, offset, sums[4], mask)
    store_if(by_p5_ptr, offset, sums[5], mask)


def _prepare(problem: NeuronGradients, config: Config) -> Launch:
    constants = {**problem.constants, "BLOCK": config["BLOCK"]}
    grid = (triton.cdiv(problem.neurons.numel, config["BLOCK"]),)
    numbers = problem.neurons.all_numbers
    return Launch(
        neuron_gradients_kernel, grid, numbers, constants, num_warps=config["warps"], enable_fp_fusion=False
    )  # fmt: skip


def _space(problem: NeuronGradients, device: object) -> list[Config]:
    """The states of all steps are held: the more there are, the fewer elements a thread has."""
    each = 4 if problem.neurons.steps <= 4 else 2 if problem.neurons.steps <= 16 else 1
    return [Config(BLOCK=32 * 4 * each, warps=4)]


_numel, _steps = sizes("neurons.numel neurons.steps")

NEURON_GRADIENTS = Template(
    name="neuron_gradients",
    op="neuron_gradients",
    sources=(
        neuron_gradients_kernel, results_of, store_if, do_instruction, to_bfloat16, state_before, what_stays,
        parameter_of,
    ),  # fmt: skip
    space=_space,
    cost=Cost(bytes=_numel * (16 * _steps + 8)),
    prepare=_prepare,
)
