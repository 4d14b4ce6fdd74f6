"""Float32 convolutions of images on 16-bit tensor cores, by three products of halves (see `halves_product`).

The weight is split ahead of the product, a row an output channel. The input is split on the way: a program finds the
largest number that each of its output pixels sees, which gives that pixel's scale, and walks the window again; where
one step holds all of it, it keeps what it has loaded. So no scale is known to the host, and none is shared by pixels
that differ. A block with a sum that is not finite, be it for what operands hold or for numbers of too wide a range, is
computed anew in float32 by the same program.
"""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.sparse.kernels.halves_product import (
    SPLIT_SOURCES,
    finite_size,
    halved,
    lift_of,
    padded,
    power_of_two,
    split_launch,
    times_both,
)
from sparsecomp.lowering.spiking.convolution import as_image
from sparsecomp.lowering.spiking.halves_conv import HalvesConv
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.limits import fits_registers, fits_shared
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def tap_of(j, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, CHANNELS_INNER: tl.constexpr):
    """Channel, line and column of the window of the j-th weight of a channel, as they lie."""
    if CHANNELS_INNER:
        return j % C, j // (C * S), j // C % S
    else:
        return j // (R * S), j // S % R, j % S


@triton.jit
def seen(
    x_ptr, corner, top, left, start, x_c, x_h, x_w, H, W, dil_h, dil_w,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, CHANNELS_INNER: tl.constexpr, BK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """What pixels see through BK places of the window from `start` on, zeros beyond the image and the window.

    corner: offset of the window's first place, at (top, left). P is the axis of places: (pixels, BK) for 1,
    (BK, pixels) for 0.
    """
    place = start + tl.arange(0, BK)
    channel, line, column = tap_of(place, C, R, S, CHANNELS_INNER)
    height = tl.expand_dims(top, P) + tl.expand_dims(line * dil_h, 1 - P)
    width = tl.expand_dims(left, P) + tl.expand_dims(column * dil_w, 1 - P)
    inside = (height.to(tl.uint32) < H) & (width.to(tl.uint32) < W) & tl.expand_dims(place < C * R * S, 1 - P)
    offset = channel * x_c + line * dil_h * x_h + column * dil_w * x_w
    return tl.load(x_ptr + (tl.expand_dims(corner, P) + tl.expand_dims(offset, 1 - P)), mask=inside, other=0.0)


@triton.jit
def halves_conv_kernel(
    x_ptr, weight_ptr, halves_ptr, factor_ptr, bias_ptr, out_ptr,
    M, H, W, OH, OW, K, x_n, x_c, x_h, x_w, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
    out_pixel, out_channel, out_image, width, low,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, CHANNELS_INNER: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out = x convolved with weight, plus bias (or None); M = N·OH·OW output pixels, K channels.

    x by its strides. weight: (K, C·R·S) float32, whose places `tap_of` reads; halves and factor are what
    `split_rows_kernel` makes of it. P: which axis of a tile is its places; see `seen`.
    """
    blocks = tl.cdiv(K, BN)
    # blocks of channels of the same pixels run side by side and share their input in L2
    channel = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    row = tl.program_id(0) // blocks * BM + tl.arange(0, BM)
    pixel = row % (OH * OW)
    image = row // (OH * OW)
    # rows past the end see nothing but what is above the image, so that their loads are masked like padding
    top = tl.where(row < M, pixel // OW * stride_h - pad_h, -R * dil_h)
    left = pixel % OW * stride_w - pad_w
    # 64 bits a number that is loaded would take the registers of the sums
    corner = image * x_n + top * x_h + left * x_w
    weights = halves_ptr + tl.expand_dims(channel.to(tl.int64) * width, 1 - P)
    weight_ok = tl.expand_dims(channel < K, 1 - P)
    if C * R * S <= BK:
        patch = seen(x_ptr, corner, top, left, 0, x_c, x_h, x_w, H, W, dil_h, dil_w, C, R, S, CHANNELS_INNER, BK, P)
        largest = finite_size(patch)
    else:
        largest = tl.zeros((BM, BK) if P == 1 else (BK, BM), tl.float32)
        for start in range(0, C * R * S, BK):
            patch = seen(
                x_ptr, corner, top, left, start, x_c, x_h, x_w, H, W, dil_h, dil_w, C, R, S, CHANNELS_INNER, BK, P
            )
            largest = tl.maximum(largest, finite_size(patch))
    lift = lift_of(tl.max(largest, P))
    scale = tl.expand_dims(power_of_two(lift), P)
    large = tl.zeros((BM, BN) if P == 1 else (BN, BM), tl.float32)
    small = tl.zeros((BM, BN) if P == 1 else (BN, BM), tl.float32)
    for start in range(0, C * R * S, BK):
        if C * R * S > BK:
            patch = seen(
                x_ptr, corner, top, left, start, x_c, x_h, x_w, H, W, dil_h, dil_w, C, R, S, CHANNELS_INNER, BK, P
            )
        high, less = halved(patch * scale, patch == 0.0)
        at = weights + tl.expand_dims(start + tl.arange(0, BK), P)
        w_high = tl.load(at, mask=weight_ok, other=0.0)
        w_less = tl.load(at + low, mask=weight_ok, other=0.0)
        # tensor cores cut sums off instead of rounding them, so that a long sum is not left to them
        if P == 1:
            small = tl.dot(high, w_less, small)
            small = tl.dot(less, w_high, small)
            large += tl.dot(high, w_high) * 2048.0
        else:
            small = tl.dot(w_less, high, small)
            small = tl.dot(w_high, less, small)
            large += tl.dot(w_high, high) * 2048.0
    acc = (large + small) * 0.00048828125  # 2^-11
    if tl.max(tl.max((acc * 0.0 != 0.0).to(tl.int32), 1), 0) != 0:
        acc = tl.zeros_like(acc)
        for j in range(C * R * S):
            c, line, column = tap_of(j, C, R, S, CHANNELS_INNER)
            inside = ((top + line * dil_h).to(tl.uint32) < H) & ((left + column * dil_w).to(tl.uint32) < W)
            offset = corner + (c * x_c + line * dil_h * x_h + column * dil_w * x_w)
            value = tl.load(x_ptr + offset, mask=inside, other=0.0)
            weight = tl.load(weight_ptr + channel.to(tl.int64) * (C * R * S) + j, mask=channel < K, other=0.0)
            acc += tl.expand_dims(value, P) * tl.expand_dims(weight, 1 - P)
    else:
        factor = tl.load(factor_ptr + channel, mask=channel < K, other=0.0)
        acc = times_both(acc, tl.expand_dims(power_of_two(-lift), P), tl.expand_dims(factor, 1 - P))
    if bias_ptr is not None:
        acc += tl.expand_dims(tl.load(bias_ptr + channel, mask=channel < K, other=0.0), 1 - P)
    to_pixel = tl.expand_dims(image.to(tl.int64) * out_image + pixel.to(tl.int64) * out_pixel, P)
    to_channel = tl.expand_dims(channel.to(tl.int64) * out_channel, 1 - P)
    tl.store(out_ptr + to_pixel + to_channel, acc, mask=tl.expand_dims(row < M, P) & weight_ok)


def _space(problem: HalvesConv, device: Device) -> list[Config]:
    tall = (32,) if problem.conv.k <= 32 else (64, 128)
    return [
        Config(BM=bm, BN=bn, BK=bk, warps=warps, stages=stages)
        for bm in (64, 128, 256) for bn in tall for bk in (32, 64) for warps in (4, 8) for stages in (2, 3)
        if fits_registers(3 * bm * bn + 2 * bm * bk, warps) and fits_shared(stages * bk * (bm + bn) * 4, device)
    ]  # fmt: skip


def _prepare(problem: HalvesConv, config: Config) -> Launches:
    """Tensors: the operation's four, halves (4) and factors (5) of the weight."""
    p, c = problem, problem.conv
    width = padded(p.depth)
    split = split_launch((1, c.k, p.depth), (0, p.depth, 1), c.k, width)
    out_size, (r, s) = as_image(c.out_size, 1), c.window.kernel
    numbers = (c.m, *c.size, *out_size, c.k, *p.x, *c.geometry, width, c.k * width)
    constants = {"C": c.c, "R": r, "S": s, "CHANNELS_INNER": p.channels_inner, "P": int(not p.pixels_inner)}
    constants |= {name: config[name] for name in ("BM", "BN", "BK")}
    grid = (triton.cdiv(c.m, config["BM"]) * triton.cdiv(c.k, config["BN"]),)
    options = {"num_warps": config["warps"], "num_stages": config["stages"]}
    product = Launch(halves_conv_kernel, grid, numbers, constants, **options)
    workspaces = [((2, c.k, width), torch.float16), ((c.k,), torch.float32)]
    return Launches(workspaces, [Step(split, (1, 4, 5)), Step(product, (0, 1, 4, 5, 2, 3))])


_n, _m, _k, _c, _depth, _in_pixels = sizes("conv.n conv.m conv.k conv.c depth conv.in_pixels")
_bm, _bn, _bk, _warps = sizes("BM BN BK warps")
_half, _tile_halves, _shared_rate, _processors = sizes("half tile_halves shared_rate processors")
_walked = sympy.ceiling(_depth / _bk) * _bk
_blocks = sympy.ceiling(_m / _bm) * sympy.ceiling(_k / _bn)
# a step holds the whole window, or the input is loaded twice: number by number, as from shared memory
_loads = _blocks * _bm * _walked * 4 * sympy.Piecewise((1, _depth <= _bk), (2, True)) / (_shared_rate * _processors)
_products = 2 * _blocks * _bm * _bn * _walked / (_tile_halves * _half)
# a thread with few numbers of a tile has little to wait with
_thread = 1e-8 * abs(sympy.log(_bm * _bn / (_warps * 32 * 32)))

HALVES_CONV = Template(
    name="halves_conv",
    op="halves_conv",
    sources=(halves_conv_kernel, seen, tap_of, times_both, *SPLIT_SOURCES),
    space=_space,
    # nothing is fitted to a measurement yet: loads, products and traffic count as if none overlapped another
    cost=Cost(
        bytes=4 * (_in_pixels * _c + _m * _k), launches=sympy.Integer(2), seconds=_loads + _products + _thread,
    ),
    prepare=_prepare,
)  # fmt: skip
