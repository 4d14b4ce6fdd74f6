"""CUDA implementation of the gradient by numbers that are added to scores, and the operation behind it.

A number may be added to the scores of several batch entries and heads. A program owns a tile of numbers, and adds up
over all of these: no sum depends on who comes first.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparsecomp.lowering.attention import problem as described
from sparsecomp.lowering.attention.problem import TOLERANCE, BlockAttention
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.attention import block_attention as reference
from sparsecomp.reference.attention.block_attention import Scoring
from sparsecomp.reference.attention.scores import delta_of

_SHAPES = "qkvo"
_ENOUGH = 1024
"""Programs, from which on a sum is no longer divided among several."""


class AddedGradient(BlockAttention):
    """A problem of which the gradient by what is added is wanted, of the shape `added_sizes`."""

    __slots__ = ()

    @property
    def shared(self) -> tuple[int, int]:
        """Batch entries, and heads, to whose scores the same numbers are added."""
        batch, heads = self.added_sizes[:2]
        return self.batch // batch, self.heads // heads

    @property
    def items(self) -> int:
        """Scores of different batch entries and heads that a number is added to."""
        return self.shared[0] * self.shared[1]

    @property
    def sides(self) -> tuple[int, int]:
        """Queries, and keys, of a tile, which is a block or divides it: as many as shared memory has room for."""
        itemsize = 4 if self.dtype == "float32" else 2
        most = 64 if itemsize * (self.padded_depth + self.padded_v_depth) <= 512 else 32
        return min(most, self.block_q), min(most, self.block_k)

    @property
    def tiles(self) -> tuple[int, int]:
        """Of queries, and of keys."""
        height, width = self.sides
        return -(-self.q_len // height), -(-self.k_len // width)

    @property
    def programs(self) -> int:
        """Tiles of numbers, where each is of one query and one key."""
        return math.prod(self.added_sizes[:2]) * math.prod(self.tiles)

    @property
    def sums(self) -> int:
        """Parts of a tile's sum, each of a program of its own."""
        return min(self.items, -(-_ENOUGH // self.programs))

    @property
    def listed(self) -> float:
        """Tiles of which a pair is kept, at most."""
        rows, columns = self.tiles
        return math.prod(self.added_sizes[:2]) * rows * min(columns, self.width * (self.block_k // self.sides[1]))

    @property
    def numbers_written(self) -> int:
        """Elements of the tiles, in all parts."""
        return self.programs * math.prod(self.sides) * self.sums


def added_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, logsumexp: Tensor, delta: Tensor, blocks: Sequence[Tensor],
    scoring: Scoring, by_added: Tensor,
) -> None:  # fmt: skip
    """Write the gradient by what a scoring adds to ``by_added``, contiguous and in its shape and dtype.

    Args:
        grad, q, k, v: whose rows are innermost.
        logsumexp, delta: contiguous, of each query.
        blocks: lists that tell no more batch entries and heads apart than what is added.
    """
    problem = described.problem_of(q, k, v, blocks, scoring, (q, k, v, grad))
    lists = (blocks[0], blocks[2], blocks[3], blocks[4])
    beside = described.read_beside(scoring)
    dispatch.launch(
        ATTENTION_BY_ADDED, AddedGradient(*problem), q, k, v, grad, logsumexp, delta, *lists, *beside, by_added
    )  # fmt: skip


_APART = ("added_batch", "added_heads", "added_rows")


def _signature(problem: AddedGradient, device: Device) -> KernelSignature:
    """Of numbers that are alike for all keys the gradient is next to 0, and no candidate can be held to it."""
    found = described.signature("attention_by_added", problem, device)
    apart = tuple((name, int(size > 1)) for name, size in zip(_APART, problem.added_sizes, strict=False))
    return replace(found, parameters=(*found.parameters, *apart))


def _representative(signature: KernelSignature) -> AddedGradient:
    problem = AddedGradient(*described.representative(signature, _SHAPES))
    given, whole = dict(signature.parameters), (problem.batch, problem.heads, problem.q_len)
    sizes = tuple(size if given[name] else 1 for name, size in zip(_APART, whole, strict=True))
    return problem._replace(added_sizes=(*sizes, problem.k_len))


def _operands(problem: AddedGradient, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    random = torch.Generator(device).manual_seed(seed)
    q, k, v, grad = described.dense_operands(problem, _SHAPES, random)
    blocks, taken = described.banded_blocks(problem, random), described.taken_of(problem, device)
    out, logsumexp = reference.block_attention_reference(q, k, v, blocks, described.scoring_of(problem, taken))
    delta = delta_of(grad, out).float()
    by_added = torch.full(problem.added_sizes, math.nan, dtype=getattr(torch, problem.added), device=device)
    return q, k, v, grad, logsumexp, delta, blocks[0], *blocks[2:5], *taken, by_added


def _reference(problem: AddedGradient, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    q, k, v, grad, logsumexp, delta, count, *lists = (one for one in operands[:10] if one is not None)
    grad, q, k, v, logsumexp, delta = (one.double() for one in (grad, q, k, v, logsumexp, delta))
    scoring = described.scoring_of(problem, operands[10:13])
    lists = (count, count, *lists)  # which blocks are kept whole does not matter
    return (reference.by_added(grad, q, k, v, logsumexp, delta, lists, scoring, problem.added_sizes),)


ATTENTION_BY_ADDED = Operation(
    "attention_by_added", _signature, _representative, _operands, (13,), _reference,
    lambda problem: 2 * max(TOLERANCE[problem.dtype], TOLERANCE[problem.added]),
)  # fmt: skip
