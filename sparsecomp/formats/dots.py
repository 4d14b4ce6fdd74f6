"""Dot products of rows of two sparse matrices, at given places: their product there, without the rest of it.

Operators compute them, a floor above, with kernels on a GPU. On a CPU the rows of one matrix are looked up in the
other, by binary search, for as many elements at a time as fit a bounded memory. A gradient by one of the two is such
products again, at the places that it stores; so are the gradients of the whole product, in `sparse_product`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.indices import (
    index_dtype_for,
    pair_keys,
    places_in,
    pointers_of,
    rows_of,
    sorted_pairs,
    take,
)
from sparsecomp.formats.triplets import Triplets

F = TypeVar("F", bound=Callable[..., Any])
AT_ONCE = {"cpu": 2**17, "cuda": 2**22}
"""Elements that are looked up at a time, of some 50 bytes each, or those of one row if more: what a CPU's cache holds,
and what fills a GPU."""
_operators: dict[str, Callable[..., Any]] = {}
_TABLE = 2**24
"""Places of a matrix, of four bytes each, up to which they are looked up in a table."""


class StoredRows(NamedTuple):
    """Where a matrix by rows stores: pointers (rows + 1,) and indices (entries,), ascending in a row; and its shape."""

    pointers: Tensor
    indices: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, elements: Triplets) -> Self:
        """Where these elements are."""
        rows, col = elements.shape[0], elements.col
        dtype = index_dtype_for(*elements.shape, col.numel())
        return cls(pointers_of(elements.row, rows, dtype), col.to(dtype), elements.shape)

    @property
    def row(self) -> Tensor:
        """Row of each entry, int64."""
        return rows_of(self.pointers, self.indices.numel(), torch.int64)

    @property
    def keys(self) -> Tensor:
        """A number for each entry, ascending.

        Raises:
            FormatError: the shape has too many places for one.
        """
        keys = pair_keys(self.row, self.indices.long(), self.shape)
        if keys is None:
            raise FormatError(f"a matrix of shape {self.shape} has more than 2**63 - 1 places, which are not compared")
        return keys


def untraced(function: F) -> F:
    """The function where Dynamo compiles none of its parts, as it does of what runs behind a break of a graph."""
    return _disabled(function)


@cache
def _disabled(function: Any) -> Any:
    disable: Any = torch.compiler.disable
    return disable(function)  # loads Dynamo


def transposed(rows: StoredRows, values: Tensor) -> tuple[StoredRows, Tensor]:
    """The transposed matrix."""
    shape = (rows.shape[1], rows.shape[0])
    row, col, order = sorted_pairs(rows.indices.long(), rows.row, shape)
    return StoredRows.of(Triplets(row, col, values, shape)), take(values, -1, order)


def dots(x: StoredRows, x_values: Tensor, y: StoredRows, y_values: Tensor, at: StoredRows) -> Tensor:
    """Dot products of a row of x and a row of y, for each entry of `at` (rows of x, rows of y).

    Sums are float32 for half precision, rounded once. Gradients flow to both values, higher ones too.
    """
    return _provided("dots")(x_values, *x[:2], y_values, *y[:2], *at[:2], x.shape[1])


def products_at(a: StoredRows, a_values: Tensor, b: StoredRows, b_values: Tensor, at: StoredRows) -> Tensor:
    """Elements of a @ b, for each entry of `at`; as `dots`."""
    return _provided("products")(a_values, *a[:2], b_values, *b[:2], *at[:2], b.shape[1])


def everywhere(
    a: StoredRows, a_values: Tensor, b: StoredRows, b_values: Tensor, capacity: int | None = None
) -> tuple[Tensor, StoredRows]:
    """a @ b and where it stores: every place that a product of two stored elements reaches; gradients as of `dots`.

    Args:
        capacity: entries there is room for, those behind the last row's being spare; None for as many as there are,
            which waits for a GPU. Where more pairs of elements meet, every value is NaN.
    """
    values, pointers, indices = _provided("whole")(a_values, *a[:2], b_values, *b[:2], b.shape[1], capacity)
    return values, StoredRows(pointers, indices, (a.shape[0], b.shape[1]))


def enter_products(**operators: Callable[..., Any]) -> None:
    """Enter what computes `dots`, `products` at places and `whole` products."""
    _operators.update(operators)


def are_loaded() -> bool:
    """Whether the operators are there: a graph that is being traced cannot load them."""
    return "whole" in _operators


def _provided(name: str) -> Callable[..., Any]:
    if name not in _operators:
        importlib.import_module("sparsecomp.ops")
    return _operators[name]


def looked_up(x: StoredRows, x_values: Tensor, y: StoredRows, y_values: Tensor, at: StoredRows) -> Tensor:
    """`dots` on a CPU, and of dtypes that no kernel has; of compact matrices and without gradients.

    Waits for the device, to know how many elements are looked up.
    """
    row, col = at.row, at.indices.long()
    counts = [rows.pointers.diff().long()[line] for rows, line in ((x, row), (y, col))]
    pairs = torch.stack([count.sum() for count in counts]).tolist()
    if pairs[1] < pairs[0]:
        return _looked_up(y, y_values, x, x_values, col, row, counts[1], pairs[1])
    return _looked_up(x, x_values, y, y_values, row, col, counts[0], pairs[0])


def _looked_up(
    x: StoredRows, x_values: Tensor, y: StoredRows, y_values: Tensor, row: Tensor, col: Tensor, counts: Tensor,
    pairs: int,
) -> Tensor:  # fmt: skip
    """Dot products of rows of x, of which each entry is looked for, and rows of y.

    Args:
        counts: (entries,) int64, elements of the row of x; `pairs` is their sum.
    """
    wide = torch.promote_types(x_values.dtype, torch.float32)
    batch = torch.broadcast_shapes(x_values.shape[:-1], y_values.shape[:-1])
    out = torch.zeros(*batch, row.numel(), dtype=wide, device=row.device)
    if not (pairs and y.indices.numel()):
        return out.to(x_values.dtype)
    ends, find = counts.cumsum(0), _finder(y.keys, y.shape, pairs)
    line = col * y.shape[1]
    before = x.pointers.long()[row] - ends + counts  # of the entry's elements: where they lie, less how many precede
    size = max(AT_ONCE[row.device.type] // max(batch.numel(), 1), 1)
    for low, high, since, until in _blocks(ends, pairs, size):
        entry = torch.repeat_interleave(counts[low:high], output_size=until - since) + low
        place = torch.arange(since, until, device=row.device).add_(before.index_select(0, entry))
        found = find(line.index_select(0, entry).add_(x.indices.index_select(0, place)))
        if not found.is_cuda:  # there it would wait for how many these are
            met = (found >= 0).nonzero().squeeze(1)
            entry, place, found = (one.index_select(0, met) for one in (entry, place, found))
        lefts, rights = x_values.index_select(-1, place), y_values.index_select(-1, found.clamp(min=0))
        # filled and not multiplied: elements that do not meet may be infinite
        out.index_add_(-1, entry, (lefts.to(wide) * rights.to(wide)).masked_fill_(found < 0, 0))
    return out.to(x_values.dtype)


def _finder(keys: Tensor, shape: tuple[int, int], pairs: int) -> Callable[[Tensor], Tensor]:
    """What finds the place of wanted keys, int64, or -1: a table of all places where it is small, or a search."""
    numel = shape[0] * shape[1]
    if numel > min(pairs, _TABLE):
        return lambda wanted: places_in(keys, wanted.to(keys.dtype))
    table = torch.full((numel,), -1, dtype=torch.int32, device=keys.device)
    table[keys] = torch.arange(keys.numel(), dtype=torch.int32, device=keys.device)
    return lambda wanted: table.index_select(0, wanted).long()


def _blocks(ends: Tensor, pairs: int, size: int) -> list[tuple[int, int, int, int]]:
    """Entries from and to which a block goes, and pairs before these; of about `size` pairs. Reads from the device."""
    wanted = torch.arange(0, pairs + size, size, device=ends.device)
    edges = torch.searchsorted(ends, wanted, right=True).unique_consecutive()
    low, since = torch.stack([edges, torch.cat([ends.new_zeros(1), ends])[edges]]).tolist()
    return list(zip(low, low[1:], since, since[1:], strict=False))
