"""Event-driven convolution: each non-zero input adds its rows of the weight to the output pixels that see it.

Serves sparse inputs at any arrangement: time grows with the number of events, the sums are of float32 weights, and a
pixel adds its events in a fixed order, so results repeat bit for bit. An event is a 32-bit word: the value's bfloat16
bits (exact for integers in [-128, 127]) above 16 bits of `x·C + c`, its place in its image row. The events of an
image row lie together and in order; `starts` tells where those of each pixel begin. The events of S adjacent pixels
are then one stretch of the list, whose weight rows follow from the place alone.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.convolution import as_image, beyond_images
from sparsecomp.lowering.spiking.event_conv import TRIAL_DENSITY, Accumulate, FindEvents, PackEvents
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def events_kernel(
    x_ptr, events_ptr, starts_ptr, total_ptr, W, C, capacity, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """The prescan of one image row, of channels-last memory: its events and where each pixel's begin.

    x: (rows, W, C). events: (capacity,) int32. starts: (rows, W + 1) int32. total: (1,) int32, zero before the launch
    and the number of events after it; when that exceeds `capacity`, `events` is incomplete and must not be read.
    WORDS = ⌈C/32⌉ words of 32 flags a pixel; BLOCK ≥ W·WORDS.
    """
    row = tl.program_id(0)
    word = tl.arange(0, BLOCK)
    lane = tl.arange(0, 32)
    pixel = word // WORDS
    first = (word % WORDS) * 32
    inside = pixel < W
    src = x_ptr + row.to(tl.int64) * W * C
    place = pixel * C + first
    mask = inside[:, None] & ((first[:, None] + lane[None, :]) < C)
    x = tl.load(src + place[:, None] + lane[None, :], mask=mask, other=0)
    flags = tl.sum(tl.where(x != 0, (1 << lane)[None, :], 0), 1).to(tl.uint32, bitcast=True)
    ones = _popcount(flags)
    end = tl.cumsum(ones, 0)
    count = tl.sum(ones, 0)
    base = tl.atomic_add(total_ptr, count)
    starts = starts_ptr + row.to(tl.int64) * (W + 1)
    tl.store(starts + tl.zeros_like(word), base, mask=word == 0)
    tl.store(starts + pixel + 1, base + end, mask=inside & (word % WORDS == WORDS - 1))
    # an image row that does not fit is dropped whole: the list is not used then
    if base + count <= capacity:
        at = base + end - ones
        for _ in range(tl.max(ones, 0)):
            left = flags != 0
            bit = flags & (0 - flags)  # not ~flags + 1: Triton before 3.9 does not interpret ~ of unsigned numbers
            # the exponent of a power of two is the number of its bit
            index = (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            where = place + index
            # still in the first-level cache, and few
            value = tl.load(src + where, mask=left, other=0).to(tl.float32).to(tl.int32, bitcast=True)
            tl.store(events_ptr + at, (value & -65536) | where, mask=left)
            flags = flags ^ bit
            at += 1


@triton.jit
def _popcount(v):
    """Set bits of each uint32, as int32."""
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    return ((v * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def event_conv_kernel(
    events_ptr, starts_ptr, total_ptr, w_ptr, bias_ptr, factor_ptr, out_ptr, capacity,
    M, H, W, OH, OW, C, K,
    stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
    out_pixel, out_channel, out_image, multiplier,
    R: tl.constexpr, S: tl.constexpr, SPAN: tl.constexpr, HAS_BIAS: tl.constexpr,
    P: tl.constexpr, E: tl.constexpr, KS: tl.constexpr,
):  # fmt: skip
    """out[m, k] = f · Σ over events in the window of m: value · w[row(event), k] + bias[k]; nothing if over capacity.

    f = multiplier · factor[0]. w: (⌈K/KS⌉, R·S·C, KS) as `pack_event_weight_kernel` writes it. SPAN: adjacent input
    columns that one stretch of the event list covers, S without dilation, else 1. A block is P output pixels by KS
    channels, E events at a time; programs walk the blocks, all blocks of the same channels first, whose weights then
    stay in the first-level cache.
    """
    if tl.load(total_ptr) > capacity:
        return
    if factor_ptr is not None:
        multiplier *= tl.load(factor_ptr).to(tl.float32)
    blocks_p = tl.cdiv(M, P)
    for block in range(tl.program_id(0), blocks_p * tl.cdiv(K, KS), tl.num_programs(0)):
        rows = (block % blocks_p) * P + tl.arange(0, P)
        slab = block // blocks_p
        w_base = w_ptr + slab.to(tl.int64) * (R * S * C) * KS
        value = _gather(
            events_ptr, starts_ptr, w_base, rows, M, H, W, OH, OW, C, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
            R, S, SPAN, P, E, KS,
        )  # fmt: skip
        k = slab * KS + tl.arange(0, KS)
        value *= multiplier
        if HAS_BIAS:
            value += tl.load(bias_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        image = (rows // (OH * OW)).to(tl.int64)
        pixel = (rows % (OH * OW)).to(tl.int64)
        out_row = image * out_image + pixel * out_pixel
        out_ptrs = out_ptr + out_row[:, None] + (k.to(tl.int64) * out_channel)[None, :]
        tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (k < K)[None, :])


@triton.jit
def _gather(
    events_ptr, starts_ptr, w_base, rows, M, H, W, OH, OW, C, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
    R: tl.constexpr, S: tl.constexpr, SPAN: tl.constexpr, P: tl.constexpr, E: tl.constexpr, KS: tl.constexpr,
):  # fmt: skip
    """The sums (P, KS) of the weight rows of all events that `rows` see.

    A window meets the list in R·S/SPAN stretches. They are walked as one run, so that every pixel's loop is as short as
    its number of events and all the starts are loaded at once.
    """
    pixel = rows % (OH * OW)
    image = rows // (OH * OW)
    ih0 = (pixel // OW) * stride_h - pad_h
    iw0 = (pixel % OW) * stride_w - pad_w
    STEPS: tl.constexpr = S // SPAN
    total = tl.zeros((P,), tl.int32)
    begins = ()
    shifts = ()
    weights = ()
    for q in tl.static_range(R * STEPS):
        ih = ih0 + (q // STEPS) * dil_h
        iw = iw0 + (q % STEPS) * dil_w
        low = tl.maximum(iw, 0)
        high = tl.minimum(iw + SPAN, W)
        meets = (rows < M) & (ih >= 0) & (ih < H) & (low < high)
        starts = starts_ptr + (image * H + ih).to(tl.int64) * (W + 1)
        start = tl.load(starts + low, mask=meets, other=0)
        stop = tl.load(starts + high, mask=meets, other=0)
        begins = begins + (total,)
        shifts = shifts + (start - total,)
        weights = weights + ((q * SPAN - iw) * C,)
        total += stop - start
    col = tl.arange(0, KS)
    acc = tl.zeros((P, E, KS), tl.float32)
    for j in range(0, tl.max(total, 0), E):
        turn = j + tl.arange(0, E)
        at = tl.broadcast_to(shifts[0][:, None], (P, E))
        w_row = tl.broadcast_to(weights[0][:, None], (P, E))
        for q in tl.static_range(1, R * STEPS):
            past = turn[None, :] >= begins[q][:, None]
            at = tl.where(past, shifts[q][:, None], at)
            w_row = tl.where(past, weights[q][:, None], w_row)
        ok = turn[None, :] < total[:, None]
        event = tl.load(events_ptr + at + turn[None, :], mask=ok, other=0)
        value = (event & -65536).to(tl.float32, bitcast=True)
        offset = (w_row + (event & 65535)) * KS
        w = tl.load(w_base + offset[:, :, None] + col[None, None, :], mask=ok[:, :, None], other=0.0)
        acc += w.to(tl.float32) * value[:, :, None]
    return tl.sum(acc, 1)


@triton.jit
def pack_event_weight_kernel(
    w_ptr, scale_ptr, factor_ptr, out_ptr, total_ptr, K, C, DEPTH, stride_k, stride_c, stride_r, stride_s, over,
    S: tl.constexpr, BD: tl.constexpr, KS: tl.constexpr,
):  # fmt: skip
    """out[slab, (r·S + s)·C + c, j] = w[slab·KS + j, c, r, s], zero past K.

    DEPTH = R·S·C. Events leave out what zeros are multiplied with, which only a finite weight and factor allow: where a
    scale of `split_weight` is NaN, or the factor is not finite, the number of events becomes `over`, which no list
    holds.
    """
    slab = tl.program_id(1)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    k = slab * KS + tl.arange(0, KS)
    tap = d // C
    offset = (d % C) * stride_c + (tap // S) * stride_r + (tap % S) * stride_s
    mask = (d < DEPTH)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + offset.to(tl.int64)[:, None] + (k.to(tl.int64) * stride_k)[None, :], mask=mask, other=0.0)
    dst = out_ptr + (slab.to(tl.int64) * DEPTH + d)[:, None] * KS + tl.arange(0, KS)[None, :]
    tl.store(dst, w, mask=(d < DEPTH)[:, None])
    if tl.program_id(0) == 0:
        rest = tl.sum(tl.load(scale_ptr + k, mask=k < K, other=0.0), 0) * 0.0
        if factor_ptr is not None:
            rest += tl.load(factor_ptr).to(tl.float32) * 0.0
        if rest != 0.0:
            tl.atomic_max(total_ptr, over)


def _prepare_find(problem: FindEvents, config: Config) -> Launch:
    rows, w, c, capacity, _ = problem
    words = triton.cdiv(c, 32)
    block = triton.next_power_of_2(w * words)
    constants = {"WORDS": words, "BLOCK": block}
    return Launch(events_kernel, (rows,), (w, c, capacity), constants, num_warps=min(max(block // 32, 1), 16))


def _prepare_pack(problem: PackEvents, config: Config) -> Launch:
    p, weight = problem, problem.weight
    grid = (triton.cdiv(p.depth, 32), triton.cdiv(weight.outer, p.block))
    numbers = (weight.outer, weight.c, p.depth, *weight.numbers, 2**30)
    constants = {"S": as_image(weight.size, 1)[-1], "BD": 32, "KS": p.block}
    return Launch(pack_event_weight_kernel, grid, numbers, constants)


def _prepare_accumulate(problem: Accumulate, config: Config) -> Launch:
    p, c = problem, problem.conv
    blocks = triton.cdiv(c.m, config["P"]) * triton.cdiv(c.k, p.block)
    span = c.window.kernel[-1] if c.window.dilation[-1] == 1 else 1
    constants = {**c.constants, "SPAN": span, "P": config["P"], "E": config["E"], "KS": p.block}
    grid = (min(blocks, p.processors * config["programs"]),)
    return Launch(event_conv_kernel, grid, p.numbers, constants, num_warps=config["warps"])


def _accumulate_space(problem: Accumulate, device: Device) -> list[Config]:
    """Few pixels of all channels a program; whole memory sectors of one channel where the output is channels-first."""
    pixels = (1, 2, 4) if problem.conv.out.channel == 1 else (4, 8, 16)
    return [
        Config(P=p, E=e, warps=warps, programs=128)
        for p in pixels for e in (1, 2, 4) for warps in (1, 2, 4)
        if p * e * problem.block <= 2048 * warps
    ]  # fmt: skip


_rows, _w, _c, _itemsize = sizes("rows w c itemsize")
_k, _depth, _weight_itemsize, _weight_rows = sizes("weight.outer depth weight.itemsize weight_rows")
_m, _channels, _filters, _taps, _out_itemsize = sizes("conv.m conv.c conv.k conv.taps conv.itemsize")
_p, _e, _warps, _block, _processors, _channel = sizes("P E warps block processors conv.out.channel")
# what was best on an H100: as many pixels as fill 192 lanes with channels, or 8 of channels-first; two events; one
# warp; what is twice or half of that takes some 15 % more
_best_pixels = sympy.Piecewise((sympy.Max(sympy.floor(192 / _block), 1), sympy.Eq(_channel, 1)), (8, True))
_misfit = abs(sympy.log(_p / _best_pixels)) + abs(sympy.log(_e / 2)) + sympy.log(_warps)
# of one processor: 12 ns a pixel to find its stretches of the list, and the rows of the weight
_weight_bytes = _taps * _channels * _filters * _out_itemsize
_accumulating = _m / _processors * (1.2e-8 + TRIAL_DENSITY * _weight_bytes / _weight_rows)

FIND_EVENTS = Template(
    name="find_events",
    op="find_events",
    sources=(events_kernel, _popcount),
    cost=Cost(bytes=_rows * _w * _c * _itemsize),
    prepare=_prepare_find,
)

PACK_EVENTS = Template(
    name="pack_events",
    op="pack_events",
    sources=(pack_event_weight_kernel,),
    cost=Cost(bytes=2 * _k * _depth * _weight_itemsize),
    prepare=_prepare_pack,
)

ACCUMULATE = Template(
    name="event_conv",
    op="event_conv",
    sources=(event_conv_kernel, _gather),
    refuse=lambda problem, device: beyond_images(problem.conv),
    space=_accumulate_space,
    cost=Cost(
        bytes=_m * _filters * _out_itemsize,
        seconds=3e-6 + _accumulating * (1 + 0.2 * _misfit),
    ),
    prepare=_prepare_accumulate,
)
