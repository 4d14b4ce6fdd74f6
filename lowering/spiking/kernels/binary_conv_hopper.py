# pyright: reportPossiblyUnbound=false
"""The byte-split convolution for Hopper's warpgroup instructions, with its asynchrony under our own control.

`binary_conv` compiles for Hopper too, but Triton waits after every product whose accumulator is not float32
(rule 2.1 of its WGMMA pipeline pass), which leaves the tensor cores idle half of the time. Gluon issues the same
instructions and lets them overlap: loads run two steps ahead, products one step. Same arguments, same result.

Copies into shared memory are ordered before the products that read them by the copy wait and the block barrier alone,
the protocol of CUTLASS's multistage Hopper main loop (`sm90_mma_multistage_gmma_ss_warpspecialized.hpp`); a proxy
fence there drains the copies in flight and costs 7 % (H100).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.binary_conv import BinaryConv
from sparsecomp.lowering.spiking.binary_cost import binary_conv_cost
from sparsecomp.lowering.spiking.convolution import beyond_images
from sparsecomp.lowering.tuning.limits import fits_registers, fits_shared
from sparsecomp.lowering.tuning.template import Config, Template

# renamed in Triton 3.8
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _load_weights(
    smem, w_ptr, i, k0, kg, group, K, depth, more, plane0,
    PLANES: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy `PLANES` byte planes, starting at `plane0`, of one block of output channels; rows are plane-major.

    Zeros unless there are `more` steps: copies that read nothing are soon done.
    """
    row = gl.arange(0, PLANES * BN, layout=gl.SliceLayout(1, LAYOUT))
    chan = gl.arange(0, BK, layout=gl.SliceLayout(0, LAYOUT))
    col = k0 + row % BN
    base = ((plane0 + row // BN) * K + group * kg + col).to(gl.int64) * depth
    pointers = w_ptr + base[:, None] + (i + chan)[None, :]
    _copy(smem, pointers, mask=((col < kg) & more)[:, None] & (chan >= 0)[None, :])


@gluon.jit
def _load_inputs(smem, x_ptrs, ih, iw, chan, dh, dw, c, H, W, C, more):
    """Copy one tap of the block of pixels: channels c onwards of (ih + dh, iw + dw), zeros outside the image."""
    ok = ((ih + dh).to(gl.uint32) < H) & ((iw + dw).to(gl.uint32) < W) & more
    _copy(smem, x_ptrs + ((dh * W + dw) * C + c), mask=ok[:, None] & (chan >= 0)[None, :])


@gluon.jit
def _next_step(r, s, c, S: gl.constexpr, CP, BK: gl.constexpr):
    c += BK
    next_tap = c >= CP
    c = gl.where(next_tap, 0, c)
    s = gl.where(next_tap, s + 1, s)
    next_row = s >= S
    return gl.where(next_row, r + 1, r), gl.where(next_row, 0, s), c


@gluon.constexpr_function
def copies(BK, num_warps):
    """How the threads of a block share a copy of BK channels of its rows, 16 bytes each."""
    return gl.BlockedLayout([1, 16], [512 // BK, BK // 16], [num_warps, 1], [1, 0])


@gluon.jit
def image_and_pixel(rows, area, images, SLOTS: gl.constexpr):
    """Image and output pixel of rows: SLOTS steps of a pixel lie beside each other, each step of so many images."""
    pixel = rows // SLOTS % area
    image = rows // SLOTS // area
    if SLOTS > 1:
        image += rows % SLOTS * images
    return image, pixel


@gluon.jit
def products(
    x_ptr, w_ptr, rows, row_ok, images, k0, kg, group, H, W, OH, OW, C, K, CP,
    stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
    R: gl.constexpr, S: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, DIGITS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The block's sums, those by byte of the weight joined in float32, in the layout of the products."""
    SINGLE: gl.constexpr = DIGITS % 2
    PAIRS: gl.constexpr = DIGITS // 2
    copy_layout: gl.constexpr = copies(BK, num_warps)
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=BK, element_bitwidth=8, rank=2)
    # integer products are at most 128 columns wide in Triton
    PAIR_N: gl.constexpr = min(2 * BN, 128)
    pair_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, PAIR_N, 32])
    one_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BN, 32])
    cg = C // GROUPS
    chan = gl.arange(0, BK, layout=gl.SliceLayout(0, copy_layout))
    image, pixel = image_and_pixel(rows, OH * OW, images, SLOTS)
    ih = gl.where(row_ok, (pixel // OW) * stride_h - pad_h, -(1 << 30))
    iw = (pixel % OW) * stride_w - pad_w
    x_row = ((image.to(gl.int64) * H + ih) * W + iw) * C + group * cg
    x_ptrs = x_ptr + x_row[:, None] + chan[None, :]
    depth = R * S * CP
    steps = depth // BK

    a_smem = gl.allocate_shared_memory(gl.int8, [STAGES, BM, BK], shared)
    b_smem = gl.allocate_shared_memory(gl.int8, [STAGES, 2 * BN, BK], shared)
    if PAIRS == 2:
        e_smem = gl.allocate_shared_memory(gl.int8, [STAGES, 2 * BN, BK], shared)
        rest = gl.zeros((BM, 2 * BN), gl.int32, pair_acc)
    if SINGLE:
        e_smem = gl.allocate_shared_memory(gl.int8, [STAGES, BN, BK], shared)
        rest = gl.zeros((BM, BN), gl.int32, one_acc)
    acc = gl.zeros((BM, 2 * BN), gl.int32, pair_acc)

    # Loads run AHEAD steps before the products that use them.
    AHEAD: gl.constexpr = STAGES - 2
    r = 0
    s = 0
    c = 0
    for early in gl.static_range(AHEAD):
        more = early < steps
        _load_inputs(a_smem.index(early), x_ptrs, ih, iw, chan, r * dil_h, s * dil_w, c, H, W, C, more)
        i = early * BK
        _load_weights(b_smem.index(early), w_ptr, i, k0, kg, group, K, depth, more, 0, 2, BN, BK, copy_layout)
        if DIGITS > 2:
            rest_smem = e_smem.index(early)
            _load_weights(rest_smem, w_ptr, i, k0, kg, group, K, depth, more, 2, DIGITS - 2, BN, BK, copy_layout)
        async_copy.commit_group()
        r, s, c = _next_step(r, s, c, S, CP, BK)
    for step in range(steps):
        async_copy.wait_group(AHEAD - 1)
        stage = step % STAGES
        a = a_smem.index(stage)
        acc = warpgroup_mma(a, b_smem.index(stage).permute((1, 0)), acc, is_async=True)
        if DIGITS > 2:
            rest = warpgroup_mma(a, e_smem.index(stage).permute((1, 0)), rest, is_async=True)
        turn = step + AHEAD
        slot = turn % STAGES
        more = turn < steps
        _load_inputs(a_smem.index(slot), x_ptrs, ih, iw, chan, r * dil_h, s * dil_w, c, H, W, C, more)
        i = turn * BK
        _load_weights(b_smem.index(slot), w_ptr, i, k0, kg, group, K, depth, more, 0, 2, BN, BK, copy_layout)
        if DIGITS > 2:
            rest_smem = e_smem.index(slot)
            _load_weights(rest_smem, w_ptr, i, k0, kg, group, K, depth, more, 2, DIGITS - 2, BN, BK, copy_layout)
        async_copy.commit_group()
        r, s, c = _next_step(r, s, c, S, CP, BK)
        # the products of the step before are done, so their stage may be overwritten from the next step on
        if DIGITS > 2:
            acc, rest = warpgroup_mma_wait(2, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
    if DIGITS > 2:
        acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    # zeros of steps that there are not would land in what is written behind the loop and lies in the same memory;
    # the wait is behind the products, so that the barrier that comes with it is one for them as well
    async_copy.wait_group(0)

    first, second = gl.split(gl.permute(gl.reshape(acc, (BM, 2, BN)), (0, 2, 1)))
    value = gl.fma(first.to(gl.float32), 256.0, second.to(gl.float32))
    if PAIRS == 2:
        third, fourth = gl.split(gl.permute(gl.reshape(rest, (BM, 2, BN)), (0, 2, 1)))
        value = gl.fma(gl.fma(value, 256.0, third.to(gl.float32)), 256.0, fourth.to(gl.float32))
    if SINGLE:
        value = gl.fma(value, 256.0, gl.convert_layout(rest.to(gl.float32), value.type.layout))
    return value


@gluon.jit
def binary_conv_hopper_kernel(
    x_ptr, w_ptr, scale_ptr, weight_ptr, bias_ptr, factor_ptr, out_ptr, count_ptr, rows_ptr,
    M, H, W, OH, OW, C, K, CP,
    stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
    out_pixel, out_channel, out_image, weight_k, weight_c, weight_r, weight_s, multiplier, limit,
    R: gl.constexpr, S: gl.constexpr, GROUPS: gl.constexpr, DIGITS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """See `binary_conv_kernel`; here planes go through the tensor cores in pairs, side by side in one instruction.

    Channels of a group need no padding (CP = C/GROUPS), so that every copy is of 16 aligned bytes.
    """
    pid = gl.program_id(0)
    kg = K // GROUPS
    cg = C // GROUPS
    blocks_n = gl.cdiv(kg, BN)
    pm = pid // (blocks_n * GROUPS)
    pn = pid % (blocks_n * GROUPS)
    group = pn // blocks_n
    k0 = (pn % blocks_n) * BN
    if count_ptr is not None:
        count = gl.load(count_ptr)
        if rows_ptr is not None:
            limit = pm * BM
            M = count
        if count <= limit:
            return
    copy_layout: gl.constexpr = copies(BK, num_warps)
    rows = pm * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, copy_layout))
    row_ok = rows < M
    if rows_ptr is not None:
        rows = gl.load(rows_ptr + rows, mask=row_ok, other=0)
    value = products(
        x_ptr, w_ptr, rows, row_ok, 0, k0, kg, group, H, W, OH, OW, C, K, CP, stride_h, stride_w, pad_h, pad_w,
        dil_h, dil_w, R, S, 1, GROUPS, DIGITS, BM, BN, BK, STAGES, num_warps,
    )  # fmt: skip

    out_layout: gl.constexpr = value.type.layout
    out_rows = pm * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, out_layout))
    out_ok = out_rows < M
    if rows_ptr is not None:
        out_rows = gl.load(rows_ptr + out_rows, mask=out_ok, other=0)
    cols = k0 + gl.arange(0, BN, layout=gl.SliceLayout(0, out_layout))
    col_ok = cols < kg
    k = group * kg + cols
    scale = gl.load(scale_ptr + k, mask=col_ok, other=1.0)
    if factor_ptr is not None:
        multiplier *= gl.load(factor_ptr).to(gl.float32)
    if (gl.min((scale > 0.0).to(gl.int32), 0) == 0) | (multiplier * 0.0 != 0.0):
        value = float_products(
            x_ptr + group * cg, weight_ptr + k.to(gl.int64) * weight_k, out_rows, out_ok, col_ok, 0, multiplier, cg,
            H, W, OH, OW, C, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, weight_c, weight_r, weight_s,
            R, S, 1, factor_ptr is not None, BM, BN, out_layout,
        )  # fmt: skip
    else:
        value = value * scale[None, :] * multiplier
    if HAS_BIAS:
        value += gl.load(bias_ptr + k, mask=col_ok, other=0.0).to(gl.float32)[None, :]
    out_offset = (out_rows // (OH * OW)).to(gl.int64) * out_image + (out_rows % (OH * OW)).to(gl.int64) * out_pixel
    out_ptrs = out_ptr + out_offset[:, None] + (k.to(gl.int64) * out_channel)[None, :]
    gl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=out_ok[:, None] & col_ok[None, :])


