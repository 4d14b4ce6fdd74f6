"""CUDA implementation of attention over listed pairs, the description of its problems, and the operation behind it."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.lowering.attention.problem import (
    HeadStrides,
    contiguous,
    dense_operands,
    result_like,
    rows_innermost,
    slopes,
)
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.attention.element_attention import element_attention_reference
from sparsecomp.reference.attention.elements import elements_of_mask
from sparsecomp.reference.attention.scores import Scores

TOLERANCE_OF_ELEMENTS = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Relative Frobenius error of a result: weights are not rounded, only it is."""
MOST_HEADS = 2**16 - 1
"""Of all batch entries: as many programs as a grid's second dimension has."""
_SIZES = ("batch", "heads", "q_len", "k_len", "row")
_PARAMETERS = ("group", "depth", "v_depth")
_SHAPES = "qkvo"


class ElementAttention(NamedTuple):
    """The sizes, strides and types of a product; see `sparsecomp.ops.element_attention`.

    Attributes:
        group: query heads to a head of keys.
        depth, v_depth: numbers of a query or key, and of a value.
        pairs: of all lists.
        by_batch, by_head: whether the lists differ by batch, and by head.
        dtype: of all dense operands but the logsumexp.
        strides: of the dense operands that an operation takes strided, in its order.
        biased: whether there is an alibi.
    """

    batch: int
    heads: int
    group: int
    q_len: int
    k_len: int
    depth: int
    v_depth: int
    pairs: int
    by_batch: bool
    by_head: bool
    dtype: str
    scale: float
    strides: tuple[HeadStrides, ...]
    softcap: float = 0.0
    biased: bool = False

    @property
    def lists(self) -> int:
        """Heads with lists of their own."""
        return (self.batch if self.by_batch else 1) * (self.heads if self.by_head else 1)

    @property
    def row(self) -> int:
        """Keys of a query, on the mean, rounded up."""
        return -(-self.pairs // max(self.lists * self.q_len, 1))

    @property
    def column(self) -> int:
        """Queries of a key, on the mean, rounded up."""
        return -(-self.pairs // max(self.lists * self.k_len, 1))

    @property
    def padded_depth(self) -> int:
        """Side of a tile that holds a query or key."""
        return 1 << (self.depth - 1).bit_length()

    @property
    def padded_v_depth(self) -> int:
        """Side of a tile that holds a value."""
        return 1 << (self.v_depth - 1).bit_length()

    def numbers(self, lines: int) -> tuple[Any, ...]:
        """The run-time numbers that kernels take last; `lines` are the rows of a list."""
        strides = (stride for one in self.strides for stride in one)
        heads = self.heads if self.by_head else 1
        lists = ((lines + 1) * heads * self.by_batch, (lines + 1) * self.by_head)
        return (self.heads, self.q_len, self.k_len, self.scale, self.softcap, *strides, *lists)


def element_attention(
    q: Tensor, k: Tensor, v: Tensor, lists: Sequence[Tensor], scores: Scores, out: Tensor, logsumexp: Tensor
) -> None:
    """Write the result to ``out`` and the logsumexp, contiguous float32, to ``logsumexp``.

    Args:
        q, k, v: float16, bfloat16 or float32; none is empty.
        lists: the four tensors of ``AttentionElements``.
    """
    q, k, v = map(rows_innermost, (q, k, v))
    into = result_like(out)
    problem = elements_problem(q, k, v, lists, scores, (q, k, v, into))
    alibi = None if scores.alibi is None else scores.alibi.contiguous()
    own = [one.contiguous() for one in lists[:2]]
    dispatch.launch(ELEMENT_ATTENTION, problem, q, k, v, *own, alibi, into, logsumexp)
    if into is not out:
        out.copy_(into)


def elements_problem(
    q: Tensor, k: Tensor, v: Tensor, lists: Sequence[Tensor], scores: Scores, strided_operands: Sequence[Tensor]
) -> ElementAttention:
    """Describe a product of operands of which a kernel takes some by their strides.

    Raises:
        FormatError: there are more than `MOST_HEADS`.
    """
    if q.shape[0] * q.shape[1] > MOST_HEADS:
        raise FormatError(
            f"q has {q.shape[0]} times {q.shape[1]} heads, kernels of single pairs take {MOST_HEADS} in all: attend by"
            " blocks, or by parts of the batch"
        )
    pointers, index = lists[:2]
    return ElementAttention(
        q.shape[0], q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], len(index),
        pointers.shape[0] > 1, pointers.shape[1] > 1, dtype_name(q), float(scores.scale),
        tuple(HeadStrides(*one.stride()[:3]) for one in strided_operands), float(scores.softcap),
        scores.alibi is not None,
    )  # fmt: skip


def elements_signature(op: str, problem: ElementAttention, device: Device) -> KernelSignature:
    """Of a problem of one of the operations; how the operands are strided and what the lists share costs nothing."""
    return KernelSignature(
        op, device, dtypes=(problem.dtype,), accumulator="float32", index="int32",
        sizes=tuple((name, getattr(problem, name)) for name in _SIZES),
        parameters=(*((name, getattr(problem, name)) for name in _PARAMETERS),
                    ("capped", int(problem.softcap > 0)), ("biased", int(problem.biased))),
    )  # fmt: skip


def elements_representative(signature: KernelSignature, shapes: str) -> ElementAttention:
    """A problem of a signature.

    Args:
        shapes: a letter for each strided operand: `q`, `k` or `v`, or `o` for what has q's length and v's depth.
    """
    sizes, given = ({name: int(n) for name, n in pairs} for pairs in (signature.sizes, signature.parameters))
    heads = max(sizes["heads"] // given["group"], 1) * given["group"]
    problem = ElementAttention(
        sizes["batch"], heads, given["group"], sizes["q_len"], sizes["k_len"], given["depth"], given["v_depth"],
        min(sizes["row"], sizes["k_len"]) * sizes["q_len"], False, False, signature.dtypes[0], given["depth"] ** -0.5,
        (), 20.0 * given["capped"], bool(given["biased"]),
    )  # fmt: skip
    return contiguous(problem, shapes)


def operands_of_elements(
    problem: ElementAttention, shapes: str, random: torch.Generator
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Dense operands, one a letter; lists of as many pairs, at least one of each query; slopes."""
    p, device = problem, random.device
    dense = dense_operands(p, shapes, random)
    leading = (p.batch if p.by_batch else 1, p.heads if p.by_head else 1)
    drawn = torch.rand((*leading, p.q_len, p.k_len), generator=random, device=device)
    drawn.scatter_(3, drawn.argmin(3, keepdim=True), -1)
    kept = torch.zeros(drawn.numel(), dtype=torch.bool, device=device)
    kept[drawn.flatten().topk(max(p.pairs, p.lists * p.q_len), largest=False).indices] = True
    lists = list(elements_of_mask(kept.view_as(drawn))[2:])
    alibi = slopes(p.heads, p.k_len, device) if p.biased else None
    return dense, lists, alibi


def _operands(problem: ElementAttention, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    random = torch.Generator(device).manual_seed(seed)
    (q, k, v, out), lists, alibi = operands_of_elements(problem, _SHAPES, random)
    return q, k, v, *lists[:2], alibi, out.fill_(math.nan), torch.full(q.shape[:3], math.nan, device=device)


def _reference(problem: ElementAttention, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    q, k, v, *lists = (one for one in operands[:5] if one is not None)
    scores = Scores(problem.scale, problem.softcap, operands[5])
    out, logsumexp = element_attention_reference(q.double(), k.double(), v.double(), lists, scores)
    # a norm of infinities says nothing
    return out, logsumexp.masked_fill(logsumexp == -math.inf, 0)


ELEMENT_ATTENTION = Operation(
    "element_attention", partial(elements_signature, "element_attention"),
    partial(elements_representative, shapes=_SHAPES), _operands, (6, 7), _reference,
    lambda problem: TOLERANCE_OF_ELEMENTS[problem.dtype],
)  # fmt: skip
