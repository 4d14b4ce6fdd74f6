"""What a pattern of an attention is: a rule that says of each query and key whether they attend, and what follows.

A pattern is asked twice. For single pairs it says which it keeps. For whole ranges of queries and keys it may bound
that: nothing in here is kept, or everything is. With bounds, block lists of a long sequence are made without looking at
each of its pairs (`sparsecomp.attention.building`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.attention import building, drawing, exchange
from sparsecomp.attention.choice import AttentionChoice, AttentionWork, chosen_way
from sparsecomp.attention.pairs import Bounds, Pairs, Ranges
from sparsecomp.errors import PatternError
from sparsecomp.formats.bsr import BSR
from sparsecomp.lowering.attention.block_choice import of_faster_block
from sparsecomp.reference.attention.blocks import DEFAULT_BLOCK, WIDE_BLOCK, AttentionBlocks, check_block_sizes
from sparsecomp.reference.attention.elements import AttentionElements, elements_of_blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_KEPT = 32
"""Block lists that are kept for patterns that are made anew; the ones not used for longest go first."""


class AttentionPattern(ABC):
    """Which keys each query of an attention attends to. Patterns do not change; `&`, `|` and `~` make new ones.

    Patterns of numbers are equal where their numbers are; one that holds a tensor has a copy of it, and equals itself.
    """

    @abstractmethod
    def keeps(self, pairs: Pairs) -> Tensor:
        """Whether each pair is kept: bool, of the shape that the pairs broadcast to, or one that broadcasts to it."""

    def bounds(self, ranges: Ranges) -> Bounds:
        """What is known of ranges without looking at their pairs; by default nothing."""
        return Bounds(*torch.tensor([True, False], device=ranges.first_query.device))

    @property
    def sizes(self) -> tuple[int, int]:
        """How many batch entries and heads the pattern tells apart; 1 where it is the same for all."""
        return 1, 1

    def check(self, q_len: int, k_len: int) -> None:  # noqa: B027  (most patterns are for any lengths)
        """Look whether the pattern is one for these lengths.

        Raises:
            PatternError: it is not.
        """

    def __and__(self, other: "AttentionPattern") -> "AttentionPattern":
        return Both((self, pattern_of(other)))

    def __or__(self, other: "AttentionPattern") -> "AttentionPattern":
        return Either((self, pattern_of(other)))

    def __invert__(self) -> "AttentionPattern":
        return Not(self)

    def shifted(self, by: int) -> "AttentionPattern":
        """The pattern where query i stands at position i + `by`: of the last queries of a longer sequence, as in
        decoding with a cache of keys."""
        return Shifted(self, by)

    def to_dense(self, q_len: int, k_len: int | None = None, device: torch.device | str | None = None) -> Tensor:
        """The mask: (batch or 1, heads or 1, q_len, k_len) bool, True where a query attends to a key.

        Args:
            k_len: by default `q_len`.

        Raises:
            PatternError: the pattern is for other lengths.
        """
        return building.dense_mask_of(self, q_len, q_len if k_len is None else k_len, torch.device(device or "cpu"))

    def to_blocks(
        self, q_len: int, k_len: int | None = None, block: tuple[int, int] = DEFAULT_BLOCK,
        device: torch.device | str | None = None,
    ) -> AttentionBlocks:  # fmt: skip
        """The block lists that kernels read; the host waits for the device.

        Of a pattern with bounds only blocks on its edge are looked at pair by pair, of any other all, some at a time.

        Args:
            k_len: by default `q_len`.
            block: queries and keys of a block, powers of two from 32 on.

        Raises:
            PatternError: the pattern is for other lengths.
            MaskError: an impossible block.
        """
        return building.blocks_of_pattern(
            self, q_len, q_len if k_len is None else k_len, block, torch.device(device or "cpu")
        )

    def kept(self, q_len: int, k_len: int, block: tuple[int, int], device: torch.device) -> AttentionBlocks:
        """`to_blocks`, made once for each of these arguments.

        Dynamo reads it off the pattern, as it reads any attribute: what it gives are inputs of the graph.
        """
        check_block_sizes(block)
        name = f"_kept_{q_len}_{k_len}_{block[0]}_{block[1]}_{device.type}_{device.index}"
        self._keep(name, q_len, k_len, block, device)
        return getattr(self, name)

    def kept_mask(self, q_len: int, k_len: int, device: torch.device) -> Tensor:
        """`to_dense`, as `kept` keeps `to_blocks`."""
        name = f"_kept_mask_{q_len}_{k_len}_{device.type}_{device.index}"
        self._keep(name, q_len, k_len, None, device)
        return getattr(self, name)

    @torch.compiler.assume_constant_result
    def _keep(self, name: str, q_len: int, k_len: int, block: tuple[int, int] | None, device: torch.device) -> None:
        if name not in self.__dict__:
            object.__setattr__(self, name, _kept(self, q_len, k_len, block, device))

    def kept_elements(self, q_len: int, k_len: int, device: torch.device) -> AttentionElements:
        """The kept pairs as lists, as `kept` keeps `to_blocks`."""
        name = f"_kept_elements_{q_len}_{k_len}_{device.type}_{device.index}"
        self._keep_elements(name, q_len, k_len, device)
        return getattr(self, name)

    @torch.compiler.assume_constant_result
    def _keep_elements(self, name: str, q_len: int, k_len: int, device: torch.device) -> None:
        if name not in self.__dict__:
            with _compat.outside_modes(), torch.inference_mode(False), torch.no_grad():
                found = elements_of_blocks(self.kept(q_len, k_len, DEFAULT_BLOCK, device))
            object.__setattr__(self, name, found)

    @torch.compiler.assume_constant_result
    def way(self, block: tuple[int, int], *work: Any) -> str:
        """By which way attention over the pattern is computed: see `chosen`."""
        return self.chosen(block, *work).by

    @torch.compiler.assume_constant_result
    def wide_is_faster(self, *work: Any) -> bool:
        """Whether attention over the pattern is faster by `WIDE_BLOCK`, on a GPU; found out once for the same work.

        Args:
            work: the fields of `AttentionWork`.
        """
        if "_wide" not in self.__dict__:
            object.__setattr__(self, "_wide", {})
        found = self.__dict__["_wide"]
        if work not in found:
            w = AttentionWork(*work)
            lengths = (w.q_len, w.k_len)
            with _compat.outside_modes(), torch.inference_mode(False), torch.no_grad():
                blocks = of_faster_block(
                    self.kept(*lengths, DEFAULT_BLOCK, w.device), lambda: self.kept(*lengths, WIDE_BLOCK, w.device),
                    max(w.depth, w.v_depth), w.dtype, w.trained,
                )  # fmt: skip
            found[work] = (blocks.block_q, blocks.block_k) == WIDE_BLOCK
        return found[work]

    @torch.compiler.assume_constant_result
    def list_parts(self, block: tuple[int, int], *work: Any) -> int:
        """Which lists of blocks are walked over in parts: see `chosen`."""
        return self.chosen(block, *work).parts

    def chosen(self, block: tuple[int, int], *work: Any) -> AttentionChoice:
        """By which way attention over the pattern is computed, and why; chosen once for the same work.

        Args:
            work: the fields of `AttentionWork`.
        """
        if "_choices" not in self.__dict__:
            object.__setattr__(self, "_choices", {})
        found = self.__dict__["_choices"]  # faster than to hash the pattern in each call
        if (block, *work) not in found:
            found[block, *work] = _chosen(self, block, AttentionWork(*work))
        return found[block, *work]

    def to_flex(
        self, q_len: int, k_len: int | None = None, block: int = 128, device: torch.device | str | None = None
    ) -> "BlockMask":
        """A block mask of torch's FlexAttention, made without a dense mask.

        Raises:
            PatternError: the pattern is for other lengths.
            MaskError: an impossible block.
        """
        return exchange.to_flex(self, q_len, q_len if k_len is None else k_len, block, torch.device(device or "cpu"))

    def to_bsr(
        self, q_len: int, k_len: int | None = None, block: tuple[int, int] = DEFAULT_BLOCK,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> BSR:  # fmt: skip
        """A matrix (q_len, k_len) with ones at the kept pairs.

        Raises:
            PatternError: the pattern is for other lengths, or not the same for each batch entry and head.
            MaskError: an impossible block.
        """
        return exchange.to_bsr(self.to_blocks(q_len, k_len, block, device), dtype)

    def spy(
        self, q_len: int, k_len: int | None = None, path: str | PathLike[str] | None = None, *, batch: int = 0,
        head: int = 0, width: int = 64,
    ) -> str | None:  # fmt: skip
        """A picture of the kept pairs, queries downwards and keys across: text, or an image file.

        Args:
            path: of the image; None returns text of at most `width` columns and half as many lines.
            batch, head: of which, where the pattern tells them apart.

        Raises:
            PatternError: the pattern is for other lengths, or has no such batch entry or head.
            ExtraError: an image is asked for, and matplotlib is missing.
        """
        return drawing.spy(self, (q_len, q_len if k_len is None else k_len), path, (batch, head), width)

    def statistics(
        self, q_len: int, k_len: int | None = None, block: tuple[int, int] = DEFAULT_BLOCK
    ) -> "drawing.PatternStatistics":
        """How many pairs and blocks are kept.

        Raises:
            PatternError: the pattern is for other lengths.
            MaskError: an impossible block.
        """
        return drawing.statistics_of_blocks(self.to_blocks(q_len, k_len, block))


@dataclass(frozen=True)
class _Joined(AttentionPattern):
    parts: tuple[AttentionPattern, ...]
    JOIN: ClassVar[Callable[[Tensor, Tensor], Tensor]]

    def keeps(self, pairs: Pairs) -> Tensor:
        """What the parts keep, joined."""
        return reduce(self.JOIN, (part.keeps(pairs) for part in self.parts))

    def bounds(self, ranges: Ranges) -> Bounds:
        """The parts' bounds, joined."""
        found = [part.bounds(ranges) for part in self.parts]
        return Bounds(reduce(self.JOIN, (one.some for one in found)), reduce(self.JOIN, (one.all for one in found)))

    @property
    def sizes(self) -> tuple[int, int]:
        """Those that the parts have in common."""
        return common_sizes(self.parts)

    def check(self, q_len: int, k_len: int) -> None:
        """Of each part."""
        for part in self.parts:
            part.check(q_len, k_len)


