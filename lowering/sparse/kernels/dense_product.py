"""Dense times dense of 16-bit numbers on tensor cores: a piece of templates that write a sparse operand out densely.

A tile can tell whether all its sums are finite, for those who must not multiply a zero that they wrote out themselves
with an infinity.
"""

from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, dot, finish, flag
from sparsecomp.lowering.tuning.limits import fits_shared
from sparsecomp.lowering.tuning.template import Config

GROUP = 8
"""Row blocks whose tiles run side by side, to share columns of the second operand in L2."""
Tile = tuple[int, int, int, int, int]
"""BM, BN, BK, warps and stages of a product's configuration."""
_TILES = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4),
         (64, 64, 64, 4, 4), (64, 32, 64, 4, 5), (64, 16, 128, 4, 4), (32, 16, 128, 4, 4))  # fmt: skip


@triton.jit
def tile_of(pid, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Batch, row block and column block of a program: GROUP row blocks at a time."""
    row_blocks = tl.cdiv(M, BM)
    col_blocks = tl.cdiv(N, BN)
    batch = pid // (row_blocks * col_blocks)
    pid = pid % (row_blocks * col_blocks)
    first = pid // (GROUP * col_blocks) * GROUP
    height = tl.minimum(row_blocks - first, GROUP)
    place = pid % (GROUP * col_blocks)
    return batch.to(tl.int64), first + place % height, place // height


@triton.jit
def tile_at(ptr, batch, rows, cols, of_batch, of_row, of_col):
    """Pointers (rows, cols) into a matrix of a batch, by its strides."""
    return ptr + batch * of_batch + rows.to(tl.int64)[:, None] * of_row + cols.to(tl.int64)[None, :] * of_col


@triton.jit
def product_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr, bad_ptr,
    M, N, K, a_b, a_m, a_k, b_b, b_k, b_n, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out = epilogue(a @ b). bad: (programs,) int8, whether a sum of the program's tile is not finite; or None."""
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
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = K - start
        x = tl.load(a, mask=row_ok & (depth < left)[None, :], other=0.0)
        y = tl.load(b, mask=(depth < left)[:, None] & col_ok, other=0.0)
        acc = dot(x, y, acc, PRECISION)
        a += a_step
        b += b_step
    mask = row_ok & col_ok
    flag(acc, mask, bad_ptr)
    finish(
        acc, bias_ptr, residual_ptr, out_ptr, batch, rows, cols, mask,
        out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


SOURCES = (product_kernel, tile_of, tile_at, dot, flag, *FINISH)


def fitting_tiles(tiles: Sequence[Tile], m: int, n: int, fits: Callable[[Config], bool]) -> list[Config]:
    """Those for a product of `m` rows by `n` columns that are no wider than it and fit, or the last."""
    configs = [Config(BM=bm, BN=bn, BK=bk, warps=warps, stages=stages) for bm, bn, bk, warps, stages in tiles]
    return [one for one in configs if one["BN"] < 2 * n and one["BM"] < 2 * m and fits(one)] or configs[-1:]


def product_tiles(m: int, n: int, device: Device) -> list[Config]:
    """Configurations of `product_kernel`."""
    return fitting_tiles(
        _TILES, m, n, lambda one: fits_shared(one["stages"] * one["BK"] * (one["BM"] + one["BN"]) * 2, device)
    )


def tile_count(m: int, n: int, config: Config) -> int:
    """Tiles of one matrix."""
    return triton.cdiv(m, config["BM"]) * triton.cdiv(n, config["BN"])


def tile_launch(
    kernel: Any, shape: tuple[int, int, int, int], operands: Sequence[int], output_numbers: Sequence[Any],
    constants: dict[str, Any], config: Config,
) -> Launch:  # fmt: skip
    """The launch of a kernel that takes a tile of a product a program.

    Args:
        shape: (batch, m, n, k).
        operands: the kernel's run-time numbers of a and b.
        output_numbers: those of the output.
    """
    batch, m, n, k = shape
    constants = {**constants, "GROUP": GROUP} | {name: config[name] for name in ("BM", "BN", "BK")}
    options = {"num_warps": config["warps"], "num_stages": config["stages"]}
    numbers = (m, n, k, *operands, *output_numbers)
    return Launch(kernel, (batch * tile_count(m, n, config),), numbers, constants, **options)
