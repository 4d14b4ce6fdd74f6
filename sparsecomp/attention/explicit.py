"""Attention over single pairs in three steps, for those who want its weights or change them on the way.

`attention` computes the same in one step and keeps no weights; here each pair's is written, and can be looked at,
penalised or dropped.
"""

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.csr import CSR
from sparsecomp.ops.attention.operands import check_heads, scale_of
from sparsecomp.ops.sparse.row_softmax import row_softmax
from sparsecomp.ops.sparse.sddmm import sddmm
from sparsecomp.ops.sparse.spmm import spmm
from sparsecomp.reference.patterns import Layout


def attention_weights(query: Tensor, key: Tensor, pairs: CSR, *, scale: float | None = None) -> Tensor:
    """The softmax over each query's pairs of scale · query · key: a sampled product and a softmax of stored rows.

    Scores are float32 (float64 for float64), and so is what is returned. A query without pairs has none.

    Args:
        query: (batch, heads, q_len, depth), floating.
        key: (batch, kv_heads, k_len, depth), of the same dtype, where kv_heads divides heads.
        pairs: (q_len, k_len): which keys each query attends to; its values are not read. All heads share it.
        scale: of the scores; 1 / sqrt(depth) if None.

    Returns:
        (batch, heads, stored elements), one weight for each that `pairs` stores, 0 in spare ones. Gradients flow to
        query and key.

    Raises:
        FormatError: operands that do not belong together.
    """
    _check(query, key, pairs)
    scale = scale_of(query, scale)
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k = (_matrices(one.to(wide), query.shape[1]) for one in (query, key))
    scores = sddmm(q, k, (pairs.crow, pairs.col), _layout(pairs), scale=scale)
    return row_softmax(scores, pairs.crow).unflatten(0, query.shape[:2])


def attend_by_weights(weights: Tensor, value: Tensor, pairs: CSR) -> Tensor:
    """Each query's sum of its pairs' values by their weights: a sparse matrix times a dense one, for each head.

    Args:
        weights: (batch, heads, stored elements), as of `attention_weights`.
        value: (batch, kv_heads, k_len, v_depth), where kv_heads divides heads.
        pairs: (q_len, k_len), as there.

    Returns:
        (batch, heads, q_len, v_depth) of value's dtype. Gradients flow to weights and value.

    Raises:
        FormatError: operands that do not belong together.
    """
    fits = weights.dim() == 3 and value.dim() == 4 and weights.shape[0] == value.shape[0]
    if not fits or weights.shape[2] != pairs.col.numel() or value.shape[2] != pairs.shape[1]:
        raise FormatError(
            f"weights {tuple(weights.shape)} and value {tuple(value.shape)} do not go with pairs {pairs.shape} of"
            f" {pairs.col.numel()}: need (batch, heads, stored elements) and (batch, kv_heads, k_len, v_depth)"
        )
    batch, heads, _ = weights.shape
    check_heads(heads, value.shape[1])
    dense = _matrices(value, heads)
    out = spmm(weights.flatten(0, 1).to(value.dtype), (pairs.crow, pairs.col), dense, _layout(pairs))
    return out.unflatten(0, (batch, heads))


def _check(query: Tensor, key: Tensor, pairs: CSR) -> None:
    fits = query.dim() == key.dim() == 4 and query.dtype == key.dtype and query.shape[0] == key.shape[0]
    if not fits or (query.shape[2], key.shape[2]) != pairs.shape or query.shape[3] != key.shape[3]:
        raise FormatError(
            f"query {tuple(query.shape)} {query.dtype} and key {tuple(key.shape)} {key.dtype} do not go with pairs"
            f" {pairs.shape}: need (batch, heads, length, depth) of one dtype"
        )
    check_heads(query.shape[1], key.shape[1])


def _matrices(tensor: Tensor, heads: int) -> Tensor:
    """(batch · heads, length, depth)."""
    return tensor.repeat_interleave(heads // tensor.shape[1], 1).flatten(0, 1)


def _layout(pairs: CSR) -> Layout:
    return Layout("csr", (1, 1), (pairs.shape[0], pairs.shape[1]))
