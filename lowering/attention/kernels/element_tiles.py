"""What the kernels of attention over listed pairs share: how rows are gathered, which tiles there are, and their cost.

A program takes BM lines and walks over BN entries of each line's list at a time. Rows that an entry names are gathered
as they are, since no two lines read the same ones: nothing is there for tensor cores. What is summed over a list stays
apart for each of the BN places until the end, so that nothing crosses threads in the loop but products over the depth.
"""

from collections.abc import Mapping
from itertools import product

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.attention.element_attention import ElementAttention
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config


@triton.jit
def gathered_rows(ptr, index, there, row, depth, DEPTH: tl.constexpr, PADDED: tl.constexpr):
    """(BM, BN, PADDED) float32: the rows that `index` (BM, BN) names, zeros where there is none."""
    ptrs = ptr + index.to(tl.int64)[:, :, None] * row + depth[None, None, :]
    if DEPTH == PADDED:
        return tl.load(ptrs, mask=there[:, :, None], other=0.0).to(tl.float32)
    return tl.load(ptrs, mask=there[:, :, None] & (depth < DEPTH)[None, None, :], other=0.0).to(tl.float32)


@triton.jit
def own_rows(ptr, line, row, depth, LINES, DEPTH: tl.constexpr):
    """(BM, padded depth) float32: the rows of the program's lines."""
    mask = (line < LINES)[:, None] & (depth < DEPTH)[None, :]
    return tl.load(ptr + line.to(tl.int64)[:, None] * row + depth[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_own(ptr, value, line, row, depth, LINES, DEPTH: tl.constexpr):
    """Write the rows of the program's lines."""
    mask = (line < LINES)[:, None] & (depth < DEPTH)[None, :]
    ptrs = ptr + line.to(tl.int64)[:, None] * row + depth[None, :]
    tl.store(ptrs, value.to(ptr.dtype.element_ty), mask=mask)


def element_space(problem: ElementAttention, most: int) -> list[Config]:
    """Configurations: BM lines, BN entries, warps and stages.

    Args:
        most: numbers of a gathered tile that a thread holds, more of which were slower on an H200
            (`python -m bench element-candidates`).
    """
    wide, found = max(problem.padded_depth, problem.padded_v_depth), []
    for lines, entries, warps, stages in product((1, 2, 4, 8), (4, 8, 16, 32), (1, 2, 4), (1, 2, 3)):
        if 4 <= lines * entries * wide / (32 * warps) <= most:
            found.append(Config(BM=lines, BN=entries, warps=warps, stages=stages))
    return found or [Config(BM=1, BN=4, warps=4, stages=1)]


def element_constants(problem: ElementAttention, config: Mapping[str, int]) -> dict[str, int | bool]:
    """What all these kernels are specialised on."""
    return {
        "GROUP": problem.group, "D": problem.depth, "DV": problem.v_depth, "BD": problem.padded_depth,
        "BDV": problem.padded_v_depth, "BM": config["BM"], "BN": config["BN"], "CAPPED": problem.softcap > 0,
        "BIASED": problem.biased,
    }  # fmt: skip


_batch, _heads, _depth, _v_depth, _itemsize = sizes("batch heads depth v_depth itemsize")
_bm, _bn, _warps, _processors, _gathered = sizes("BM BN warps processors gathered")
_LATENCY = 6e-7
"""Seconds of a step: an entry's index is loaded, then the row that it names."""
_PROGRAM = 1e-6
"""Seconds before a program's first step and after its last."""


def cost_by_elements(lines: sympy.Expr, listed: sympy.Expr, tiles: int, times: sympy.Expr) -> Cost:
    """The cost of a launch: what it gathers from L2, and what its programs wait for, overlap, if not wholly.

    Fitted to the times of all configurations on 1 % of 4096 x 4096 pairs and heads of 64 numbers, on an H200: the first
    by estimate took at most 1.01 times as long as the fastest.

    Args:
        lines: rows of lists, of one head.
        listed: entries of a list, on the mean.
        tiles: of BM x BN rows that are alive at once.
        times: lists that a program walks, one after another.
    """
    listed = sympy.Max(listed, 1)  # where nothing is kept
    steps = sympy.ceiling(listed / _bn) * times
    programs = sympy.ceiling(lines / _bm) * _batch * _heads / times
    # entries behind a list's end are not read, but have their turn
    read = programs * steps * _bm * _bn * (1 + listed / (sympy.ceiling(listed / _bn) * _bn)) / 2
    load = read * (_depth + _v_depth) * _itemsize / (_gathered * _processors)
    registers = sympy.Min(255, 32 + tiles * _bm * _bn * sympy.Max(_depth, _v_depth) / (32 * _warps))
    resident = sympy.Min(64, 2048 / registers) * _processors
    wait = programs * (steps * _LATENCY + _PROGRAM) * _warps / resident
    return Cost(bytes=sympy.Integer(0), seconds=sympy.Max(load, wait) + sympy.Min(load, wait) / 4)
