"""The selective AdamW step, one element of theta a lane."""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cost import Cost, sizes
from sparsecomp.lowering.launch import Launch
from sparsecomp.lowering.selective_step import SelectiveStep
from sparsecomp.lowering.template import Config, Template


@triton.jit
def selective_step_kernel(
    weight_ptr, grad_ptr, pruned_ptr, mean_ptr, size_ptr, square_ptr, steps_ptr,
    pruned, warm_up, beta, beta2, log2_beta, log2_beta2, keep, gain, eps, tau, delta, B: tl.constexpr,
):  # fmt: skip
    """See ``sparsecomp.ops.selective_step``: the averages are written, and theta where it is selected."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < pruned
    place = tl.load(pruned_ptr + at, mask=inside, other=0).to(tl.int64)
    g = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + at, mask=inside, other=0.0)
    size = tl.load(size_ptr + at, mask=inside, other=0.0)
    square = tl.load(square_ptr + at, mask=inside, other=0.0)
    mean += (1.0 - beta) * (g - mean)
    size += (1.0 - beta) * (tl.abs(g) - size)
    square += (1.0 - beta2) * (g * g - square)
    tl.store(mean_ptr + at, mean, mask=inside)
    tl.store(size_ptr + at, size, mask=inside)
    tl.store(square_ptr + at, square, mask=inside)
    steps = tl.load(steps_ptr)
    warm = tl.zeros((B,), tl.int64) + steps > warm_up
    selected = inside & warm & (tl.abs(mean) / (size + delta) > tau)
    # in float32 a power next to 1 would leave few digits of what it lacks to 1
    first = (1.0 - tl.exp2(steps.to(tl.float64) * log2_beta)).to(tl.float32)
    second = (1.0 - tl.exp2(steps.to(tl.float64) * log2_beta2)).to(tl.float32)
    theta = tl.load(weight_ptr + place, mask=selected, other=0.0).to(tl.float32)
    moved = theta * keep - gain * (mean / first) / (tl.sqrt(square / second) + eps)
    tl.store(weight_ptr + place, moved.to(weight_ptr.dtype.element_ty), mask=selected)


def _prepare(problem: SelectiveStep, config: Config) -> Launch:
    grid = (triton.cdiv(problem.pruned, config["B"]),)
    return Launch(selective_step_kernel, grid, problem[:11], {"B": config["B"]}, num_warps=config["warps"])


_pruned, _itemsize, _block, _warps = sizes("pruned itemsize B warps")

SELECTIVE_STEP = Template(
    name="selective_step",
    op="selective_step",
    sources=(selective_step_kernel,),
    refuse=lambda problem, device: None,
    space=lambda problem, device: [
        Config(B=block, warps=warps) for block in (512, 1024, 2048) for warps in (4, 8) if block // (32 * warps) >= 4
    ],
    # three averages in and out, positions, and whole sectors of gradient and weight
    cost=Cost(
        bytes=_pruned * (28 + 4.3 * _itemsize), seconds=sympy.Abs(_block - 1024) * 1e-10 + sympy.Abs(_warps - 4) * 1e-8
    ),
    prepare=_prepare,
)
