"""The selective AdamW step on theta, one pass over the pruned elements, or by a mask over all.

Positions and averages are read in whole vectors, gradient and weight are gathered; the weight only where it moves.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.masked.selective_step import SelectiveStep, log_of
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def averages(mean_ptr, size_ptr, square_ptr, step, at, own, inside, ok, g, gain, gain2):
    """The averages of g, |g| and g², moved on in memory where `ok`: the second at `at`, the others at `own`."""
    mean = average(mean_ptr + own, step, inside, ok, g, gain)
    size = average(size_ptr + at, step, inside, ok, tl.abs(g), gain)
    square = average(square_ptr + own, step, inside, ok, g * g, gain2)
    return mean, size, square


@triton.jit
def average(slot_ptrs, step, inside, ok, new, gain):
    """An average; it begins at the first step. Whole vectors are written back, those not `ok` as they were."""
    held = tl.load(slot_ptrs, mask=inside, other=0.0)
    old = tl.where(step > 1, held, 0.0)
    moved_on = old + gain * (new - old)
    tl.store(slot_ptrs, tl.where(ok, moved_on, held), mask=inside)
    return moved_on


@triton.jit
def move(weight_ptr, place, selected, mean, square, step, rate, log_beta, log_beta2, eps, weight_decay):
    """AdamW's step in memory, where selected; the numbers that hold for all in float64, where they are next to 1."""
    power = tl.cast(step, tl.float64)
    first = (1.0 / (1.0 - tl.exp(power * log_beta))).to(tl.float32)
    second = (1.0 / (1.0 - tl.exp(power * log_beta2))).to(tl.float32)
    keep = (1.0 - rate * weight_decay).to(tl.float32)
    theta = tl.load(weight_ptr + place, mask=selected, other=0.0).to(tl.float32)
    update = tl.div_rn(mean * first, tl.sqrt_rn(square * second) + eps)
    theta = theta * keep - rate.to(tl.float32) * update
    tl.store(weight_ptr + place, theta.to(weight_ptr.dtype.element_ty), mask=selected)


@triton.jit
def block_of_step(
    weight_ptr, grad_ptr, pruned_ptr, mean_ptr, size_ptr, square_ptr, step_ptr, rate_ptr, consistency_ptr, selected_ptr,
    at, inside, warm_up, gain, gain2, log_beta, log_beta2, tau, delta, eps, weight_decay,
    WHOLE: tl.constexpr, MASK: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """The elements `at` of theta, or with a MASK of the weight, where `inside`."""
    step = tl.load(step_ptr)
    if MASK:
        ok = inside & (tl.load(pruned_ptr + at, mask=inside, other=0) != 0)
        place = at
    else:
        ok = inside
        place = tl.load(pruned_ptr + at, mask=inside, other=0).to(tl.int64)
    own = place if WHOLE else at
    if PHASE == "move":
        mean = tl.load(mean_ptr + own, mask=ok, other=0.0)
        square = tl.load(square_ptr + own, mask=ok, other=0.0)
        selected = ok & (tl.load(selected_ptr + at, mask=inside, other=0) != 0)
    else:
        g = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        mean, size, square = averages(mean_ptr, size_ptr, square_ptr, step, at, own, inside, ok, g, gain, gain2)
        consistency = tl.div_rn(tl.abs(mean), size + delta)
        # NaN is above nothing
        selected = ok & (consistency > tau)
        if PHASE == "average":
            if MASK:  # NaN ranks last of the pruned
                consistency = tl.where(ok, tl.where(consistency == consistency, consistency, -0.5), -1.0)
            tl.store(consistency_ptr + at, consistency, mask=inside)
    if PHASE != "average":
        selected = selected & (tl.zeros_like(at) < tl.where(step > warm_up, 1, 0))
        rate = tl.load(rate_ptr).to(tl.float64)
        move(weight_ptr, place, selected, mean, square, step, rate, log_beta, log_beta2, eps, weight_decay)


@triton.jit
def selective_step_kernel(
    weight_ptr, grad_ptr, pruned_ptr, mean_ptr, size_ptr, square_ptr, step_ptr, rate_ptr, consistency_ptr, selected_ptr,
    pruned, warm_up, gain, gain2, log_beta, log_beta2, tau, delta, eps, weight_decay,
    WHOLE: tl.constexpr, MASK: tl.constexpr, PHASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `sparsecomp.ops.selective_step`, and `SelectiveStep` for the phases."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    # a bound that is no multiple of a vector's length would break all vectors up, not only the last block's
    if first + BLOCK <= pruned:
        block_of_step(
            weight_ptr, grad_ptr, pruned_ptr, mean_ptr, size_ptr, square_ptr, step_ptr, rate_ptr, consistency_ptr,
            selected_ptr, at, tl.full((BLOCK,), 1, tl.int1), warm_up, gain, gain2, log_beta, log_beta2, tau, delta, eps,
            weight_decay, WHOLE, MASK, PHASE,
        )  # fmt: skip
    else:
        block_of_step(
            weight_ptr, grad_ptr, pruned_ptr, mean_ptr, size_ptr, square_ptr, step_ptr, rate_ptr, consistency_ptr,
            selected_ptr, at, at < pruned, warm_up, gain, gain2, log_beta, log_beta2, tau, delta, eps, weight_decay,
            WHOLE, MASK, PHASE,
        )  # fmt: skip


def _prepare(problem: SelectiveStep, config: Config) -> Launch:
    p = problem
    numbers = (
        p.pruned, p.warm_up, 1 - p.beta, 1 - p.beta2, log_of(p.beta), log_of(p.beta2), p.tau, p.delta, p.eps,
        p.weight_decay,
    )  # fmt: skip
    grid = (triton.cdiv(p.pruned, config["BLOCK"]),)
    constants = {"WHOLE": bool(p.whole), "MASK": p.by_mask, "PHASE": p.phase, "BLOCK": config["BLOCK"]}
    return Launch(selective_step_kernel, grid, numbers, constants, num_warps=config["warps"])


def _space(problem: SelectiveStep, device: Device) -> list[Config]:
    blocks, warps = (256, 512, 1024, 2048), (2, 4, 8)
    return [Config(BLOCK=b, warps=w) for b in blocks for w in warps if 4 <= b // (32 * w) <= 16]


_pruned, _numel, _whole, _itemsize, _block, _warps = sizes("pruned numel whole itemsize BLOCK warps")

# averages in and out, of whole moments all of them; positions; the sectors of gradient and weight that hold a pruned
# element
_sectors = 3 * _itemsize * _numel * (1 - (1 - _pruned / _numel) ** (32 / _itemsize))

SELECTIVE_STEP = Template(
    name="selective_step",
    op="selective_step",
    sources=(selective_step_kernel, block_of_step, averages, average, move),
    space=_space,
    # the fewer elements a thread, whose loads follow one another, the more threads hide them
    cost=Cost(
        bytes=28 * _pruned + _sectors + 16 * _whole * (_numel - _pruned),
        seconds=1e-8 * _block / (32 * _warps) + 1e-8 * abs(sympy.log(_block / 512)),
    ),
    prepare=_prepare,
)
