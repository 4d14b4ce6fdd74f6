"""CSR times dense on tensor cores: S is written out densely, then multiplied.

On a card whose tensor cores outrun its gathers this is the fastest way down to a few percent of nonzeros, once
`dense` has many columns. A written-out zero times an infinity would be NaN where a sparse product has nothing: every
tile with a sum that is not finite is computed again by gathering, by a third launch that finds nothing to do otherwise.
So results are those of the gathering kernels whatever the values, the host never waits, and finite data pay one empty
launch.
"""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.sparse.kernels.dense_product import (
    GROUP,
    SOURCES,
    product_kernel,
    product_tiles,
    tile_count,
    tile_launch,
    tile_of,
)
from sparsecomp.lowering.sparse.kernels.epilogue import finish, precision
from sparsecomp.lowering.sparse.kernels.gather import gather_rows
from sparsecomp.lowering.sparse.kernels.product_cost import product_seconds
from sparsecomp.lowering.sparse.kernels.stored_places import densify_kernel, densify_launch
from sparsecomp.lowering.sparse.spmm_csr import SpmmCsr, unsupported_dtypes
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template

MOST_WORKSPACE = 2**28
"""Elements of the written-out matrix."""
_WIDTH = 64
"""Its rows are padded to a multiple of this, so that whole vectors are read and no tile ends within a row's padding."""
_REPAIR_ROWS = 16


@triton.jit
def repair_kernel(
    crow_ptr, col_ptr, values_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr, bad_ptr,
    M, N, values_b, dense_b, dense_k, dense_n, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, FILLED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gathers the tiles of `product_kernel` that are flagged; a program does ROWS rows of a tile, or nothing."""
    tile = tl.program_id(0) // (BM // ROWS)
    if tl.load(bad_ptr + tile) == 0:
        return
    batch, block_m, block_n = tile_of(tile, M, N, BM, BN, GROUP)
    first = block_m * BM + tl.program_id(0) % (BM // ROWS) * ROWS
    for place in range((ROWS // BR) * (BN // WIDE)):
        rows = first + place // (BN // WIDE) * BR + tl.arange(0, BR)
        cols = block_n * BN + place % (BN // WIDE) * WIDE + tl.arange(0, WIDE)
        begin = tl.load(crow_ptr + rows, mask=rows < M, other=0)
        end = tl.load(crow_ptr + rows + 1, mask=rows < M, other=0)
        acc = gather_rows(
            begin, end, col_ptr, values_ptr + batch * values_b, dense_ptr + batch * dense_b, cols, N, dense_k, dense_n,
            FILLED, BR, 1, E, WIDE,
        )  # fmt: skip
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        finish(
            acc, bias_ptr, residual_ptr, out_ptr, batch, rows, cols, mask,
            out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
        )  # fmt: skip


def _width(problem: SpmmCsr) -> int:
    return triton.cdiv(max(problem.k, 1), _WIDTH) * _WIDTH


def _refuse(problem: SpmmCsr, device: Device) -> str | None:
    p = problem
    if p.dtype == "float32":
        return "float32 is split in halves: spmm_csr_halves"
    if p.dtype != p.dense_dtype:
        return f"tensor cores multiply one dtype, not {p.dtype} with {p.dense_dtype}"
    matrices = 1 if p.values_batch == 0 else p.batch
    if matrices * p.m * _width(p) > MOST_WORKSPACE:
        return f"the dense matrix would pass {MOST_WORKSPACE} elements"
    if p.n < 8:
        return "fewer than 8 columns leave tensor cores idle"
    return unsupported_dtypes(p.dtype, p.dense_dtype, p.output.dtype)


def _space(problem: SpmmCsr, device: Device) -> list[Config]:
    return product_tiles(problem.m, problem.n, device)


def _prepare(problem: SpmmCsr, config: Config) -> Launches:
    p, width = problem, _width(problem)
    matrices = 1 if p.values_batch == 0 else p.batch
    densify = densify_launch(p.m, width, p.nnz, matrices, p.values_batch)
    strides = (0 if matrices == 1 else p.m * width, width, 1, *p.dense)
    constants = {**p.output.constants, "PRECISION": precision(p.dtype)}
    product = tile_launch(product_kernel, (p.batch, p.m, p.n, p.k), strides, p.output.numbers, constants, config)
    repair, flags = repair_launch(p, config)
    full = ((matrices, p.m, width), getattr(torch, p.dtype))
    steps = [Step(densify, (0, 1, 2, 7)), Step(product, (7, 3, 4, 5, 6, 8)),
             Step(repair, (0, 1, 2, 3, 4, 5, 6, 8))]  # fmt: skip
    return Launches([full, ((flags,), torch.int8)], steps)


def repair_launch(problem: SpmmCsr, config: Config) -> tuple[Launch, int]:
    """The launch that gathers flagged tiles, and how many flags there are; takes the seven tensors and the flags."""
    p = problem
    flags = p.batch * tile_count(p.m, p.n, config)
    constants = {"ROWS": _REPAIR_ROWS, "BR": 2, "E": 4, "WIDE": min(config["BN"], 64), "GROUP": GROUP}
    constants |= {**p.output.constants, "FILLED": p.filled, "BM": config["BM"], "BN": config["BN"]}
    numbers = (p.m, p.n, p.values_batch, *p.dense, *p.output.numbers)
    return Launch(repair_kernel, (flags * (config["BM"] // _REPAIR_ROWS),), numbers, constants, num_warps=4), flags


_m, _k, _n, _batch, _nnz, _values_batch, _itemsize = sizes("m k n batch nnz values_batch itemsize")
_bandwidth, _rewritten = sizes("bandwidth rewritten")

MATRICES = sympy.Piecewise((1, sympy.Eq(_values_batch, 0)), (_batch, True))
"""How many are written out."""
# the matrix is written once; the product then finds much of it in L2
_writing = MATRICES * (_m * _k * _itemsize + _nnz * (_itemsize + 4)) / (_rewritten * _bandwidth)
_measured = 0.7
"""Share of the estimate that products took on an H100."""

SPMM_CSR_DENSE = Template(
    name="spmm_csr_dense",
    op="spmm_csr",
    sources=(densify_kernel, repair_kernel, gather_rows, *SOURCES),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=MATRICES * _m * _k * _itemsize + _batch * (_k + _m) * _n * _itemsize,
        launches=sympy.Integer(2),
        seconds=_measured * (_writing + product_seconds(_k)),
    ),
    prepare=_prepare,
)
