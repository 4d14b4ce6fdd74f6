"""Sampled dense-dense product on tensor cores: the whole product is computed, and what the pattern stores is kept.

From a few percent of stored places on this is faster than a dot product for each. Every element stands alone, so that
values that are not finite reach no place they would not reach otherwise.
"""

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cost import Cost, sizes
from sparsecomp.lowering.launch import Launch
from sparsecomp.lowering.launches import Launches, Step
from sparsecomp.lowering.sddmm import Sddmm
from sparsecomp.lowering.signature import Device
from sparsecomp.lowering.spmm_csr import unsupported
from sparsecomp.lowering.template import Config, Template
from sparsecomp.lowering.templates import dense_product
from sparsecomp.lowering.templates.product_cost import product_seconds
from sparsecomp.lowering.templates.sddmm import rows_of_entries

MOST_WORKSPACE = 2**28
"""Elements of the product, float32."""


@triton.jit
def sample_kernel(
    crow_ptr, col_ptr, full_ptr, out_ptr, M, N, blocks, halvings, out_b, scale, P: tl.constexpr
):  # fmt: skip
    """out[batch, e] = scale · full[batch, row(e), col(e)]; full: (batch, M, N) float32."""
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    entry = (tl.program_id(0) % blocks).to(tl.int64) * P + tl.arange(0, P)
    ok = (entry >= tl.load(crow_ptr)) & (entry < tl.load(crow_ptr + M))
    row = tl.where(ok, rows_of_entries(crow_ptr, entry, M, halvings), 0)
    col = tl.load(col_ptr + entry, mask=ok, other=0)
    value = tl.load(full_ptr + (batch * M + row) * N + col, mask=ok, other=0.0) * scale
    tl.store(out_ptr + batch * out_b + entry, value.to(out_ptr.dtype.element_ty), mask=ok)


def _refuse(problem: Sddmm, device: Device) -> str | None:
    p = problem
    if p.batch * p.m * p.n > MOST_WORKSPACE:
        return f"the product would pass {MOST_WORKSPACE} elements"
    if p.d < 8:
        return "a depth below 8 leaves tensor cores idle"
    return unsupported(p.dtype, p.out_dtype)


def _space(problem: Sddmm, device: Device) -> list[Config]:
    return dense_product.tiles(problem.m, problem.n, problem.dtype, device)


def _prepare(problem: Sddmm, config: Config) -> Launches:
    p = problem
    strides = (p.a_batch, p.a_row, p.a_col, p.b_batch, p.b_col, p.b_row)
    output = (p.m * p.n, p.n, 1, 0, 0, 0, 1.0)
    plain = {"BIAS_ROWS": False, "ACTIVATION": "none"}
    product = dense_product.product_launch((p.batch, p.m, p.n, p.d), strides, output, plain, p.dtype, config)
    blocks = triton.cdiv(p.nnz, 512)
    numbers = (p.m, p.n, blocks, p.m.bit_length(), p.out_batch, p.scale)
    sample = Launch(sample_kernel, (blocks * p.batch,), numbers, {"P": 512}, num_warps=4)
    steps = [Step(product, (2, 3, None, None, 5, None)), Step(sample, (0, 1, 5, 4))]
    return Launches([((p.batch, p.m, p.n), torch.float32)], steps)


_m, _n, _d, _batch, _nnz, _itemsize, _bm, _bn = sizes("m n d batch nnz itemsize BM BN")

SDDMM_DENSE = Template(
    name="sddmm_dense",
    op="sddmm",
    sources=(sample_kernel, rows_of_entries, *dense_product.SOURCES),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=_batch * (_m * _n * 4 + _nnz * 40),
        launches=sympy.Integer(2),
        seconds=product_seconds(sympy.ceiling(_m / _bm) * sympy.ceiling(_n / _bn) * _batch, _d) + 5e-6,
    ),
    prepare=_prepare,
)
