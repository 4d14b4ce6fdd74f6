"""The product of two sparse matrices where a pattern says, without the rest of it (masked SpGEMM)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsecomp.errors import FormatError, SparseOperatorError
from sparsecomp.formats.base import Matrix, SparseMatrix
from sparsecomp.formats.dots import StoredRows, products, untraced
from sparsecomp.formats.pattern import Pattern
from sparsecomp.formats.sparse_product import check_operands, of_tensors
from sparsecomp.formats.triplets import Triplets


def masked_matmul(one: Matrix, other: SparseMatrix, at: Pattern | SparseMatrix | Tensor) -> Matrix:
    """one @ other at the elements of a pattern, all of which the result stores, in the format of `one`.

    Sums are float32 for half precision, rounded once. Gradients flow to the values of both. Memory is that of the
    result and of a bounded number of elements; the device is waited for, to know how many meet.

    Args:
        one: a matrix, or a batch of one pattern; or both are SparseTensors, and so is the result.
        other: as `one`, of its dtype.
        at: the pattern, or what stores it; see `Pattern.of`.

    Raises:
        FormatError: shapes, dtypes, devices or batches do not belong together, or the result does not fit the format.
        PatternError: `at` has no pattern.
        SparseOperatorError: a graph is being traced; without `fullgraph` it breaks here.
    """
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return of_tensors(masked_matmul, one, other, at)
    if torch.compiler.is_compiling():
        raise SparseOperatorError(
            "masked_matmul within a compiled graph, which would have to know how many elements meet: multiply outside "
            "of the graph, or leave fullgraph=True out"
        )
    return untraced(_masked)(one, other, at)


def _masked(one: Matrix, other: SparseMatrix, at: Pattern | SparseMatrix | Tensor) -> Matrix:
    check_operands(one, other)
    where = at if isinstance(at, Pattern) else Pattern.of(at)
    shape = (one.shape[0], other.shape[1])
    if where.shape != shape or where.device != one.device:
        raise FormatError(f"{where!r} does not fit a product of {shape} on {one.device}: give places of that")
    left, right = one._terms(), other._terms()
    places = StoredRows.of(Triplets(where.row, where.col, left.values, shape))
    values = products(StoredRows.of(left), left.values, StoredRows.of(right), right.values, places)
    found = Triplets(where.row, where.col, values, shape)
    return type(one)._from_triplets(found, None, one.index_dtype, **one.layout)
