"""A linear layer of one row by the weights of inputs that are not zero: loads of the other rows are masked off.

The depth is split among programs, since the columns alone give too few to keep the memory busy; a second launch adds
their sums in a fixed order, with the bias. Loads that are masked off take no memory's time, but a processor's: at 97 %
zeros a layer still takes half of the dense layer's time (docs/results.md).
"""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.sparse.active_linear import ActiveLinear
from sparsecomp.lowering.tuning.cost import Cost, sizes, waves
from sparsecomp.lowering.tuning.template import Config, Template

_COLUMNS = 256
"""Of a program that adds up."""


@triton.jit
def active_row_kernel(
    x_ptr, weight_ptr, every_ptr, sums_ptr, K, N, span, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """sums[split, n] = Σ x[k] · weight[k, n] over the `span` inputs of a split, of which zeros are not read.

    A thread keeps a sum for each place of its tile, and nothing crosses threads before the end.
    """
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * span
    depth = tl.arange(0, BK)
    every = tl.load(every_ptr) != 0
    inside = (column < N)[None, :]
    sums = tl.zeros((BK, BN), tl.float32)
    for start in range(first, tl.minimum(first + span, K), BK):
        k = start + depth
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        active = ((x != 0.0) | every) & (k < K)
        weights = weight_ptr + k.to(tl.int64)[:, None] * N + column[None, :]
        weight = tl.load(weights, mask=active[:, None] & inside, other=0.0)
        sums += x[:, None] * weight.to(tl.float32)
    tl.store(sums_ptr + tl.program_id(1).to(tl.int64) * N + column, tl.sum(sums, 0), mask=column < N)


@triton.jit
def add_splits_kernel(
    sums_ptr, bias_ptr, out_ptr, N, splits, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[n] = Σ sums[split, n] + bias[n], rounded once; SPLITS is `splits` or more, a power of two."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS)
    place = split.to(tl.int64)[:, None] * N + column[None, :]
    inside = column < N
    sums = tl.load(sums_ptr + place, mask=(split < splits)[:, None] & inside[None, :], other=0.0)
    total = tl.sum(sums, 0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def _space(problem: ActiveLinear, device: Device) -> list[Config]:
    """Tiles by warps and splits: a thread has 8 to 64 elements of a tile."""
    return [
        Config(BN=bn, BK=bk, warps=warps, splits=splits)
        for bn in (64, 128, 256, 512) for bk in (16, 32, 64, 128) for warps in (4, 8) for splits in (1, 2, 4, 8, 16, 32)
        if 8 <= bn * bk // (32 * warps) <= 64 and (splits == 1 or splits * bk <= problem.k)
        and (bn == 64 or bn < 2 * problem.n)
    ]  # fmt: skip


def _prepare(problem: ActiveLinear, config: Config) -> Launches:
    p, tile = problem, {"BN": config["BN"], "BK": config["BK"]}
    span = triton.cdiv(triton.cdiv(p.k, config["splits"]), config["BK"]) * config["BK"]
    splits = triton.cdiv(p.k, span)
    grid = (triton.cdiv(p.n, config["BN"]), splits)
    multiply = Launch(active_row_kernel, grid, (p.k, p.n, span), tile, num_warps=config["warps"], num_stages=2)
    add = Launch(
        add_splits_kernel, (triton.cdiv(p.n, _COLUMNS),), (p.n, splits),
        {"SPLITS": triton.next_power_of_2(splits), "BLOCK": _COLUMNS}, num_warps=4,
    )  # fmt: skip
    return Launches([((splits, p.n), torch.float32)], [Step(multiply, (0, 1, 2, 5)), Step(add, (5, 3, 4))])


_k, _n, _itemsize = sizes("k n itemsize")
_bn, _bk, _warps, _splits = sizes("BN BK warps splits")
_bandwidth, _processors = sizes("bandwidth processors")
_LATENCY = 8e-7
"""Seconds from a load to its first byte."""
_programs = sympy.ceiling(_n / _bn) * _splits
_registers = 40 + 1.6 * _bn * _bk / (32 * _warps)
_resident = sympy.Max(1, sympy.Min(sympy.floor(64 / _warps), sympy.floor(65536 / (_registers * 32 * _warps))))
_walk = waves(_programs, _processors * _resident) * sympy.ceiling(_k / (_splits * _bk)) * _LATENCY
"""Loads of one step after another; a processor's programs hide one another's."""
_traffic = (_k * _n * _itemsize + 8 * _splits * _n) / _bandwidth

ACTIVE_ROW = Template(
    name="active_row",
    op="active_linear",
    sources=(active_row_kernel, add_splits_kernel),
    space=_space,
    # as if no input were zero: how many are is not known before the call
    cost=Cost(
        bytes=sympy.Integer(0), launches=sympy.Integer(2), seconds=sympy.sqrt(_walk**2 + _traffic**2) + 2e-6,
    ),
    prepare=_prepare,
)  # fmt: skip
