"""Attention of the last queries of each sequence over a cache of keys and values, as decoding needs it.

One query has little to compute and much to read: what counts is that only the keys that it sees are read, once for all
heads of a group, and by the whole GPU even for a single sequence.
"""

import math

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.ops.attention.operands import check_heads, form_of, on_kernels, scale_of
from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.reference.attention.decode_attention import Sight, decode_attention_reference
from sparsecomp.reference.attention.scores import Scores
from sparsecomp.reference.precision import accumulator, without_autocast

MOST_ROWS = 8
"""Queries of a sequence: one, or those that a draft proposes."""
MOST_KEYS = 2**30
"""Of a sequence: kernels add up positions in 32 bits."""

library.define(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor? table, int window, int sinks, float scale, "
    "float softcap, Tensor? alibi) -> (Tensor, Tensor)",
    tags=TAGS,
)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, table: Tensor | None = None, window: int | None = None,
    sinks: int = 0, scale: float | None = None, softcap: float = 0.0, alibi: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale · q kᵀ) v of each sequence's last queries over its cache, which holds their own keys already.

    The query of row r stands at position `lengths - rows + r`. It sees the keys up to there, or only `window` of them
    before its own, as `sparsecomp.attention.LocalWindow(window, 0)`, and the first `sinks` (attention sinks, Xiao et
    al., 2023). Nothing else is read, so that pages of keys that left the window can be used for others. Keys are split
    among programs, whose parts are then merged (flash-decoding, Dao et al., 2023). The host waits for nothing, CUDA
    graphs can hold the call, and its time follows the lengths that it finds on the device. Sums are float32 (float64
    for float64). It has no gradients.

    A query that sees no key, such as one of a sequence of length 0, gives zeros. A length below 0 or beyond the cache,
    and a page that is read and none of the pool's, give NaN: they are only known on the device.

    Args:
        q: (batch, heads, rows, depth), floating, any strides; 1 to 8 rows.
        k: (batch, kv_heads, capacity, depth), where kv_heads divides heads: each serves so many heads in a row. With a
            table, pages (pages, kv_heads, page, depth) that all sequences share. Any strides, which may differ from
            v's: a cache (pages, page, kv_heads, depth) is given by its `transpose(1, 2)`.
        v: the same, with v_depth.
        lengths: (batch,) int32: keys of each sequence, those of the rows of q included; on q's device.
        table: (batch, pages of a sequence) int32: where in the pool the pages of a sequence are. Pages that no query
            sees may have any number.
        window: None for all keys.
        scale: of the scores; 1 / sqrt(depth) if None.
        softcap: c in scores of c · tanh(scale · q kᵀ / c); 0 for none.
        alibi: (heads,) float32: added to a score is the head's number times (position of the key - of the query).

    Returns:
        The result (batch, heads, rows, v_depth), contiguous, and the natural logarithm of each query's sum of
        exponentials (batch, heads, rows) in float32 (float64 for float64), -inf where it sees nothing.

    Raises:
        FormatError: operands that do not belong together, or one that requires a gradient while gradients are on.
    """
    if torch.is_grad_enabled() and any(one.requires_grad for one in (q, k, v)):
        raise FormatError("decode_attention has no gradients: call it under torch.no_grad(), or detach its operands")
    scale = scale_of(q, scale)
    if window is not None and not 0 <= window < MOST_KEYS:
        raise FormatError(f"window is {window}, needs a number of keys from 0 to {MOST_KEYS - 1}, or None for all")
    before = -1 if window is None else window
    return torch.ops.sparsecomp.decode_attention.default(
        q, k, v, lengths, table, before, sinks, scale, float(softcap), alibi
    )


def _check(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None, window: int, sinks: int, scale: float,
    softcap: float, alibi: Tensor | None,
) -> None:  # fmt: skip
    """All checks that look at no contents."""
    if not (q.dim() == k.dim() == v.dim() == 4 and q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise FormatError(
            f"q, k and v are {form_of(q)}, {form_of(k)} and {form_of(v)}: need four dimensions and one floating dtype"
        )
    if q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3] or (table is None and q.shape[0] != k.shape[0]):
        raise FormatError(
            f"q, k and v are {form_of(q)}, {form_of(k)} and {form_of(v)}: need k of the depth of q, v of the heads and"
            " length of k, and without a table one batch"
        )
    check_heads(q.shape[1], k.shape[1])
    check_rows(q)
    if lengths.shape != q.shape[:1] or lengths.dtype is not torch.int32:
        raise FormatError(f"lengths is {form_of(lengths)}, needs ({q.shape[0]},) torch.int32")
    if table is not None and (table.dim() != 2 or len(table) != len(q) or table.dtype is not torch.int32):
        raise FormatError(f"table is {form_of(table)}, needs ({q.shape[0]}, pages of a sequence) torch.int32")
    if any(one is not None and one.device != q.device for one in (k, v, lengths, table, alibi)):
        raise FormatError("the operands of decode_attention are on several devices: move them to q's")
    check_room(capacity_of(k, table))
    if not 0 <= sinks < MOST_KEYS:
        raise FormatError(f"sinks is {sinks}, needs a number of keys from 0 to {MOST_KEYS - 1}")
    if not math.isfinite(scale):
        raise FormatError(f"scale is {scale}, needs a number")
    if not softcap >= 0:
        raise FormatError(f"softcap is {softcap}, needs a number above 0, or 0 for none")
    if alibi is not None and (alibi.shape != q.shape[1:2] or alibi.dtype is not torch.float32):
        raise FormatError(f"alibi is {form_of(alibi)}, needs ({q.shape[1]},) torch.float32")


def check_rows(q: Tensor) -> None:
    """Raise FormatError for more queries of a sequence than a kernel takes."""
    if not 1 <= q.shape[2] <= MOST_ROWS:
        raise FormatError(
            f"q has {q.shape[2]} queries of each sequence, needs 1 to {MOST_ROWS}: take sparsecomp.attention.attention"
            " for more"
        )


def check_room(keys: int) -> None:
    """Raise FormatError for more keys of a sequence than a kernel counts."""
    if keys >= MOST_KEYS:
        raise FormatError(f"the cache has room for {keys} keys, needs fewer than {MOST_KEYS}")


def capacity_of(k: Tensor, table: Tensor | None) -> int:
    """Keys that a sequence has room for."""
    return k.shape[2] if table is None else k.shape[2] * table.shape[1]


def decoded_places(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Where the result goes, and the logsumexp."""
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


