"""A gated pair by narrow CSR: some rows of the one weight and then those of the other, by one transposed dense.

Each weight is walked as `narrow_rows` walks one. The sums of the first wait in registers; a stream of the other beside
it would take so many more that a third fewer programs ran at a time.
"""

import sympy
import triton
import triton.language as tl

from sparsecomp.formats.narrow import CHUNK
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches
from sparsecomp.lowering.sparse.kernels import narrow_rows
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH_PAIR, finish_pair
from sparsecomp.lowering.sparse.kernels.narrow_rows import (
    FAR,
    MANY,
    WALK,
    behind_transpose,
    far_from,
    next_ends,
    opened,
    stream_seconds,
    walked_row,
)
from sparsecomp.lowering.sparse.narrow import SpmmNarrow
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def narrow_pair_kernel(
    starts_ptr, chunks_ptr, bases_ptr, indices_ptr, values_ptr, other_starts_ptr, other_chunks_ptr, other_bases_ptr,
    other_indices_ptr, other_values_ptr, dense_ptr, bias_ptr, other_bias_ptr, out_ptr, M, N, dense_k, out_m, out_n,
    ACTIVATION: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """ROWS rows of each weight, E values a step; dense is (K, BN) where BN is not 1."""
    first = tl.program_id(0) * ROWS
    behind = tl.minimum(first + ROWS, M)
    cols = tl.arange(0, BN)
    turn = tl.arange(0, ROWS)[:, None]
    totals = tl.zeros((ROWS, BN), tl.float32)
    limit, at, end, chunk, last_chunk, value, column = opened(
        starts_ptr, chunks_ptr, bases_ptr, indices_ptr, values_ptr, first, M, ROWS, E, CHUNK
    )
    for row in range(first, behind):
        next_end, next_last_chunk = next_ends(starts_ptr, chunks_ptr, row, M)
        total, at, chunk, value, column = walked_row(
            bases_ptr, indices_ptr, values_ptr, dense_ptr, dense_k, limit, at, end, chunk, last_chunk, value, column,
            BN, E, CHUNK,
        )  # fmt: skip
        totals = tl.where(turn == row - first, total + tl.zeros((1, BN), tl.float32), totals)
        end, last_chunk = next_end, next_last_chunk
    limit, at, end, chunk, last_chunk, value, column = opened(
        other_starts_ptr, other_chunks_ptr, other_bases_ptr, other_indices_ptr, other_values_ptr, first, M, ROWS, E,
        CHUNK,
    )  # fmt: skip
    for row in range(first, behind):
        next_end, next_last_chunk = next_ends(other_starts_ptr, other_chunks_ptr, row, M)
        other, at, chunk, value, column = walked_row(
            other_bases_ptr, other_indices_ptr, other_values_ptr, dense_ptr, dense_k, limit, at, end, chunk, last_chunk,
            value, column, BN, E, CHUNK,
        )  # fmt: skip
        rows = row + tl.zeros((1,), tl.int32)
        total = tl.sum(tl.where(turn == row - first, totals, 0.0), 0)[None, :]
        finish_pair(
            total, other + tl.zeros((1, BN), tl.float32), bias_ptr, other_bias_ptr, out_ptr, rows, cols,
            (cols < N)[None, :], out_m, out_n, ACTIVATION,
        )  # fmt: skip
        end, last_chunk = next_end, next_last_chunk


def _prepare(problem: SpmmNarrow, config: Config) -> Launch | Launches:
    p, out = problem, problem.output
    constants = {"ACTIVATION": out.activation, "CHUNK": CHUNK} | {name: config[name] for name in ("ROWS", "BN", "E")}
    product = Launch(
        narrow_pair_kernel, (triton.cdiv(p.m, config["ROWS"]),), (p.m, p.n, p.dense.row, *out.strides[1:]), constants,
        num_warps=config["warps"],
    )  # fmt: skip
    return behind_transpose(p, config["BN"], product, 10, 14)


_m, _nnz, _bn = sizes("m nnz BN")
_far = sympy.Piecewise((far_from(1, sympy.Piecewise((256, _m >= MANY), (128, True)), 1), _bn < 2), (FAR, True))
# of what its layers take: 0.81 to 0.95 for 28672x8192, 0.76 to 0.86 for 11008x4096, with 8 rows and more 0.95 to 1.19
_seconds = sympy.Piecewise(
    (stream_seconds(0.72 * 2 * _m, 0.93 * 2 * _nnz, _far), _bn < 8), (1.1 * stream_seconds(2 * _m, 2 * _nnz), True)
)

NARROW_PAIR_ROWS = Template(
    name="narrow_pair",
    op="narrow_pair",
    sources=(narrow_pair_kernel, *WALK, *FINISH_PAIR),
    refuse=narrow_rows.NARROW_ROWS.refuse,
    space=narrow_rows.NARROW_ROWS.space,
    cost=Cost(bytes=sympy.Integer(0), launches=narrow_rows.NARROW_ROWS.cost.launches, seconds=_seconds),
    prepare=_prepare,
)
