"""Weights split in signed bytes, one launch a layer: `sparsecomp.reference.digits.split_weight` on CUDA."""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.convolution import kernel_constants
from sparsecomp.lowering.spiking.packing import PackWeight
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template
from sparsecomp.reference.digits import digit_bits, largest_mantissa


@triton.jit
def pack_weight_kernel(
    w_ptr, planes_ptr, scale_ptr, K, C, CP, stride_k, stride_c, stride_r, stride_s, spread,
    R: tl.constexpr, S: tl.constexpr, DIGITS: tl.constexpr, BITS: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """planes[d, k, (r·S + s)·CP + c] and scale[k] of one output channel k; see `split_weight` for the values.

    TOP is the largest number of DIGITS balanced bytes as a share of 2^BITS, BITS = 8·DIGITS - 1.
    """
    k = tl.program_id(0).to(tl.int64)
    depth = R * S * CP
    largest = tl.zeros((BLOCK,), tl.float32)
    finite = tl.full((BLOCK,), 1, tl.int32)
    for start in range(0, depth, BLOCK):
        w = _channel(w_ptr, k, start, depth, C, CP, stride_k, stride_c, stride_r, stride_s, S, BLOCK)
        # a comparison with NaN is false, so NaN counts as not finite
        finite = finite & (tl.abs(w) < float("inf")).to(tl.int32)
        largest = tl.maximum(largest, tl.abs(w))
    amax = tl.max(largest, 0)
    all_finite = tl.min(finite, 0) == 1
    bits = amax.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    # a subnormal number has its exponent's bits clear, and counts as below any scale there is
    exponent = tl.where(amax == 0.0, 0, (bits >> 23) - 126) - BITS + (mantissa > TOP).to(tl.int32)
    biased = tl.minimum(tl.maximum(exponent + 127, 1), 254)
    inverse = ((254 - biased) << 23).to(tl.float32, bitcast=True)
    used = tl.zeros((BLOCK,), tl.int32)
    near = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, depth, BLOCK):
        w = _channel(w_ptr, k, start, depth, C, CP, stride_k, stride_c, stride_r, stride_s, S, BLOCK)
        used += (w != 0.0).to(tl.int32)
        near += ((w != 0.0) & (tl.abs(w) * spread >= amax)).to(tl.int32)
        q = w * inverse
        q = tl.where(tl.abs(q) < 8388608.0, tl.floor(q + 0.5), q)
        q = tl.where(all_finite, q, 0.0).to(tl.int32)
        j = start + tl.arange(0, BLOCK)
        for d in tl.static_range(DIGITS - 1, -1, -1):
            digit = ((q + 128) & 255) - 128
            tl.store(planes_ptr + (d * K + k) * depth + j, digit.to(tl.int8), mask=j < depth)
            q = (q - digit) >> 8
    count = tl.sum(used, 0)
    lost = (2 * tl.sum(near, 0) <= count) | (exponent < -126)
    scale = (biased << 23).to(tl.float32, bitcast=True)
    scale = tl.where(lost & (count > 0), -scale, scale)
    tl.store(scale_ptr + k, tl.where(all_finite, scale, float("nan")))


@triton.jit
def _channel(
    w_ptr, k, start, depth, C, CP, stride_k, stride_c, stride_r, stride_s, S: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of a channel's weights in the packed order, channels innermost, zeros in the padding."""
    j = start + tl.arange(0, BLOCK)
    tap = j // CP
    c = j % CP
    offset = k * stride_k + c * stride_c + (tap // S) * stride_r + (tap % S) * stride_s
    return tl.load(w_ptr + offset, mask=(j < depth) & (c < C), other=0.0).to(tl.float32)


def _prepare(problem: PackWeight, config: Config) -> Launch:
    p, weight = problem, problem.weight
    constants = {**kernel_constants(weight.size), "DIGITS": p.digits, "BITS": digit_bits(p.digits)}
    constants |= {"TOP": largest_mantissa(p.digits), "BLOCK": config["BLOCK"]}
    numbers = (weight.outer, weight.c, p.cp, *weight.numbers, p.spread)
    return Launch(pack_weight_kernel, (weight.outer,), numbers, constants, num_warps=config["warps"])


_k, _c, _taps, _itemsize = sizes("weight.outer weight.c weight.pixels weight.itemsize")
_digits, _block, _warps = sizes("digits BLOCK warps")

PACK_WEIGHT = Template(
    name="pack_weight",
    op="pack_weight",
    sources=(pack_weight_kernel, _channel),
    space=lambda problem, device: [
        Config(BLOCK=block, warps=warps) for block in (512, 1024, 2048, 4096) for warps in (4, 8)
    ],
    # a program reads its channel twice, a block at a time; 3 µs to start and end; 1024 to 2048 elements by 4 warps were
    # best on an H100, if by less than its timings of so short a kernel vary
    cost=Cost(
        bytes=_k * _c * _taps * (2 * _itemsize + _digits),
        seconds=3e-6 + 1e-8 * (abs(sympy.log(_block / 1400)) + abs(sympy.log(_warps / 4)) / 2),
    ),
    prepare=_prepare,
)
