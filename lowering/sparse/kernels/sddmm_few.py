"""Sampled dense-dense product of little depth whose operands lie by columns: a layer's gradient from its few inputs.

As in `spmm_csr_few` the threads of a warp take neighbouring entries of a row, which point at ascending places of the
same line of `b`; nothing is copied, and no product is computed that the pattern does not store.
"""

import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels.few_cost import gather_seconds
from sparsecomp.lowering.sparse.sddmm import Sddmm
from sparsecomp.lowering.sparse.spmm_csr import unsupported_dtypes
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template

_MOST_DEPTH = 64


@triton.jit
def sddmm_few_kernel(
    crow_ptr, col_ptr, a_ptr, b_ptr, out_ptr,
    M, D, a_b, a_m, a_d, b_b, b_n, b_d, out_b, scale, BR: tl.constexpr, BD: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """A program does BR rows, E entries of each at a time, BD of the depth together."""
    blocks = tl.cdiv(M, BR)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    rows = tl.program_id(0) % blocks * BR + tl.arange(0, BR)
    begin = tl.load(crow_ptr + rows, mask=rows < M, other=0)
    end = tl.load(crow_ptr + rows + 1, mask=rows < M, other=0)
    depth = tl.arange(0, BD)
    a = a_ptr + batch * a_b + rows.to(tl.int64)[:, None] * a_m
    b_ptr += batch * b_b
    out_ptr += batch * out_b
    for start in range(0, tl.max(end - begin, 0), E):
        at = begin[:, None] + start + tl.arange(0, E)[None, :]
        ok = at < end[:, None]
        b = b_ptr + tl.load(col_ptr + at, mask=ok, other=0).to(tl.int64)[:, None, :] * b_n
        acc = tl.zeros((BR, E), tl.float32)
        for first in range(0, D, BD):
            d = (first + depth).to(tl.int64)
            inside = (d < D)[None, :]
            x = tl.load(a + d[None, :] * a_d, mask=(rows < M)[:, None] & inside, other=0.0)
            y = tl.load(b + d[None, :, None] * b_d, mask=ok[:, None, :] & inside[:, :, None], other=0.0)
            acc += tl.sum(x.to(tl.float32)[:, :, None] * y.to(tl.float32), 1)
        tl.store(out_ptr + at, (acc * scale).to(out_ptr.dtype.element_ty), mask=ok)


def _refuse(problem: Sddmm, device: Device) -> str | None:
    if problem.d > _MOST_DEPTH:
        return f"a depth of {problem.d}: it is for {_MOST_DEPTH} and less"
    if problem.b.row != 1 or problem.d < 2:
        return "b does not lie by columns, beside others"
    return unsupported_dtypes(problem.dtype, problem.out_dtype)


def _space(problem: Sddmm, device: Device) -> list[Config]:
    depth = min(triton.next_power_of_2(problem.d), 8)
    tiles = [(8, 32, 4), (8, 32, 2), (1, 32, 1), (2, 32, 1), (1, 64, 1), (4, 64, 4)]
    return [Config(BR=rows, BD=depth, E=entries, warps=warps) for rows, entries, warps in tiles]


def _prepare(problem: Sddmm, config: Config) -> Launch:
    p = problem
    numbers = (p.m, p.d, *p.a, *p.b, p.out_batch, p.scale)
    constants = {name: config[name] for name in ("BR", "BD", "E")}
    grid = (triton.cdiv(p.m, config["BR"]) * p.batch,)
    return Launch(sddmm_few_kernel, grid, numbers, constants, num_warps=config["warps"])


_m, _n, _d, _batch, _nnz, _variation, _itemsize = sizes("m n d batch nnz variation itemsize")

SDDMM_FEW = Template(
    name="sddmm_few",
    op="sddmm",
    sources=(sddmm_few_kernel,),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=_batch * (_nnz * (_itemsize + 4) + (_m + _n) * _d * _itemsize),
        seconds=gather_seconds(_m, _n, _d, _batch, _nnz, _variation, _itemsize),
    ),
    prepare=_prepare,
)