@gluon.jit
def float_products(
    x_ptr, weight_ptrs, rows, row_ok, col_ok, images, multiplier, cg, H, W, OH, OW, C,
    stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, weight_c, weight_r, weight_s,
    R: gl.constexpr, S: gl.constexpr, SLOTS: gl.constexpr, FACTOR: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """As `float_sums` of `binary_conv`, in the layout of the result."""
    image, pixel = image_and_pixel(rows, OH * OW, images, SLOTS)
    ih = gl.where(row_ok, (pixel // OW) * stride_h - pad_h, -(1 << 30))
    iw = (pixel % OW) * stride_w - pad_w
    x_ptrs = x_ptr + ((image.to(gl.int64) * H + ih) * W + iw) * C
    value = gl.zeros((BM, BN), gl.float32, LAYOUT)
    for i in range(R * S * cg):
        r = i // (S * cg)
        s = i // cg % S
        c = i % cg
        ok = ((ih + r * dil_h).to(gl.uint32) < H) & ((iw + s * dil_w).to(gl.uint32) < W)
        x = gl.load(x_ptrs + ((r * dil_h * W + s * dil_w) * C + c), mask=ok, other=0).to(gl.float32)
        offset = c.to(gl.int64) * weight_c + r * weight_r + s * weight_s
        w = gl.load(weight_ptrs + offset, mask=col_ok, other=0.0).to(gl.float32)
        if FACTOR:
            x = gl.where(x == 0.0, 0.0, gl.where(x < 0.0, float("nan"), multiplier))
        else:
            x *= multiplier
        value = gl.fma(x[:, None], w[None, :], value)
    return value


def why_no_products(problem: BinaryConv, device: Device) -> str | None:
    """Why the products cannot run on a device, None if they can."""
    if not device.is_hopper:
        return f"needs compute capability 9.x, not {device.capability or 'no GPU'}"
    if problem.conv.cp != problem.conv.cg:
        return f"{problem.conv.cg} channels a group would need padding to {problem.conv.cp}"
    return beyond_images(problem.conv)


def product_blocks(problem: BinaryConv, device: Device) -> list[Config]:
    """Blocks of pixels by output channels of a group."""
    p = problem
    narrow = p.conv.kg <= 32
    return [
        Config(BM=bm, BN=bn, BK=bk, warps=warps, stages=stages)
        for bm, warps in ((64, 4), (128, 4), (128, 8), (256, 8)) for bn in ((32,) if narrow else (64, 128))
        for bk in ((64, 128) if p.conv.cp % 64 == 0 else (32,)) for stages in (3, 4, 6)
        if p.conv.cp % bk == 0
        and fits_registers(bm * bn * p.digits, warps)
        and fits_shared(stages * bk * (bm + p.digits * bn), device)
    ]  # fmt: skip


def _prepare(problem: BinaryConv, config: Config) -> Launch:
    p = problem
    constants = {**p.constants, **{name: config[name] for name in ("BM", "BN", "BK")}}
    constants |= {"STAGES": config["stages"], "num_warps": config["warps"]}
    return Launch(binary_conv_hopper_kernel, p.grid(config["BM"], config["BN"]), p.numbers, constants)


SOURCES = (products, image_and_pixel, _load_weights, _load_inputs, _next_step, float_products)
"""What other kernels around these products are made of, too."""

BINARY_CONV_HOPPER = Template(
    name="binary_conv_hopper",
    op="binary_conv",
    sources=(binary_conv_hopper_kernel, *SOURCES),
    refuse=why_no_products,
    space=product_blocks,
    cost=binary_conv_cost(hopper=True),
    prepare=_prepare,
)
