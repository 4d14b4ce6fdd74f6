"""CSR times few columns that each lie in one piece: a layer's few inputs as they come, without a copy by column.

What kernels that read `dense` row by row gain by a copy, a call of a small layer loses again to the copy's launch. Here
the threads of a warp take neighbouring entries of a row of S. These point at ascending places of the same column, so
that a load of theirs touches few lines of memory, and the columns stay in L1 while a processor walks its rows.
"""

import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, finish
from sparsecomp.lowering.sparse.kernels.few_cost import gather_seconds
from sparsecomp.lowering.sparse.spmm_csr import SpmmCsr, unsupported_dtypes
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template

_MOST_COLUMNS = 64


@triton.jit
def gathered_sums(
    crow_ptr, col_ptr, values_ptr, column_ptr, dense_k, rows, inside, M,
    FILLED: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Sums (BR, BN) of `rows` with the columns of dense that begin at `column_ptr`, those `inside`."""
    begin = tl.load(crow_ptr + rows, mask=rows < M, other=0)
    end = tl.load(crow_ptr + rows + 1, mask=rows < M, other=0)
    acc = tl.zeros((BR, BN, E), tl.float32)
    at = begin[:, None] + tl.arange(0, E)[None, :]
    ok = at < end[:, None]
    k = tl.load(col_ptr + at, mask=ok, other=0)
    v = tl.load(values_ptr + at, mask=ok, other=0.0)
    for _ in range(0, tl.max(end - begin, 0), E):
        at += E
        next_ok = at < end[:, None]
        next_k = tl.load(col_ptr + at, mask=next_ok, other=0)
        next_v = tl.load(values_ptr + at, mask=next_ok, other=0.0)
        if FILLED:
            ok = ok & (v != 0.0)
        place = column_ptr[None, :, None] + (k.to(tl.int64) * dense_k)[:, None, :]
        d = tl.load(place, mask=ok[:, None, :] & inside[None, :, None], other=0.0)
        acc += v.to(tl.float32)[:, None, :] * d.to(tl.float32)
        k = next_k
        v = next_v
        ok = next_ok
    return tl.sum(acc, 2)


@triton.jit
def spmm_csr_few_kernel(
    crow_ptr, col_ptr, values_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, values_b, dense_b, dense_k, dense_n, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, FILLED: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """A program finishes BR rows by BN columns of out, E entries of each row at a time; see `finish`."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(M, BR)
    col_blocks = tl.cdiv(N, BN)
    slab = pid // blocks
    batch = (slab // col_blocks).to(tl.int64)
    cols = (slab % col_blocks) * BN + tl.arange(0, BN)
    rows = pid % blocks * BR + tl.arange(0, BR)
    column_ptr = dense_ptr + batch * dense_b + cols.to(tl.int64) * dense_n
    total = gathered_sums(
        crow_ptr, col_ptr, values_ptr + batch * values_b, column_ptr, dense_k, rows, cols < N, M, FILLED, BR, BN, E
    )
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    finish(
        total, bias_ptr, residual_ptr, out_ptr, batch, rows, cols, mask,
        out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


def _refuse(problem: SpmmCsr, device: Device) -> str | None:
    if problem.n > _MOST_COLUMNS:
        return f"{problem.n} columns: it is for {_MOST_COLUMNS} and fewer"
    if problem.dense.row != 1 or problem.n < 2:
        return "columns of dense do not lie in one piece each, beside others"
    return unsupported_dtypes(problem.dtype, problem.dense_dtype, problem.output.dtype)


def _space(problem: SpmmCsr, device: Device) -> list[Config]:
    """The best first, as measured on an H200: eight rows share their columns in L1, unless there are few columns."""
    if problem.n < 8:
        n = triton.next_power_of_2(problem.n)
        tiles = [(1, n, 64, 1), (2, n, 64, 2), (2, n, 64, 1), (4, n, 64, 4), (8, n, 64, 4)]
    else:
        tiles = [(8, 8, 32, 4), (8, 8, 32, 2), (1, 8, 32, 1), (8, 16, 32, 4), (1, 8, 64, 2), (2, 8, 64, 4)]
    return [Config(BR=rows, BN=columns, E=entries, warps=warps) for rows, columns, entries, warps in tiles]


def _prepare(problem: SpmmCsr, config: Config) -> Launch:
    p = problem
    grid = (triton.cdiv(p.m, config["BR"]) * triton.cdiv(p.n, config["BN"]) * p.batch,)
    numbers = (p.m, p.n, p.values_batch, *p.dense, *p.output.numbers)
    tile = {name: config[name] for name in ("BR", "BN", "E")}
    constants = {**p.output.constants, "FILLED": p.filled, **tile}
    return Launch(spmm_csr_few_kernel, grid, numbers, constants, num_warps=config["warps"])


_m, _k, _n, _batch, _nnz, _variation, _itemsize = sizes("m k n batch nnz variation itemsize")

SPMM_CSR_FEW = Template(
    name="spmm_csr_few",
    op="spmm_csr",
    sources=(spmm_csr_few_kernel, gathered_sums, *FINISH),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=_batch * (_nnz * (_itemsize + 4) + (_k + _m) * _n * _itemsize),
        seconds=gather_seconds(_m, _k, _n, _batch, _nnz, _variation, _itemsize),
    ),
    prepare=_prepare,
)
