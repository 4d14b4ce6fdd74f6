"""Float32 products on 16-bit tensor cores: each operand is written as a sum of two float16 matrices.

Three float16 products cost about half of three TF32 ones, and none of the work of splitting numbers between them. A
number x is high + low / 2^11, which keeps 22 bits of it; of the four products low · low is left out, so that a product
of numbers is wrong by less than 2^-21 of itself (Ootomo and Yokota, "Recovering single precision accuracy from Tensor
Cores while surpassing the FP32 theoretical peak performance", IJHPCA 2022, section 4). Float16 has few exponents, hence
each row is scaled by a power of two that brings its largest number near 2^15. What would then lose more than 20 bits,
because it is smaller than 2^-30 of that, is written as NaN: it spoils the sums it is part of, and whoever uses this
computes sums that are not finite in another way. So no wide range of numbers goes wrong silently.
"""

import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels.dense_product import fitting_tiles, tile_at, tile_of
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, finish, flag
from sparsecomp.lowering.tuning.limits import fits_registers, fits_shared
from sparsecomp.lowering.tuning.template import Config

WIDTH = 64
"""The shared dimension of both operands is padded with zeros to a multiple of this."""
_TILES = (
    (128, 128, 64, 8, 3), (128, 128, 32, 8, 4), (64, 128, 64, 4, 3), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4),
    (128, 64, 32, 8, 4), (64, 64, 64, 4, 4), (64, 32, 64, 4, 4), (64, 16, 64, 4, 4), (32, 16, 64, 4, 4),
)  # fmt: skip


@triton.jit
def power_of_two(exponent):
    """2^exponent in float32, of an int32 from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def lift_of(largest):
    """The exponent e, at most 126, with 2^14 <= largest · 2^e < 2^15."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.minimum(14 - exponent, 126)


@triton.jit
def finite_size(x):
    """|x|, and 0 for NaN and infinity."""
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)


@triton.jit
def halved(x, is_zero):
    """x as high + low / 2048, both float16; high is NaN where that keeps less than 20 bits."""
    high = x.to(tl.float16)
    low = ((x - high.to(tl.float32)) * 2048.0).to(tl.float16)
    # 2^-16: below it the steps of low are more than 2^-20 of x
    return tl.where(is_zero | (tl.abs(x) >= 1.52587890625e-05), high, float("nan")), low


@triton.jit
def split_rows_kernel(
    x_ptr, halves_ptr, factor_ptr, R, L, x_b, x_r, x_l, rows, width, low, BR: tl.constexpr, BL: tl.constexpr
):  # fmt: skip
    """halves: float16 (2, batch, rows, width), high at 0 and low at `low`, of x (batch, R, L), zeros around it.

    factor: float32 (batch, rows). x = factor · (high + low / 2048); 0 for a row of zeros.
    """
    blocks = tl.cdiv(rows, BR)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * BR + tl.arange(0, BR)
    place = tl.arange(0, BL)
    x = x_ptr + batch * x_b + (row.to(tl.int64) * x_r)[:, None]
    largest = tl.zeros((BR, BL), tl.float32)
    for start in range(0, L, BL):
        at = (start + place)[None, :]
        value = tl.load(x + at.to(tl.int64) * x_l, mask=(row < R)[:, None] & (at < L), other=0.0)
        largest = tl.maximum(largest, finite_size(value))
    largest = tl.max(largest, 1)
    lift = lift_of(largest)
    factor = tl.where(largest > 0.0, power_of_two(-lift), 0.0)
    tl.store(factor_ptr + batch * rows + row, factor, mask=row < rows)
    halves = halves_ptr + (batch * rows + row.to(tl.int64))[:, None] * width
    for start in range(0, width, BL):
        at = (start + place)[None, :]
        value = tl.load(x + at.to(tl.int64) * x_l, mask=(row < R)[:, None] & (at < L), other=0.0)
        high, small = halved(value * power_of_two(lift)[:, None], value == 0.0)
        inside = (row < rows)[:, None] & (at < width)
        tl.store(halves + at, high, mask=inside)
        tl.store(halves + low + at, small, mask=inside)


