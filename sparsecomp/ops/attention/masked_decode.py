"""Attention of a few queries over a cache of keys and values by a mask, as models with a static cache write it.

The mask says it all, so that whatever it keeps is right. What makes it fast is that between the first key that is kept
and the last there are few: which these are is found on the device, once for all layers that read the same mask.
"""

import math

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.ops.attention.decode_attention import MOST_KEYS, check_room, check_rows, decoded_places
from sparsecomp.ops.attention.operands import check_attended, form_of, on_kernels, scale_of
from sparsecomp.ops.library import TAGS, decompose, implement, library
from sparsecomp.reference.attention.decode_attention import (
    Sight,
    kept_range_reference,
    masked_decode_reference,
    seen_numbers_reference,
)
from sparsecomp.reference.attention.scores import Scores
from sparsecomp.reference.precision import KERNEL_DTYPES, without_autocast

library.define("kept_range(Tensor kept, int batch) -> Tensor", tags=TAGS)
library.define("seen_numbers(Tensor added) -> (Tensor, Tensor)", tags=TAGS)
library.define(
    "masked_decode(Tensor q, Tensor k, Tensor v, Tensor kept, Tensor ranges, int width, float scale, float softcap) -> "
    "(Tensor, Tensor)",
    tags=TAGS,
)


def masked_decode_attention(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, *, width: int | None = None, scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale · q kᵀ) v of a few queries over a cache, of whose keys a mask keeps some.

    Of each sequence the keys are read from the first that one of its queries keeps to the last, and no others. The host
    waits for nothing, CUDA graphs can hold the call, and its time follows what the mask holds. Sums are float32
    (float64 for float64). It has no gradients. A query that keeps no key gives zeros.

    Args:
        q: (batch, heads, rows, depth), floating, any strides; 1 to 8 rows.
        k: (batch, kv_heads, capacity, depth), where kv_heads divides heads: each serves so many heads in a row. Any
            strides.
        v: the same, with v_depth.
        kept: (batch or 1, heads or 1, rows or 1, capacity or 1) bool, True where a query sees a key; or floating, of
            numbers that are added to scores (after the cap), -inf where it does not.
        width: keys from the first to the last that is kept, if that is known; a kernel is chosen by it, and nothing
            else.
        scale: of the scores; 1 / sqrt(depth) if None.
        softcap: c in scores of c · tanh(scale · q kᵀ / c); 0 for none.

    Returns:
        The result (batch, heads, rows, v_depth), contiguous, and the natural logarithm of each query's sum of
        exponentials (batch, heads, rows) in float32 (float64 for float64), -inf where it keeps nothing.

    Raises:
        FormatError: operands that do not belong together, or one that requires a gradient while gradients are on.
    """
    if torch.is_grad_enabled() and any(one.requires_grad for one in (q, k, v)):
        raise FormatError(
            "masked_decode_attention has no gradients: call it under torch.no_grad(), or detach its operands"
        )
    _check_mask(q, k, kept)
    seen = kept if kept.dtype is torch.bool else kept != -math.inf
    ranges = kept_range(seen.expand(-1, -1, -1, k.shape[2]), len(q))
    width = -1 if width is None else width
    return torch.ops.sparsecomp.masked_decode.default(q, k, v, kept, ranges, width, scale_of(q, scale), float(softcap))


def kept_range(kept: Tensor, batch: int) -> Tensor:
    """Of each sequence, the first key that one of its queries keeps, and the one behind the last: (batch, 2) int32.

    Both are 0 where no query keeps any.

    Args:
        kept: (batch or 1, heads, rows, capacity) bool.
        batch: sequences.

    Raises:
        FormatError: a mask of another form.
    """
    return torch.ops.sparsecomp.kept_range.default(kept, batch)


def _check_range(kept: Tensor, batch: int) -> None:
    if kept.dim() != 4 or kept.dtype is not torch.bool or kept.shape[0] not in (1, batch):
        raise FormatError(f"kept is {form_of(kept)}, needs ({batch} or 1, heads, rows, capacity) torch.bool")


def _range(kept: Tensor, batch: int) -> Tensor:
    _check_range(kept, batch)
    return kept_range_reference(kept, batch)


def _fake_range(kept: Tensor, batch: int) -> Tensor:
    _check_range(kept, batch)
    return kept.new_empty((batch, 2), dtype=torch.int32)


def _check_mask(q: Tensor, k: Tensor, kept: Tensor) -> None:
    sizes = (*q.shape[:3], k.shape[2]) if q.dim() == k.dim() == 4 else ()
    fits = kept.dim() == len(sizes) and all(one in (1, size) for one, size in zip(kept.shape, sizes, strict=True))
    if not fits or not (kept.dtype is torch.bool or kept.is_floating_point()):
        raise FormatError(
            f"kept is {form_of(kept)} beside q and k of {form_of(q)} and {form_of(k)}, needs (batch or 1, heads or 1,"
            " rows or 1, capacity or 1) torch.bool, or floating"
        )


def _check(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, ranges: Tensor, width: int, scale: float, softcap: float
) -> None:
    """All checks that look at no contents."""
    check_attended(q, k, v, softcap, None)
    _check_mask(q, k, kept)
    check_rows(q)
    if ranges.shape != (len(q), 2) or ranges.dtype is not torch.int32:
        raise FormatError(f"ranges is {form_of(ranges)}, needs ({len(q)}, 2) torch.int32")
    if any(one.device != q.device for one in (k, v, kept, ranges)):
        raise FormatError("the operands of masked_decode_attention are on several devices: move them to q's")
    check_room(k.shape[2])
    if not -1 <= width < MOST_KEYS:
        raise FormatError(f"width is {width}, needs a number of keys, or None where it is not known")
    if not math.isfinite(scale):
        raise FormatError(f"scale is {scale}, needs a number")


def _decode(q, k, v, kept, ranges, width, scale, softcap):
    _check(q, k, v, kept, ranges, width, scale, softcap)
    out, logsumexp = decoded_places(q, v)
    with without_autocast(q):
        found, sums = masked_decode_reference(q, k, v, kept, ranges, Scores(scale, softcap))
    return out.copy_(found), logsumexp.copy_(sums)


def _decode_cuda(q, k, v, kept, ranges, width, scale, softcap):
    if not on_kernels(q, k, v) or kept.dtype not in (torch.bool, *KERNEL_DTYPES):
        return _decode(q, k, v, kept, ranges, width, scale, softcap)
    _check(q, k, v, kept, ranges, width, scale, softcap)
    from sparsecomp.lowering.attention.decode_attention import decode_attention as lowered  # loads Triton

    out, logsumexp = decoded_places(q, v)
    sight = Sight(-1 if width < 0 else max(width - q.shape[2], 0), 0)
    lowered(q, k, v, ranges, None, sight, Scores(scale, softcap), out, logsumexp, kept)
    return out, logsumexp


def _fake_decode(q, k, v, kept, ranges, width, scale, softcap):
    _check(q, k, v, kept, ranges, width, scale, softcap)
    return decoded_places(q, v)


implement("seen_numbers", seen_numbers_reference)
decompose("seen_numbers", seen_numbers_reference)
implement("kept_range", _range, fake=_fake_range)
decompose("kept_range", kept_range_reference)
implement("masked_decode", _decode, _decode_cuda, _fake_decode)