def _decode(q, k, v, lengths, table, window, sinks, scale, softcap, alibi):
    _check(q, k, v, lengths, table, window, sinks, scale, softcap, alibi)
    out, logsumexp = decoded_places(q, v)
    if not logsumexp.numel():
        return out, logsumexp
    if not len(k):  # a table has no page to point to
        k, v = (one.new_zeros((1, *one.shape[1:])) for one in (k, v))
        table = None if table is None else torch.full_like(table, -1)
    with without_autocast(q):
        scores = Scores(scale, softcap, alibi)
        found, sums = decode_attention_reference(q, k, v, lengths, table, Sight(window, sinks), scores)
    return out.copy_(found), logsumexp.copy_(sums)


def _decode_cuda(q, k, v, lengths, table, window, sinks, scale, softcap, alibi):
    if not on_kernels(q, k, v) or not capacity_of(k, table):
        return _decode(q, k, v, lengths, table, window, sinks, scale, softcap, alibi)
    _check(q, k, v, lengths, table, window, sinks, scale, softcap, alibi)
    from sparsecomp.lowering.attention.decode_attention import decode_attention as lowered  # loads Triton

    out, logsumexp = decoded_places(q, v)
    lowered(q, k, v, lengths, table, Sight(window, sinks), Scores(scale, softcap, alibi), out, logsumexp)
    return out, logsumexp


def _fake_decode(q, k, v, lengths, table, window, sinks, scale, softcap, alibi):
    _check(q, k, v, lengths, table, window, sinks, scale, softcap, alibi)
    return decoded_places(q, v)


implement("decode_attention", _decode, _decode_cuda, _fake_decode)
