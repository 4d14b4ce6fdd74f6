"""CUDA implementation of attention of spikes over listed blocks, and the operation behind it."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sparsecomp.lowering.attention import problem as described
from sparsecomp.lowering.attention.problem import TOLERANCE, BlockAttention, problem_of, rows_innermost
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.attention.block_attention import Scoring
from sparsecomp.reference.attention.spike_attention import spike_attention_reference

_SHAPES = "qkvo"


def spike_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Tensor], scale: float, out: Tensor, single: bool = False
) -> None:  # fmt: skip
    """Write the result to ``out``; see `sparsecomp.ops.attention.spike_attention`.

    Args:
        q, k, v: float16, bfloat16 or float32, with as many heads; none is empty.
        blocks: the ten tensors of ``AttentionBlocks``.
        scale: of the result.
        out: of any of these dtypes.
        single: as of ``BlockAttention``, of float32.
    """
    q, k, v = map(rows_innermost, (q, k, v))
    into = described.result_like(out)
    result = "" if into.dtype is q.dtype else dtype_name(into)
    problem = problem_of(q, k, v, blocks, Scoring(scale), (q, k, v, into))._replace(
        scale=scale, result=result, single=single and q.dtype is torch.float32
    )
    dispatch.launch(SPIKE_ATTENTION, problem, q, k, v, *(one.contiguous() for one in blocks[:5]), into)
    if into is not out:
        out.copy_(into)


def _operands(problem: BlockAttention, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    random = torch.Generator(device).manual_seed(seed)
    q, k, v, out = described.dense_operands(problem, _SHAPES, random)
    out = out.to(getattr(torch, problem.result or problem.dtype))
    return q, k, v, *described.banded_blocks(problem, random)[:5], out.fill_(math.nan)


def _reference(problem: BlockAttention, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    q, k, v, *lists = (one for one in operands[:8] if one is not None)
    return (spike_attention_reference(q.double(), k.double(), v.double(), lists, problem.scale),)


def _kinds(problem: BlockAttention) -> tuple[str, ...]:
    """Dtypes that numbers are rounded to; TF32 has the digits of float16."""
    return problem.dtype, problem.result or problem.dtype, "float16" if problem.single else problem.dtype


SPIKE_ATTENTION = Operation(
    "spike_attention", partial(described.signature, "spike_attention"),
    partial(described.representative, shapes=_SHAPES), _operands, (8,), _reference,
    lambda problem: max(TOLERANCE[kind] for kind in _kinds(problem)),
)  # fmt: skip
