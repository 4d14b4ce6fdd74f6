"""CSR times dense in float32 on 16-bit tensor cores: S is written out as two float16 matrices, then multiplied.

The plan of `spmm_csr_dense` for float32, with the same repair: a tile with a sum that is not finite, be it for an
infinity or for numbers of too wide a range (see `halves_product`), is computed again by gathering.
"""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.sparse.kernels.dense_product import tile_launch
from sparsecomp.lowering.sparse.kernels.gather import gather_rows
from sparsecomp.lowering.sparse.kernels.halves_product import (
    HALVES_SOURCES,
    finite_size,
    halved,
    halves_product_kernel,
    halves_tiles,
    lift_of,
    padded,
    power_of_two,
    split_launch,
)
from sparsecomp.lowering.sparse.kernels.product_cost import HALVES_RATE, product_seconds
from sparsecomp.lowering.sparse.kernels.spmm_csr_dense import MATRICES, MOST_WORKSPACE, repair_kernel, repair_launch
from sparsecomp.lowering.sparse.spmm_csr import SpmmCsr, unsupported_dtypes
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def densify_halves_kernel(
    crow_ptr, col_ptr, values_ptr, of_row_ptr, halves_ptr, factor_ptr,
    M, values_b, of_row_b, width, low, ZEROS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """halves (2, batch, M, width) float16 and factor (batch, M) of S, whose columns are scaled by of_row (or None)."""
    row = tl.program_id(0) % M
    batch = (tl.program_id(0) // M).to(tl.int64)
    halves = halves_ptr + (batch * M + row) * width
    place = tl.arange(0, ZEROS)
    for start in range(0, width, ZEROS):
        at = start + place
        nothing = tl.zeros((ZEROS,), tl.float16)
        tl.store(halves + at, nothing, mask=at < width)
        tl.store(halves + low + at, nothing, mask=at < width)
    begin = tl.load(crow_ptr + row)
    end = tl.load(crow_ptr + row + 1)
    turn = tl.arange(0, ENTRIES)
    largest = tl.zeros((ENTRIES,), tl.float32)
    for start in range(begin, end, ENTRIES):
        at = start + turn
        value = tl.load(values_ptr + batch * values_b + at, mask=at < end, other=0.0)
        if of_row_ptr is not None:
            col = tl.load(col_ptr + at, mask=at < end, other=0)
            value *= tl.load(of_row_ptr + batch * of_row_b + col, mask=at < end, other=0.0)
        largest = tl.maximum(largest, finite_size(value))
    lift = lift_of(tl.max(largest, 0))
    tl.store(factor_ptr + batch * M + row, power_of_two(-lift))
    # the zeros of all threads lie before the entries of any
    tl.debug_barrier()
    for start in range(begin, end, ENTRIES):
        at = start + turn
        ok = at < end
        col = tl.load(col_ptr + at, mask=ok, other=0)
        value = tl.load(values_ptr + batch * values_b + at, mask=ok, other=0.0)
        is_zero = value == 0.0
        if of_row_ptr is not None:
            factor = tl.load(of_row_ptr + batch * of_row_b + col, mask=ok, other=0.0)
            # a row of zeros in the dense operand takes every finite number to zero; of others nothing may be rounded
            is_zero |= (factor == 0.0) & (tl.abs(value) < float("inf"))
            value *= factor
            value = tl.where(tl.abs(value) < 1e-30, 0.0, value)
        high, less = halved(value * power_of_two(lift), is_zero)
        tl.store(halves + col, high, mask=ok)
        tl.store(halves + low + col, less, mask=ok)


def _scales_rows(problem: SpmmCsr) -> bool:
    """Whether rows of the dense operand are scaled, which S makes up for, and not its columns."""
    return problem.dense.row != 1 or problem.dense.column == 1


def _matrices(problem: SpmmCsr) -> int:
    p = problem
    return p.batch if p.values_batch or (_scales_rows(p) and p.dense.batch) else 1


def _entries(problem: SpmmCsr) -> int:
    """Entries that a program takes together: those of most rows."""
    return min(max(triton.next_power_of_2(int(1.15 * problem.nnz / max(problem.m, 1))), 128), 1024)


def _refuse(problem: SpmmCsr, device: Device) -> str | None:
    p = problem
    if (p.dtype, p.dense_dtype) != ("float32", "float32"):
        return f"splits float32, not {p.dtype} with {p.dense_dtype}"
    if 2 * _matrices(p) * p.m * padded(p.k) > MOST_WORKSPACE:
        return f"the dense matrix would pass {MOST_WORKSPACE} elements"
    if p.n < 8:
        return "fewer than 8 columns leave tensor cores idle"
    return unsupported_dtypes(p.output.dtype)


def _space(problem: SpmmCsr, device: Device) -> list[Config]:
    return halves_tiles(problem.m, problem.n, device)


def _prepare(problem: SpmmCsr, config: Config) -> Launches:
    """Tensors: the operation's seven, halves and factors of S (7, 8), those of dense (9, 10), flags (11)."""
    p, width, matrices = problem, padded(problem.k), _matrices(problem)
    by_row, sets = _scales_rows(p), p.batch if p.dense.batch else 1
    rows, length, real = (width, triton.cdiv(p.n, 8) * 8, (p.k, p.n)) if by_row else (p.n, width, (p.n, p.k))
    strides = p.dense if by_row else (p.dense.batch, p.dense.column, p.dense.row)
    split = split_launch((sets, *real), strides, rows, length)
    densify = Launch(
        densify_halves_kernel, (matrices * p.m,),
        (p.m, p.values_batch, rows if sets > 1 else 0, width, matrices * p.m * width),
        {"ZEROS": min(triton.next_power_of_2(width), 4096), "ENTRIES": _entries(p)}, num_warps=8,
    )  # fmt: skip
    a = (p.m * width if matrices > 1 else 0, width, 1, matrices * p.m * width)
    b = (rows * length if sets > 1 else 0, *((length, 1) if by_row else (1, length)), sets * rows * length)
    factors = (p.m if matrices > 1 else 0, rows if sets > 1 else 0)
    product = tile_launch(
        halves_product_kernel, (p.batch, p.m, p.n, width), (*a, *b, *factors), p.output.numbers, p.output.constants,
        config,
    )  # fmt: skip
    repair, flags = repair_launch(p, config)
    workspaces = [
        ((2, matrices, p.m, width), torch.float16), ((matrices, p.m), torch.float32),
        ((2, sets, rows, length), torch.float16), ((sets, rows), torch.float32), ((flags,), torch.int8),
    ]  # fmt: skip
    steps = [
        Step(split, (3, 9, 10)),
        Step(densify, (0, 1, 2, 10 if by_row else None, 7, 8)),
        Step(product, (7, 9, 8, None if by_row else 10, 4, 5, 6, 11)),
        Step(repair, (0, 1, 2, 3, 4, 5, 6, 11)),
    ]
    return Launches(workspaces, steps)


_m, _k, _n, _batch, _nnz, _bandwidth, _rewritten = sizes("m k n batch nnz bandwidth rewritten")

_writing = (MATRICES * (_m * _k * 4 + 2 * _nnz * 8) + _batch * _k * _n * 12) / (_rewritten * _bandwidth)
_measured = 0.75
"""Share of the estimate that products took on an H100."""

SPMM_CSR_HALVES = Template(
    name="spmm_csr_halves",
    op="spmm_csr",
    sources=(densify_halves_kernel, repair_kernel, gather_rows, *HALVES_SOURCES),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=MATRICES * _m * _k * 4 + _batch * (_k + _m) * _n * 4,
        launches=sympy.Integer(4),
        seconds=_measured * (_writing + product_seconds(_k, rate=HALVES_RATE)),
    ),
    prepare=_prepare,
)
