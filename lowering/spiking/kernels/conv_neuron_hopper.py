"""`conv_neuron` with the products of `binary_conv_hopper`, for Hopper's warpgroup instructions: same arguments and
result."""

from functools import partial

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsecomp.lowering.spiking.binary_cost import conv_lif_cost
from sparsecomp.lowering.spiking.kernels.conv_lif import all_steps, connected_block
from sparsecomp.lowering.spiking.kernels.conv_lif_hopper import (
    LAYER,
    block_outputs,
    layer_products,
    steps_apart,
    warpgroup_blocks,
    warpgroup_launch,
    why_no_layer,
)
from sparsecomp.lowering.spiking.kernels.conv_neuron import NEURONS, by_channel, rounded_block
from sparsecomp.lowering.spiking.kernels.lif import batch_norm_gain, normed_block
from sparsecomp.lowering.spiking.kernels.neuron import do_instruction, state_before
from sparsecomp.lowering.tuning.template import Template


@gluon.jit
def conv_neuron_hopper_kernel(
    x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, v0_ptr, v1_ptr,
    p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, added_ptr, residual_ptr, spikes_ptr, last0_ptr, last1_ptr,
    current_ptr,
    M, N, H, W, OH, OW, C, K, CP,
    stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
    out_pixel, out_channel, out_image, weight_k, weight_c, weight_r, weight_s, multiplier,
    eps, each0, each1, each2, each3, each4, each5, start0, start1, n0, n1, n2, n3, n4, n5, n6, n7,
    R: gl.constexpr, S: gl.constexpr, GROUPS: gl.constexpr, DIGITS: gl.constexpr, HAS_BIAS: gl.constexpr,
    SCALED: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr, CODE: gl.constexpr, SPIKE: gl.constexpr,
    AFTER: gl.constexpr, ROUND: gl.constexpr, CONNECT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """See `conv_neuron_kernel`."""
    value = layer_products(
        x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, M, N, H, W, OH, OW, C, K, CP,
        stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, weight_k, weight_c, weight_r, weight_s, multiplier,
        R, S, GROUPS, DIGITS, HAS_BIAS, SCALED, STEPS, SLOTS, BM, BN, BK, STAGES, num_warps,
    )  # fmt: skip
    PIXELS: gl.constexpr = BM // SLOTS
    currents = steps_apart(rounded_block(value, ROUND), SLOTS, PIXELS, BN, num_warps)
    held: gl.constexpr = currents[0].type.layout
    k, col_ok, offset, mask = block_outputs(M, OH * OW, K, out_pixel, out_channel, out_image, GROUPS, PIXELS, BN, held)
    mean = None
    gain = None
    shift = None
    if mean_ptr is not None:
        mean = gl.load(mean_ptr + k, mask=col_ok, other=0.0).to(gl.float32)[None, :]
        gain = batch_norm_gain(var_ptr, gamma_ptr, k, col_ok, eps, gamma_ptr is not None)[None, :]
        if beta_ptr is not None:
            shift = gl.load(beta_ptr + k, mask=col_ok, other=0.0).to(gl.float32)[None, :]
    zero = gl.zeros((PIXELS, BN), gl.float32, held)
    states = (state_before(v0_ptr, start0, offset, mask, zero), state_before(v1_ptr, start1, offset, mask, zero))
    fixed = by_channel(
        p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, each0, each1, each2, each3, each4, each5,
        n0, n1, n2, n3, n4, n5, n6, n7, k, col_ok, zero,
    )  # fmt: skip
    step_size = gl.cast(N, gl.int64) * out_image
    if added_ptr is not None:
        added = all_steps(added_ptr + offset, mask, step_size, STEPS)
    if residual_ptr is not None:
        residuals = all_steps(residual_ptr + offset, mask, step_size, STEPS)
    for step in gl.static_range(STEPS):
        current = currents[step]
        if mean_ptr is not None:
            current = rounded_block(normed_block(current, mean, gain, shift), ROUND)
        if added_ptr is not None:
            current = rounded_block(current + added[step].to(gl.float32), ROUND)
        if current_ptr is not None:
            gl.store(current_ptr + step * step_size + offset, current.to(current_ptr.dtype.element_ty), mask=mask)
        values = (current,) + states + fixed
        for at in gl.static_range(len(CODE)):
            one = do_instruction(CODE[at][0], values[CODE[at][1]], values[CODE[at][2]], values[CODE[at][3]])
            values = values + (one,)
        spikes = values[SPIKE].to(gl.int8)
        if residual_ptr is not None:
            spikes = connected_block(values[SPIKE] != 0, residuals[step], CONNECT)
        gl.store(spikes_ptr + step * step_size + offset, spikes, mask=mask)
        if len(AFTER) == 2:
            states = (values[AFTER[0]], values[AFTER[1]])
        else:
            states = (values[AFTER[0]], zero)
    if last0_ptr is not None:
        gl.store(last0_ptr + offset, states[0].to(last0_ptr.dtype.element_ty), mask=mask)
    if last1_ptr is not None:
        gl.store(last1_ptr + offset, states[1].to(last1_ptr.dtype.element_ty), mask=mask)


CONV_NEURON_HOPPER = Template(
    name="conv_neuron_hopper",
    op="conv_neuron",
    sources=(conv_neuron_hopper_kernel, *LAYER, *NEURONS),
    refuse=why_no_layer,
    space=warpgroup_blocks,
    cost=conv_lif_cost(hopper=True),
    prepare=partial(warpgroup_launch, conv_neuron_hopper_kernel),
)
