"""Products of two sparse matrices at given places: one launch, whatever the rows hold when it runs."""

from functools import lru_cache

import torch
from torch import Tensor

from sparsecomp.lowering.launch.launch import Launch

Rows = tuple[Tensor, Tensor]
"""Pointers and indices."""


def write_dots(
    x: Rows, x_values: Tensor, y: Rows, y_values: Tensor, at: Rows, out: Tensor, columns: int, turn: bool
) -> None:
    """out = the dot products of rows of x and y at the places of `at`; 0 in its spare entries.

    Args:
        x, y, at: contiguous; x's rows are walked and y's searched.
        x_values, y_values: (entries,) or (batch, entries), neighbours side by side; of float64, float32 or less.
        columns: of x and y.
        turn: whether x has the columns of `at`, and y its rows.
        out: (entries,) or (batch, entries).
    """
    if out.numel():
        lines = x[0].numel() - 1, at[0].numel() - 1
        launch = _prepared("dots", lines, *_described(x, x_values, y, y_values, at, out), columns, turn)
        launch(*x, x_values, *y, y_values, *at, out)


def add_products(
    a: Rows, a_values: Tensor, b: Rows, b_values: Tensor, at: Rows, out: Tensor, columns: int
) -> None:
    """out += the elements of a @ b at the places of `at`, of `columns`.

    As `write_dots`, but that `out` is of the dtype of sums, whose order is another in each run.
    """
    if out.numel() and a_values.numel() and b_values.numel():
        lines = a[0].numel() - 1, b[0].numel() - 1
        launch = _prepared("products", lines, *_described(a, a_values, b, b_values, at, out), columns, False)
        launch(*a, a_values, *b, b_values, *at, out)


def _described(
    x: Rows, x_values: Tensor, y: Rows, y_values: Tensor, at: Rows, out: Tensor
) -> tuple[tuple[int, int, int], tuple[int, int, int], torch.device, tuple[torch.dtype, ...]]:
    sizes = x[1].shape[0], y[1].shape[0], at[1].shape[0]
    batch = (1, 0, 0) if out.dim() == 1 else (out.shape[0], _between(x_values), _between(y_values))
    dtypes = x[0].dtype, x[1].dtype, x_values.dtype, y[0].dtype, y[1].dtype, at[0].dtype, at[1].dtype, out.dtype
    return sizes, batch, out.device, dtypes


def _between(values: Tensor) -> int:
    """Elements from one matrix of a batch to the next."""
    return values.stride(0) if values.dim() == 2 and values.shape[0] > 1 else 0


@lru_cache(maxsize=4096)
def _prepared(
    kernel: str, lines: tuple[int, int], sizes: tuple[int, int, int], batch: tuple[int, int, int],
    device: torch.device, dtypes: tuple[torch.dtype, ...], columns: int, turn: bool,
) -> Launch:  # fmt: skip
    from sparsecomp.lowering.sparse.kernels.row_products import dots_launch, products_launch

    if kernel == "dots":
        return dots_launch(lines, sizes, columns, batch, turn, torch.float64 in dtypes)
    return products_launch(lines, sizes, columns, batch)
