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
    """out (batch, entries) = the dot products of rows of x and y at the places of `at`; 0 in its spare entries.

    Args:
        x, y, at: contiguous; x's rows are walked and y's searched.
        x_values, y_values: (batch or 1, entries), neighbours side by side; of float64, float32 or less.
        columns: of x and y.
        turn: whether x has the columns of `at`, and y its rows.
    """
    if out.numel():
        lines = x[0].numel() - 1, at[0].numel() - 1
        launch = _prepared("dots", lines, *_described(x, x_values, y, y_values, at, out), columns, turn)
        launch(*x, x_values, *y, y_values, *at, out)


def add_products(
    a: Rows, a_values: Tensor, b: Rows, b_values: Tensor, at: Rows, out: Tensor, columns: int
) -> None:
    """out (batch, entries) += the elements of a @ b at the places of `at`, of `columns`.

    As `write_dots`, but that `out` is of the dtype of sums, whose order is another in each run.
    """
    if out.numel() and a_values.numel() and b_values.numel():
        lines = a[0].numel() - 1, b[0].numel() - 1
        launch = _prepared("products", lines, *_described(a, a_values, b, b_values, at, out), columns, False)
        launch(*a, a_values, *b, b_values, *at, out)


def _described(
    x: Rows, x_values: Tensor, y: Rows, y_values: Tensor, at: Rows, out: Tensor
) -> tuple[tuple[int, int, int], tuple[int, int, int], torch.device, tuple[torch.dtype, ...]]:
    sizes = x[1].numel(), y[1].numel(), at[1].numel()
    strides = [values.stride(0) if values.shape[0] > 1 else 0 for values in (x_values, y_values)]
    dtypes = tuple(tensor.dtype for tensor in (*x, x_values, *y, y_values, *at, out))
    return sizes, (out.shape[0], strides[0], strides[1]), out.device, dtypes


@lru_cache(maxsize=4096)
def _prepared(
    kernel: str, lines: tuple[int, int], sizes: tuple[int, int, int], batch: tuple[int, int, int],
    device: torch.device, dtypes: tuple[torch.dtype, ...], columns: int, turn: bool,
) -> Launch:  # fmt: skip
    from sparsecomp.lowering.sparse.kernels.row_products import dots_launch, products_launch

    if kernel == "dots":
        return dots_launch(lines, sizes, columns, batch, turn, torch.float64 in dtypes)
    return products_launch(lines, sizes, columns, batch)
