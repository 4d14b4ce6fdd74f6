"""Sampled dense-dense product, entry by entry: every stored place is a dot product of two rows.

Programs take equal numbers of entries, whatever the rows: each finds the rows of its entries by binary search. Entries
of one row lie together, so that the row of `a` stays in the first-level cache.
"""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.launch.strided import Strides
from sparsecomp.lowering.sparse.kernels.spmm_csr_rows import copy_rows_kernel
from sparsecomp.lowering.sparse.sddmm import Sddmm
from sparsecomp.lowering.sparse.spmm_csr import unsupported_dtypes
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def rows_of_entries(crow_ptr, entry, M, halvings):
    """The row of each entry, of those that a row has."""
    low = tl.zeros_like(entry)
    high = low + M
    for _ in range(halvings):
        middle = (low + high) // 2
        end = tl.load(crow_ptr + middle + 1, mask=low < high, other=0)
        past = (end <= entry) & (low < high)
        low = tl.where(past, middle + 1, low)
        high = tl.where(past, high, middle)
    return low


@triton.jit
def sddmm_kernel(
    crow_ptr, col_ptr, a_ptr, b_ptr, out_ptr,
    M, D, blocks, halvings, a_b, a_m, a_d, b_b, b_n, b_d, out_b, scale, P: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A program does P entries, BD of the depth at a time; `blocks` programs do a batch's."""
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    entry = (tl.program_id(0) % blocks).to(tl.int64) * P + tl.arange(0, P)
    # of the pattern's entries, not of the capacity around them
    ok = (entry >= tl.load(crow_ptr)) & (entry < tl.load(crow_ptr + M))
    row = tl.where(ok, rows_of_entries(crow_ptr, entry, M, halvings), 0)
    col = tl.load(col_ptr + entry, mask=ok, other=0).to(tl.int64)
    depth = tl.arange(0, BD)
    a = a_ptr + batch * a_b + (row * a_m)[:, None]
    b = b_ptr + batch * b_b + (col * b_n)[:, None]
    acc = tl.zeros((P, BD), tl.float32)
    for start in range(0, D, BD):
        d = (start + depth)[None, :]
        mask = ok[:, None] & (d < D)
        x = tl.load(a + d.to(tl.int64) * a_d, mask=mask, other=0.0)
        y = tl.load(b + d.to(tl.int64) * b_d, mask=mask, other=0.0)
        acc += x.to(tl.float32) * y.to(tl.float32)
    value = tl.sum(acc, 1) * scale
    tl.store(out_ptr + batch * out_b + entry, value.to(out_ptr.dtype.element_ty), mask=ok)


def _refuse(problem: Sddmm, device: Device) -> str | None:
    return unsupported_dtypes(problem.dtype, problem.out_dtype)


def _space(problem: Sddmm, device: Device) -> list[Config]:
    depth = max(triton.next_power_of_2(problem.d), 4)
    copies = (0, 1) if problem.d > 1 and (problem.a.column != 1 or problem.b.column != 1) else (0,)
    return [
        Config(P=p, BD=bd, warps=warps, COPY=copy)
        for copy in copies for bd in (32, 64, 128, 256) if bd <= max(depth, 32)
        for p in (16, 32, 64, 128) for warps in (1, 2, 4, 8) if 8 <= p * bd // (32 * warps) <= 64
    ]  # fmt: skip


def _prepare(problem: Sddmm, config: Config) -> Launch | Launches:
    if not config["COPY"]:
        return _main(problem, config)
    p, width = problem, triton.cdiv(problem.d, 8) * 8
    workspaces, steps, takes = [], [], [0, 1, 2, 3, 4]
    for place, name, rows, strides in ((2, "a", p.m, p.a), (3, "b", p.n, p.b)):
        if strides.column == 1:
            continue
        count = p.batch if strides.batch else 1
        grid = (count * triton.cdiv(rows, 64) * triton.cdiv(p.d, 64),)
        copy = Launch(copy_rows_kernel, grid, (rows, p.d, *strides, width), {"BK": 64, "BN": 64}, num_warps=4)
        takes[place] = 5 + len(workspaces)
        workspaces.append(((count * rows, width), getattr(torch, p.dtype)))
        steps.append(Step(copy, (place, takes[place])))
        problem = problem._replace(**{name: Strides(rows * width if count > 1 else 0, width, 1)})
    return Launches(workspaces, [*steps, Step(_main(problem, config), tuple(takes))])


def _main(problem: Sddmm, config: Config) -> Launch:
    p = problem
    blocks = triton.cdiv(p.nnz, config["P"])
    numbers = (p.m, p.d, blocks, p.m.bit_length(), *p.a, *p.b, p.out_batch, p.scale)
    constants = {"P": config["P"], "BD": config["BD"]}
    return Launch(sddmm_kernel, (blocks * p.batch,), numbers, constants, num_warps=config["warps"])


_m, _n, _d, _batch, _nnz, _itemsize, _processors = sizes("m n d batch nnz itemsize processors")
_p, _bd, _warps, _copy, _a_col, _b_col = sizes("P BD warps COPY a.column b.column")
_gathered, _bandwidth, _rewritten = sizes("gathered bandwidth rewritten")

_near = sympy.Eq(_copy, 1) | (sympy.Eq(_a_col, 1) & sympy.Eq(_b_col, 1))
_pulled = sympy.Piecewise((1.2 * _itemsize, _near), (40, True)) * _d * _batch * _nnz
_registers = 40 + 2.5 * _p * _bd / (32 * _warps)
_resident = sympy.Min(32, 65536 / (_registers * 32 * _warps))
# the search reads crow as often as it has digits, one read behind the other
_walk = sympy.log(_m + 1, 2) * 1.5e-7 + sympy.ceiling(_d / _bd) * 8e-7 + 1.5e-6
_waves = sympy.Max(_batch * _nnz / (_p * _processors * _resident), 1)

SDDMM = Template(
    name="sddmm",
    op="sddmm",
    sources=(sddmm_kernel, rows_of_entries, copy_rows_kernel),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=_batch * (_nnz * 8 + (_m + _n) * _d * _itemsize),
        seconds=sympy.Max(_pulled / (_gathered * _processors), _waves * _walk)
        + _copy * (2 * _batch * (_m + _n) * _d * _itemsize / (_rewritten * _bandwidth) + 3e-6),
    ),
    prepare=_prepare,
)
