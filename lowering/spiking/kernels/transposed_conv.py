"""Transposed convolution of int8 inputs with byte-split weights, as a gather on int8 tensor cores.

With a stride s, outputs that are s apart see the same taps of the weight: each such phase is a convolution of stride
one with some of the taps, so that no product with an inserted zero is computed. One program computes a block of one
phase's output pixels by a block of output channels, in the way of `binary_conv`.
"""

from math import gcd

import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.binary_cost import binary_conv_cost
from sparsecomp.lowering.spiking.kernels.binary_conv import float_sums, int8_tiles, joined
from sparsecomp.lowering.spiking.transposed_conv import TransposedConv
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def transposed_conv_kernel(
    x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, factor_ptr, out_ptr,
    N, D, H, W, OD, OH, OW, C, K, CP, pad_d, pad_h, pad_w,
    out_pixel, out_channel, out_image, weight_k, weight_c, weight_t, weight_r, weight_s, multiplier,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DIL_D: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr,
    SHARED_D: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    INVERSE_D: tl.constexpr, INVERSE_H: tl.constexpr, INVERSE_W: tl.constexpr,
    GROUPS: tl.constexpr, DIGITS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_C: tl.constexpr, VECTOR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[n, k, o] = f · scale[k] · Σ_d 256^(DIGITS-1-d) Σ_(tap,c) x[n, (o + pad - dil·tap) / stride, c] · w[d,k,tap,c]
    + bias[k], over the taps for which the division leaves no rest and gives a pixel of the map, in three dimensions.

    x: (N, D, H, W, C) int8. w: (DIGITS, K, T·R·S·CP) int8; see `binary_conv_kernel` for it, f, `weight` and VECTOR.
    SHARED is the greatest common divisor of stride and dilation, INVERSE that of dilation / SHARED modulo
    stride / SHARED. out is addressed by image, pixel and channel strides.
    """
    pid = tl.program_id(0)
    kg = K // GROUPS
    cg = C // GROUPS // VECTOR * VECTOR
    C = cg * GROUPS
    blocks_n = tl.cdiv(kg, BN)
    pn = pid % (blocks_n * GROUPS)
    group = pn // blocks_n
    cols = (pn % blocks_n) * BN + tl.arange(0, BN)
    col_ok = cols < kg
    k = group * kg + cols
    # phases of the same pixels run side by side and share their input in L2
    pm = pid // (blocks_n * GROUPS)
    phase = pm % (STRIDE_D * STRIDE_H * STRIDE_W)
    pm = pm // (STRIDE_D * STRIDE_H * STRIDE_W)
    phase_w = phase % STRIDE_W
    phase_h = phase // STRIDE_W % STRIDE_H
    phase_d = phase // (STRIDE_W * STRIDE_H)
    t0, taps_t, shift_d = _taps(phase_d + pad_d, T, STRIDE_D, DIL_D, SHARED_D, INVERSE_D)
    r0, taps_r, shift_h = _taps(phase_h + pad_h, R, STRIDE_H, DIL_H, SHARED_H, INVERSE_H)
    s0, taps_s, shift_w = _taps(phase_w + pad_w, S, STRIDE_W, DIL_W, SHARED_W, INVERSE_W)
    step_t: tl.constexpr = STRIDE_D // SHARED_D
    step_r: tl.constexpr = STRIDE_H // SHARED_H
    step_s: tl.constexpr = STRIDE_W // SHARED_W
    back_d: tl.constexpr = -(DIL_D // SHARED_D)
    back_h: tl.constexpr = -(DIL_H // SHARED_H)
    back_w: tl.constexpr = -(DIL_W // SHARED_W)

    # pixels of a phase, as many in each
    QD = tl.cdiv(OD, STRIDE_D)
    QH = tl.cdiv(OH, STRIDE_H)
    QW = tl.cdiv(OW, STRIDE_W)
    rows = pm * BM + tl.arange(0, BM)
    image = rows // (QD * QH * QW)
    frame = rows // (QH * QW) % QD
    line = rows // QW % QH
    column = rows % QW
    od = frame * STRIDE_D + phase_d
    oh = line * STRIDE_H + phase_h
    ow = column * STRIDE_W + phase_w
    row_ok = (image < N) & (od < OD) & (oh < OH) & (ow < OW)
    frame += shift_d
    # rows past the end get a height outside the image, so that their loads are masked like padding
    ih = tl.where(row_ok, line + shift_h, -(1 << 30))
    iw = column + shift_w
    chan = tl.arange(0, BK)
    x_row = (((image.to(tl.int64) * D + frame) * H + ih) * W + iw) * C + group * cg
    x_ptrs = x_ptr + x_row[:, None] + chan[None, :]
    depth = T * R * S * CP
    w_ptrs = w_ptr + k.to(tl.int64)[None, :] * depth + chan[:, None]
    plane = tl.cast(K, tl.int64) * depth
    acc0 = tl.zeros((BM, BN), tl.int32)
    acc1 = tl.zeros((BM, BN), tl.int32)
    acc2 = tl.zeros((BM, BN), tl.int32)
    acc3 = tl.zeros((BM, BN), tl.int32)
    t = 0
    r = 0
    s = 0
    c = 0
    for _ in range(0, taps_t * taps_r * taps_s * CP, BK):
        ok = ((frame + t * back_d).to(tl.uint32) < D) & ((ih + r * back_h).to(tl.uint32) < H)
        ok = ok & ((iw + s * back_w).to(tl.uint32) < W)
        mask = ok[:, None] if EVEN_C else ok[:, None] & ((c + chan) < cg)[None, :]
        pixel = (t * back_d * H + r * back_h) * W + s * back_w
        i = (((t0 + t * step_t) * R + r0 + r * step_r) * S + s0 + s * step_s) * CP + c
        a = tl.load(x_ptrs + (pixel * C + c), mask=mask, other=0)
        b = tl.load(w_ptrs + i, mask=col_ok[None, :], other=0)
        acc0 = tl.dot(a, b, acc0, out_dtype=tl.int32)
        b = tl.load(w_ptrs + i + plane, mask=col_ok[None, :], other=0)
        acc1 = tl.dot(a, b, acc1, out_dtype=tl.int32)
        if DIGITS > 2:
            b = tl.load(w_ptrs + i + 2 * plane, mask=col_ok[None, :], other=0)
            acc2 = tl.dot(a, b, acc2, out_dtype=tl.int32)
        if DIGITS > 3:
            b = tl.load(w_ptrs + i + 3 * plane, mask=col_ok[None, :], other=0)
            acc3 = tl.dot(a, b, acc3, out_dtype=tl.int32)
        c += BK
        next_tap = c >= CP
        c = tl.where(next_tap, 0, c)
        s = tl.where(next_tap, s + 1, s)
        next_row = s >= taps_s
        s = tl.where(next_row, 0, s)
        r = tl.where(next_row, r + 1, r)
        next_frame = r >= taps_r
        r = tl.where(next_frame, 0, r)
        t = tl.where(next_frame, t + 1, t)
    scale = tl.load(scale_ptr + k, mask=col_ok, other=1.0)
    if factor_ptr is not None:
        multiplier *= tl.load(factor_ptr).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + k, mask=col_ok, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros((BN,), tl.float32)
    pixel = (od * OH + oh).to(tl.int64) * OW + ow
    out_row = image.to(tl.int64) * out_image + pixel * out_pixel
    out_ptrs = out_ptr + out_row[:, None] + (k.to(tl.int64) * out_channel)[None, :]
    out_ok = row_ok[:, None] & col_ok[None, :]
    # NaN is not above zero either, and no product of a number that is not finite with zero is zero
    if (tl.min((scale > 0.0).to(tl.int32), 0) == 0) | (multiplier * 0.0 != 0.0):
        first = t0 * weight_t + r0 * weight_r + s0 * weight_s
        value = float_sums(
            x_ptr + x_row, frame, ih, iw, weight_ptr + k.to(tl.int64) * weight_k + first, col_ok, multiplier, cg,
            D, H, W, C, back_d, back_h, back_w, weight_c, step_t * weight_t, step_r * weight_r, step_s * weight_s,
            taps_t, taps_r, taps_s, factor_ptr is not None, BM, BN,
        )  # fmt: skip
        tl.store(out_ptrs, (value + bias[None, :]).to(out_ptr.dtype.element_ty), mask=out_ok)
    else:
        value = joined(acc0, acc1, acc2, acc3, DIGITS) * scale[None, :] * multiplier + bias[None, :]
        tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=out_ok)


@triton.jit
def _taps(
    at, EXTENT: tl.constexpr, STRIDE: tl.constexpr, DIL: tl.constexpr, SHARED: tl.constexpr, INVERSE: tl.constexpr
):
    """Of the outputs `at` modulo STRIDE, padding counted: the first tap that they see, how many, and by how much the
    pixel that it reads is ahead of an output's number among them.

    These taps solve DIL · tap = at (mod STRIDE); they are STRIDE / SHARED apart.
    """
    step: tl.constexpr = STRIDE // SHARED
    first = at // SHARED * INVERSE % step
    count = tl.where(at % SHARED == 0, (EXTENT - first + step - 1) // step, 0)
    # exact where there is a tap; it may be below zero
    return first, count, (at - first * DIL) // STRIDE


def _prepare(problem: TransposedConv, config: Config) -> Launch:
    p = problem
    constants = {**p.constants, "EVEN_C": p.conv.cp == p.conv.cg, "VECTOR": gcd(p.conv.cg, 16)}
    constants |= {name: config[name] for name in ("BM", "BN", "BK")}
    options = {"num_warps": config["warps"], "num_stages": config["stages"]}
    return Launch(transposed_conv_kernel, p.grid(config["BM"], config["BN"]), p.numbers, constants, **options)


TRANSPOSED_CONV = Template(
    name="transposed_conv",
    op="transposed_conv",
    sources=(transposed_conv_kernel, _taps, joined, float_sums),
    space=lambda problem, device: int8_tiles(problem.conv.kg, problem.conv.cp, problem.digits, device),
    cost=binary_conv_cost(hopper=False, transposed=True),
    prepare=_prepare,
)
