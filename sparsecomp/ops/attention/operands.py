"""What the operators of attention ask of their operands alike, whatever says which pairs are kept."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.errors import FormatError, MaskError
from sparsecomp.reference.precision import KERNEL_DTYPES, accumulator

MOST_BYTES = 512
"""Of a query, key or value that kernels take: 256 numbers of 16 bits, 128 of float32."""


def scale_of(q: Tensor, scale: float | None) -> float:
    """The scale that was asked for, or 1 / sqrt(depth)."""
    return 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)


def form_of(tensor: Tensor) -> str:
    """A tensor's shape and dtype, for messages."""
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def check_attended(q: Tensor, k: Tensor, v: Tensor, softcap: float, alibi: Tensor | None) -> None:
    """Refuse operands that do not belong together.

    Raises:
        FormatError: they do not, or a softcap or slopes that are none.
    """
    given = f"q, k and v are {form_of(q)}, {form_of(k)} and {form_of(v)}"
    if not (q.dim() == k.dim() == v.dim() == 4 and q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise FormatError(f"{given}: need (batch, heads, length, depth) of one floating dtype")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise FormatError(f"{given}: need one batch, k of the depth of q, v of the heads and length of k")
    check_heads(q.shape[1], k.shape[1])
    if not softcap >= 0:
        raise FormatError(f"softcap is {softcap}, needs a number above 0, or 0 for none")
    if alibi is not None and (alibi.shape != q.shape[1:2] or alibi.dtype is not torch.float32 or alibi.requires_grad):
        raise FormatError(f"alibi is {form_of(alibi)}, needs ({q.shape[1]},) float32, without gradients")


def check_heads(heads: int, kv_heads: int) -> None:
    """Refuse heads of keys that do not divide those of queries."""
    if kv_heads == 0 or heads % kv_heads:
        raise FormatError(f"there are {heads} heads of queries, {kv_heads} of keys: the latter must divide the former")


def check_lists(blocks: Sequence[Tensor], q: Tensor, k_len: int) -> None:
    """Refuse block lists of other queries, and of another number of keys.

    Raises:
        MaskError: they are.
    """
    if len(blocks) != 10:
        raise MaskError(f"blocks are {len(blocks)} tensors, need the ten of AttentionBlocks in its order")
    for length, lists in ((q.shape[2], blocks[:5]), (k_len, blocks[5:])):
        _check_lists(lists, q.shape[0], q.shape[1], length)


def _check_lists(lists: Sequence[Tensor], batch: int, heads: int, length: int) -> None:
    count, partial, index, tile, bits = lists
    rows = -(-length // max(bits.shape[1], 1)) if bits.dim() == 3 else -1
    fits = count.dim() == 3 and count.shape[0] in (1, batch) and count.shape[1] in (1, heads) and count.shape[2] == rows
    fits = fits and partial.shape == count.shape == index.shape[:3] and tile.shape == index.shape
    if not fits or any(one.dtype is not torch.int32 for one in lists):
        raise MaskError(
            f"the blocks have lists {tuple(count.shape)}, indices {tuple(index.shape)} and tiles {tuple(bits.shape)}:"
            f" a length of {length} needs lists (1 or {batch}, 1 or {heads}, {rows}), all int32"
        )


def on_kernels(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether kernels take operands of these sizes and dtype."""
    some = q.numel() and k.numel() and v.numel()
    return bool(some) and q.dtype in KERNEL_DTYPES and max(q.shape[3], v.shape[3]) * q.itemsize <= MOST_BYTES


def place_of(q: Tensor, v: Tensor) -> Tensor:
    """Where the result goes, which lies as q does."""
    return torch.empty_like(q) if q.shape[3] == v.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))


def places_of(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Where the result goes, and the logsumexp."""
    return place_of(q, v), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


def places_of_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the gradients go, each of which lies as what it is by."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def points_of(operands: Sequence[Tensor]) -> list[Tensor]:
    """Views of operands, by each of which alone a gradient can be taken that is differentiated again: of operands that
    are one tensor, or made of one another, each gradient would be that of all."""
    return [one.view_as(one) if one.requires_grad else _compat.leaf_of(one) for one in operands]


def differentiable_gradients(
    found: Sequence[Tensor], points: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The gradients by `points` of what was found of them, where there is a gradient, through plain torch."""
    pairs = [(one.to(given.dtype), given) for one, given in zip(found, grads, strict=True) if given is not None]
    outs, given = zip(*pairs, strict=True)
    return torch.autograd.grad(outs, points, given, create_graph=True, materialize_grads=True)
