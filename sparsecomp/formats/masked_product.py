"""The product of two sparse matrices where a pattern says, without the rest of it (masked SpGEMM)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError, SparseOperatorError
from sparsecomp.formats.base import Matrix, SparseMatrix
from sparsecomp.formats.csr import CSC, CSR
from sparsecomp.formats.dots import StoredRows, dots, products_at, untraced
from sparsecomp.formats.pattern import Pattern
from sparsecomp.formats.sparse_product import check_operands, of_tensors
from sparsecomp.formats.triplets import Triplets


def masked_matmul(one: Matrix, other: SparseMatrix, at: Pattern | SparseMatrix | Tensor) -> Matrix:
    """one @ other at the elements of a pattern, all of which the result stores, in the format of `one`.

    Sums are float32 for half precision, rounded once. Gradients flow to the values of both. Memory is that of the
    result, and on a CPU of a bounded number of elements. Of two matrices in CSR, or CSR and CSC, at what a third in CSR
    stores, nothing is read from a GPU: such a product can be captured in a CUDA graph, and stands in a compiled one.

    Args:
        one: a matrix, or a batch of one pattern; or both are SparseTensors, and so is the result.
        other: as `one`, of its dtype.
        at: the pattern, or what stores it; see `Pattern.of`.

    Raises:
        FormatError: shapes, dtypes, devices or batches do not belong together, or the result does not fit the format.
        PatternError: `at` has no pattern.
        SparseOperatorError: a graph is being traced, and a matrix has another format; without `fullgraph` it breaks
            here.
    """
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return of_tensors(masked_matmul, one, other, at)
    if isinstance(one, CSR) and isinstance(other, CSR | CSC) and isinstance(at, CSR):
        return _by_arrays(one, other, at)
    if torch.compiler.is_compiling():
        raise SparseOperatorError(
            f"masked_matmul of {type(one).__name__} and {type(other).__name__} at a {type(at).__name__} within a "
            "compiled graph, which would have to know sizes: give CSR all, multiply outside of the graph, or leave "
            "fullgraph=True out"
        )
    return untraced(_masked)(one, other, at)


def _by_arrays(one: CSR, other: CSR | CSC, at: CSR) -> CSR:
    """The product with the arrays of `at`, spare entries included."""
    check_operands(one, other)
    _check_places(at, one, other)
    left, places = StoredRows(one.crow, one.col, one.shape), StoredRows(at.crow, at.col, at.shape)
    if isinstance(other, CSR):
        values = products_at(left, one.values, StoredRows(other.crow, other.col, other.shape), other.values, places)
    else:
        columns = StoredRows(other.ccol, other.row, (other.shape[1], other.shape[0]))
        values = dots(left, one.values, columns, other.values, places)
    return CSR(at.crow, at.col, values, at.shape)


def _check_places(at: Any, one: SparseMatrix, other: SparseMatrix) -> None:
    shape = (one.shape[0], other.shape[1])
    if at.shape != shape or at.device != one.device:
        raise FormatError(f"{at!r} does not fit a product of {shape} on {one.device}: give places of that")


def _masked(one: Matrix, other: SparseMatrix, at: Pattern | SparseMatrix | Tensor) -> Matrix:
    check_operands(one, other)
    where = at if isinstance(at, Pattern) else Pattern.of(at)
    _check_places(where, one, other)
    shape = where.shape
    left, right = one._terms(), other._terms()
    places = StoredRows.of(Triplets(where.row, where.col, left.values, shape))
    values = products_at(StoredRows.of(left), left.values, StoredRows.of(right), right.values, places)
    found = Triplets(where.row, where.col, values, shape)
    return type(one)._from_triplets(found, None, one.index_dtype, **one.layout)
