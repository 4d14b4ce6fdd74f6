"""A sparse weight's dense copy that stays from call to call, and is brought up to date in each on the device.

Nothing tells the host of every write to a weight. A launch reads the weight, which takes less than to write it out, and
writes those rows of the copy anew that are not the weight's. It costs the memory of the dense weight.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.ops.library import KEPT, TAGS, implement, library
from sparsecomp.ops.sparse.dense_weight import are_contiguous, stored_to_dense
from sparsecomp.reference.memo import MEMO
from sparsecomp.reference.patterns import Layout

DEVICES = ("cuda",)
"""Where the operator keeps copies; elsewhere it writes the weight out in each call."""
SHARE = 0.1
"""Of a GPU's memory that copies may take."""

library.define("dense_copy(Tensor values, Tensor[] pattern, str layout) -> Tensor", tags=TAGS)


class DenseCopy(NamedTuple):
    """A dense copy (rows, columns) and, int64, (rows,), what tells its rows from others."""

    dense: Tensor
    seen: Tensor


class _Room(NamedTuple):
    """What gives the copy of a matrix without entries."""

    rows: int
    columns: int

    def __call__(self, values: Tensor) -> DenseCopy:
        return DenseCopy(
            values.new_zeros((self.rows, self.columns)), values.new_zeros(self.rows, dtype=torch.int64)
        )  # fmt: skip


def dense_copy(values: Tensor, pattern: Sequence[Tensor], layout: str) -> Tensor:
    """The dense matrix (rows, columns), contiguous: nothing else may write to it, and other calls give it again.

    Args:
        values: (entries,), of two or four bytes each; without a gradient.
        pattern: pointers and indices of CSR; see `sparsecomp.reference.patterns`.
        layout: from `Layout.written`.
    """
    return torch.ops.sparsecomp.dense_copy.default(values, pattern, layout)


def has_room(values: Tensor, layout: Layout) -> bool:
    """Whether there can be a copy for these values: not without room for it, for values of eight bytes, or off CUDA."""
    if values.itemsize not in (2, 4) or values.device.type not in DEVICES:
        return False
    if not values.is_cuda or _kept(values.detach(), layout) is not None:
        return True
    taken = sum(one.dense.nbytes for one in MEMO.results(DenseCopy) if one.dense.device == values.device)
    size = prod(layout.shape) * values.itemsize
    return taken + size <= SHARE * torch.cuda.get_device_properties(values.device).total_memory


def keep_dense_copy(values: Tensor, layout: Layout) -> bool:
    """Have there be a copy for these values from now on, if there is room; whether there is one."""
    if not has_room(values, layout):
        return False
    if _kept(values.detach(), layout) is None:
        MEMO.prepare(_Room(*layout.shape), (values.detach(),), "followed")
    return True


def _kept(values: Tensor, layout: Layout) -> DenseCopy | None:
    return MEMO.kept(_Room(*layout.shape), (values,), "followed")


def _written(values: Tensor, pattern: Sequence[Tensor], layout: str) -> Tensor:
    return stored_to_dense(values, pattern, layout)


def _cuda(values: Tensor, pattern: Sequence[Tensor], layout: str) -> Tensor:
    copy = _kept(values, Layout.read(layout))
    if copy is None or not are_contiguous((values, *pattern)):
        return stored_to_dense(values, pattern, layout)
    from sparsecomp.lowering.launch.watch import note_kept  # loads Triton
    from sparsecomp.lowering.sparse.stored_places import refresh

    note_kept(values, *copy)
    refresh(pattern[0], pattern[1], values, *copy)
    return copy.dense.detach()


def _fake(values: Tensor, pattern: Sequence[Tensor], layout: str) -> Tensor:
    return values.new_empty(Layout.read(layout).shape)


implement("dense_copy", _written, _cuda, _fake)
KEPT.add(torch.ops.sparsecomp.dense_copy.default)
