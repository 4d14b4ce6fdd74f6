"""A bitmap that is stored times few columns, by the kernel of layers that takes copies under the promise.

More columns, transposes, batches and dtypes that no kernel takes are multiplied by CSR's kernels, for which the values
are brought in their order in each call; a compiler writes the weight out instead where that is faster.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import Output, output_of
from sparsecomp.lowering.launch.launch import aligned
from sparsecomp.lowering.launch.strided import dtype_name, name_of
from sparsecomp.lowering.sparse import spmm_csr
from sparsecomp.lowering.sparse.bitmap_linear import BITMAP_LINEAR, BitmapLinear, random_longest
from sparsecomp.lowering.sparse.bitmap_places import csr_matrix, read_dense, written_dense
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.patterns import Layout

__all__ = ["csr_matrix", "multiply", "operations", "problem_of", "read_dense", "written_dense"]


def multiply(
    values: Tensor, pattern: Sequence[Tensor], layout: Layout, transpose: bool, dense: Tensor, out: Tensor,
    **finish: Any,
) -> None:  # fmt: skip
    """As `Launcher.multiply`."""
    if values.dim() == 1 and dense.dim() == 2 and out.numel() and values.numel():
        described = output_of(out, **finish)
        problem = problem_of(values, layout, dense, out, described, pattern[0].dtype)
        if BITMAP_LINEAR.candidates(problem, device_of(out.device)):
            operands = (*pattern[: layout.own], values, dense.mT)
            given = [aligned(one.contiguous()) for one in operands]
            beside = finish.get("bias"), finish.get("residual")
            dispatch.launch(BITMAP_LINEAR, problem, *given, *beside, out)
            return
    spmm_csr.multiply(*csr_matrix(values, pattern, layout), transpose, dense, out, **finish)


def problem_of(
    values: Tensor, layout: Layout, dense: Tensor, out: Tensor, described: Output, index: torch.dtype = torch.int32
) -> BitmapLinear:
    """As `Launcher.problem_of`.

    Raises:
        FormatError: shapes that do not belong together.
    """
    spmm_csr.check_shapes(layout.shape[0], values.dim() == 2, values.shape[:-1], dense, out)
    if dense.shape[-2] != layout.shape[1]:
        raise FormatError(f"dense has {dense.shape[-2]} rows, needs {layout.shape[1]}, the columns of the matrix")
    (m, k), batch = layout.shape, out.shape[0] if out.dim() == 3 else 1
    one, other = dtype_name(values), dtype_name(dense)
    dtype, nnz = one if one == other else f"{one} and {other}", values.shape[-1]
    longest = layout.block[0] or random_longest(m, k, nnz, 1)
    return BitmapLinear(m, k, dense.shape[-1], nnz, 1, longest, dtype, name_of(index), described, batch)


def operations(layout: Layout) -> tuple[Operation[Any], ...]:
    """As `Launcher.operations`."""
    return (BITMAP_LINEAR,)
