"""CUDA implementation of the gradients of attention over listed blocks, and the two operations behind it.

By queries first, which also leaves delta (see ``sparsecomp.reference.attention.block_attention.gradients``) for the
keys and values, and for what is added (`sparsecomp.lowering.attention.added_gradient`). Each program owns what it
writes and walks over a list: no sum depends on who comes first.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sparsecomp.lowering.attention import problem as described
from sparsecomp.lowering.attention.added_gradient import added_gradient
from sparsecomp.lowering.attention.problem import TOLERANCE, BlockAttention, problem_of, rows_innermost
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.attention import block_attention as reference
from sparsecomp.reference.attention.block_attention import Scoring
from sparsecomp.reference.attention.scores import delta_of

_BY_QUERY, _BY_KEY = "qkvooq", "qkvokv"
Operands = tuple[Tensor | None, ...]


def block_attention_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, grad_logsumexp: Tensor | None,
    blocks: Sequence[Tensor], scoring: Scoring, by_q: Tensor, by_k: Tensor, by_v: Tensor,
    by_added: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradients by q, k and v to ``by_q``, ``by_k`` and ``by_v``, which lie in any way, and that by what is
    added to ``by_added``, contiguous.

    Args:
        grad, grad_logsumexp: gradients of the result, and of the logsumexp if it has one.
        q, k, v, out, logsumexp, blocks: as of ``sparsecomp.lowering.attention.block_attention``, after it.
    """
    grad, q, k, v, out = map(rows_innermost, (grad, q, k, v, out))
    blocks = [one.contiguous() for one in blocks]
    wanted = (by_q, by_k, by_v)
    into_q, into_k, into_v = map(described.result_like, wanted)
    logsumexp = logsumexp.contiguous()
    delta = torch.empty_like(logsumexp)
    grad_logsumexp = None if grad_logsumexp is None else grad_logsumexp.contiguous()
    beside = described.read_beside(scoring)
    problem = problem_of(q, k, v, blocks, scoring, (q, k, v, grad, out, into_q))
    dispatch.launch(
        ATTENTION_BY_QUERY, problem, q, k, v, grad, out, logsumexp, grad_logsumexp, *blocks[:5], *beside, into_q,
        delta,
    )  # fmt: skip
    problem = problem_of(q, k, v, blocks, scoring, (q, k, v, grad, into_k, into_v))
    dispatch.launch(ATTENTION_BY_KEY, problem, q, k, v, grad, logsumexp, delta, *blocks[5:], *beside, into_k, into_v)
    if by_added is not None and by_added.numel():
        added_gradient(grad, q, k, v, logsumexp, delta, blocks, scoring, by_added)
    for one, into in zip(wanted, (into_q, into_k, into_v), strict=True):
        if one is not into:
            one.copy_(into)


def _operands_by_query(problem: BlockAttention, device: torch.device, seed: int) -> Operands:
    random = torch.Generator(device).manual_seed(seed)
    q, k, v, grad, out, by_q = described.dense_operands(problem, _BY_QUERY, random)
    blocks, taken = described.banded_blocks(problem, random), described.taken_of(problem, device)
    right, logsumexp = reference.block_attention_reference(q, k, v, blocks, described.scoring_of(problem, taken))
    delta = torch.full_like(logsumexp, math.nan)
    return q, k, v, grad, out.copy_(right), logsumexp, None, *blocks[:5], *taken, by_q.fill_(math.nan), delta


def _reference_by_query(problem: BlockAttention, operands: Operands) -> tuple[Tensor, ...]:
    q, k, v, grad, out, logsumexp, *lists = (one for one in operands[:12] if one is not None)
    grad, q, k, v, out, logsumexp = (one.double() for one in (grad, q, k, v, out, logsumexp))
    delta, scoring = delta_of(grad, out), described.scoring_of(problem, operands[12:15])
    return reference.by_query(grad, q, k, v, logsumexp, delta, lists, scoring), delta


def _operands_by_key(problem: BlockAttention, device: torch.device, seed: int) -> Operands:
    random = torch.Generator(device).manual_seed(seed)
    q, k, v, grad, by_k, by_v = described.dense_operands(problem, _BY_KEY, random)
    blocks, taken = described.banded_blocks(problem, random), described.taken_of(problem, device)
    out, logsumexp = reference.block_attention_reference(q, k, v, blocks, described.scoring_of(problem, taken))
    delta = delta_of(grad, out).float()
    return q, k, v, grad, logsumexp, delta, *blocks[5:], *taken, by_k.fill_(math.nan), by_v.fill_(math.nan)


def _reference_by_key(problem: BlockAttention, operands: Operands) -> tuple[Tensor, ...]:
    q, k, v, grad, logsumexp, delta, *lists = (one for one in operands[:11] if one is not None)
    grad, q, k, v, logsumexp, delta = (one.double() for one in (grad, q, k, v, logsumexp, delta))
    scoring = described.scoring_of(problem, operands[11:14])
    return reference.by_key(grad, q, k, v, logsumexp, delta, lists, scoring)


ATTENTION_BY_QUERY = Operation(
    "attention_by_query", partial(described.signature, "attention_by_query"),
    partial(described.representative, shapes=_BY_QUERY), _operands_by_query, (15, 16), _reference_by_query,
    lambda problem: 2 * TOLERANCE[problem.dtype],
)  # fmt: skip
ATTENTION_BY_KEY = Operation(
    "attention_by_key", partial(described.signature, "attention_by_key"),
    partial(described.representative, shapes=_BY_KEY), _operands_by_key, (14, 15), _reference_by_key,
    lambda problem: 2 * TOLERANCE[problem.dtype],
)  # fmt: skip
