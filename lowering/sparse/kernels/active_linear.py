"""A linear layer of few rows by the weights of inputs that are not zero: loads of all other rows are masked off.

The depth is split among programs, since few rows and columns alone give too few to keep the memory busy; a second
launch adds their sums in a fixed order, with the bias. One row is multiplied without tensor cores: a thread keeps a sum
for each place of its tile, and nothing crosses threads before the end. Several rows are one tile of 16.
"""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.sparse.active_linear import ActiveLinear
from sparsecomp.lowering.sparse.kernels.epilogue import dot, precision
from sparsecomp.lowering.tuning.cost import Cost, sizes, waves
from sparsecomp.lowering.tuning.template import Config, Template

_COLUMNS = 256
"""Of a program that adds up."""


@triton.jit
def active_row_kernel(
    x_ptr, weight_ptr, every_ptr, sums_ptr, K, N, span, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """sums[split, n] = Σ x[k] · weight[k, n] over the `span` inputs of a split, of which zeros are not read."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * span
    depth = tl.arange(0, BK)
    every = tl.load(every_ptr) != 0
    inside = column < N
    sums = tl.zeros((BK, BN), tl.float32)
    for start in range(first, tl.minimum(first + span, K), BK):
        k = start + depth
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        active = ((x != 0.0) | every) & (k < K)
        weights = weight_ptr + k.to(tl.int64)[:, None] * N + column[None, :]
        weight = tl.load(weights, mask=active[:, None] & inside[None, :], other=0.0)
        sums += x[:, None] * weight.to(tl.float32)
    tl.store(sums_ptr + tl.program_id(1).to(tl.int64) * N + column, tl.sum(sums, 0), mask=inside)


@triton.jit
def active_rows_kernel(
    x_ptr, weight_ptr, every_ptr, sums_ptr, K, N, span,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums[split, row, n] of up to 16 rows; an input is not read where it is zero in all of them."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * span
    depth = tl.arange(0, BK)
    row = tl.arange(0, 16)
    every = tl.load(every_ptr) != 0
    inside = column < N
    sums = tl.zeros((16, BN), tl.float32)
    for start in range(first, tl.minimum(first + span, K), BK):
        k = start + depth
        x = tl.load(x_ptr + row[:, None] * K + k[None, :], mask=(row < ROWS)[:, None] & (k < K)[None, :], other=0.0)
        active = ((tl.max((x != 0.0).to(tl.int32), 0) != 0) | every) & (k < K)
        weights = weight_ptr + k.to(tl.int64)[:, None] * N + column[None, :]
        weight = tl.load(weights, mask=active[:, None] & inside[None, :], other=0.0)
        sums = dot(x, weight, sums, PRECISION)
    place = (tl.program_id(1).to(tl.int64) * ROWS + row[:, None]) * N + column[None, :]
    tl.store(sums_ptr + place, sums, mask=(row < ROWS)[:, None] & inside[None, :])


@triton.jit
def add_splits_kernel(
    sums_ptr, bias_ptr, out_ptr, N, splits, ROWS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[row, n] = Σ sums[split, row, n] + bias[n], rounded once; SPLITS is `splits` or more, a power of two."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    place = (split.to(tl.int64)[:, None] * ROWS + row) * N + column[None, :]
    inside = column < N
    sums = tl.load(sums_ptr + place, mask=(split < splits)[:, None] & inside[None, :], other=0.0)
    total = tl.sum(sums, 0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * N + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def _configs(problem: ActiveLinear, kept: int) -> list[Config]:
    """Tiles by warps and splits.

    Args:
        kept: least elements of a tile that a thread has.
    """
    return [
        Config(BN=bn, BK=bk, warps=warps, splits=splits)
        for bn in (64, 128, 256, 512) for bk in (16, 32, 64, 128) for warps in (4, 8) for splits in (1, 2, 4, 8, 16, 32)
        if kept <= bn * bk // (32 * warps) <= 64 and (splits == 1 or splits * bk <= problem.k)
        and (bn == 64 or bn < 2 * problem.n)
    ]  # fmt: skip


def _prepare(problem: ActiveLinear, config: Config) -> Launches:
    p, splits = problem, config["splits"]
    span = triton.cdiv(triton.cdiv(p.k, splits), config["BK"]) * config["BK"]
    splits = triton.cdiv(p.k, span)
    tile = {"BN": config["BN"], "BK": config["BK"]}
    if p.rows == 1:
        kernel, constants = active_row_kernel, tile
    else:
        kernel, constants = active_rows_kernel, {"ROWS": p.rows, "PRECISION": precision(p.dtype), **tile}
    grid = (triton.cdiv(p.n, config["BN"]), splits)
    stages = 2 if p.rows == 1 else 3
    multiply = Launch(kernel, grid, (p.k, p.n, span), constants, num_warps=config["warps"], num_stages=stages)
    padded = triton.next_power_of_2(splits)
    add = Launch(
        add_splits_kernel, (triton.cdiv(p.n, _COLUMNS), p.rows), (p.n, splits),
        {"ROWS": p.rows, "SPLITS": padded, "BLOCK": _COLUMNS}, num_warps=4,
    )  # fmt: skip
    return Launches([((splits, p.rows, p.n), torch.float32)], [Step(multiply, (0, 1, 2, 5)), Step(add, (5, 3, 4))])


_k, _n, _rows, _itemsize = sizes("k n rows itemsize")
_bn, _bk, _warps, _splits = sizes("BN BK warps splits")
_bandwidth, _processors = sizes("bandwidth processors")
_LATENCY = 8e-7
"""Seconds from a load to its first byte."""
_steps = sympy.ceiling(_k / (_splits * _bk))
_programs = sympy.ceiling(_n / _bn) * _splits
_registers = 40 + 1.6 * _bn * _bk / (32 * _warps)
_resident = sympy.Max(1, sympy.Min(sympy.floor(64 / _warps), sympy.floor(65536 / (_registers * 32 * _warps))))
_walk = waves(_programs, _processors * _resident) * _steps * _LATENCY
"""Loads of one step after another; a processor's programs hide one another's."""
_traffic = (_k * _n * _itemsize + 8 * _splits * _rows * _n) / _bandwidth
COST = Cost(
    bytes=sympy.Integer(0), launches=sympy.Integer(2), seconds=sympy.sqrt(_walk**2 + _traffic**2) + 2e-6,
)  # fmt: skip
"""As if no input were zero: how many are is not known before the call."""


def _refuse_one(problem: ActiveLinear, device: Device) -> str | None:
    return None if problem.rows == 1 else "several rows are multiplied on tensor cores"


def _refuse_several(problem: ActiveLinear, device: Device) -> str | None:
    return "one row is multiplied without tensor cores" if problem.rows == 1 else None


ACTIVE_ROW = Template(
    name="active_row", op="active_linear", sources=(active_row_kernel, add_splits_kernel), cost=COST, prepare=_prepare,
    refuse=_refuse_one, space=lambda problem, device: _configs(problem, 8),
)  # fmt: skip
ACTIVE_ROWS = Template(
    name="active_rows", op="active_linear", sources=(active_rows_kernel, add_splits_kernel, dot), cost=COST,
    prepare=_prepare, refuse=_refuse_several,
    space=lambda problem, device: [one for one in _configs(problem, 8) if one["BN"] <= 256],
)  # fmt: skip
