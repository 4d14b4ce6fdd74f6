"""Idle pixels: which output pixels see a spike at all, so that the implicit GEMM computes only those.

Serves inputs whose zeros cluster (event cameras, quiet regions). An input pixel is active when any of its channels is
non-zero; an output pixel whose window holds no active pixel is the bias. The others are listed, in any order: the rows
that the convolution on int8 tensor cores then computes. Both kernels cost little next to a full convolution, so dense
inputs lose little.
"""

import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.convolution import Maps, as_image, beyond_images
from sparsecomp.lowering.spiking.skip_conv import ListRows
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def scan_pixels_kernel(
    x_ptr, bytes_ptr, active_ptr, count_ptr, N, C, W, pixels, stride_n, stride_c, stride_h, stride_w,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """bytes[n, p, c] = int8(x[n, c, p]) and active[n, p] = any channel of x[n, :, p] non-zero; count = 0.

    x: any strides, `pixels` = H·W an image, N images. active: (N, pixels) int8. count: (1,) int32, cleared here for
    `list_rows_kernel`.
    """
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    image = p // pixels
    place = p % pixels
    ok = image < N
    src = x_ptr + image * stride_n + (place // W) * stride_h + (place % W) * stride_w
    active = tl.zeros((BP,), tl.int32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        mask = ok[:, None] & (c < C)[None, :]
        # through float32: the interpreter has no direct bf16 conversion
        x = tl.load(src[:, None] + (c.to(tl.int64) * stride_c)[None, :], mask=mask, other=0).to(tl.float32).to(tl.int8)
        tl.store(bytes_ptr + (p * C)[:, None] + c[None, :], x, mask=mask)
        active = active | tl.max((x != 0).to(tl.int32), 1)
    tl.store(active_ptr + p, active.to(tl.int8), mask=ok)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, 0)


@triton.jit
def list_rows_kernel(
    active_ptr, rows_ptr, count_ptr, scale_ptr, bias_ptr, out_ptr,
    M, H, W, OH, OW, K,
    stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
    out_pixel, out_channel, out_image,
    R: tl.constexpr, S: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """List the output pixels (of M = N·OH·OW) that see an active input pixel; write the bias to the others.

    rows: (M,) int32; count: (1,) int32. scale: (K,) float32, NaN for a channel with a weight that is not finite.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    pixel = rows % (OH * OW)
    image = rows // (OH * OW)
    ih = tl.where(rows < M, (pixel // OW) * stride_h - pad_h, -(1 << 30))
    iw = (pixel % OW) * stride_w - pad_w
    seen = tl.zeros((BM,), tl.int32)
    for r in range(R):
        h = ih + r * dil_h
        line = active_ptr + (image * H + h).to(tl.int64) * W
        for s in tl.static_range(S):
            w = iw + s * dil_w
            ok = (h >= 0) & (h < H) & (w >= 0) & (w < W)
            seen = seen | tl.load(line + w, mask=ok, other=0).to(tl.int32)
    end = tl.cumsum(seen, 0)
    count = tl.sum(seen, 0)
    base = tl.atomic_add(count_ptr, count)
    tl.store(rows_ptr + base + end - 1, rows, mask=seen != 0)
    if count < BM:
        idle = (rows < M) & (seen == 0)
        out_row = image.to(tl.int64) * out_image + pixel.to(tl.int64) * out_pixel
        for k0 in range(0, K, BN):
            k = k0 + tl.arange(0, BN)
            value = tl.load(scale_ptr + k, mask=k < K, other=0.0) * 0.0
            if HAS_BIAS:
                value += tl.load(bias_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            out_ptrs = out_ptr + out_row[:, None] + (k.to(tl.int64) * out_channel)[None, :]
            filled = tl.broadcast_to(value[None, :], (BM, BN))
            tl.store(out_ptrs, filled.to(out_ptr.dtype.element_ty), mask=idle[:, None] & (k < K)[None, :])


def _prepare_scan(problem: Maps, config: Config) -> Launch:
    p = problem
    channels = min(triton.next_power_of_2(max(p.c, 1)), 128)
    block = max(4096 // channels, 16)
    # at least one program, which clears the counter
    grid = (max(triton.cdiv(p.outer * p.pixels, block), 1),)
    numbers = (p.outer, p.c, as_image(p.size, 1)[-1], p.pixels, *p.numbers)
    return Launch(scan_pixels_kernel, grid, numbers, {"BP": block, "BC": channels})


def _prepare_list(problem: ListRows, config: Config) -> Launch:
    c, block = problem.conv, 128
    constants = {**c.constants, "BM": block, "BN": 32}
    return Launch(list_rows_kernel, (triton.cdiv(c.m, block),), (*c.maps, c.k, *c.geometry), constants)


_n, _c, _pixels, _itemsize = sizes("outer c pixels itemsize")
_m, _k, _out_itemsize = sizes("conv.m conv.k conv.itemsize")

SCAN_PIXELS = Template(
    name="scan_pixels",
    op="scan_pixels",
    sources=(scan_pixels_kernel,),
    cost=Cost(bytes=_n * _pixels * _c * (_itemsize + 1)),
    prepare=_prepare_scan,
)

LIST_ROWS = Template(
    name="list_rows",
    op="list_rows",
    sources=(list_rows_kernel,),
    refuse=lambda problem, device: beyond_images(problem.conv),
    cost=Cost(bytes=_m * (_k * _out_itemsize + 5)),
    prepare=_prepare_list,
)
