"""Layers by narrow CSR that read one x: a program is one of `narrow_rows`, of any of them."""

from functools import partial

import sympy
import triton
import triton.language as tl

from sparsecomp.formats.narrow import CHUNK
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches
from sparsecomp.lowering.sparse.kernels import narrow_rows
from sparsecomp.lowering.sparse.kernels.epilogue import FINISH
from sparsecomp.lowering.sparse.kernels.narrow_rows import WALK, behind_transpose, finished_rows
from sparsecomp.lowering.sparse.kernels.sibling import CHOOSING, chosen, part_programs, part_rows, sibling
from sparsecomp.lowering.sparse.narrow import SpmmNarrow
from sparsecomp.lowering.tuning.cost import Cost
from sparsecomp.lowering.tuning.template import Config, Template


@triton.jit
def narrow_siblings_kernel(
    starts_ptr, chunks_ptr, bases_ptr, indices_ptr, values_ptr,
    second_starts_ptr, second_chunks_ptr, second_bases_ptr, second_indices_ptr, second_values_ptr,
    third_starts_ptr, third_chunks_ptr, third_bases_ptr, third_indices_ptr, third_values_ptr,
    dense_ptr, bias_ptr, second_bias_ptr, third_bias_ptr, out_ptr, second_out_ptr, third_out_ptr,
    M, second_M, third_M, N, dense_k,
    ACTIVATION: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one of the weights, E values a step; an out is (N, its M), dense (K, BN) where BN is not 1."""
    place, program = sibling(tl.program_id(0), M, second_M, ROWS)
    if bias_ptr is not None:
        bias_ptr = chosen(place, bias_ptr, second_bias_ptr, third_bias_ptr)
    rows = chosen(place, M, second_M, third_M)
    finished_rows(
        chosen(place, starts_ptr, second_starts_ptr, third_starts_ptr),
        chosen(place, chunks_ptr, second_chunks_ptr, third_chunks_ptr),
        chosen(place, bases_ptr, second_bases_ptr, third_bases_ptr),
        chosen(place, indices_ptr, second_indices_ptr, third_indices_ptr),
        chosen(place, values_ptr, second_values_ptr, third_values_ptr),
        dense_ptr, bias_ptr, None, chosen(place, out_ptr, second_out_ptr, third_out_ptr),
        program * ROWS, rows, N, dense_k, 0, 1, rows, 0, 0, 0, 1.0, True, ACTIVATION, CHUNK, ROWS, BN, E,
    )  # fmt: skip


def _prepare(problem: SpmmNarrow, config: Config) -> Launch | Launches:
    p = problem
    constants = {"ACTIVATION": p.output.activation, "CHUNK": CHUNK}
    constants |= {name: config[name] for name in ("ROWS", "BN", "E")}
    product = Launch(
        narrow_siblings_kernel, (part_programs(p, config["ROWS"]),), (*part_rows(p), p.n, p.dense.row), constants,
        num_warps=config["warps"],
    )  # fmt: skip
    return behind_transpose(p, config["BN"], product, 15, 22)


_template = partial(
    Template,
    sources=(narrow_siblings_kernel, finished_rows, *CHOOSING, *WALK, *FINISH),
    refuse=narrow_rows.NARROW_ROWS.refuse,
    space=narrow_rows.NARROW_ROWS.space,
    cost=Cost(
        bytes=sympy.Integer(0), launches=narrow_rows.NARROW_ROWS.cost.launches,
        seconds=narrow_rows.NARROW_ROWS.cost.seconds,
    ),
    prepare=_prepare,
)  # fmt: skip
NARROW_TWO, NARROW_THREE = (_template(name=name, op=name) for name in ("narrow_two", "narrow_three"))
