"""Patterns that somebody gives as a tensor or a function, packed documents, and one pattern a head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsecomp.attention.pairs import Bounds, Pairs, Ranges, entry
from sparsecomp.attention.pattern import AttentionPattern, common_sizes, pattern_of, whole_number
from sparsecomp.errors import PatternError
from sparsecomp.formats.base import SparseMatrix
from sparsecomp.reference.attention.blocks import AttentionBlocks, dense_mask

_PADDING = torch.iinfo(torch.int64).max


@dataclass(frozen=True, eq=False)
class FromTensor(AttentionPattern):
    """A mask.

    Attributes:
        mask: (queries, keys), (heads or 1, queries, keys) or (batch or 1, heads or 1, queries, keys) bool, True where a
            query attends to a key; copied. For lengths below its own it is what the first queries and keys have.

    Raises:
        PatternError: another dtype or number of dimensions.
    """

    mask: Tensor

    def __post_init__(self) -> None:
        mask = self.mask
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.dim() not in (2, 3, 4):
            given = f"{tuple(mask.shape)} of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
            raise PatternError(
                f"the mask is {given}, needs torch.bool, True where a query attends to a key, in (queries, keys), with"
                " heads, or batch and heads, in front"
            )
        object.__setattr__(self, "mask", mask.detach().clone()[(None,) * (4 - mask.dim())])

    @classmethod
    def of_matrix(cls, matrix: SparseMatrix) -> Self:
        """The pattern that keeps what is stored in a matrix (queries, keys) and is not zero."""
        return cls(matrix.to_dense() != 0)

    @classmethod
    def of_blocks(cls, blocks: AttentionBlocks) -> Self:
        """The pattern that block lists stand for."""
        return cls(dense_mask(blocks))

    def keeps(self, pairs: Pairs) -> Tensor:
        """As the mask says."""
        mask, (batch, heads) = self.mask.to(pairs.query.device), self.sizes
        return mask[entry(pairs.batch, batch), entry(pairs.head, heads), pairs.query, pairs.key]

    @property
    def sizes(self) -> tuple[int, int]:
        """The mask's."""
        return self.mask.shape[0], self.mask.shape[1]

    def check(self, q_len: int, k_len: int) -> None:
        """The mask reaches as far."""
        queries, keys = self.mask.shape[2:]
        if q_len > queries or k_len > keys:
            raise PatternError(f"a mask of {queries} queries and {keys} keys is none for {q_len} and {k_len}")


@dataclass(frozen=True)
class FromFunction(AttentionPattern):
    """A function of positions, as FlexAttention's ``mask_mod``.

    Attributes:
        function: of (batch, head, query, key), int64 tensors that broadcast, to a bool tensor; always the same result
            for the same positions.
        batches, heads: how many batch entries and heads the function tells apart; 1 where they do not matter.

    Raises:
        PatternError: no function, or numbers below 1.
    """

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    batches: int = 1
    heads: int = 1

    def __post_init__(self) -> None:
        whole_number("batches", self.batches, 1)
        whole_number("heads", self.heads, 1)
        if not callable(self.function):
            raise PatternError(f"{self.function!r} is no function of (batch, head, query, key)")

    def keeps(self, pairs: Pairs) -> Tensor:
        """What the function gives.

        Raises:
            PatternError: no bool tensor, or one of another shape.
        """
        kept = self.function(*pairs[:4])
        if not isinstance(kept, Tensor) or kept.dtype is not torch.bool:
            given = kept.dtype if isinstance(kept, Tensor) else type(kept).__name__
            raise PatternError(f"the function gave {given} for positions, needs a tensor of torch.bool")
        shape = torch.broadcast_shapes(*(one.shape for one in pairs[:4]))
        try:
            return kept.expand(shape)
        except RuntimeError:
            raise PatternError(
                f"the function gave {tuple(kept.shape)} for positions that broadcast to {tuple(shape)}, needs the same:"
                " compute it of the positions element by element"
            ) from None

    @property
    def sizes(self) -> tuple[int, int]:
        """As given."""
        return self.batches, self.heads