class Both(_Joined):
    """Pairs that every one of the parts keeps."""

    JOIN = staticmethod(torch.logical_and)


class Either(_Joined):
    """Pairs that one of the parts keeps."""

    JOIN = staticmethod(torch.logical_or)


@dataclass(frozen=True)
class Not(AttentionPattern):
    """Pairs that the other does not keep."""

    other: AttentionPattern

    def keeps(self, pairs: Pairs) -> Tensor:
        """Not kept there."""
        return ~self.other.keeps(pairs)

    def bounds(self, ranges: Ranges) -> Bounds:
        """Empty where the other is whole, and the other way round."""
        some, all_ = self.other.bounds(ranges)
        return Bounds(~all_, ~some)

    @property
    def sizes(self) -> tuple[int, int]:
        """The other's."""
        return self.other.sizes

    def check(self, q_len: int, k_len: int) -> None:
        """Of the other."""
        self.other.check(q_len, k_len)


@dataclass(frozen=True)
class Shifted(AttentionPattern):
    """See `AttentionPattern.shifted`."""

    other: AttentionPattern
    by: int

    def __post_init__(self) -> None:
        whole_number("by", self.by, 0)

    def keeps(self, pairs: Pairs) -> Tensor:
        """What the other keeps of the queries' positions."""
        q_len, k_len = pairs.lengths
        return self.other.keeps(pairs._replace(query=pairs.query + self.by, lengths=(q_len + self.by, k_len)))

    def bounds(self, ranges: Ranges) -> Bounds:
        """The other's, there."""
        q_len, k_len = ranges.lengths
        first, last = ranges.first_query + self.by, ranges.last_query + self.by
        there = ranges._replace(first_query=first, last_query=last, lengths=(q_len + self.by, k_len))
        return self.other.bounds(there)

    @property
    def sizes(self) -> tuple[int, int]:
        """The other's."""
        return self.other.sizes

    def check(self, q_len: int, k_len: int) -> None:
        """Of the other, for the longer sequence."""
        self.other.check(q_len + self.by, k_len)


