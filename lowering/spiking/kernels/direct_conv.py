"""Convolution of int8 inputs with a weight as it is, in float32: for depthwise layers, whose time is their memory's.

There a tensor core has nothing to share: each output reads channels of its own. A program computes a block of output
pixels by a block of output channels; a tap's inputs are loaded as bytes, sixteen channels at a time where a group has
one, and nothing is split or packed before.
"""

from math import gcd

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.direct_conv import DirectConv
from sparsecomp.lowering.tuning.cost import Cost, sizes, waves
from sparsecomp.lowering.tuning.template import Config, Template

_UNROLLED = tl.constexpr(32)
"""Most products of an output that are written out one after another, so that their loads do not wait for each other."""


@triton.jit
def direct_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, factor_ptr, out_ptr,
    M, D, H, W, OD, OH, OW, C, K,
    stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w,
    out_pixel, out_channel, out_image, weight_k, weight_c, weight_t, weight_r, weight_s, multiplier,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, CG: tl.constexpr, KG: tl.constexpr,
    HAS_BIAS: tl.constexpr, VECTOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[m, k] = multiplier · Σ_(t,r,s,c) x[pixel(m,t,r,s), k // KG · CG + c] · weight[k, c, t, r, s] + bias[k].

    x: (N, D, H, W, C) int8. weight: (K, CG, T, R, S) by its strides. M = N·OD·OH·OW. VECTOR divides C and K. out is
    addressed by image, pixel and channel strides. With factor_ptr a one stands for the factor times multiplier, be it
    finite or not, and -1 for NaN.
    """
    pid = tl.program_id(0)
    # what they are already, but Triton sees multiples now, and loads so many channels at a time
    C = C // VECTOR * VECTOR
    K = K // VECTOR * VECTOR
    blocks_n = tl.cdiv(K, BN)
    # channel blocks of the same pixels run side by side and share lines of the input in L2
    k = (pid % blocks_n) * BN + tl.arange(0, BN)
    col_ok = k < K
    rows = (pid // blocks_n) * BM + tl.arange(0, BM)
    row_ok = rows < M
    pixel = rows % (OD * OH * OW)
    image = rows // (OD * OH * OW)
    line = pixel // OW
    frame = (line // OH) * stride_d - pad_d
    # rows past the end get a height outside the image, so that their loads are masked like padding
    ih = tl.where(row_ok, line % OH * stride_h - pad_h, -(1 << 30))
    iw = (pixel % OW) * stride_w - pad_w
    x_row = (((image.to(tl.int64) * D + frame) * H + ih) * W + iw) * C
    x_ptrs = x_ptr + x_row[:, None] + (k // KG * CG)[None, :]
    weight_ptrs = weight_ptr + k.to(tl.int64) * weight_k
    if factor_ptr is not None:
        multiplier *= tl.load(factor_ptr).to(tl.float32)
    value = tl.zeros((BM, BN), tl.float32)
    if T * R * S * CG <= _UNROLLED:
        for i in tl.static_range(T * R * S * CG):
            value += _products(
                i, x_ptrs, frame, ih, iw, weight_ptrs, col_ok, multiplier, D, H, W, C, dil_d, dil_h, dil_w,
                weight_c, weight_t, weight_r, weight_s, R, S, CG, factor_ptr is not None,
            )  # fmt: skip
    else:
        for i in range(T * R * S * CG):
            value += _products(
                i, x_ptrs, frame, ih, iw, weight_ptrs, col_ok, multiplier, D, H, W, C, dil_d, dil_h, dil_w,
                weight_c, weight_t, weight_r, weight_s, R, S, CG, factor_ptr is not None,
            )  # fmt: skip
    if factor_ptr is None:
        value *= multiplier
    if HAS_BIAS:
        value += tl.load(bias_ptr + k, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    out_row = image.to(tl.int64) * out_image + pixel.to(tl.int64) * out_pixel
    out_ptrs = out_ptr + out_row[:, None] + (k.to(tl.int64) * out_channel)[None, :]
    tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


@triton.jit
def _products(
    i, x_ptrs, frame, ih, iw, weight_ptrs, col_ok, multiplier, D, H, W, C, dil_d, dil_h, dil_w,
    weight_c, weight_t, weight_r, weight_s, R: tl.constexpr, S: tl.constexpr, CG: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Of every output of the block with one channel of one tap, the i-th of them."""
    t = i // (R * S * CG)
    r = i // (S * CG) % R
    s = i // CG % S
    c = i % CG
    ok = ((ih + r * dil_h).to(tl.uint32) < H) & ((iw + s * dil_w).to(tl.uint32) < W)
    ok = ok & ((frame + t * dil_d).to(tl.uint32) < D)
    pixel = (t * dil_d * H + r * dil_h) * W + s * dil_w
    x = tl.load(x_ptrs + (pixel * C + c), mask=ok[:, None] & col_ok[None, :], other=0).to(tl.float32)
    if FACTOR:
        x = tl.where(x == 0.0, 0.0, tl.where(x < 0.0, float("nan"), multiplier))
    offset = c * weight_c + t * weight_t + r * weight_r + s * weight_s
    w = tl.load(weight_ptrs + offset, mask=col_ok, other=0.0).to(tl.float32)
    return x * w[None, :]


def _space(problem: DirectConv, device: Device) -> list[Config]:
    widths = [width for width in (16, 32, 64, 128) if width == 16 or problem.conv.k > width // 2]
    return [
        Config(BM=bm, BN=bn, warps=warps)
        for bm in (32, 64, 128, 256) for bn in widths for warps in (4, 8)
        if 16 <= bm * bn // (32 * warps) <= 64
    ]  # fmt: skip


def _prepare(problem: DirectConv, config: Config) -> Launch:
    p = problem.in_volumes
    # a block of channels begins in its group's first only where a group has one output and input
    vector = gcd(p.conv.c, 16) if p.conv.kg == p.conv.cg == 1 else 1
    constants = {**p.constants, "VECTOR": vector, "BM": config["BM"], "BN": config["BN"]}
    grid = p.grid(config["BM"], config["BN"])
    return Launch(direct_conv_kernel, grid, p.numbers, constants, num_warps=config["warps"])


_m, _k, _in_pixels, _c, _products_each, _itemsize = sizes(
    "conv.m conv.k conv.in_pixels conv.c products conv.itemsize"
)  # fmt: skip
_bm, _bn, _warps, _lanes = sizes("BM BN warps lanes")
_processors, _shared_rate, _bandwidth = sizes("processors shared_rate bandwidth")
_CONVERTED = 64
"""Bytes that a processor makes numbers of in a cycle (CUDA C++ Programming Guide, arithmetic throughput)."""
_LOADED = 128
"""Bytes that it loads in a cycle, of which a thread's weight takes four."""
_START = 3e-6
"""Seconds before the first load and after the last store."""

_cycles = (
    _bm * _bn / _CONVERTED  # every byte becomes a number
    + _bm * _bn / _lanes * 4 / _LOADED  # a load is at least four bytes wide, however few it takes
    + _warps * 32 * 16 * 4 / _LOADED  # each thread loads the weights of its channels
)
_work = waves(sympy.ceiling(_m / _bm) * sympy.ceiling(_k / _bn), _processors) * _products_each * _cycles
_traffic = (_in_pixels * _c + _itemsize * _m * _k) / _bandwidth

DIRECT_CONV = Template(
    name="direct_conv",
    op="direct_conv",
    sources=(direct_conv_kernel, _products),
    space=_space,
    # derived from the guide's rates, and fitted to no timing
    cost=Cost(
        bytes=sympy.Integer(0), seconds=sympy.sqrt((_work * _LOADED / _shared_rate) ** 2 + _traffic**2) + _START
    ),
    prepare=_prepare,
)
