"""Products of the plain matrices of `sparsecomp.formats`, by the operators that multiply a `SparseTensor`.

A matrix does not change and keeps nothing, so that the arrays of its transpose are computed in each product that needs
them, and rows are taken as even. A `SparseTensor` knows both.
"""

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats import products
from sparsecomp.formats.base import SparseMatrix
from sparsecomp.ops.sparse.linear import autocast
from sparsecomp.ops.sparse.matmul import multiplied
from sparsecomp.reference.patterns import Layout


def multiply(matrix: SparseMatrix, dense: Tensor, from_right: bool, transpose: bool) -> Tensor:
    """`sparsecomp.formats.products.product`, of any shapes that `torch.matmul` takes of the dense matrix.

    Raises:
        FormatError: shapes, dtypes or devices do not belong together.
    """
    inner = matrix.shape[0 if from_right != transpose else 1]
    vector = dense.dim() == 1
    if dense.dim() == 0 or dense.shape[-1 if from_right or vector else -2] != inner:
        where = f"(…, {inner})" if from_right else f"({inner},) or (…, {inner}, n)"
        raise FormatError(f"dense has shape {tuple(dense.shape)}, {matrix!r} needs {where}")
    values, arrays, block, shape = matrix.by_rows()
    dense, values = autocast(dense, values)
    layout = Layout(matrix.OPERAND, block, shape)
    flip, linear = (from_right != matrix.BY_COLUMNS) != transpose, from_right or vector
    if matrix.batch is not None and linear:
        right = dense[:, None] if vector else dense.mT
        found = _product(values, arrays, layout, flip, right, False)
        return found.squeeze(-1) if vector else found.mT
    return _product(values, arrays, layout, flip, dense, linear)


def _product(
    values: Tensor, arrays: tuple[Tensor, ...], layout: Layout, transpose: bool, dense: Tensor, linear: bool
) -> Tensor:
    spmm = torch.ops.sparsecomp.spmm.default
    rest = (None, None, linear, "column", "none", 1.0, None)
    return multiplied(spmm, values, arrays, layout, transpose, dense, *rest)


products.provide(multiply)