def common_sizes(parts: Sequence[AttentionPattern]) -> tuple[int, int]:
    """Batch entries and heads of patterns taken together.

    Raises:
        PatternError: they tell different numbers apart.
    """
    sizes = [part.sizes for part in parts]
    try:
        batch, heads = torch.broadcast_shapes(*sizes)
    except RuntimeError:
        raise PatternError(
            f"patterns of (batch, heads) {', '.join(map(str, sizes))} do not go together: each needs 1 or the number "
            "that the others have"
        ) from None
    return batch, heads


def whole_number(name: str, value: object, least: int) -> None:
    """Raise PatternError if a setting of a pattern is no int of at least `least`."""
    if type(value) is not int or value < least:
        raise PatternError(f"{name} is {value!r}, needs a whole number of {least} or more")


def pattern_of(value: object) -> AttentionPattern:
    """What stands for a pattern, checked.

    Raises:
        PatternError: it is none.
    """
    if not isinstance(value, AttentionPattern):
        raise PatternError(
            f"a {type(value).__name__} is no pattern: wrap a mask in FromTensor, a function in FromFunction"
        )
    return value


@lru_cache(maxsize=_KEPT)
def _chosen(pattern: AttentionPattern, block: tuple[int, int], work: AttentionWork) -> AttentionChoice:
    with _compat.outside_modes(), torch.inference_mode(False), torch.no_grad():
        return chosen_way(work, pattern.kept(work.q_len, work.k_len, block, work.device))


@lru_cache(maxsize=_KEPT)
def _kept(
    pattern: AttentionPattern, q_len: int, k_len: int, block: tuple[int, int] | None, device: torch.device
) -> AttentionBlocks | Tensor:
    """Block lists that equal patterns share; the mask without a block."""
    with _compat.outside_modes(), torch.inference_mode(False), torch.no_grad():
        if block is None:
            return pattern.to_dense(q_len, k_len, device)
        return pattern.to_blocks(q_len, k_len, block, device)
