"""Implicit-GEMM convolution of int8 inputs with byte-split weights, on int8 tensor cores.

Serves inputs of any density: its time does not depend on the spikes. One program computes a block of output pixels by a
block of output channels; it walks the taps and channels of the kernel window, loads the input block once and multiplies
it with every byte plane of the weight, each into its own int32 accumulator, and joins them in the epilogue in float32.
"""

from math import gcd

import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.binary_conv import BinaryConv
from sparsecomp.lowering.spiking.binary_cost import binary_conv_cost
from sparsecomp.lowering.spiking.convolution import beyond_images
from sparsecomp.lowering.tuning.limits import fits_registers, fits_shared
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def binary_conv_kernel(
    x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, factor_ptr, out_ptr, count_ptr, rows_ptr,
    M, D, H, W, OD, OH, OW, C, K, CP,
    stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w,
    out_pixel, out_channel, out_image, weight_k, weight_c, weight_t, weight_r, weight_s, multiplier, limit,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr, DIGITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, VOLUMES: tl.constexpr, EVEN_C: tl.constexpr, VECTOR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[m, k] = f · scale[k] · Σ_d 256^(DIGITS-1-d) Σ_(t,r,s,c) x[pixel(m,t,r,s), c] · w[d,k,t,r,s,c] + bias[k].

    x: (N, D, H, W, C) int8. w: (DIGITS, K, T·R·S·CP) int8, CP channels of one group, padded by zeros to a multiple of
    BK. f = multiplier · factor[0]. weight: (K, C/GROUPS, T, R, S) by its strides, read where a scale is not above zero.
    M = N·OD·OH·OW. VECTOR divides C/GROUPS. Without VOLUMES maps and window are one frame deep, and not padded there.
    out is addressed by image, pixel and channel strides, so either memory format is written in place.
    With count_ptr nothing happens unless *count_ptr > limit. With rows_ptr too, only the output pixels m that are its
    first *count_ptr entries are computed, and the grid serves the most there can be.
    """
    pid = tl.program_id(0)
    kg = K // GROUPS
    # what it is already, but Triton sees a multiple now, and loads so many channels at a time
    cg = C // GROUPS // VECTOR * VECTOR
    C = cg * GROUPS
    blocks_n = tl.cdiv(kg, BN)
    # channel blocks of the same pixels run side by side and share their input in L2
    pm = pid // (blocks_n * GROUPS)
    pn = pid % (blocks_n * GROUPS)
    group = pn // blocks_n
    cols = (pn % blocks_n) * BN + tl.arange(0, BN)
    col_ok = cols < kg
    k = group * kg + cols
    if count_ptr is not None:
        count = tl.load(count_ptr)
        if rows_ptr is not None:
            limit = pm * BM
            M = count
        if count <= limit:
            return
    rows = pm * BM + tl.arange(0, BM)
    row_ok = rows < M
    if rows_ptr is not None:
        rows = tl.load(rows_ptr + rows, mask=row_ok, other=0)
    pixel = rows % (OD * OH * OW)
    image = rows // (OD * OH * OW)
    x_row, frame, ih, iw = window_corners(
        image, pixel, row_ok, group * cg, D, H, W, OH, OW, C, stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, VOLUMES
    )
    acc0, acc1, acc2, acc3 = int8_sums(
        x_ptr, x_row, w_ptr, frame, ih, iw, k, col_ok, cg, D, H, W, C, K, CP, dil_d, dil_h, dil_w,
        T, R, S, DIGITS, VOLUMES, EVEN_C, BM, BN, BK,
    )  # fmt: skip
    scale = tl.load(scale_ptr + k, mask=col_ok, other=1.0)
    if factor_ptr is not None:
        multiplier *= tl.load(factor_ptr).to(tl.float32)
    out_row = image.to(tl.int64) * out_image + pixel.to(tl.int64) * out_pixel
    out_ptrs = out_ptr + out_row[:, None] + (k.to(tl.int64) * out_channel)[None, :]
    out_ok = row_ok[:, None] & col_ok[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + k, mask=col_ok, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros((BN,), tl.float32)
    # NaN is not above zero either, and no product of a number that is not finite with zero is zero
    if (tl.min((scale > 0.0).to(tl.int32), 0) == 0) | (multiplier * 0.0 != 0.0):
        weight_ptrs = weight_ptr + k.to(tl.int64) * weight_k
        value = float_sums(
            x_ptr + x_row, frame, ih, iw, weight_ptrs, col_ok, multiplier, cg, D, H, W, C, dil_d, dil_h, dil_w,
            weight_c, weight_t, weight_r, weight_s, T, R, S, factor_ptr is not None, BM, BN,
        )  # fmt: skip
        tl.store(out_ptrs, (value + bias[None, :]).to(out_ptr.dtype.element_ty), mask=out_ok)
    else:
        value = joined(acc0, acc1, acc2, acc3, DIGITS)
        value = value * scale[None, :] * multiplier + bias[None, :]
        tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=out_ok)


@triton.jit
def window_corners(
    image, pixel, row_ok, first, D, H, W, OH, OW, C, stride_d, stride_h, stride_w, pad_d, pad_h, pad_w,
    VOLUMES: tl.constexpr,
):  # fmt: skip
    """Where the windows of output pixels begin: offset of input channel `first`, frame, line and column."""
    frame = image * 0
    line = pixel // OW
    if VOLUMES:
        frame = (line // OH) * stride_d - pad_d
        line = line % OH
    # rows past the end get a height outside the image, so that their loads are masked like padding
    ih = tl.where(row_ok, line * stride_h - pad_h, -(1 << 30))
    iw = (pixel % OW) * stride_w - pad_w
    return (((image.to(tl.int64) * D + frame) * H + ih) * W + iw) * C + first, frame, ih, iw


@triton.jit
def int8_sums(
    x_ptr, x_row, w_ptr, frame, ih, iw, k, col_ok, cg, D, H, W, C, K, CP, dil_d, dil_h, dil_w,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, DIGITS: tl.constexpr, VOLUMES: tl.constexpr,
    EVEN_C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The block's sums by byte of the weight, in int32; windows begin `x_row` behind `x_ptr`."""
    chan = tl.arange(0, BK)
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
    for i in range(0, depth, BK):
        dh = r * dil_h
        dw = s * dil_w
        ok = ((ih + dh).to(tl.uint32) < H) & ((iw + dw).to(tl.uint32) < W)
        if VOLUMES:
            ok = ok & ((frame + t * dil_d).to(tl.uint32) < D)
            dh += t * dil_d * H
        mask = ok[:, None] if EVEN_C else ok[:, None] & ((c + chan) < cg)[None, :]
        a = tl.load(x_ptrs + ((dh * W + dw) * C + c), mask=mask, other=0)
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
        next_row = s >= S
        s = tl.where(next_row, 0, s)
        r = tl.where(next_row, r + 1, r)
        if VOLUMES:
            next_frame = r >= R
            r = tl.where(next_frame, 0, r)
            t = tl.where(next_frame, t + 1, t)
    return acc0, acc1, acc2, acc3


@triton.jit
def joined(acc0, acc1, acc2, acc3, DIGITS: tl.constexpr):
    """Sums by byte of the weight as one, in float32: |acc| can pass 2^24, and rounds there as any float32 sum does."""
    value = tl.fma(acc0.to(tl.float32), 256.0, acc1.to(tl.float32))
    if DIGITS > 2:
        value = tl.fma(value, 256.0, acc2.to(tl.float32))
    if DIGITS > 3:
        value = tl.fma(value, 256.0, acc3.to(tl.float32))
    return value


@triton.jit
def float_sums(
    x_ptrs, frame, ih, iw, weight_ptrs, col_ok, multiplier, cg, D, H, W, C, dil_d, dil_h, dil_w,
    weight_c, weight_t, weight_r, weight_s, T, R, S,
    FACTOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The block's sums of float32 products, one input channel of one of T·R·S taps at a time.

    With FACTOR, spikes of a factor that may not be finite: -1 stands for NaN, and 0 for zero whatever the factor is.
    """
    value = tl.zeros((BM, BN), tl.float32)
    for i in range(T * R * S * cg):
        t = i // (R * S * cg)
        r = i // (S * cg) % R
        s = i // cg % S
        c = i % cg
        ok = ((ih + r * dil_h).to(tl.uint32) < H) & ((iw + s * dil_w).to(tl.uint32) < W)
        ok = ok & ((frame + t * dil_d).to(tl.uint32) < D)
        pixel = ((t * dil_d * H + r * dil_h) * W + s * dil_w) * C + c
        x = tl.load(x_ptrs + pixel, mask=ok, other=0).to(tl.float32)
        offset = tl.cast(c, tl.int64) * weight_c + t * weight_t + r * weight_r + s * weight_s
        w = tl.load(weight_ptrs + offset, mask=col_ok, other=0.0).to(tl.float32)
        if FACTOR:
            x = tl.where(x == 0.0, 0.0, tl.where(x < 0.0, float("nan"), multiplier))
        else:
            x *= multiplier
        value = tl.fma(x[:, None], w[None, :], value)
    return value


def _refuse(problem: BinaryConv, device: Device) -> str | None:
    if device.is_hopper and problem.conv.cp == problem.conv.cg and beyond_images(problem.conv) is None:
        return "binary_conv_hopper takes it, and was faster at every size measured on an H100"
    return None


def int8_tiles(outputs: int, depth: int, digits: int, device: Device) -> list[Config]:
    """Blocks of pixels by output channels of a group, and how deep: `depth` input channels of one as padded."""
    return [
        Config(BM=bm, BN=bn, BK=bk, warps=warps, stages=stages)
        for bm in (64, 128) for bn in ((32,) if outputs <= 32 else (64, 128))
        for bk in ((64, 128) if depth % 64 == 0 else (32,)) for warps in (4, 8) for stages in (3, 4)
        if depth % bk == 0
        and fits_registers(bm * bn * digits, warps)
        and fits_shared(stages * bk * (bm + digits * bn), device)
    ]  # fmt: skip


def _prepare(problem: BinaryConv, config: Config) -> Launch:
    p = problem.in_volumes
    constants = {**p.constants, "VOLUMES": beyond_images(problem.conv) is not None, "EVEN_C": p.conv.cp == p.conv.cg}
    constants |= {"VECTOR": gcd(p.conv.cg, 16)}
    constants |= {name: config[name] for name in ("BM", "BN", "BK")}
    options = {"num_warps": config["warps"], "num_stages": config["stages"]}
    return Launch(binary_conv_kernel, p.grid(config["BM"], config["BN"]), p.numbers, constants, **options)


BINARY_CONV = Template(
    name="binary_conv",
    op="binary_conv",
    sources=(binary_conv_kernel, window_corners, int8_sums, joined, float_sums),
    refuse=_refuse,
    space=lambda problem, device: int8_tiles(problem.conv.kg, problem.conv.cp, problem.digits, device),
    cost=binary_conv_cost(hopper=False),
    prepare=_prepare,
)
