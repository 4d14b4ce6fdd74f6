"""Sampled dense-dense product on tensor cores: the whole product is computed, and what the pattern stores is kept.

From a few percent of stored places on this is faster than a dot product for each. Every element stands alone, so that
values that are not finite reach no place they would not reach otherwise. Float32 is multiplied in halves, and what they
cannot hold (see `halves_product`) is multiplied again when it is sampled.
"""

from typing import Any

import sympy
import torch
import triton
import triton.language as tl

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches, Step, Workspace
from sparsecomp.lowering.sparse.kernels import dense_product, halves_product
from sparsecomp.lowering.sparse.kernels.dense_product import tile_launch
from sparsecomp.lowering.sparse.kernels.epilogue import precision
from sparsecomp.lowering.sparse.kernels.halves_product import padded
from sparsecomp.lowering.sparse.kernels.product_cost import HALVES_RATE, RATE, product_seconds
from sparsecomp.lowering.sparse.kernels.sddmm import rows_of_entries
from sparsecomp.lowering.sparse.sddmm import Sddmm
from sparsecomp.lowering.sparse.spmm_csr import unsupported_dtypes
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template

_MOST_PRODUCT = 2**28
"""Elements of the product, float32."""


@triton.jit
def sample_kernel(
    crow_ptr, col_ptr, a_ptr, b_ptr, full_ptr, out_ptr,
    M, N, D, blocks, halvings, a_b, a_m, a_d, b_b, b_n, b_d, out_b, scale, HALVES: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """out[batch, e] = scale · full[batch, row(e), col(e)]; full: (batch, M, N) float32.

    With HALVES a product that is not finite is computed again, as a dot product of rows.
    """
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    entry = (tl.program_id(0) % blocks).to(tl.int64) * P + tl.arange(0, P)
    ok = (entry >= tl.load(crow_ptr)) & (entry < tl.load(crow_ptr + M))
    row = tl.where(ok, rows_of_entries(crow_ptr, entry, M, halvings), 0)
    col = tl.load(col_ptr + entry, mask=ok, other=0).to(tl.int64)
    value = tl.load(full_ptr + (batch * M + row) * N + col, mask=ok, other=0.0)
    if HALVES:
        again = ~(value - value == 0.0)
        if tl.max(again.to(tl.int32), 0) > 0:
            right = tl.zeros((P,), tl.float32)
            for d in range(D):
                x = tl.load(a_ptr + batch * a_b + row * a_m + tl.cast(d, tl.int64) * a_d, mask=again, other=0.0)
                y = tl.load(b_ptr + batch * b_b + col * b_n + tl.cast(d, tl.int64) * b_d, mask=again, other=0.0)
                right += x * y
            value = tl.where(again, right, value)
    tl.store(out_ptr + batch * out_b + entry, (value * scale).to(out_ptr.dtype.element_ty), mask=ok)


def _refuse(problem: Sddmm, device: Device) -> str | None:
    p = problem
    if p.batch * p.m * p.n > _MOST_PRODUCT:
        return f"the product would pass {_MOST_PRODUCT} elements"
    if p.d < 8:
        return "a depth below 8 leaves tensor cores idle"
    return unsupported_dtypes(p.dtype, p.out_dtype)


def _space(problem: Sddmm, device: Device) -> list[Config]:
    if problem.dtype == "float32":
        return halves_product.halves_tiles(problem.m, problem.n, device)
    return dense_product.product_tiles(problem.m, problem.n, device)


def _prepare(problem: Sddmm, config: Config) -> Launches:
    p, halves = problem, problem.dtype == "float32"
    output = (p.m * p.n, p.n, 1, 0, 0, 0, 1.0)
    plain = {"BIAS_ROWS": False, "ACTIVATION": "none"}
    blocks = triton.cdiv(p.nnz, 512)
    numbers = (p.m, p.n, p.d, blocks, p.m.bit_length(), *p.a, *p.b, p.out_batch, p.scale)
    sample = Launch(sample_kernel, (blocks * p.batch,), numbers, {"HALVES": halves, "P": 512}, num_warps=4)
    sampling = Step(sample, (0, 1, 2, 3, 5, 4))
    full = ((p.batch, p.m, p.n), torch.float32)
    if halves:
        workspaces, steps = _in_halves(p, config, output, plain)
        return Launches([full, *workspaces], [*steps, sampling])
    strides = (*p.a, p.b.batch, p.b.column, p.b.row)
    constants = {**plain, "PRECISION": precision(p.dtype)}
    product = tile_launch(dense_product.product_kernel, (p.batch, p.m, p.n, p.d), strides, output, constants, config)
    return Launches([full], [Step(product, (2, 3, None, None, 5, None)), sampling])


def _in_halves(
    problem: Sddmm, config: Config, output: tuple[Any, ...], plain: dict[str, Any]
) -> tuple[list[Workspace], list[Step]]:
    """Halves and factors of a (6, 7) and b (8, 9), and the product of them (5)."""
    p, width = problem, padded(problem.d)
    workspaces, steps, operands, factors = [], [], [], []
    for place, rows, strides in ((2, p.m, p.a), (3, p.n, p.b)):
        sets = p.batch if strides.batch else 1
        at = 6 + len(workspaces)
        workspaces += [((2, sets, rows, width), torch.float16), ((sets, rows), torch.float32)]
        split = halves_product.split_launch((sets, rows, p.d), strides, rows, width)
        steps.append(Step(split, (place, at, at + 1)))
        walk = (width, 1) if place == 2 else (1, width)
        operands += [rows * width if sets > 1 else 0, *walk, sets * rows * width]
        factors.append(rows if sets > 1 else 0)
    shape = (p.batch, p.m, p.n, width)
    kernel = halves_product.halves_product_kernel
    product = tile_launch(kernel, shape, (*operands, *factors), output, plain, config)
    return workspaces, [*steps, Step(product, (6, 8, 7, 9, None, None, 5, None))]


_m, _n, _d, _batch, _nnz, _itemsize = sizes("m n d batch nnz itemsize")

# float32 runs in halves, and its operands are split before
_rate = sympy.Piecewise((HALVES_RATE, sympy.Eq(_itemsize, 4)), (RATE, True))

SDDMM_DENSE = Template(
    name="sddmm_dense",
    op="sddmm",
    sources=(sample_kernel, rows_of_entries, *dense_product.SOURCES, *halves_product.HALVES_SOURCES),
    refuse=_refuse,
    space=_space,
    cost=Cost(
        bytes=_batch * (_m * _n * 4 + _nnz * 40),
        launches=sympy.Integer(2),
        seconds=product_seconds(_d, rate=_rate) + 5e-6,
    ),
    prepare=_prepare,
)
