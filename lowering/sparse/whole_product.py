"""The product of two sparse matrices at every place that it reaches: one launch that counts, and one that fills."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.sparse.row_products import Rows

COLUMNS = 2**21
"""Columns of a product, at most: a row of more is looked for in too large a bitmap."""
KEPT_WORDS = 2**22
"""Words of bitmaps, of 12 bytes each with their ranks, up to which every row keeps its own."""
_WORDS = 2**23
"""Words of the programs' bitmaps, where they have them."""
PROGRAMS = 4224
"""Programs: 32 on each of an H200's multiprocessors, as many as it holds."""


class Counted(NamedTuple):
    """What counting leaves to filling.

    Attributes:
        pointers: (rows + 1,) int64.
        pairs: () int64, pairs of stored elements that meet.
        bits, ranks: memory of the kernels.
        launch: their sizes.
    """

    pointers: Tensor
    pairs: Tensor
    bits: Tensor
    ranks: Tensor
    launch: tuple[int, int, int, bool, tuple[int, int]]


def count(a: Rows, b: Rows, columns: int) -> Counted:
    """How many elements each row of a @ b has; nothing is read from the device.

    Args:
        a, b: contiguous, of int32 or int64; b has rows, and `columns` from 1 to COLUMNS.
    """
    rows, device = a[0].numel() - 1, a[0].device
    sizes = _sizes(rows, a[1].numel(), b[0].numel() - 1, b[1].numel(), columns)
    words, programs, kept = sizes[1:4]
    bitmaps = (rows if kept else programs) * words
    ranks = torch.empty(bitmaps, dtype=torch.int64, device=device)
    # pairs, counts and bitmaps, each from a multiple of 16 bytes on
    start = 2 + rows + 1 + (rows + 1) % 2
    zeros = torch.zeros(start + (bitmaps + 1) // 2, dtype=torch.int64, device=device)
    pairs, counts, bits = zeros[:2], zeros[2:start], zeros[start:].view(torch.int32)
    if rows:
        dtypes = (a[0].dtype, a[1].dtype, b[0].dtype, b[1].dtype)
        _counting(device, dtypes, *sizes)(*a, *b, bits, ranks, counts, pairs)
    return Counted(counts[: rows + 1].cumsum(0), pairs[0], bits, ranks, sizes)


def fill(
    a: Rows, a_values: Tensor, b: Rows, b_values: Tensor, counted: Counted, pointers: Tensor, indices: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """indices (entries,) and out (batch, entries), both 0 before, = columns and values of a @ b.

    Args:
        a_values, b_values: (batch or 1, entries), neighbours side by side; of float64, float32 or less.
        pointers: (rows + 1,) as counted, or less: what lies behind the last is not written.
        out: of the dtype of sums.
    """
    if not (out.numel() and a_values.numel() and b_values.numel()):
        return
    dtypes = tuple(tensor.dtype for tensor in (*a, a_values, *b, b_values, pointers, indices, out))
    launch = _filling(out.device, dtypes, *counted.launch)
    for item, values in enumerate(out):
        one, other = (whole[item % whole.shape[0]] for whole in (a_values, b_values))
        launch(*a, one, *b, other, counted.bits, counted.ranks, pointers, indices, values)


def _sizes(
    rows: int, a_entries: int, b_rows: int, b_entries: int, columns: int
) -> tuple[int, int, int, bool, tuple[int, int]]:
    """Rows, words of a bitmap, programs, whether each row keeps its own, and entries of a row of a and of b."""
    words = -(-columns // 32)
    kept = rows * words <= KEPT_WORDS
    programs = rows if kept else min(rows, PROGRAMS, _WORDS // words)
    means = _power(a_entries, rows), _power(b_entries, b_rows)
    return rows, words, programs, kept, means


def _power(entries: int, rows: int) -> int:
    """Entries of a row in the mean, rounded up to a power of two."""
    return 1 << (max(-(-entries // max(rows, 1)), 1) - 1).bit_length()


@lru_cache(maxsize=4096)
def _counting(device: torch.device, dtypes: tuple[torch.dtype, ...], *sizes: Any) -> Launch:
    from sparsecomp.lowering.sparse.kernels.whole_product import count_launch

    return count_launch(*sizes)


@lru_cache(maxsize=4096)
def _filling(device: torch.device, dtypes: tuple[torch.dtype, ...], *sizes: Any) -> Launch:
    from sparsecomp.lowering.sparse.kernels.whole_product import fill_launch

    return fill_launch(*sizes)
