"""A convolution on int8 tensor cores with the neurons that read it, over all time steps, in one launch.

A block holds all steps of its output pixels: its rows are pixels, and the steps of one lie beside each other. So the
products are those of `binary_conv`, as many blocks of them, and nothing waits for an earlier step. Once they are done,
the sums are taken apart by step, and the membrane walks through them in registers: spikes are written as bytes, and the
sums never.
"""

from functools import partial
from math import gcd
from typing import Any

import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.binary_cost import conv_lif_cost
from sparsecomp.lowering.spiking.convolution import beyond_images
from sparsecomp.lowering.spiking.fused_layer import FusedLayer
from sparsecomp.lowering.spiking.kernels.binary_conv import float_sums, int8_sums, int8_tiles, joined, window_corners
from sparsecomp.lowering.spiking.kernels.lif import batch_norm_gain, lif_step, normed_block
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def conv_lif_kernel(
    x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, v_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, rate_ptr,
    added_ptr, residual_ptr, spikes_ptr, last_ptr, current_ptr,
    M, N, D, H, W, OD, OH, OW, C, K, CP,
    stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w,
    out_pixel, out_channel, out_image, weight_k, weight_c, weight_t, weight_r, weight_s, multiplier,
    v0, eps, tau, threshold, reset,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr, DIGITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, VOLUMES: tl.constexpr, EVEN_C: tl.constexpr, VECTOR: tl.constexpr,
    SCALED: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr, CHARGE: tl.constexpr, HALVES: tl.constexpr,
    DECAY_INPUT: tl.constexpr, SOFT_RESET: tl.constexpr, CONNECT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """`lif_kernel` of what `binary_conv_kernel` gives, and `added`, if there is such; see both.

    x: (STEPS·N, D, H, W, C) int8. M = N·OD·OH·OW, the output pixels of one step. SLOTS, a power of two, is STEPS or
    more. The strides of the output are those of the spikes, of what is added to their neurons' currents, of these
    currents, of what the spikes are connected with, and of both membranes.
    """
    PIXELS: tl.constexpr = BM // SLOTS
    value, first, k, col_ok = layer_sums(
        x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, M, N, D, H, W, OD, OH, OW, C, K, CP,
        stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w,
        weight_k, weight_c, weight_t, weight_r, weight_s, multiplier,
        T, R, S, GROUPS, DIGITS, HAS_BIAS, VOLUMES, EVEN_C, VECTOR, SCALED, STEPS, SLOTS, BM, BN, BK,
    )  # fmt: skip
    currents = by_step(value, SLOTS, PIXELS, BN)
    mean = None
    gain = None
    shift = None
    rate = None
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + k, mask=col_ok, other=0.0)[None, :]
        gain = batch_norm_gain(var_ptr, gamma_ptr, k, col_ok, eps, gamma_ptr is not None)[None, :]
        if beta_ptr is not None:
            shift = tl.load(beta_ptr + k, mask=col_ok, other=0.0)[None, :]
    if rate_ptr is not None:
        rate = tl.load(rate_ptr).to(tl.float32)
    offset, mask = pixel_outputs(first, k, col_ok, M, OD * OH * OW, out_pixel, out_channel, out_image, PIXELS)
    zero = tl.zeros((PIXELS, BN), tl.float32)
    v = zero + v0
    if v_ptr is not None:
        v = tl.load(v_ptr + offset, mask=mask, other=0.0)
    step_size = tl.cast(N, tl.int64) * out_image
    if added_ptr is not None:
        added = all_steps(added_ptr + offset, mask, step_size, STEPS)
    if residual_ptr is not None:
        residuals = all_steps(residual_ptr + offset, mask, step_size, STEPS)
    for step in tl.static_range(STEPS):
        current = normed_block(currents[step], mean, gain, shift)
        if added_ptr is not None:
            current += added[step].to(tl.float32)
        if current_ptr is not None:
            tl.store(current_ptr + step * step_size + offset, current, mask=mask)
        fired, v = lif_step(current, v, rate, zero + tau, threshold, reset, CHARGE, HALVES, DECAY_INPUT, SOFT_RESET)
        spikes = fired.to(tl.int8)
        if residual_ptr is not None:
            spikes = connected_block(fired, residuals[step], CONNECT)
        tl.store(spikes_ptr + step * step_size + offset, spikes, mask=mask)
    if last_ptr is not None:
        tl.store(last_ptr + offset, v, mask=mask)


