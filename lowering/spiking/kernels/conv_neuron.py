"""A convolution on int8 tensor cores with described neurons, over all time steps, in one launch.

The products of `conv_lif`, and the instructions of `neuron`. In half precision what the layer gives, and what its
batch-norm and a residual make of it, is rounded where torch's operators round it; sums and states are float32.
"""

from functools import partial

import triton
import triton.language as tl

from sparsecomp.lowering.spiking.binary_cost import conv_lif_cost
from sparsecomp.lowering.spiking.kernels.conv_lif import (
    LAYER,
    all_steps,
    by_step,
    connected_block,
    fused_launch,
    hopper_instead,
    layer_sums,
    pixel_blocks,
    pixel_outputs,
)
from sparsecomp.lowering.spiking.kernels.lif import batch_norm_gain, normed_block
from sparsecomp.lowering.spiking.kernels.neuron import do_instruction, state_before, to_bfloat16
from sparsecomp.lowering.tuning.template import Template


@triton.jit
def conv_neuron_kernel(
    x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, v0_ptr, v1_ptr,
    p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, added_ptr, residual_ptr, spikes_ptr, last0_ptr, last1_ptr,
    current_ptr,
    M, N, D, H, W, OD, OH, OW, C, K, CP,
    stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w,
    out_pixel, out_channel, out_image, weight_k, weight_c, weight_t, weight_r, weight_s, multiplier,
    eps, each0, each1, each2, each3, each4, each5, start0, start1, n0, n1, n2, n3, n4, n5, n6, n7,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr, DIGITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, VOLUMES: tl.constexpr, EVEN_C: tl.constexpr, VECTOR: tl.constexpr,
    SCALED: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr, CODE: tl.constexpr, SPIKE: tl.constexpr,
    AFTER: tl.constexpr, ROUND: tl.constexpr, CONNECT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """See `conv_lif_kernel`, and `sparsecomp.reference.neuron` for CODE; ROUND is the instruction that rounds what the
    layer gives, negative without. A parameter has a number each channel where `each` is 1, and one where it is 0."""
    value, first, k, col_ok = layer_sums(
        x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, M, N, D, H, W, OD, OH, OW, C, K, CP,
        stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w,
        weight_k, weight_c, weight_t, weight_r, weight_s, multiplier,
        T, R, S, GROUPS, DIGITS, HAS_BIAS, VOLUMES, EVEN_C, VECTOR, SCALED, STEPS, SLOTS, BM, BN, BK,
    )  # fmt: skip
    PIXELS: tl.constexpr = BM // SLOTS
    currents = by_step(rounded_block(value, ROUND), SLOTS, PIXELS, BN)
    mean = None
    gain = None
    shift = None
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + k, mask=col_ok, other=0.0).to(tl.float32)[None, :]
        gain = batch_norm_gain(var_ptr, gamma_ptr, k, col_ok, eps, gamma_ptr is not None)[None, :]
        if beta_ptr is not None:
            shift = tl.load(beta_ptr + k, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    offset, mask = pixel_outputs(first, k, col_ok, M, OD * OH * OW, out_pixel, out_channel, out_image, PIXELS)
    zero = tl.zeros((PIXELS, BN), tl.float32)
    states = (state_before(v0_ptr, start0, offset, mask, zero), state_before(v1_ptr, start1, offset, mask, zero))
    fixed = by_channel(
        p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, each0, each1, each2, each3, each4, each5,
        n0, n1, n2, n3, n4, n5, n6, n7, k, col_ok, zero,
    )  # fmt: skip
    step_size = tl.cast(N, tl.int64) * out_image
    if added_ptr is not None:
        added = all_steps(added_ptr + offset, mask, step_size, STEPS)
    if residual_ptr is not None:
        residuals = all_steps(residual_ptr + offset, mask, step_size, STEPS)
    for step in tl.static_range(STEPS):
        current = currents[step]
        if mean_ptr is not None:
            current = rounded_block(normed_block(current, mean, gain, shift), ROUND)
        if added_ptr is not None:
            current = rounded_block(current + added[step].to(tl.float32), ROUND)
        if current_ptr is not None:
            tl.store(current_ptr + step * step_size + offset, current.to(current_ptr.dtype.element_ty), mask=mask)
        values = (current,) + states + fixed
        for at in tl.static_range(len(CODE)):
            one = do_instruction(CODE[at][0], values[CODE[at][1]], values[CODE[at][2]], values[CODE[at][3]])
            values = values + (one,)
        spikes = values[SPIKE].to(tl.int8)
        if residual_ptr is not None:
            spikes = connected_block(values[SPIKE] != 0, residuals[step], CONNECT)
        tl.store(spikes_ptr + step * step_size + offset, spikes, mask=mask)
        if len(AFTER) == 2:
            states = (values[AFTER[0]], values[AFTER[1]])
        else:
            states = (values[AFTER[0]], zero)
    if last0_ptr is not None:
        tl.store(last0_ptr + offset, states[0].to(last0_ptr.dtype.element_ty), mask=mask)
    if last1_ptr is not None:
        tl.store(last1_ptr + offset, states[1].to(last1_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rounded_block(value, ROUND: tl.constexpr):
    """A block rounded by an instruction, if there is one."""
    if ROUND >= 0:
        return do_instruction(ROUND, value, value, value)
    else:
        return value


@triton.jit
def channels_of(pointer, each, k, col_ok, zero):
    """What the elements of a block read of a parameter, by their channel."""
    if pointer is not None:
        return zero + tl.load(pointer + k * each, mask=col_ok, other=0.0)[None, :]
    else:
        return zero


@triton.jit
def by_channel(
    p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, each0, each1, each2, each3, each4, each5,
    n0, n1, n2, n3, n4, n5, n6, n7, k, col_ok, zero,
):  # fmt: skip
    """What a description reads that is the same in all steps: parameters, and numbers."""
    return (
        channels_of(p0_ptr, each0, k, col_ok, zero), channels_of(p1_ptr, each1, k, col_ok, zero),
        channels_of(p2_ptr, each2, k, col_ok, zero), channels_of(p3_ptr, each3, k, col_ok, zero),
        channels_of(p4_ptr, each4, k, col_ok, zero), channels_of(p5_ptr, each5, k, col_ok, zero),
        zero + n0, zero + n1, zero + n2, zero + n3, zero + n4, zero + n5, zero + n6, zero + n7,
    )  # fmt: skip


NEURONS = (
    batch_norm_gain, normed_block, do_instruction, to_bfloat16, state_before, rounded_block, channels_of, by_channel
)
"""What kernels that step through described neurons by channel are made of."""

CONV_NEURON = Template(
    name="conv_neuron",
    op="conv_neuron",
    sources=(conv_neuron_kernel, *LAYER, *NEURONS),
    refuse=hopper_instead,
    space=pixel_blocks,
    cost=conv_lif_cost(hopper=False),
    prepare=partial(fused_launch, conv_neuron_kernel),
)
