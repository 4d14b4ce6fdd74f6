"""Batch-norm, integrate-and-fire over all time steps, and the cast to one byte, in one pass over memory.

Inductor compiles the same chain to several kernels, because each time step reads what the one before it left. Here the
membrane stays in a register: the input is read once, and spikes are written as bytes.
"""

import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.lif import Lif
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def batch_norm_gain(var_ptr, weight_ptr, c, mask, eps, HAS_WEIGHT: tl.constexpr):
    """What a batch-norm multiplies channels `c` with, less their mean."""
    gain = 1.0 / tl.sqrt(tl.load(var_ptr + c, mask=mask, other=0.0).to(tl.float32) + eps)
    if HAS_WEIGHT:
        gain = gain * tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
    return gain


@triton.jit
def normed_block(x, mean, gain, shift):
    """A batch-norm: `mean` and `gain` are None without one, `shift` without its bias."""
    if mean is not None:
        x = x - mean
        x = x * gain if shift is None else tl.fma(x, gain, shift)
    return x


@triton.jit
def lif_step(
    x, v, rate, tau, threshold, reset,
    CHARGE: tl.constexpr, HALVES: tl.constexpr, DECAY_INPUT: tl.constexpr, SOFT_RESET: tl.constexpr,
):  # fmt: skip
    """One time step: whether each neuron fired, and its membrane after; see `sparsecomp.ops.lif` for the equations.

    `tau` is as large as `x`, and its inverse with HALVES. Kernels that step here fire alike, bit for bit, if they join
    no product with a sum (`enable_fp_fusion=False`).
    """
    rest = reset
    if SOFT_RESET:
        rest = 0.0
    if CHARGE == "if":
        h = v + x
    else:
        leak = v - rest
        if DECAY_INPUT:
            leak = x - leak
        if CHARGE == "plif":
            leak = leak * rate
        else:
            leak = leak * tau if HALVES else tl.div_rn(leak, tau)
        h = v + leak if DECAY_INPUT else v - leak + x
    fired = h >= threshold
    # h - spike * threshold, and spike * reset + (1 - spike) * h, with each product known: 0 times what is finite is a
    # zero of its sign, and 0 times an infinite h is not a number
    if SOFT_RESET:
        after = h - tl.where(fired, threshold, 0.0 * threshold)
    else:
        after = tl.where(fired, tl.fma(h, 0.0, reset), h + 0.0 * reset)
    return fired, after


@triton.jit
def lif_kernel(
    x_ptr, v_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, rate_ptr, spikes_ptr, last_ptr,
    numel, x_step, spikes_step, channels, channel_stride, v0, eps, tau, threshold, reset,
    STEPS: tl.constexpr, CHARGE: tl.constexpr, HALVES: tl.constexpr, DECAY_INPUT: tl.constexpr,
    SOFT_RESET: tl.constexpr, HAS_V: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One element of the membrane a lane, STEPS time steps."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < numel
    zero = tl.full((BLOCK,), 0.0, tl.float32)
    v = zero + v0
    if HAS_V:
        v = tl.load(v_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    mean = None
    gain = None
    shift = None
    rate = None
    if HAS_NORM:
        c = (offset // channel_stride) % channels
        mean = tl.load(mean_ptr + c, mask=mask, other=0.0).to(tl.float32)
        gain = batch_norm_gain(var_ptr, weight_ptr, c, mask, eps, HAS_WEIGHT)
        if HAS_BIAS:
            shift = tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
    # offsets of later steps pass 2^31 where a whole layer does
    x_step = tl.cast(x_step, tl.int64)
    spikes_step = tl.cast(spikes_step, tl.int64)
    if CHARGE == "plif":
        rate = tl.load(rate_ptr).to(tl.float32)
    for step in tl.static_range(STEPS):
        x = tl.load(x_ptr + step * x_step + offset, mask=mask, other=0.0).to(tl.float32)
        x = normed_block(x, mean, gain, shift)
        fired, v = lif_step(x, v, rate, zero + tau, threshold, reset, CHARGE, HALVES, DECAY_INPUT, SOFT_RESET)
        tl.store(spikes_ptr + step * spikes_step + offset, fired.to(tl.int8), mask=mask)
    tl.store(last_ptr + offset, v.to(last_ptr.dtype.element_ty), mask=mask)


def _prepare(problem: Lif, config: Config) -> Launch:
    constants = {**problem.constants, "BLOCK": config["BLOCK"]}
    grid = (triton.cdiv(problem.numel, config["BLOCK"]),)
    return Launch(lif_kernel, grid, problem.numbers, constants, num_warps=config["warps"], enable_fp_fusion=False)


_numel, _steps, _block, _warps = sizes("numel steps BLOCK warps")

LIF = Template(
    name="lif",
    op="lif",
    sources=(lif_kernel, batch_norm_gain, normed_block, lif_step),
    space=lambda problem, device: [
        Config(BLOCK=block, warps=warps) for block in (256, 512, 1024, 2048) for warps in (2, 4, 8)
        if 4 <= block // (32 * warps) <= 16
    ],
    # float32 in and one byte out a step; 3 µs to start and end; the fewer elements a thread, which holds those of all
    # steps, and the fewer a block, the more blocks there are to hide loads
    cost=Cost(
        bytes=_numel * (5 * _steps + 4),
        seconds=3e-6 + 1e-8 * (_block / (32 * _warps)) ** 2 + 4e-10 * _block,
    ),
    prepare=_prepare,
)
