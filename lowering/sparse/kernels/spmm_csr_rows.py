"""CSR times dense, rows shared out among programs: each gathers the rows of `dense` that its nonzeros point at.

Best while rows are alike: the program with the longest row ends last. Where rows are uneven, long ones can be done by
programs of their own that start before all others. Programs of the same columns run side by side, so that their slab of
`dense` stays in L2, and as they walk ascending columns together, partly in L1.
"""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step
from sparsecomp.lowering.launch.strided import Strides
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH, finish
from sparsecomp.lowering.sparse.kernels.gather import gather_rows
from sparsecomp.lowering.sparse.spmm_csr import SpmmCsr, unsupported_dtypes
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template

DENSE_OPERAND = 3
"""Position of the dense operand among the tensors."""
_GROUP = 8
"""Rows that a program looks at for long ones."""
_LONG = 128
"""Entries from which a row is long, unless most rows are."""


@triton.jit
def spmm_csr_rows_kernel(
    crow_ptr, col_ptr, values_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, ahead, long_from, values_b, dense_b, dense_k, dense_n, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, FILLED: tl.constexpr,
    BR: tl.constexpr, U: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A program finishes BR rows by BN columns of out; see `gather_rows` for U and E, and `finish`.

    With GROUP, the first `ahead` programs look at GROUP rows each and finish those of `long_from` entries or more,
    which the others leave out.
    """
    pid = tl.program_id(0)
    height = BR if GROUP == 0 else tl.where(pid < ahead, GROUP, BR)
    pid = pid if GROUP == 0 else tl.where(pid < ahead, pid, pid - ahead)
    blocks = tl.cdiv(M, height)
    col_blocks = tl.cdiv(N, BN)
    slab = pid // blocks
    first = pid % blocks * height
    batch = (slab // col_blocks).to(tl.int64)
    cols = (slab % col_blocks) * BN + tl.arange(0, BN)
    if GROUP == 0:
        rows = first + tl.arange(0, BR)
        begin = tl.load(crow_ptr + rows, mask=rows < M, other=0)
        end = tl.load(crow_ptr + rows + 1, mask=rows < M, other=0)
        _finish_rows(
            begin, end, rows, rows < M, cols, batch, col_ptr, values_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr,
            N, values_b, dense_b, dense_k, dense_n, out_b, out_m, out_n, res_b, res_m, res_n, scale,
            BIAS_ROWS, ACTIVATION, FILLED, BR, U, E, BN,
        )  # fmt: skip
    elif tl.program_id(0) < ahead:
        every = first + tl.arange(0, GROUP)
        begins = tl.load(crow_ptr + every, mask=every < M, other=0)
        ends = tl.load(crow_ptr + every + 1, mask=every < M, other=0)
        longest = tl.max(ends - begins, 0)
        stop = tl.where(longest >= long_from, tl.minimum(first + GROUP, M), first)
        for one in range(first, stop):
            row = one + tl.arange(0, 1)
            one_begin = tl.load(crow_ptr + row)
            one_end = tl.load(crow_ptr + row + 1)
            long = one_end - one_begin >= long_from
            _finish_rows(
                one_begin, tl.where(long, one_end, one_begin), row, long, cols, batch, col_ptr, values_ptr, dense_ptr,
                bias_ptr, residual_ptr, out_ptr, N, values_b, dense_b, dense_k, dense_n, out_b, out_m, out_n, res_b,
                res_m, res_n, scale, BIAS_ROWS, ACTIVATION, FILLED, 1, BR * U, E, BN,
            )  # fmt: skip
    else:
        rows = first + tl.arange(0, BR)
        begin = tl.load(crow_ptr + rows, mask=rows < M, other=0)
        end = tl.load(crow_ptr + rows + 1, mask=rows < M, other=0)
        short = end - begin < long_from
        _finish_rows(
            begin, tl.where(short, end, begin), rows, (rows < M) & short, cols, batch, col_ptr, values_ptr, dense_ptr,
            bias_ptr, residual_ptr, out_ptr, N, values_b, dense_b, dense_k, dense_n, out_b, out_m, out_n, res_b, res_m,
            res_n, scale, BIAS_ROWS, ACTIVATION, FILLED, BR, U, E, BN,
        )  # fmt: skip


@triton.jit
def _finish_rows(
    begin, end, rows, wanted, cols, batch, col_ptr, values_ptr, dense_ptr, bias_ptr, residual_ptr, out_ptr,
    N, values_b, dense_b, dense_k, dense_n, out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, FILLED: tl.constexpr,
    BR: tl.constexpr, U: tl.constexpr, E: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    acc = gather_rows(
        begin, end, col_ptr, values_ptr + batch * values_b, dense_ptr + batch * dense_b, cols, N, dense_k, dense_n,
        FILLED, BR, U, E, BN,
    )  # fmt: skip
    mask = wanted[:, None] & (cols < N)[None, :]
    finish(
        acc, bias_ptr, residual_ptr, out_ptr, batch, rows, cols, mask,
        out_b, out_m, out_n, res_b, res_m, res_n, scale, BIAS_ROWS, ACTIVATION,
    )  # fmt: skip


@triton.jit
def copy_rows_kernel(
    dense_ptr, rows_ptr, K, N, dense_b, dense_k, dense_n, rows_k, BK: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """rows[b, k, n] = dense[b, k, n], with row k of batch b at (b·K + k)·rows_k. Tiles are transposed on chip."""
    col_blocks = tl.cdiv(N, BN)
    row_blocks = tl.cdiv(K, BK)
    block = tl.program_id(0)
    batch = (block // (row_blocks * col_blocks)).to(tl.int64)
    k = (block // col_blocks % row_blocks) * BK + tl.arange(0, BK)
    n = (block % col_blocks) * BN + tl.arange(0, BN)
    mask = (k < K)[:, None] & (n < N)[None, :]
    k = k.to(tl.int64)[:, None]
    n = n.to(tl.int64)[None, :]
    value = tl.load(dense_ptr + batch * dense_b + k * dense_k + n * dense_n, mask=mask)
    tl.store(rows_ptr + (batch * K + k) * rows_k + n, value, mask=mask)


def row_major_copy(problem: SpmmCsr) -> tuple[tuple[tuple[int, ...], torch.dtype], Launch, SpmmCsr]:
    """A workspace, the launch (dense, workspace) that copies dense to it row by row, and the problem with it."""
    p = problem
    count = 1 if p.dense.batch == 0 else p.batch
    width = triton.cdiv(p.n, 8) * 8
    grid = (count * triton.cdiv(p.k, 64) * triton.cdiv(p.n, 64),)
    numbers = (p.k, p.n, *p.dense, width)
    launch = Launch(copy_rows_kernel, grid, numbers, {"BK": 64, "BN": 64}, num_warps=4)
    row_major = p._replace(dense=Strides(0 if count == 1 else p.k * width, width, 1))
    return ((count * max(p.k, 1), width), getattr(torch, p.dense_dtype)), launch, row_major


def gather_configs(problem: SpmmCsr) -> list[Config]:
    """Tiles of rows by entries by columns that fill one to four warps, without and with a row-major copy of dense."""
    n = triton.next_power_of_2(problem.n)
    wide = n >= 64
    columns = (64, 128, 256, 512) if wide else (max(n, 1),)
    copies = (0, 1) if problem.dense.column != 1 and problem.n > 1 and problem.k > 0 else (0,)
    return [
        Config(BR=br, U=u, E=e, BN=bn, warps=warps, COPY=copy)
        for copy in copies for bn in columns if bn <= n
        for br in ((2, 1, 4) if wide else (1, 2, 4, 8, 16)) for u in (1, 2, 4, 8, 16)
        for e in ((1, 2, 4, 8) if wide else (4, 8, 16, 32)) for warps in (1, 2, 4)
        if _balanced(br, u, e, bn, warps)
    ]  # fmt: skip


def _balanced(rows: int, unroll: int, entries: int, columns: int, warps: int) -> bool:
    """Whether threads have work and registers for it, and a sum over `unroll` stays within a thread."""
    elements = rows * unroll * entries * columns // (32 * warps)
    if unroll == 1:
        return entries > 1 and 4 <= elements <= 32
    # vectors of four along the columns, then along the entries
    # measured: many columns in depth leave too few warps, and few ones are better spread over entries
    deep = columns >= 32 and (unroll <= 4 or entries > 1)
    return warps == 1 and entries == max(128 // columns, 1) and rows <= 2 and 8 <= elements <= 64 and deep


def _refuse(problem: SpmmCsr, device: Device) -> str | None:
    return unsupported_dtypes(problem.dtype, problem.dense_dtype, problem.output.dtype)


def _space(problem: SpmmCsr, device: Device) -> list[Config]:
    uneven, narrow = problem.variation > 0 and problem.n > 1, problem.n < 32
    return [
        Config(**config, AHEAD=ahead)
        for config in gather_configs(problem) for ahead in (0, 1) if not ahead or uneven and (narrow or config["U"] > 1)
    ]  # fmt: skip


def _prepare(problem: SpmmCsr, config: Config) -> Launch | Launches:
    if config["COPY"]:
        workspace, copy, row_major = row_major_copy(problem)
        main = Step(_main(row_major, config), (0, 1, 2, 7, 4, 5, 6))
        return Launches([workspace], [Step(copy, (DENSE_OPERAND, 7)), main])
    return _main(problem, config)


def _main(problem: SpmmCsr, config: Config) -> Launch:
    p = problem
    slabs = triton.cdiv(p.n, config["BN"]) * p.batch
    group = _GROUP if config["AHEAD"] else 0
    ahead = triton.cdiv(p.m, group) * slabs if group else 0
    grid = (ahead + triton.cdiv(p.m, config["BR"]) * slabs,)
    long_from = max(_LONG, 4 * p.nnz // max(p.m, 1))
    numbers = (p.m, p.n, ahead, long_from, p.values_batch, *p.dense, *p.output.numbers)
    tile = {name: config[name] for name in ("BR", "U", "E", "BN")}
    constants = {**p.output.constants, "FILLED": p.filled, "GROUP": group, **tile}
    return Launch(spmm_csr_rows_kernel, grid, numbers, constants, num_warps=config["warps"])


_m, _k, _n, _batch, _nnz, _variation, _col, _itemsize = sizes("m k n batch nnz variation dense.column itemsize")
_br, _u, _e, _bn, _warps, _copy, _ahead, _processors = sizes("BR U E BN warps COPY AHEAD processors")
_gathered, _bandwidth, _rewritten = sizes("gathered bandwidth rewritten")

mean = _nnz / _m
"""Entries a row."""
_sector = 32
# what one nonzero pulls through L2: whole sectors, of one column each where columns are not neighbours
pulled = sympy.Piecewise(
    (sympy.Max(_n * _itemsize, _sector), sympy.Eq(_col, 1) | sympy.Eq(_copy, 1) | sympy.Le(_n, 1)),
    (_n * _sector, True),
)
copying = _copy * (2 * _batch * _k * _n * _itemsize / (_rewritten * _bandwidth) + 3e-6)
"""Seconds to copy dense."""
traffic = _batch * _nnz * pulled / (_gathered * _processors)
"""Seconds to gather: L2 with some help of L1."""
_measured = sympy.Piecewise((0.88, sympy.Eq(_itemsize, 2)), (0.6, True))
"""Share of the estimate that rows took on an H100, where L1 helps float32 more than was thought."""


def walk_seconds(steps: sympy.Expr, programs: sympy.Expr) -> sympy.Expr:
    """Seconds of `programs` that make `steps` dependent loads each, as many at a time as registers allow."""
    registers = 40 + (1 + 1.5 * _u) * _br * _e * _bn / (32 * _warps)
    resident = sympy.Min(32, 65536 / (registers * 32 * _warps))
    return sympy.Max(programs / (_processors * resident), 1) * (sympy.Max(steps, 0.5) * 7e-7 + 1.5e-6)


# a block of rows is as long as its longest
_uneven = sympy.Min(mean * (1 + _variation * (0.3 + 0.5 * sympy.log(_br + 1))), _k)
_longest = sympy.Piecewise((_uneven, sympy.Eq(_ahead, 0)), (sympy.Min(_uneven, sympy.Max(_LONG, 4 * mean)), True))
_programs = sympy.ceiling(_m / _br) * sympy.ceiling(_n / _bn) * _batch
# the last program ends when the longest row does, which starts anywhere, or at first
_most = sympy.Min(mean * (1 + 4 * _variation + _variation**2) + 30 * _variation * sympy.sqrt(mean), _k)
_last = _most / (_u * _e) * 9e-7
_tail = sympy.Piecewise((0.3 * _last, _variation > 0), (0, True))
_looking = _ahead * walk_seconds(sympy.Integer(0), sympy.ceiling(_m / _GROUP) * sympy.ceiling(_n / _bn) * _batch)
# the fewer bytes each warp has under way, the slower
_flow = traffic * (1 + 600 / (_br * _u * _e * _bn * _itemsize / _warps))
# rows that end early leave many columns' loads idle
_idle = sympy.Piecewise((1.6, (_variation > 0) & (_bn > 64) & (_u * _e > 2) & (mean > 4)), (1, True))
_body = _measured * _idle * sympy.Max(_flow, walk_seconds(_longest / (_u * _e), _programs))

SPMM_CSR_ROWS = Template(
    name="spmm_csr_rows",
    op="spmm_csr",
    sources=(spmm_csr_rows_kernel, _finish_rows, copy_rows_kernel, gather_rows, *FINISH),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=_batch * (_nnz * (_itemsize + 4) + (_k + _m) * _n * _itemsize),
        seconds=copying + 3e-6 + sympy.Piecewise(
            (sympy.Max(_body, _last) + _tail, sympy.Eq(_ahead, 0)), (sympy.Max(_body, _last / _br) + _looking, True)
        ),
    ),
    prepare=_prepare,
)
