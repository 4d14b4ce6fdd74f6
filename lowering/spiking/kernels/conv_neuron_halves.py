"""`conv_neuron` with products of halves: the spikes, which are bytes in memory, become numbers of the weight's dtype in
registers, and the weight is read as it is.

One product takes the tensor cores as long as two of bytes; there is no weight to split, and none whose digits are lost.
"""

from math import gcd

import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.binary_cost import conv_lif_cost
from sparsecomp.lowering.spiking.convolution import beyond_images
from sparsecomp.lowering.spiking.fused_layer import FusedLayer
from sparsecomp.lowering.spiking.kernels.binary_conv import window_corners
from sparsecomp.lowering.spiking.kernels.conv_lif import all_steps, by_step, connected_block, interleaved, pixel_outputs
from sparsecomp.lowering.spiking.kernels.conv_neuron import NEURONS, step_through
from sparsecomp.lowering.tuning.limits import fits_registers, fits_shared
from sparsecomp.lowering.tuning.template import Config, Template

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def conv_neuron_halves_kernel(
    x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, v0_ptr, v1_ptr,
    p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, added_ptr, residual_ptr, spikes_ptr, last0_ptr, last1_ptr,
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
    """See `conv_neuron_kernel`; the weight (K, C/GROUPS, T, R, S) lies with its channels innermost."""
    pid = tl.program_id(0)
    kg = K // GROUPS
    # what it is already, but Triton sees a multiple now, and loads so many channels at a time
    cg = C // GROUPS // VECTOR * VECTOR
    C = cg * GROUPS
    depth = T * R * S * cg
    blocks_n = tl.cdiv(kg, BN)
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
    value = half_sums(
        x_ptr, x_row, weight_ptr, frame, ih, iw, k, col_ok, cg, D, H, W, C, CP, depth, dil_d, dil_h, dil_w,
        T, R, S, VOLUMES, EVEN_C, BM, BN, BK,
    )  # fmt: skip
    if SCALED:
        value *= multiplier
    if HAS_BIAS:
        value += tl.load(bias_ptr + k, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    step_through(
        value, first, k, col_ok, mean_ptr, var_ptr, gamma_ptr, beta_ptr, v0_ptr, v1_ptr,
        p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, added_ptr, residual_ptr, spikes_ptr, last0_ptr, last1_ptr,
        M, N, area, out_pixel, out_channel, out_image,
        eps, each0, each1, each2, each3, each4, each5, start0, start1, n0, n1, n2, n3, n4, n5, n6, n7,
        STEPS, SLOTS, CODE, SPIKE, AFTER, ROUND, CONNECT, BM, BN,
    )  # fmt: skip


@triton.jit
def half_sums(
    x_ptr, x_row, weight_ptr, frame, ih, iw, k, col_ok, cg, D, H, W, C, CP, depth, dil_d, dil_h, dil_w,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, VOLUMES: tl.constexpr, EVEN_C: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The block's sums in float32; windows begin `x_row` behind `x_ptr`."""
    chan = tl.arange(0, BK)
    x_ptrs = x_ptr + x_row[:, None] + chan[None, :]
    w_ptrs = weight_ptr + k.to(tl.int64)[None, :] * depth + chan[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    t = 0
    r = 0
    s = 0
    c = 0
    tap = 0
    for _ in range(0, T * R * S * CP, BK):
        dh = r * dil_h
        dw = s * dil_w
        ok = ((ih + dh).to(tl.uint32) < H) & ((iw + dw).to(tl.uint32) < W)
        if VOLUMES:
            ok = ok & ((frame + t * dil_d).to(tl.uint32) < D)
            dh += t * dil_d * H
        mask = ok[:, None]
        known = col_ok[None, :]
        if not EVEN_C:
            mask = mask & ((c + chan) < cg)[None, :]
            known = known & ((c + chan) < cg)[:, None]
        a = tl.load(x_ptrs + ((dh * W + dw) * C + c), mask=mask, other=0)
        b = tl.load(w_ptrs + (tap + c), mask=known, other=0.0)
        if _INTERPRETED:
            acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
        else:
            acc = tl.dot(a.to(b.dtype), b, acc)
        c += BK
        next_tap = c >= CP
        c = tl.where(next_tap, 0, c)
        tap = tl.where(next_tap, tap + cg, tap)
        s = tl.where(next_tap, s + 1, s)
        next_row = s >= S
        s = tl.where(next_row, 0, s)
        r = tl.where(next_row, r + 1, r)
        if VOLUMES:
            next_frame = r >= R
            r = tl.where(next_frame, 0, r)
            t = tl.where(next_frame, t + 1, t)
    return acc


def _space(problem: FusedLayer, device: Device) -> list[Config]:
    outputs, depth = problem.conv.kg, problem.conv.cp
    return [
        Config(BM=bm, BN=bn, BK=bk, warps=warps, stages=stages)
        for bm, warps in ((64, 4), (128, 4), (128, 8), (256, 8)) for bn in ((32,) if outputs <= 32 else (64, 128))
        for bk in ((32, 64, 128) if depth % 64 == 0 else (32,)) for stages in (3, 4, 5)
        if depth % bk == 0 and bm % problem.slots == 0
        and fits_registers(bm * bn, warps)
        and fits_shared(stages * bk * (bm + 2 * bn), device)
    ]  # fmt: skip


def _prepare(problem: FusedLayer, config: Config) -> Launch:
    p = problem.in_volumes
    constants = {**p.constants, "VOLUMES": beyond_images(problem.conv) is not None, "EVEN_C": p.conv.cp == p.conv.cg}
    constants |= {"VECTOR": gcd(p.conv.cg, 16), **{name: config[name] for name in ("BM", "BN", "BK")}}
    options = {"num_warps": config["warps"], "num_stages": config["stages"], "enable_fp_fusion": False}
    return Launch(conv_neuron_halves_kernel, p.grid(config["BM"], config["BN"]), p.numbers, constants, **options)


CONV_NEURON_HALVES = Template(
    name="conv_neuron_halves",
    op="conv_neuron",
    sources=(
        conv_neuron_halves_kernel, half_sums, step_through, window_corners, pixel_outputs, by_step, interleaved,
        all_steps, connected_block, *NEURONS,
    ),
    refuse=lambda problem, device: None if problem.halves else "its products are of bytes",
    space=_space,
    cost=conv_lif_cost(hopper=True),
    prepare=_prepare,
)  # fmt: skip
