"""CUDA implementation of attention over listed blocks, and the operation behind it."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sparsecomp.lowering.attention import problem as described
from sparsecomp.lowering.attention.problem import TOLERANCE, BlockAttention, problem_of, rows_innermost
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.attention import block_attention as reference
from sparsecomp.reference.attention.block_attention import Scoring

_SHAPES = "qkvo"


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Tensor], scoring: Scoring, out: Tensor, logsumexp: Tensor
) -> None:  # fmt: skip
    """Write the result to ``out`` and the logsumexp to ``logsumexp``; see `sparsecomp.ops.attention`.

    Args:
        q, k, v: float16, bfloat16 or float32; none is empty.
        blocks: the ten tensors of ``AttentionBlocks``.
        scoring: of products.
        out: whose depth is innermost.
        logsumexp: (batch, heads, q_len) float32, contiguous.
    """
    q, k, v = map(rows_innermost, (q, k, v))
    into = described.result_like(out)
    problem = problem_of(q, k, v, blocks, scoring, (q, k, v, into))
    lists = [one.contiguous() for one in blocks[:5]]
    dispatch.launch(BLOCK_ATTENTION, problem, q, k, v, *lists, *described.read_beside(scoring), into, logsumexp)
    if into is not out:
        out.copy_(into)


def _operands(problem: BlockAttention, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    random = torch.Generator(device).manual_seed(seed)
    q, k, v, out = described.dense_operands(problem, _SHAPES, random)
    lists = described.banded_blocks(problem, random)[:5]
    logsumexp = torch.full(q.shape[:3], math.nan, device=device)
    return q, k, v, *lists, *described.taken_of(problem, device), out.fill_(math.nan), logsumexp


def _reference(problem: BlockAttention, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    q, k, v, *lists = (one for one in operands[:8] if one is not None)
    scoring = described.scoring_of(problem, operands[8:11])
    out, logsumexp = reference.block_attention_reference(q.double(), k.double(), v.double(), lists, scoring)
    # a norm of infinities says nothing
    return out, logsumexp.masked_fill(logsumexp == -math.inf, 0)


BLOCK_ATTENTION = Operation(
    "block_attention", partial(described.signature, "block_attention"),
    partial(described.representative, shapes=_SHAPES), _operands, (11, 12), _reference,
    lambda problem: TOLERANCE[problem.dtype],
)  # fmt: skip
