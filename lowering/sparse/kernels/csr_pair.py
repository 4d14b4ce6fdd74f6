"""A gated pair by CSR times few columns that each lie in one piece: both weights' rows as `spmm_csr_few` does one's.

What of dense the rows of the one read, those of the other find in L1.
"""

import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.kernels import spmm_csr_few
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH_PAIR, finish_pair
from sparsecomp.lowering.sparse.kernels.few_cost import gather_seconds
from sparsecomp.lowering.sparse.kernels.spmm_csr_few import gathered_sums
from sparsecomp.lowering.sparse.spmm_csr import SpmmCsr
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def csr_pair_kernel(
    crow_ptr, col_ptr, values_ptr, other_crow_ptr, other_col_ptr, other_values_ptr, dense_ptr, bias_ptr, other_bias_ptr,
    out_ptr, M, N, dense_k, dense_n, out_m, out_n,
    ACTIVATION: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """A program finishes BR rows by BN columns of out, E entries of each row at a time; see `finish_pair`."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(M, BR)
    cols = pid // blocks * BN + tl.arange(0, BN)
    rows = pid % blocks * BR + tl.arange(0, BR)
    column_ptr = dense_ptr + cols.to(tl.int64) * dense_n
    total = gathered_sums(
        crow_ptr, col_ptr, values_ptr, column_ptr, dense_k, rows, cols < N, M, False, BR, BN, E
    )  # fmt: skip
    other = gathered_sums(
        other_crow_ptr, other_col_ptr, other_values_ptr, column_ptr, dense_k, rows, cols < N, M, False, BR, BN, E
    )
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    finish_pair(total, other, bias_ptr, other_bias_ptr, out_ptr, rows, cols, mask, out_m, out_n, ACTIVATION)


def _refuse(problem: SpmmCsr, device: Device) -> str | None:
    if problem.batch != 1 or problem.filled:
        return "a batch, or rows that are filled up, are multiplied one weight after another"
    return spmm_csr_few.SPMM_CSR_FEW.refuse(problem, device)


def _prepare(problem: SpmmCsr, config: Config) -> Launch:
    p, out = problem, problem.output
    grid = (triton.cdiv(p.m, config["BR"]) * triton.cdiv(p.n, config["BN"]),)
    numbers = (p.m, p.n, *p.dense[1:], *out.strides[1:])
    constants = {"ACTIVATION": out.activation} | {name: config[name] for name in ("BR", "BN", "E")}
    return Launch(csr_pair_kernel, grid, numbers, constants, num_warps=config["warps"])


_m, _k, _n, _nnz, _variation, _itemsize = sizes("m k n nnz variation itemsize")

CSR_PAIR_FEW = Template(
    name="csr_pair",
    op="csr_pair",
    sources=(csr_pair_kernel, gathered_sums, *FINISH_PAIR),
    refuse=_refuse,
    space=spmm_csr_few.SPMM_CSR_FEW.space,
    # three quarters of what its layers take by their estimate (H200, 2 to 16 rows: 0.9 to 1.3 of what was measured)
    cost=Cost(
        bytes=0.75 * (2 * _nnz * (_itemsize + 4) + (_k + _m) * _n * _itemsize),
        seconds=0.75 * gather_seconds(2 * _m, _k, _n, 1, 2 * _nnz, _variation, _itemsize),
    ),
    prepare=_prepare,
)
