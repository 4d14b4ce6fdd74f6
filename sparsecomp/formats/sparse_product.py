"""The product of two sparse matrices, a sparse one (SpGEMM).

An operator multiplies, a floor above, with kernels on a GPU and by torch on a CPU. Gradients at the operands' patterns
are products at given places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsecomp.errors import FormatError, SparseOperatorError
from sparsecomp.formats.dots import StoredRows, everywhere, untraced

if TYPE_CHECKING:
    from sparsecomp.formats.base import SparseMatrix


def check_operands(one: SparseMatrix, other: SparseMatrix) -> None:
    """Raise FormatError unless two matrices can be multiplied."""
    fits = one.shape[1] == other.shape[0] and one.dtype is other.dtype and one.device == other.device
    batches = {one.batch, other.batch} - {None}
    if not fits or len(batches) > 1 or 0 in batches:
        raise FormatError(
            f"{one!r} and {other!r} have no product: they need inner dimensions that are equal, one dtype and device, "
            "and one batch that is not empty, or none"
        )


def of_tensors(function: Any, one: Any, other: Any, *rest: Any) -> Any:
    """What a function of two matrices gives for two SparseTensors, whose class says so by `FUNCTIONS`.

    Raises:
        SparseOperatorError: they are not both SparseTensors.
    """
    # no torch function, which Dynamo would not trace
    handler = getattr(type(one), "FUNCTIONS", {}).get(function)
    if handler is None or type(other) is not type(one):
        raise SparseOperatorError(
            f"{function.__name__} takes two SparseTensors or two matrices, not {type(one).__name__} and "
            f"{type(other).__name__}: torch.matmul takes a dense one too"
        )
    return handler(type(one), one, other, *rest)


def sparse_product(one: SparseMatrix, other: SparseMatrix) -> tuple[StoredRows, Tensor]:
    """Where one @ other stores, every place that a product of two stored elements reaches, and the values there.

    Sums are float32 for half precision, rounded once. Gradients flow to the values of both.

    Raises:
        FormatError: shapes, dtypes, devices or batches do not belong together.
        SparseOperatorError: a graph is being traced, in which a size must be known before it is made; without
            `fullgraph` it breaks here.
    """
    if torch.compiler.is_compiling():
        raise SparseOperatorError(
            "a product of two sparse matrices within a compiled graph, which would have to know its size: say it by "
            "bounded_matmul, multiply outside of the graph, or leave fullgraph=True out"
        )
    check_operands(one, other)
    values, found = untraced(everywhere)(*_rows(one), *_rows(other))
    return found, values


def _rows(matrix: SparseMatrix) -> tuple[StoredRows, Tensor]:
    """The matrix by rows, as it lies there where it does, spare entries included."""
    if matrix.OPERAND == "csr" and not matrix.BY_COLUMNS:
        values, (pointers, indices), _, shape = matrix.by_rows()
        return StoredRows(pointers, indices, shape), values
    elements = matrix._terms()
    return StoredRows.of(elements), elements.values