@dataclass(frozen=True, eq=False)
class Documents(AttentionPattern):
    """Sequences packed into one: tokens attend to those of their own document.

    Attributes:
        ids: (tokens,) or (batch, tokens) of whole numbers: each token's document; negative ones are padding, which
            attends to nothing and nothing to it. Copied.

    Raises:
        PatternError: another dtype or number of dimensions.
    """

    ids: Tensor

    def __post_init__(self) -> None:
        ids = self.ids
        if not isinstance(ids, Tensor) or ids.dim() not in (1, 2) or ids.is_floating_point() or ids.is_complex():
            given = f"{tuple(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
            raise PatternError(f"ids are {given}, need whole numbers in (tokens,) or (batch, tokens)")
        ids = ids.detach().to(torch.int64, copy=True)
        object.__setattr__(self, "ids", torch.atleast_2d(ids.masked_fill_(ids < 0, _PADDING)))

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], total: int | None = None) -> Self:
        """Documents one behind another.

        Args:
            lengths: tokens of each.
            total: tokens in all; those behind the last document are padding.

        Raises:
            PatternError: negative lengths, or more tokens than there are.
        """
        for length in lengths:
            whole_number("a length", length, 0)
        used = sum(lengths)
        padding = 0 if total is None else total - used
        if padding < 0:
            raise PatternError(f"{used} tokens of documents do not fit into {total}")
        numbers, tokens = torch.arange(len(lengths) + 1, device="cpu"), torch.tensor([*lengths, padding], device="cpu")
        ids = numbers.repeat_interleave(tokens)
        return cls(ids.masked_fill_(ids == len(lengths), -1))

    def keeps(self, pairs: Pairs) -> Tensor:
        """Of the same document."""
        query, key = self._id(pairs.batch, pairs.query), self._id(pairs.batch, pairs.key)
        return (query == key) & (query < _PADDING)

    def bounds(self, ranges: Ranges) -> Bounds:
        """By the first and the last document of a range, where documents stand in order."""
        if not bool((self.ids.diff(dim=-1) >= 0).all()):
            return super().bounds(ranges)
        first_query, last_query = (self._id(ranges.batch, one) for one in ranges[2:4])
        first_key, last_key = (self._id(ranges.batch, one) for one in ranges[4:6])
        first, last = torch.maximum(first_query, first_key), torch.minimum(last_query, last_key)
        some = (first <= last) & (first < _PADDING)
        return Bounds(some, some & (torch.minimum(first_query, first_key) == torch.maximum(last_query, last_key)))

    @property
    def sizes(self) -> tuple[int, int]:
        """A batch entry a row of ids."""
        return len(self.ids), 1

    def check(self, q_len: int, k_len: int) -> None:
        """There are as many tokens."""
        tokens = self.ids.shape[1]
        if max(q_len, k_len) > tokens:
            raise PatternError(f"documents of {tokens} tokens are none for {q_len} queries and {k_len} keys")

    def _id(self, batch: Tensor, position: Tensor) -> Tensor:
        return self.ids.to(position.device)[entry(batch, len(self.ids)), position]


@dataclass(frozen=True)
class PerHead(AttentionPattern):
    """A pattern for each head.

    Attributes:
        patterns: as many as there are query heads.

    Raises:
        PatternError: there is none, or one tells heads apart itself.
    """

    patterns: tuple[AttentionPattern, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", tuple(map(pattern_of, self.patterns)))
        if not self.patterns or common_sizes(self.patterns)[1] != 1:
            raise PatternError("patterns of heads need one or more, each for a single head")

    def keeps(self, pairs: Pairs) -> Tensor:
        """What the head's pattern keeps."""
        return self._chosen(pairs.head, [one.keeps(pairs) for one in self.patterns])

    def bounds(self, ranges: Ranges) -> Bounds:
        """Those of the head's pattern."""
        found = [one.bounds(ranges) for one in self.patterns]
        some, all_ = (self._chosen(ranges.head, [getattr(one, name) for one in found]) for name in Bounds._fields)
        return Bounds(some, all_)

    @property
    def sizes(self) -> tuple[int, int]:
        """A head a pattern."""
        return common_sizes(self.patterns)[0], len(self.patterns)

    def check(self, q_len: int, k_len: int) -> None:
        """Of each pattern."""
        for one in self.patterns:
            one.check(q_len, k_len)

    def _chosen(self, head: Tensor, each: Sequence[Tensor]) -> Tensor:
        chosen = torch.zeros_like(head, dtype=torch.bool)
        for number, one in enumerate(each):
            chosen = chosen | ((head == number) & one)
        return chosen
