"""How the stored elements of a matrix spread over its rows: what a kernel's choice depends on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparsecomp.formats.base import SparseMatrix


@dataclass(frozen=True)
class Statistics:
    """Figures of a matrix, or of one matrix of a batch.

    Attributes:
        format: name of the class.
        shape: rows and columns.
        batch: matrices that share the pattern, or None.
        layout: block, or n and m.
        dtype: of the values.
        index_dtype: of the indices.
        nnz: stored elements in the shape; stored zeros count.
        sparsity: share of elements that are not stored.
        nbytes: bytes of the arrays, of all matrices of a batch.
        row_min: fewest elements stored in a row; so are `row_max` and `row_mean` the most and the mean.
        row_std: standard deviation over all rows (of the population).
        row_histogram: rows with 0, 1, 2-3, 4-7, 8-15, ... elements, up to the longest row.
    """

    format: str
    shape: tuple[int, int]
    batch: int | None
    layout: dict[str, Any]
    dtype: torch.dtype
    index_dtype: torch.dtype
    nnz: int
    sparsity: float
    nbytes: int
    row_min: int
    row_max: int
    row_mean: float
    row_std: float
    row_histogram: tuple[int, ...]

    @property
    def row_variation(self) -> float:
        """Standard deviation over mean of the rows' elements; 0 if there are none."""
        return self.row_std / self.row_mean if self.row_mean else 0.0

    def __str__(self) -> str:
        layout = "".join(f", {name} {value}" for name, value in self.layout.items())
        batch = "" if self.batch is None else f"{self.batch} x "
        lines = [
            f"{self.format} {batch}{self.shape[0]} x {self.shape[1]}{layout}, {_short(self.dtype)} values, "
            f"{_short(self.index_dtype)} indices, {self.nbytes} bytes",
            f"{self.nnz} stored, sparsity {self.sparsity:.3%}",
            f"a row: {self.row_min} to {self.row_max}, mean {self.row_mean:.4g}, deviation {self.row_std:.4g}",
        ]
        lines += [f"{bounds:>13} a row: {rows} rows" for bounds, rows in self._bins() if rows]
        return "\n".join(lines)

    def _bins(self) -> list[tuple[str, int]]:
        starts = [0, *(2**k for k in range(len(self.row_histogram)))]
        names = [str(low) if high - low < 2 else f"{low}-{high - 1}" for low, high in pairwise(starts)]
        return list(zip(names, self.row_histogram, strict=True))


def statistics_of(matrix: SparseMatrix) -> Statistics:
    """Statistics of a matrix; reads from the device."""
    rows = matrix.shape[0]
    counts = matrix._row_counts()
    counts = counts[counts > 0]
    empty = rows - counts.numel()
    mean = int(counts.sum()) / rows if rows else 0.0
    squares = float(((counts.double() - mean) ** 2).sum()) + empty * mean**2
    return Statistics(
        format=type(matrix).__name__,
        shape=matrix.shape,
        batch=matrix.batch,
        layout=matrix.layout,
        dtype=matrix.dtype,
        index_dtype=matrix.index_dtype,
        nnz=matrix.nnz,
        sparsity=matrix.sparsity,
        nbytes=matrix.nbytes,
        row_min=int(counts.min()) if rows and not empty else 0,
        row_max=int(counts.max()) if counts.numel() else 0,
        row_mean=mean,
        row_std=(squares / rows) ** 0.5 if rows else 0.0,
        row_histogram=_histogram(counts, empty),
    )


def _histogram(counts: Tensor, empty: int) -> tuple[int, ...]:
    """`empty`, then how many counts have 1, 2, 3, ... binary digits."""
    if not counts.numel():
        return (empty,) if empty else ()
    powers = 2 ** torch.arange(63, device=counts.device)
    bins = torch.bucketize(counts, powers, right=True).bincount()
    return (empty, *bins[1:].tolist())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
