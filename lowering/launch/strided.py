"""Operands of any strides: described as numbers, named as layouts, and made at random."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor


class Strides(NamedTuple):
    """Of a batch of matrices; 0 by batch where one is shared."""

    batch: int
    row: int
    column: int


_CHUNK = 2**24


def strides_of(matrix: Tensor) -> Strides:
    """Strides of (rows, columns) or (batch, rows, columns); a lone matrix has batch stride 0."""
    return Strides(*(matrix.stride() if matrix.dim() == 3 else (0, *matrix.stride())))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor whose last dimension is innermost, as torch gives them."""
    return tuple(accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1))[::-1] if shape else ()


def side_by_side(vector: Tensor | None) -> Tensor | None:
    """A vector that a kernel reads by address alone, such as a number for each channel: its numbers are neighbours."""
    return None if vector is None else vector.contiguous()


def dtype_name(tensor: Tensor) -> str:
    """Such as `"float32"`."""
    return name_of(tensor.dtype)


def name_of(dtype: torch.dtype) -> str:
    """Such as `"float32"`."""
    return str(dtype)[6:]


def order_of(strides: Strides, columns: int) -> str:
    """`"rows"` if a row's elements are neighbours, `"columns"` if a column's are, else `"strided"`.

    Kernels read either with whole vectors only if the other stride is a multiple of 16 bytes' worth of elements.
    """
    if strides.column == 1 or columns <= 1:
        return "rows" if strides.row % 8 == 0 else "uneven rows"
    return "columns" if strides.row == 1 else "strided"


def strides_from(layout: str, rows: int, columns: int) -> Strides:
    """Strides of which `order_of` says `layout`.

    Raises:
        ValueError: no layout of such a matrix.
    """
    wide = -(-columns // 8) * 8
    strides = Strides(*{
        "rows": (rows * wide, wide, 1), "uneven rows": (rows * (wide + 1), wide + 1, 1),
        "columns": (rows * columns, 1, rows), "strided": (2 * rows * wide, 2 * wide, 2),
    }[layout])  # fmt: skip
    if order_of(strides, columns) != layout:
        raise ValueError(f"no matrix of {columns} columns lies in {layout}")
    return strides


def strided(shape: tuple[int, ...], strides: tuple[int, ...], fill: Callable[[int], Tensor]) -> Tensor:
    """A tensor of these strides over as many elements of `fill(count)` as it spans."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return fill(max(extent, 1)).as_strided(shape, strides)


def random_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, random: torch.Generator) -> Tensor:
    """Normally distributed numbers of these strides."""
    kind = getattr(torch, dtype)
    return strided(shape, strides, lambda n: torch.randn(n, generator=random, device=random.device).to(kind))


def gather_product(row: Tensor, col: Tensor, values: Tensor, dense: Tensor, rows: int) -> Tensor:
    """The float64 product of entries (row, col, values (batch, entries)) with `dense` (batch, k, n)."""
    out = torch.zeros((*dense.shape[:-2], rows, dense.shape[-1]), dtype=torch.float64, device=dense.device)
    step = max(_CHUNK // max(dense.shape[-1] * dense.shape[0], 1), 1)
    for start in range(0, row.numel(), step):
        part = slice(start, start + step)
        terms = values[:, part, None].double() * dense[:, col[part].long()].double()
        out.index_add_(1, row[part].long(), terms)
    return out