@triton.jit
def halves_product_kernel(
    a_ptr, b_ptr, row_factor_ptr, col_factor_ptr, bias_ptr, residual_ptr, out_ptr, bad_ptr,
    M, N, K, a_b, a_m, a_k, a_low, b_b, b_k, b_n, b_low, row_b, col_b,
    out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out = epilogue(a @ b), of halves as `split_rows_kernel` writes them and the factors of their rows and columns.

    K is a multiple of BK. bad: (programs,) int8, whether a sum of the program's tile is not finite; or None.
    """
    batch, block_m, block_n = tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
    rows = block_m * BM + tl.arange(0, BM)
    cols = block_n * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    row_ok = (rows < M)[:, None]
    col_ok = (cols < N)[None, :]
    a = tile_at(a_ptr, batch, rows, depth, a_b, a_m, a_k)
    b = tile_at(b_ptr, batch, depth, cols, b_b, b_k, b_n)
    a_step = tl.cast(a_k, tl.int64) * BK
    b_step = tl.cast(b_k, tl.int64) * BK
    large = tl.zeros((BM, BN), tl.float32)
    small = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        a_high = tl.load(a, mask=row_ok, other=0.0)
        b_high = tl.load(b, mask=col_ok, other=0.0)
        b_less = tl.load(b + b_low, mask=col_ok, other=0.0)
        a_less = tl.load(a + a_low, mask=row_ok, other=0.0)
        small = tl.dot(a_high, b_less, small)
        small = tl.dot(a_less, b_high, small)
        # tensor cores cut sums off instead of rounding them, so that a long sum is not left to them
        large += tl.dot(a_high, b_high) * 2048.0
        a += a_step
        b += b_step
    acc = (large + small) * 0.00048828125  # 2^-11
    mask = row_ok & col_ok
    flag(acc, mask, bad_ptr)
    row_factor = tl.load(row_factor_ptr + batch * row_b + rows, mask=rows < M, other=0.0)[:, None]
    if col_factor_ptr is not None:
        col_factor = tl.load(col_factor_ptr + batch * col_b + cols, mask=cols < N, other=0.0)[None, :]
        # of a small and a large one only the product is sure to stay in range; of two alike, one after the other
        opposed = (row_factor < 1.0) != (col_factor < 1.0)
        acc = acc * tl.where(opposed, row_factor * col_factor, row_factor) * tl.where(opposed, 1.0, col_factor)
    else:
        acc *= row_factor
    finish(
        acc, bias_ptr, residual_ptr, out_ptr, batch, rows, cols, mask,
        out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


HALVES_SOURCES = (
    split_rows_kernel, halved, finite_size, lift_of, power_of_two, halves_product_kernel, tile_of, tile_at, flag,
    *FINISH,
)  # fmt: skip


def padded(depth: int) -> int:
    """Size of the shared dimension with its padding."""
    return triton.cdiv(max(depth, 1), WIDTH) * WIDTH


def halves_tiles(m: int, n: int, device: Device) -> list[Config]:
    """Configurations of `halves_product_kernel`."""
    # operands lie in registers before Hopper, beside three sums
    held = 4 if device.capability.startswith("8.") else 3

    def fits(one: Config) -> bool:
        shared = one["stages"] * one["BK"] * (one["BM"] + one["BN"]) * 4
        return fits_shared(shared, device) and fits_registers(held * one["BM"] * one["BN"], one["warps"])

    return fitting_tiles(_TILES, m, n, fits)


def split_launch(shape: tuple[int, int, int], strides: tuple[int, int, int], rows: int, width: int) -> Launch:
    """The launch of `split_rows_kernel` for x of `shape` (batch, R, L) and halves of (batch, rows, width)."""
    batch, real_rows, length = shape
    # a tile is read along whichever way its numbers lie side by side
    block = {"BR": 32, "BL": 64} if strides[1] == 1 and strides[2] != 1 else {"BR": 4, "BL": 512}
    grid = (batch * triton.cdiv(rows, block["BR"]),)
    numbers = (real_rows, length, *strides, rows, width, batch * rows * width)
    return Launch(split_rows_kernel, grid, numbers, block, num_warps=4)
