"""A linear layer of one row by the weights of inputs that are not zero, in three launches.

The first lists the inputs that are not zero, split by split of the depth; the second multiplies the rows of the weight
that are listed, so that its work, not only its traffic, is that of active inputs; the third adds the splits' sums in a
fixed order, with the bias. Few columns alone would give too few programs to keep the memory busy, hence the splits.
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
_LONGEST = 8192
"""Inputs of a split: a program lists them at once."""


@triton.jit
def list_active_kernel(
    x_ptr, every_ptr, place_ptr, value_ptr, count_ptr, K, span, SPAN: tl.constexpr
):  # fmt: skip
    """The inputs of a split that are not zero: places from split · span on, values beside them, and how many."""
    split = tl.program_id(0)
    offset = tl.arange(0, SPAN)
    k = split * span + offset
    inside = (offset < span) & (k < K)
    x = tl.load(x_ptr + k, mask=inside, other=0.0).to(tl.float32)
    active = ((x != 0.0) | (tl.load(every_ptr) != 0)) & inside
    listed = tl.cumsum(active.to(tl.int32), 0)
    at = split * span + listed - 1
    tl.store(place_ptr + at, k, mask=active)
    tl.store(value_ptr + at, x, mask=active)
    tl.store(count_ptr + split, tl.sum(active.to(tl.int32), 0))


@triton.jit
def active_row_kernel(
    weight_ptr, place_ptr, value_ptr, count_ptr, sums_ptr, N, span, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """sums[split, n] = Σ value · weight[place, n] over what a split lists.

    A thread keeps a sum for each place of its tile, and nothing crosses threads before the end. What is listed is
    loaded a step ahead.
    """
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    at = tl.arange(0, BK)
    count = tl.load(count_ptr + split)
    place_ptr += split * span
    value_ptr += split * span
    inside = (column < N)[None, :]
    place = tl.load(place_ptr + at, mask=at < count, other=0)
    value = tl.load(value_ptr + at, mask=at < count, other=0.0)
    sums = tl.zeros((BK, BN), tl.float32)
    for _ in range(0, count, BK):
        weights = weight_ptr + place.to(tl.int64)[:, None] * N + column[None, :]
        weight = tl.load(weights, mask=(at < count)[:, None] & inside, other=0.0)
        at += BK
        next_place = tl.load(place_ptr + at, mask=at < count, other=0)
        next_value = tl.load(value_ptr + at, mask=at < count, other=0.0)
        sums += value[:, None] * weight.to(tl.float32)
        place, value = next_place, next_value
    tl.store(sums_ptr + split.to(tl.int64) * N + column, tl.sum(sums, 0), mask=column < N)


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
        for bn in (64, 128, 256, 512) for bk in (8, 16, 32, 64) for warps in (4, 8)
        for splits in (1, 2, 4, 8, 16, 32, 64)
        if 8 <= bn * bk // (32 * warps) <= 64 and (splits == 1 or splits * bk <= problem.k)
        and (bn == 64 or bn < 2 * problem.n) and triton.cdiv(problem.k, splits) <= _LONGEST
    ]  # fmt: skip


def _refuse(problem: ActiveLinear, device: Device) -> str | None:
    return None if triton.cdiv(problem.k, 64) <= _LONGEST else "there are too many inputs to list"


def _prepare(problem: ActiveLinear, config: Config) -> Launches:
    p = problem
    span = triton.cdiv(triton.cdiv(p.k, config["splits"]), 16) * 16
    splits = triton.cdiv(p.k, span)
    listing = Launch(
        list_active_kernel, (splits,), (p.k, span), {"SPAN": triton.next_power_of_2(span)}, num_warps=8
    )  # fmt: skip
    multiply = Launch(
        active_row_kernel, (triton.cdiv(p.n, config["BN"]), splits), (p.n, span),
        {"BN": config["BN"], "BK": config["BK"]}, num_warps=config["warps"],
    )  # fmt: skip
    add = Launch(
        add_splits_kernel, (triton.cdiv(p.n, _COLUMNS),), (p.n, splits),
        {"SPLITS": triton.next_power_of_2(splits), "BLOCK": _COLUMNS}, num_warps=4,
    )  # fmt: skip
    room = splits * span
    workspaces = [
        ((room,), torch.int32), ((room,), torch.float32), ((splits,), torch.int32), ((splits, p.n), torch.float32),
    ]  # fmt: skip
    places, values, counts, sums = range(5, 9)
    return Launches(workspaces, [
        Step(listing, (0, 2, places, values, counts)), Step(multiply, (1, places, values, counts, sums)),
        Step(add, (sums, 3, 4)),
    ])  # fmt: skip


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
    sources=(list_active_kernel, active_row_kernel, add_splits_kernel),
    refuse=_refuse,
    space=_space,
    # as if no input were zero: how many are is not known before the call
    cost=Cost(
        bytes=sympy.Integer(0), launches=sympy.Integer(3), seconds=sympy.sqrt(_walk**2 + _traffic**2) + 2e-6,
    ),
    prepare=_prepare,
)  # fmt: skip
