"""`conv_lif` with the products of `binary_conv_hopper`, for Hopper's warpgroup instructions: same arguments and result.

A warp's products give it the sums of whole output pixels, all steps of each, so that taking them apart by step moves
nothing from one warp to another.
"""

from functools import partial
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.binary_cost import conv_lif_cost
from sparsecomp.lowering.spiking.fused_layer import FusedLayer
from sparsecomp.lowering.spiking.kernels import binary_conv_hopper
from sparsecomp.lowering.spiking.kernels.binary_conv_hopper import copies, float_products, image_and_pixel, products
from sparsecomp.lowering.spiking.kernels.conv_lif import all_steps, connected_block
from sparsecomp.lowering.spiking.kernels.lif import batch_norm_gain, lif_step, normed_block
from sparsecomp.lowering.tuning.template import Config, Template


@gluon.jit
def conv_lif_hopper_kernel(
    x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, v_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, rate_ptr,
    added_ptr, residual_ptr, spikes_ptr, last_ptr, current_ptr,
    M, N, H, W, OH, OW, C, K, CP,
    stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
    out_pixel, out_channel, out_image, weight_k, weight_c, weight_r, weight_s, multiplier,
    v0, eps, tau, threshold, reset,
    R: gl.constexpr, S: gl.constexpr, GROUPS: gl.constexpr, DIGITS: gl.constexpr, HAS_BIAS: gl.constexpr,
    SCALED: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr, CHARGE: gl.constexpr, HALVES: gl.constexpr,
    DECAY_INPUT: gl.constexpr, SOFT_RESET: gl.constexpr, CONNECT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """See `conv_lif_kernel`."""
    value = layer_products(
        x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, M, N, H, W, OH, OW, C, K, CP,
        stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, weight_k, weight_c, weight_r, weight_s, multiplier,
        R, S, GROUPS, DIGITS, HAS_BIAS, SCALED, STEPS, SLOTS, BM, BN, BK, STAGES, num_warps,
    )  # fmt: skip
    PIXELS: gl.constexpr = BM // SLOTS
    currents = steps_apart(value, SLOTS, PIXELS, BN, num_warps)
    held: gl.constexpr = currents[0].type.layout
    k, col_ok, offset, mask = block_outputs(M, OH * OW, K, out_pixel, out_channel, out_image, GROUPS, PIXELS, BN, held)
    mean = None
    gain = None
    shift = None
    rate = None
    if mean_ptr is not None:
        mean = gl.load(mean_ptr + k, mask=col_ok, other=0.0)[None, :]
        gain = batch_norm_gain(var_ptr, gamma_ptr, k, col_ok, eps, gamma_ptr is not None)[None, :]
        if beta_ptr is not None:
            shift = gl.load(beta_ptr + k, mask=col_ok, other=0.0)[None, :]
    if rate_ptr is not None:
        rate = gl.load(rate_ptr).to(gl.float32)
    zero = gl.zeros((PIXELS, BN), gl.float32, held)
    v = zero + v0
    if v_ptr is not None:
        v = gl.load(v_ptr + offset, mask=mask, other=0.0)
    step_size = gl.cast(N, gl.int64) * out_image
    if added_ptr is not None:
        added = all_steps(added_ptr + offset, mask, step_size, STEPS)
    if residual_ptr is not None:
        residuals = all_steps(residual_ptr + offset, mask, step_size, STEPS)
    for step in gl.static_range(STEPS):
        current = normed_block(currents[step], mean, gain, shift)
        if added_ptr is not None:
            current += added[step].to(gl.float32)
        if current_ptr is not None:
            gl.store(current_ptr + step * step_size + offset, current, mask=mask)
        fired, v = lif_step(current, v, rate, zero + tau, threshold, reset, CHARGE, HALVES, DECAY_INPUT, SOFT_RESET)
        spikes = fired.to(gl.int8)
        if residual_ptr is not None:
            spikes = connected_block(fired, residuals[step], CONNECT)
        gl.store(spikes_ptr + step * step_size + offset, spikes, mask=mask)
    if last_ptr is not None:
        gl.store(last_ptr + offset, v, mask=mask)


@gluon.jit
def layer_products(
    x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, M, N, H, W, OH, OW, C, K, CP,
    stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, weight_k, weight_c, weight_r, weight_s, multiplier,
    R: gl.constexpr, S: gl.constexpr, GROUPS: gl.constexpr, DIGITS: gl.constexpr, HAS_BIAS: gl.constexpr,
    SCALED: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The block's sums, bias included, in the layout of the products: a row a slot of an output pixel."""
    pm, group, k0, kg = fused_block(K, GROUPS, BN)
    cg = C // GROUPS
    rows = pm * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, copies(BK, num_warps)))
    row_ok = (rows // SLOTS < M) & (rows % SLOTS < STEPS)
    value = products(
        x_ptr, w_ptr, rows, row_ok, N, k0, kg, group, H, W, OH, OW, C, K, CP, stride_h, stride_w, pad_h, pad_w,
        dil_h, dil_w, R, S, SLOTS, GROUPS, DIGITS, BM, BN, BK, STAGES, num_warps,
    )  # fmt: skip
    sums: gl.constexpr = value.type.layout
    cols = k0 + gl.arange(0, BN, layout=gl.SliceLayout(0, sums))
    col_ok = cols < kg
    k = group * kg + cols
    scale = gl.load(scale_ptr + k, mask=col_ok, other=1.0)
    if gl.min((scale > 0.0).to(gl.int32), 0) == 0:
        sum_rows = pm * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, sums))
        sum_ok = (sum_rows // SLOTS < M) & (sum_rows % SLOTS < STEPS)
        value = float_products(
            x_ptr + group * cg, weight_ptr + k.to(gl.int64) * weight_k, sum_rows, sum_ok, col_ok, N, multiplier, cg,
            H, W, OH, OW, C, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, weight_c, weight_r, weight_s,
            R, S, SLOTS, False, BM, BN, sums,
        )  # fmt: skip
    else:
        value = value * scale[None, :]
        if SCALED:
            value *= multiplier
    if HAS_BIAS:
        value += gl.load(bias_ptr + k, mask=col_ok, other=0.0).to(gl.float32)[None, :]
    return value


@gluon.jit
def fused_block(K, GROUPS: gl.constexpr, BN: gl.constexpr):
    """The program's block of rows, its group, and the first of its output channels in the group and how many it has."""
    pid = gl.program_id(0)
    kg = K // GROUPS
    blocks_n = gl.cdiv(kg, BN)
    pn = pid % (blocks_n * GROUPS)
    return pid // (blocks_n * GROUPS), pn // blocks_n, (pn % blocks_n) * BN, kg


@gluon.jit
def block_outputs(
    M, area, K, out_pixel, out_channel, out_image,
    GROUPS: gl.constexpr, PIXELS: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The block's output channels and which there are, where its outputs lie in one step, and which there are."""
    pm, group, k0, kg = fused_block(K, GROUPS, BN)
    place = pm * PIXELS + gl.arange(0, PIXELS, layout=gl.SliceLayout(1, LAYOUT))
    cols = k0 + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
    col_ok = cols < kg
    k = group * kg + cols
    image, pixel = image_and_pixel(place, area, 0, 1)
    offset = (image.to(gl.int64) * out_image + pixel.to(gl.int64) * out_pixel)[:, None]
    offset = offset + (k.to(gl.int64) * out_channel)[None, :]
    return k, col_ok, offset, (place < M)[:, None] & col_ok[None, :]


@gluon.jit
def steps_apart(value, SLOTS: gl.constexpr, PIXELS: gl.constexpr, BN: gl.constexpr, num_warps: gl.constexpr):
    """The blocks (PIXELS, BN) of each of SLOTS steps, of rows that are steps beside each other, pixel by pixel."""
    cube = gl.permute(gl.reshape(value, (PIXELS, SLOTS, BN)), (0, 2, 1))
    return _halved(gl.convert_layout(cube, _steps_inside(BN, SLOTS, num_warps)), SLOTS, PIXELS, BN)


@gluon.constexpr_function
def _steps_inside(BN, SLOTS, num_warps):
    """A layout (pixels, channels, steps) whose threads hold all steps of neighbouring channels."""
    return gl.BlockedLayout([1, BN // 8, SLOTS], [4, 8, 1], [num_warps, 1, 1], [2, 1, 0])


@gluon.jit
def _halved(cube, SLOTS: gl.constexpr, PIXELS: gl.constexpr, BN: gl.constexpr):
    """The blocks (PIXELS, BN) of each of SLOTS steps, of a block (PIXELS, BN, SLOTS)."""
    if SLOTS == 1:
        return (gl.reshape(cube, (PIXELS, BN)),)
    else:
        half: gl.constexpr = SLOTS // 2
        # the last bit of the step is innermost, so that every other step is in either half
        even, odd = gl.split(gl.reshape(cube, (PIXELS, BN, half, 2)))
        evens = _halved(even, half, PIXELS, BN)
        odds = _halved(odd, half, PIXELS, BN)
        both = (evens[0], odds[0])
        for i in gl.static_range(1, half):
            both = both + (evens[i], odds[i])
        return both


LAYER = (
    layer_products, fused_block, block_outputs, steps_apart, _halved, all_steps, connected_block,
    *binary_conv_hopper.SOURCES,
)  # fmt: skip
"""What kernels around these products, by step, are made of."""


def why_no_layer(problem: FusedLayer, device: Device) -> str | None:
    """Why the products cannot run on a device, None if they can."""
    return binary_conv_hopper.why_no_products(problem.product, device)


def warpgroup_blocks(problem: FusedLayer, device: Device) -> list[Config]:
    """Blocks of whole pixels."""
    found = binary_conv_hopper.product_blocks(problem.product, device)
    return [config for config in found if config["BM"] % problem.slots == 0]


def warpgroup_launch(kernel: Any, problem: FusedLayer, config: Config) -> Launch:
    """A kernel's launch on a problem, in warpgroup_blocks."""
    constants = {**problem.constants, **{name: config[name] for name in ("BM", "BN", "BK")}}
    constants |= {"STAGES": config["stages"], "num_warps": config["warps"]}
    grid = problem.grid(config["BM"], config["BN"])
    return Launch(kernel, grid, problem.numbers, constants, enable_fp_fusion=False)


CONV_LIF_HOPPER = Template(
    name="conv_lif_hopper",
    op="conv_lif",
    sources=(conv_lif_hopper_kernel, *LAYER, batch_norm_gain, normed_block, lif_step),
    refuse=why_no_layer,
    space=warpgroup_blocks,
    cost=conv_lif_cost(hopper=True),
    prepare=partial(warpgroup_launch, conv_lif_hopper_kernel),
)
