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
from sparsecomp.ops.sparse.sparse_matmul import multiplied
from sparsecomp.reference.patterns import Layout


def multiply_matrix(matrix: SparseMatrix, dense: Tensor, from_right: bool, transpose: bool) -> Tensor:
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
    flip = (from_right != matrix.BY_COLUMNS) != transpose
    if matrix.batch is None:
        return _product(values, arrays, layout, flip, dense, from_right or vector)
    if vector:
        return _by_matrix(values, arrays, layout, flip, dense[:, None]).squeeze(-1)
    if from_right:
        return _by_matrix(values, arrays, layout, flip, dense.mT).mT
    return _by_matrix(values, arrays, layout, flip, dense)


def _by_matrix(
    values: Tensor, arrays: tuple[Tensor, ...], layout: Layout, transpose: bool, dense: Tensor
) -> Tensor:
    """The product of a batch of matrices with (…, k, n), whose leading axes broadcast with the batch."""
    many = values.shape[0]
    *leading, last = dense.shape[:-2] or (1,)
    if many == 1:
        return _product(values[0], arrays, layout, transpose, dense if dense.dim() > 2 else dense[None], False)
    if last not in (1, many):
        raise FormatError(f"dense has shape {tuple(dense.shape)}, the matrix a batch of {many}: they do not broadcast")
    # what stands before the batch goes beside the columns
    times, (k, n) = torch.Size(leading).numel(), dense.shape[-2:]
    beside = dense.reshape(times, last, k, n).permute(1, 2, 0, 3).reshape(last, k, times * n)
    found = _product(values, arrays, layout, transpose, beside if last == many else beside[0], False)
    m = found.shape[1]
    return found.view(many, m, times, n).permute(2, 0, 1, 3).reshape(*leading, many, m, n)


def _product(
    values: Tensor, arrays: tuple[Tensor, ...], layout: Layout, transpose: bool, dense: Tensor, linear: bool
) -> Tensor:
    spmm = torch.ops.sparsecomp.spmm.default
    rest = (None, None, linear, "column", "none", 1.0, None)
    return multiplied(spmm, values, arrays, layout, transpose, dense, *rest)


products.provide(multiply_matrix)