@triton.jit
def layer_sums(
    x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, M, N, D, H, W, OD, OH, OW, C, K, CP,
    stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w,
    weight_k, weight_c, weight_t, weight_r, weight_s, multiplier,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr, DIGITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, VOLUMES: tl.constexpr, EVEN_C: tl.constexpr, VECTOR: tl.constexpr,
    SCALED: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """The block's sums, float32 (BM, BN), bias included: a row a slot of an output pixel.

    Then the first of its pixels, its output channels, and which of them there are.
    """
    pid = tl.program_id(0)
    kg = K // GROUPS
    # what it is already, but Triton sees a multiple now, and loads so many channels at a time
    cg = C // GROUPS // VECTOR * VECTOR
    C = cg * GROUPS
    blocks_n = tl.cdiv(kg, BN)
    # channel pixel_blocks of the same pixels run side by side and share their input in L2
    pm = pid // (blocks_n * GROUPS)
    pn = pid % (blocks_n * GROUPS)
    group = pn // blocks_n
    cols = (pn % blocks_n) * BN + tl.arange(0, BN)
    col_ok = cols < kg
    k = group * kg + cols
    first = pm * (BM // SLOTS)
    rows = tl.arange(0, BM)
    place = first + rows // SLOTS
    row_ok = (place < M) & (rows % SLOTS < STEPS)
    area = OD * OH * OW
    x_row, frame, ih, iw = window_corners(
        rows % SLOTS * N + place // area, place % area, row_ok, group * cg, D, H, W, OH, OW, C,
        stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, VOLUMES,
    )  # fmt: skip
    acc0, acc1, acc2, acc3 = int8_sums(
        x_ptr, x_row, w_ptr, frame, ih, iw, k, col_ok, cg, D, H, W, C, K, CP, dil_d, dil_h, dil_w,
        T, R, S, DIGITS, VOLUMES, EVEN_C, BM, BN, BK,
    )  # fmt: skip
    scale = tl.load(scale_ptr + k, mask=col_ok, other=1.0)
    if tl.min((scale > 0.0).to(tl.int32), 0) == 0:
        value = float_sums(
            x_ptr + x_row, frame, ih, iw, weight_ptr + k.to(tl.int64) * weight_k, col_ok, multiplier, cg,
            D, H, W, C, dil_d, dil_h, dil_w, weight_c, weight_t, weight_r, weight_s, T, R, S, False, BM, BN,
        )  # fmt: skip
    else:
        value = joined(acc0, acc1, acc2, acc3, DIGITS) * scale[None, :]
        if SCALED:
            value *= multiplier
    if HAS_BIAS:
        value += tl.load(bias_ptr + k, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    return value, first, k, col_ok


@triton.jit
def pixel_outputs(
    first, k, col_ok, M, area, out_pixel, out_channel, out_image, PIXELS: tl.constexpr
):  # fmt: skip
    """Where the outputs of a block's pixels and channels lie in one step, and which of them there are."""
    place = first + tl.arange(0, PIXELS)
    out_row = (place // area).to(tl.int64) * out_image + (place % area).to(tl.int64) * out_pixel
    return out_row[:, None] + (k.to(tl.int64) * out_channel)[None, :], (place < M)[:, None] & col_ok[None, :]


@triton.jit
def by_step(value, SLOTS: tl.constexpr, PIXELS: tl.constexpr, BN: tl.constexpr):
    """The blocks (PIXELS, BN) of each of SLOTS steps, of rows that are steps beside each other, pixel by pixel."""
    if SLOTS == 1:
        return (value,)
    else:
        half: tl.constexpr = SLOTS // 2
        # the last bit of the step is innermost, so that every other step is in either half
        pairs = tl.permute(tl.reshape(value, (PIXELS * half, 2, BN)), (0, 2, 1))
        even, odd = tl.split(pairs)
        return interleaved(by_step(even, half, PIXELS, BN), by_step(odd, half, PIXELS, BN), half)


@triton.jit
def interleaved(even, odd, COUNT: tl.constexpr):
    """Two tuples as one, an element of each in turn."""
    both = (even[0], odd[0])
    for i in tl.static_range(1, COUNT):
        both = both + (even[i], odd[i])
    return both


@triton.jit
def all_steps(pointers, mask, step_size, STEPS: tl.constexpr):
    """The blocks of all steps of a tensor: their loads are on their way before the first store could hold them up."""
    pixel_blocks = (tl.load(pointers, mask=mask, other=0),)
    for step in tl.static_range(1, STEPS):
        pixel_blocks = pixel_blocks + (tl.load(pointers + step * step_size, mask=mask, other=0),)
    return pixel_blocks


@triton.jit
def connected_block(fired, residual, CONNECT: tl.constexpr):
    """The bytes of a residual with the spikes of the neurons behind it; see `sparsecomp.reference.connect`."""
    if CONNECT == "add":
        return residual + fired.to(tl.int8)
    elif CONNECT == "and":
        return tl.where(fired, residual, 0).to(tl.int8)
    else:
        return tl.where(fired, 0, residual).to(tl.int8)


LAYER = (
    layer_sums, pixel_outputs, by_step, interleaved, all_steps, connected_block, window_corners, int8_sums, joined,
    float_sums,
)  # fmt: skip
"""What kernels around these products, by step, are made of."""


def hopper_instead(problem: FusedLayer, device: Device) -> str | None:
    """Whether Hopper's kernel takes a problem."""
    if device.is_hopper and problem.conv.cp == problem.conv.cg and beyond_images(problem.conv) is None:
        return f"{problem.name}_hopper takes it, whose products overlap"
    return None


def pixel_blocks(problem: FusedLayer, device: Device) -> list[Config]:
    """Blocks of whole pixels."""
    tiles = int8_tiles(problem.conv.kg, problem.conv.cp, problem.digits, device)
    return [config for config in tiles if config["BM"] % problem.slots == 0]


def fused_launch(kernel: Any, problem: FusedLayer, config: Config) -> Launch:
    """A kernel's launch on a problem, in pixel_blocks."""
    p = problem.in_volumes
    constants = {**p.constants, "VOLUMES": beyond_images(problem.conv) is not None, "EVEN_C": p.conv.cp == p.conv.cg}
    constants |= {"VECTOR": gcd(p.conv.cg, 16)}
    constants |= {name: config[name] for name in ("BM", "BN", "BK")}
    options = {"num_warps": config["warps"], "num_stages": config["stages"], "enable_fp_fusion": False}
    return Launch(kernel, p.grid(config["BM"], config["BN"]), p.numbers, constants, **options)


CONV_LIF = Template(
    name="conv_lif",
    op="conv_lif",
    sources=(conv_lif_kernel, *LAYER, batch_norm_gain, normed_block, lif_step),
    refuse=hopper_instead,
    space=pixel_blocks,
    cost=conv_lif_cost(hopper=False),
    prepare=partial(fused_launch, conv_lif_kernel),
)  # fmt: skip
