"""CUDA implementation of the gradients of attention over listed pairs, and the two operations behind it.

By queries first, which also leaves delta (see ``sparsecomp.reference.attention.element_attention``) for the keys and
values. Each program owns what it writes and walks over a list: no sum depends on who comes first.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sparsecomp.lowering.attention.element_attention import (
    TOLERANCE_OF_ELEMENTS,
    ElementAttention,
    elements_problem,
    elements_representative,
    elements_signature,
    operands_of_elements,
)
from sparsecomp.lowering.attention.problem import result_like, rows_innermost
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.attention import element_attention as reference
from sparsecomp.reference.attention.scores import Scores, delta_of

_BY_QUERY, _BY_KEY = "qkvooq", "qkvokv"
_Operands = tuple[Tensor | None, ...]


def element_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, grad_logsumexp: Tensor | None,
    lists: Sequence[Tensor], scores: Scores, by_q: Tensor, by_k: Tensor, by_v: Tensor,
) -> None:  # fmt: skip
    """Write the gradients by q, k and v to ``by_q``, ``by_k`` and ``by_v``, which lie in any way."""
    grad, q, k, v, out = map(rows_innermost, (grad, q, k, v, out))
    lists = [one.contiguous() for one in lists]
    wanted = (by_q, by_k, by_v)
    into_q, into_k, into_v = map(result_like, wanted)
    logsumexp = logsumexp.contiguous()
    delta = torch.empty_like(logsumexp)
    beside = None if grad_logsumexp is None else grad_logsumexp.contiguous()
    alibi = None if scores.alibi is None else scores.alibi.contiguous()
    problem = elements_problem(q, k, v, lists, scores, (q, k, v, grad, out, into_q))
    dispatch.launch(
        ELEMENTS_BY_QUERY, problem, q, k, v, grad, out, logsumexp, beside, *lists[:2], alibi, into_q, delta
    )  # fmt: skip
    problem = elements_problem(q, k, v, lists, scores, (q, k, v, grad, into_k, into_v))
    dispatch.launch(ELEMENTS_BY_KEY, problem, q, k, v, grad, logsumexp, delta, *lists[2:], alibi, into_k, into_v)
    for one, into in zip(wanted, (into_q, into_k, into_v), strict=True):
        if one is not into:
            one.copy_(into)


def _operands_by_query(problem: ElementAttention, device: torch.device, seed: int) -> _Operands:
    random = torch.Generator(device).manual_seed(seed)
    (q, k, v, grad, out, by_q), lists, alibi = operands_of_elements(problem, _BY_QUERY, random)
    scores = Scores(problem.scale, problem.softcap, alibi)
    right, logsumexp = reference.element_attention_reference(q, k, v, lists, scores)
    delta = torch.full_like(logsumexp, math.nan)
    return q, k, v, grad, out.copy_(right), logsumexp, None, *lists[:2], alibi, by_q.fill_(math.nan), delta


def _reference_by_query(problem: ElementAttention, operands: _Operands) -> tuple[Tensor, ...]:
    q, k, v, grad, out, logsumexp, *lists = (one for one in operands[:9] if one is not None)
    grad, q, k, v, out, logsumexp = (one.double() for one in (grad, q, k, v, out, logsumexp))
    delta, scores = delta_of(grad, out), Scores(problem.scale, problem.softcap, operands[9])
    return reference.elements_by_query(grad, q, k, v, logsumexp, delta, lists, scores), delta


def _operands_by_key(problem: ElementAttention, device: torch.device, seed: int) -> _Operands:
    random = torch.Generator(device).manual_seed(seed)
    (q, k, v, grad, by_k, by_v), lists, alibi = operands_of_elements(problem, _BY_KEY, random)
    scores = Scores(problem.scale, problem.softcap, alibi)
    out, logsumexp = reference.element_attention_reference(q, k, v, lists, scores)
    delta = delta_of(grad.float(), out)
    return q, k, v, grad, logsumexp, delta, *lists[2:], alibi, by_k.fill_(math.nan), by_v.fill_(math.nan)


def _reference_by_key(problem: ElementAttention, operands: _Operands) -> tuple[Tensor, ...]:
    q, k, v, grad, logsumexp, delta, *lists = (one for one in operands[:8] if one is not None)
    grad, q, k, v, logsumexp, delta = (one.double() for one in (grad, q, k, v, logsumexp, delta))
    scores = Scores(problem.scale, problem.softcap, operands[8])
    return reference.elements_by_key(grad, q, k, v, logsumexp, delta, lists, scores)


ELEMENTS_BY_QUERY = Operation(
    "elements_by_query", partial(elements_signature, "elements_by_query"),
    partial(elements_representative, shapes=_BY_QUERY), _operands_by_query, (10, 11), _reference_by_query,
    lambda problem: 2 * TOLERANCE_OF_ELEMENTS[problem.dtype],
)  # fmt: skip
ELEMENTS_BY_KEY = Operation(
    "elements_by_key", partial(elements_signature, "elements_by_key"),
    partial(elements_representative, shapes=_BY_KEY), _operands_by_key, (9, 10), _reference_by_key,
    lambda problem: 2 * TOLERANCE_OF_ELEMENTS[problem.dtype],
)  # fmt: skip
