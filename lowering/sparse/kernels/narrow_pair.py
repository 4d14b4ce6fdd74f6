"""A gated pair by narrow CSR: a row of both weights, one behind the other, by rows of dense that are gathered once.

Each weight is walked as `narrow_rows` walks one. While a program is at a row of the one, the first step of the other's
next row is loaded already.
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
    WALK,
    behind_transpose,
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
    cols = tl.arange(0, BN)
    limit, at, end, chunk, last_chunk, value, column = opened(
        starts_ptr, chunks_ptr, bases_ptr, indices_ptr, values_ptr, first, M, ROWS, E, CHUNK
    )
    other_limit, other_at, other_end, other_chunk, other_last_chunk, other_value, other_column = opened(
        other_starts_ptr, other_chunks_ptr, other_bases_ptr, other_indices_ptr, other_values_ptr, first, M, ROWS, E,
        CHUNK,
    )  # fmt: skip
    for row in range(first, tl.minimum(first + ROWS, M)):
        next_end, next_last_chunk = next_ends(starts_ptr, chunks_ptr, row, M)
        other_next_end, other_next_last_chunk = next_ends(other_starts_ptr, other_chunks_ptr, row, M)
        total, at, chunk, value, column = walked_row(
            bases_ptr, indices_ptr, values_ptr, dense_ptr, dense_k, limit, at, end, chunk, last_chunk, value, column,
            BN, E, CHUNK,
        )  # fmt: skip
        other, other_at, other_chunk, other_value, other_column = walked_row(
            other_bases_ptr, other_indices_ptr, other_values_ptr, dense_ptr, dense_k, other_limit, other_at, other_end,
            other_chunk, other_last_chunk, other_value, other_column, BN, E, CHUNK,
        )  # fmt: skip
        rows = row + tl.zeros((1,), tl.int32)
        nothing = tl.zeros((1, BN), tl.float32)
        finish_pair(
            total + nothing, other + nothing, bias_ptr, other_bias_ptr, out_ptr, rows, cols, (cols < N)[None, :],
            out_m, out_n, ACTIVATION,
        )  # fmt: skip
        end, last_chunk = next_end, next_last_chunk
        other_end, other_last_chunk = other_next_end, other_next_last_chunk


def _prepare(problem: SpmmNarrow, config: Config) -> Launch | Launches:
    p, out = problem, problem.output
    constants = {"ACTIVATION": out.activation, "CHUNK": CHUNK} | {name: config[name] for name in ("ROWS", "BN", "E")}
    product = Launch(
        narrow_pair_kernel, (triton.cdiv(p.m, config["ROWS"]),), (p.m, p.n, p.dense.row, *out.strides[1:]), constants,
        num_warps=config["warps"],
    )  # fmt: skip
    return behind_transpose(p, config["BN"], product, 10, 14)


_m, _nnz = sizes("m nnz")

NARROW_PAIR_ROWS = Template(
    name="narrow_pair",
    op="narrow_pair",
    sources=(narrow_pair_kernel, *WALK, *FINISH_PAIR),
    refuse=narrow_rows.NARROW_ROWS.refuse,
    space=narrow_rows.NARROW_ROWS.space,
    cost=Cost(
        bytes=sympy.Integer(0), launches=narrow_rows.NARROW_ROWS.cost.launches,
        seconds=stream_seconds(2 * _m, 2 * _nnz),
    ),
    prepare=_prepare,
)
