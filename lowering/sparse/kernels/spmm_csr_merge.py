"""CSR times dense for uneven rows: every program gets as many rows and nonzeros together as any other.

Ends of rows and nonzeros form one list of M + nnz tokens (a row's end behind its nonzeros), cut in chunks of T. A
binary search over `crow` finds where a chunk begins (merge path: Merrill and Garland, "Merge-based parallel sparse
matrix-vector multiplication", SC 2016). Rows within a chunk are finished there. The pieces of rows that span chunks go
to a workspace, and a second small kernel adds them in order: no atomics, so that results repeat bit for bit, and the
epilogue is applied once.
"""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.sparse.kernels import spmm_csr_rows as rows
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, finish
from sparsecomp.lowering.sparse.kernels.gather import gather_rows
from sparsecomp.lowering.sparse.spmm_csr import SpmmCsr, unsupported_dtypes
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template

_MOST_WORKSPACE = 2**27
"""Elements of float32."""
_TOKENS = (64, 128, 256, 512, 1024)


@triton.jit
def path_row(crow_ptr, first, M, token):
    """How many rows end before `token` of the list of row ends and nonzeros; `first` is crow[0]."""
    low = tl.zeros((), tl.int64)
    high = low + tl.minimum(token, M)
    while low < high:
        middle = (low + high) // 2
        # the end of row `middle` is token crow[middle + 1] - first + middle
        ends = tl.load(crow_ptr + middle + 1).to(tl.int64) - first + middle < token
        low = tl.where(ends, middle + 1, low)
        high = tl.where(ends, high, middle)
    return low


