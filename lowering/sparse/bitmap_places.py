"""A stored bitmap written out dense, a dense matrix read at its places, and its values in CSR's order: on a GPU."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sparsecomp.formats.lanes import CHUNK, STRIP, chunk_count, head_bytes
from sparsecomp.lowering.launch.launch import Launch, aligned
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.reference.patterns import Layout


def written_dense(values: Tensor, pattern: Sequence[Tensor], layout: Layout) -> Tensor:
    """As `Writer.written_dense`."""
    out = allocate(layout.shape, (layout.shape[1], 1), values.dtype, values.device)
    if out.numel():
        starts, heads = pattern[0], aligned(pattern[1])
        _launch("write_bitmap_kernel", layout, _kinds(starts, heads, values), layout.shape)(starts, heads, values, out)
    return out


def read_dense(dense: Tensor, pattern: Sequence[Tensor], layout: Layout, out: Tensor) -> None:
    """As `Writer.read_dense`."""
    if dense.numel():
        starts, heads = pattern[0], aligned(pattern[1])
        _launch("read_bitmap_kernel", layout, _kinds(starts, heads, dense), dense.stride())(starts, heads, dense, out)


def csr_matrix(
    values: Tensor, pattern: Sequence[Tensor], layout: Layout
) -> tuple[Tensor, list[Tensor], Layout]:  # fmt: skip
    """The same matrix in CSR, made anew in each call; values may have a batch. What is kept of its transpose stays."""
    starts, heads = pattern[0].contiguous(), aligned(pattern[1].contiguous())
    (rows, columns), entries = layout.shape, values.shape[-1]
    turns, kinds = -(-columns // CHUNK), _kinds(starts, heads)
    counts = starts.new_empty(rows, turns)
    found, order = starts.new_empty(entries), starts.new_empty(entries)
    if counts.numel():
        _launch("count_bitmap_kernel", layout, kinds, (rows,))(starts, heads, counts)
    ends = counts.flatten().cumsum(0, dtype=starts.dtype)
    if entries:
        _launch("order_bitmap_kernel", layout, kinds, (rows,))(starts, heads, ends, found, order)
    pointers = F.pad(ends.view(rows, turns)[:, -1], (1, 0)) if ends.numel() else starts.new_zeros(rows + 1)
    plain = layout._replace(format="csr", block=(1, 1))
    return values.index_select(-1, order), [pointers, found, *pattern[layout.own :]], plain


def _kinds(*tensors: Tensor) -> tuple[Any, ...]:
    """What a launch belongs to."""
    return (tensors[0].device, *(one.dtype for one in tensors))


@lru_cache(maxsize=4096)
def _launch(kernel: str, layout: Layout, kinds: tuple[Any, ...], numbers: tuple[int, ...]) -> Launch:
    """A launch of a device for tensors of these dtypes."""
    from sparsecomp.lowering.sparse.kernels import bitmap_places

    constants = {"STRIP": STRIP, "CHUNK": CHUNK, "HEAD": head_bytes()}
    given = (*numbers, -(-layout.shape[1] // CHUNK))
    return Launch(getattr(bitmap_places, kernel), (chunk_count(layout.shape),), given, constants, num_warps=4)