@triton.jit
def spmm_csr_merge_kernel(
    crow_ptr, col_ptr, values_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr, pieces_ptr,
    M, N, chunks, values_b, dense_b, dense_k, dense_n, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, FILLED: tl.constexpr,
    T: tl.constexpr, BR: tl.constexpr, U: tl.constexpr, E: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program does chunk c by BN columns, BR rows at a time.

    pieces: (batch, chunks, 2, N) float32. Piece 0 of a chunk is what it adds to a row that began before it and ends in
    it, piece 1 what it adds to the row that does not end in it. Only pieces that `finish_rows_kernel` reads need be
    written.
    """
    chunk = (tl.program_id(0) % chunks).to(tl.int64)
    slab = tl.program_id(0) // chunks
    col_blocks = tl.cdiv(N, BN)
    batch = (slab // col_blocks).to(tl.int64)
    cols = (slab % col_blocks) * BN + tl.arange(0, BN)
    inside = (cols < N)[None, :]
    first = tl.load(crow_ptr).to(tl.int64)
    tokens = tl.load(crow_ptr + M).to(tl.int64) - first + M
    start = tl.minimum(chunk * T, tokens)
    stop = tl.minimum(start + T, tokens)
    row0 = path_row(crow_ptr, first, M, start)
    row1 = path_row(crow_ptr, first, M, stop)
    entry0 = start - row0 + first
    entry1 = stop - row1 + first
    piece = pieces_ptr + ((batch * chunks + chunk) * 2 * N) + cols[None, :] + tl.zeros((BR, 1), tl.int64)
    for block in range(row0, tl.minimum(row1 + 1, M), BR):
        row = block + tl.arange(0, BR)
        known = (row <= row1) & (row < M)
        begin = tl.load(crow_ptr + row, mask=known, other=0).to(tl.int64)
        end = tl.load(crow_ptr + row + 1, mask=known, other=0).to(tl.int64)
        earlier = begin < entry0
        begin = tl.maximum(begin, entry0)
        end = tl.where(known, tl.minimum(end, entry1), begin)
        acc = gather_rows(
            begin, end, col_ptr, values_ptr + batch * values_b, dense_ptr + batch * dense_b, cols, N, dense_k, dense_n,
            FILLED, BR, U, E, BN,
        )  # fmt: skip
        ended = row < row1
        tl.store(piece, acc, mask=(ended & earlier)[:, None] & inside)
        tl.store(piece + N, acc, mask=(known & (row == row1))[:, None] & inside)
        finish(
            acc, bias_ptr, residual_ptr, out_ptr, batch, row, cols, (ended & ~earlier)[:, None] & inside,
            out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
        )  # fmt: skip


@triton.jit
def finish_rows_kernel(
    crow_ptr, bias_ptr, residual_ptr, out_ptr, pieces_ptr,
    M, N, chunks, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, T: tl.constexpr, E: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Finishes the row, if any, that began before chunk c and ends in it: pieces 1 since it began, and piece 0 of c."""
    chunk = (tl.program_id(0) % chunks).to(tl.int64)
    slab = tl.program_id(0) // chunks
    col_blocks = tl.cdiv(N, BN)
    batch = (slab // col_blocks).to(tl.int64)
    first = tl.load(crow_ptr).to(tl.int64)
    tokens = tl.load(crow_ptr + M).to(tl.int64) - first + M
    start = tl.minimum(chunk * T, tokens)
    row = path_row(crow_ptr, first, M, start)
    if row >= M:
        return
    begin = tl.load(crow_ptr + row).to(tl.int64) - first
    end = tl.load(crow_ptr + row + 1).to(tl.int64) - first
    if begin + row >= start or end + row >= start + T:
        return
    cols = (slab % col_blocks) * BN + tl.arange(0, BN)
    inside = (cols < N)[None, :]
    turn = tl.arange(0, E)[:, None]
    pieces = pieces_ptr + batch * chunks * 2 * N + cols[None, :]
    acc = tl.zeros((E, BN), tl.float32)
    for other in range((begin + row) // T, chunk, E):
        acc += tl.load(pieces + (2 * (other + turn) + 1) * N, mask=(other + turn < chunk) & inside, other=0.0)
    own = tl.load(pieces + (2 * chunk) * N, mask=inside, other=0.0)
    total = tl.sum(acc, 0)[None, :] + own
    finish(
        total, bias_ptr, residual_ptr, out_ptr, batch, row + tl.zeros((1,), tl.int64), cols, inside,
        out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


def _refuse(problem: SpmmCsr, device: Device) -> str | None:
    if problem.batch * _chunks(problem, max(_TOKENS)) * 2 * problem.n > _MOST_WORKSPACE:
        return f"its workspace would pass {_MOST_WORKSPACE} elements"
    return unsupported_dtypes(problem.dtype, problem.dense_dtype, problem.output.dtype)


def _chunks(problem: SpmmCsr, tokens: int) -> int:
    return triton.cdiv(problem.m + problem.nnz, tokens)


def _space(problem: SpmmCsr, device: Device) -> list[Config]:
    return [
        Config(**config, T=tokens)
        for config in rows.gather_configs(problem) for tokens in _TOKENS
        if config["BR"] in (1, 2, 4, 16) and config["U"] * config["E"] >= 4 and config["warps"] < 4
        and config["BN"] <= 128 and problem.batch * _chunks(problem, tokens) * 2 * problem.n <= _MOST_WORKSPACE
    ]  # fmt: skip


def _prepare(problem: SpmmCsr, config: Config) -> Launches:
    p = problem
    pieces = ((p.batch, _chunks(p, config["T"]), 2, p.n), torch.float32)
    if not config["COPY"]:
        main = Step(_main(p, config), (0, 1, 2, 3, 4, 5, 6, 7))
        return Launches([pieces], [main, Step(_finish(p, config), (0, 4, 5, 6, 7))])
    dense, copy, row_major = rows.row_major_copy(p)
    main = Step(_main(row_major, config), (0, 1, 2, 8, 4, 5, 6, 7))
    steps = [Step(copy, (rows.DENSE_OPERAND, 8)), main, Step(_finish(p, config), (0, 4, 5, 6, 7))]
    return Launches([pieces, dense], steps)


def _main(problem: SpmmCsr, config: Config) -> Launch:
    p, chunks = problem, _chunks(problem, config["T"])
    grid = (chunks * triton.cdiv(p.n, config["BN"]) * p.batch,)
    numbers = (p.m, p.n, chunks, p.values_batch, *p.dense, *p.output.numbers)
    tile = {name: config[name] for name in ("T", "BR", "U", "E", "BN")}
    constants = {**p.output.constants, "FILLED": p.filled, **tile}
    return Launch(spmm_csr_merge_kernel, grid, numbers, constants, num_warps=config["warps"])


def _finish(problem: SpmmCsr, config: Config) -> Launch:
    p, chunks = problem, _chunks(problem, config["T"])
    block = min(triton.next_power_of_2(p.n), 128)
    constants = {**p.output.constants, "T": config["T"], "E": max(1024 // block, 8), "BN": block}
    grid = (chunks * triton.cdiv(p.n, block) * p.batch,)
    return Launch(finish_rows_kernel, grid, (p.m, p.n, chunks, *p.output.numbers), constants, num_warps=2)


_m, _k, _n, _batch, _nnz, _itemsize = sizes("m k n batch nnz itemsize")
_br, _u, _e, _bn, _t, _variation, _processors = sizes("BR U E BN T variation processors")

_pieces = _batch * (_m + _nnz) / _t * 2 * _n * 4
# a block of rows is as long as its longest; a chunk's blocks follow one another
_steps = sympy.Min(_t * (1 + _variation / 4) / _br, _t) / (_u * _e) + _t * _m / (_m + _nnz) / _br

SPMM_CSR_MERGE = Template(
    name="spmm_csr_merge",
    op="spmm_csr",
    sources=(spmm_csr_merge_kernel, finish_rows_kernel, path_row, rows.copy_rows_kernel, gather_rows, *FINISH),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=_batch * (_nnz * (_itemsize + 4) + (_k + _m) * _n * _itemsize) + 2 * _pieces,
        launches=sympy.Integer(2),
        seconds=1.1e-5 + rows.copying + 1.3 * sympy.Max(
            rows.traffic, rows.walk_seconds(_steps, _batch * (_m + _nnz) / _t * sympy.ceiling(_n / _bn))
        ),
    ),
    prepare=_prepare,
)
