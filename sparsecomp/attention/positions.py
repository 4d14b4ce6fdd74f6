"""Patterns of positions alone: windows, global tokens, prefixes, columns, and any of them on blocks.

Sources: Child et al., Generating Long Sequences with Sparse Transformers (2019); Beltagy et al., Longformer (2020);
Zaheer et al., Big Bird (2020); Raffel et al., T5 (2020), for the prefix.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.attention.pairs import Bounds, Pairs, Ranges, entry
from sparsecomp.attention.pattern import AttentionPattern, pattern_of, whole_number
from sparsecomp.errors import PatternError

_EXACT = 16
"""Most pairs of blocks within a range that are asked one by one."""
_DRAWN_ROWS = 1024


@dataclass(frozen=True)
class LocalWindow(AttentionPattern):
    """Keys at most so far from the query.

    Attributes:
        before, after: keys on either side of the query's position, which is kept too; None for all.
        dilation: only each so-many-th key counts, and is kept: distances are up to before · dilation.

    Raises:
        PatternError: a negative number, or a dilation below 1.
    """

    before: int | None
    after: int | None
    dilation: int = 1

    def __post_init__(self) -> None:
        for name in ("before", "after"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 0)
        whole_number("dilation", self.dilation, 1)

    def keeps(self, pairs: Pairs) -> Tensor:
        """By the distance from key to query."""
        distance = pairs.query - pairs.key
        kept = torch.ones_like(distance, dtype=torch.bool)
        if self.before is not None:
            kept = kept & (distance <= self.before * self.dilation)
        if self.after is not None:
            kept = kept & (distance >= -self.after * self.dilation)
        return kept & (distance % self.dilation == 0) if self.dilation > 1 else kept

    def bounds(self, ranges: Ranges) -> Bounds:
        """By the least and the greatest distance."""
        least, greatest = ranges.first_query - ranges.last_key, ranges.last_query - ranges.first_key
        low, high, whole = least, greatest, torch.ones_like(least, dtype=torch.bool)
        if self.before is not None:
            high, whole = high.clamp(max=self.before * self.dilation), whole & (greatest <= self.before * self.dilation)
        if self.after is not None:
            low, whole = low.clamp(min=-self.after * self.dilation), whole & (least >= -self.after * self.dilation)
        if self.dilation == 1:
            return Bounds(low <= high, whole)
        nearest = high.div(self.dilation, rounding_mode="floor") * self.dilation
        return Bounds((low <= high) & (nearest >= low), whole & (least == greatest) & (least % self.dilation == 0))


def causal() -> AttentionPattern:
    """Keys up to the query's own position, counted from the start of both, as `is_causal` of torch's attention."""
    return LocalWindow(None, 0)


@dataclass(frozen=True)
class GlobalTokens(AttentionPattern):
    """Tokens that attend to all keys, and that all queries attend to.

    Attributes:
        tokens: their positions, ascending, or the number of them, which then are the first.
        as_queries, as_keys: only one of the two.

    Raises:
        PatternError: positions that are negative or do not ascend.
    """

    tokens: int | tuple[int, ...]
    as_queries: bool = True
    as_keys: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.tokens, tuple):
            for token in self.tokens:
                whole_number("a position in tokens", token, 0)
            if list(self.tokens) != sorted(set(self.tokens)):
                raise PatternError(f"tokens are {self.tokens}, need positions in ascending order, each once")
        else:
            whole_number("tokens", self.tokens, 0)

    def keeps(self, pairs: Pairs) -> Tensor:
        """Where the query or the key is one of them."""
        return self._either(self._is_token(pairs.query), self._is_token(pairs.key))

    def bounds(self, ranges: Ranges) -> Bounds:
        """By how many of them are in a range."""
        queries = self._among(ranges.first_query, ranges.last_query)
        keys = self._among(ranges.first_key, ranges.last_key)
        return Bounds(self._either(queries.some, keys.some), self._either(queries.all, keys.all))

    def _either(self, query: Tensor, key: Tensor) -> Tensor:
        if self.as_queries and self.as_keys:
            return query | key
        return query if self.as_queries else key if self.as_keys else torch.zeros_like(query)

    def _is_token(self, position: Tensor) -> Tensor:
        if isinstance(self.tokens, int):
            return position < self.tokens
        return (position[..., None] == torch.tensor(self.tokens, device=position.device)).any(-1)

    def _among(self, first: Tensor, last: Tensor) -> Bounds:
        if isinstance(self.tokens, int):
            return Bounds(first < self.tokens, last < self.tokens)
        tokens = torch.tensor(self.tokens, dtype=torch.int64, device=first.device)
        found = torch.searchsorted(tokens, last, right=True) - torch.searchsorted(tokens, first)
        return Bounds(found > 0, found == last - first + 1)


@dataclass(frozen=True)
class PrefixLM(AttentionPattern):
    """A causal pattern whose first tokens see one another, whatever their order.

    Attributes:
        prefix: how many, or as many numbers as the batch has entries.

    Raises:
        PatternError: a negative number, or none.
    """

    prefix: int | tuple[int, ...]

    def __post_init__(self) -> None:
        if self.prefix == ():
            raise PatternError("prefix is (), needs a number of tokens for each batch entry, or one for all")
        for one in self.prefix if isinstance(self.prefix, tuple) else (self.prefix,):
            whole_number("prefix", one, 0)

    def keeps(self, pairs: Pairs) -> Tensor:
        """Keys of the prefix, and those up to the query."""
        return (pairs.key < self._prefix(pairs.batch)) | (pairs.key <= pairs.query)

    def bounds(self, ranges: Ranges) -> Bounds:
        """By the first and the last key."""
        prefix = self._prefix(ranges.batch)
        some = (ranges.first_key < prefix) | (ranges.first_key <= ranges.last_query)
        return Bounds(some, (ranges.last_key < prefix) | (ranges.last_key <= ranges.first_query))

    @property
    def sizes(self) -> tuple[int, int]:
        """A batch entry for each prefix."""
        return len(self.prefix) if isinstance(self.prefix, tuple) else 1, 1

    def _prefix(self, batch: Tensor) -> int | Tensor:
        if isinstance(self.prefix, int):
            return self.prefix
        numbers = torch.tensor(self.prefix, device=batch.device)
        return numbers[entry(batch, len(self.prefix))]


@dataclass(frozen=True)
class PeriodicKeys(AttentionPattern):
    """The last `count` of each `period` keys, which sum up what is before them.

    Raises:
        PatternError: numbers below 1, or more keys than a period has.
    """

    period: int
    count: int = 1

    def __post_init__(self) -> None:
        whole_number("period", self.period, 1)
        whole_number("count", self.count, 1)
        if self.count > self.period:
            raise PatternError(f"count is {self.count}, needs at most the {self.period} keys of a period")

    def keeps(self, pairs: Pairs) -> Tensor:
        """By the key's place in its period."""
        return pairs.key % self.period >= self.period - self.count


@dataclass(frozen=True)
class RandomKeys(AttentionPattern):
    """So many keys for each query, drawn at random without repetition; all where there are no more.

    The same on every device and machine, for the same numbers of queries and keys.

    Attributes:
        count: keys of a query.
        seed: of the draw.
        heads: draws, one a head; 1 for the same in all heads.

    Raises:
        PatternError: numbers below 1, or a negative seed.
    """

    count: int
    seed: int = 0
    heads: int = 1

    def __post_init__(self) -> None:
        whole_number("count", self.count, 1)
        whole_number("seed", self.seed, 0)
        whole_number("heads", self.heads, 1)

    def keeps(self, pairs: Pairs) -> Tensor:
        """Where the key is among those drawn for the query."""
        drawn = _drawn(self, *pairs.lengths).to(pairs.query.device)
        return (drawn[entry(pairs.head, self.heads), pairs.query] == pairs.key[..., None]).any(-1)

    @property
    def sizes(self) -> tuple[int, int]:
        """A draw a head."""
        return 1, self.heads


@lru_cache(maxsize=16)
def _drawn(random: RandomKeys, queries: int, keys: int) -> Tensor:
    """(heads, queries, count): the keys, drawn on the CPU."""
    count = min(random.count, keys)
    with _compat.outside_modes(), torch.inference_mode(False):  # it is kept, for calls in other modes
        generator = torch.Generator().manual_seed(random.seed)
        rows = torch.empty(random.heads * queries, count, dtype=torch.int64, device="cpu")
        for some in rows.split(_DRAWN_ROWS):
            some.copy_(torch.rand(len(some), keys, generator=generator, device="cpu").topk(count).indices)
        return rows.view(random.heads, queries, count)


@dataclass(frozen=True)
class InBlocks(AttentionPattern):
    """Another pattern, of blocks: a block of pairs is kept whole or not at all.

    Attributes:
        other: what it says of query i and key j holds for the queries of block i and the keys of block j.
        block: queries and keys of a block; one number for both.

    Raises:
        PatternError: a block of less than 1.
    """

    other: AttentionPattern
    block: int | tuple[int, int]

    def __post_init__(self) -> None:
        pattern_of(self.other)
        sides = self.block if isinstance(self.block, tuple) else (self.block, self.block)
        if len(sides) != 2:
            raise PatternError(f"block is {self.block!r}, needs a number of queries and one of keys, or one for both")
        for side in sides:
            whole_number("block", side, 1)
        object.__setattr__(self, "block", sides)

    def keeps(self, pairs: Pairs) -> Tensor:
        """What the other keeps of the blocks that the positions are in."""
        height, width = self._sides
        lengths = self._lengths(pairs.lengths)
        return self.other.keeps(
            pairs._replace(query=_div(pairs.query, height), key=_div(pairs.key, width), lengths=lengths)
        )

    def bounds(self, ranges: Ranges) -> Bounds:
        """Exact where a range has few blocks, otherwise the other's bounds."""
        height, width = self._sides
        queries = (_div(ranges.first_query, height), _div(ranges.last_query, height))
        keys = (_div(ranges.first_key, width), _div(ranges.last_key, width))
        blocks = Ranges(ranges.batch, ranges.head, *queries, *keys, self._lengths(ranges.lengths))
        rows, columns = _most(*queries), _most(*keys)
        return self._exact(blocks, rows, columns) if rows * columns <= _EXACT else self.other.bounds(blocks)

    @property
    def sizes(self) -> tuple[int, int]:
        """The other's."""
        return self.other.sizes

    def check(self, q_len: int, k_len: int) -> None:
        """Of the other, for the numbers of blocks."""
        self.other.check(*self._lengths((q_len, k_len)))

    @property
    def _sides(self) -> tuple[int, int]:
        assert isinstance(self.block, tuple)
        return self.block

    def _lengths(self, lengths: tuple[int, int]) -> tuple[int, int]:
        height, width = self._sides
        return -(-lengths[0] // height), -(-lengths[1] // width)

    def _exact(self, ranges: Ranges, rows: int, columns: int) -> Bounds:
        """What the other says of each block of ranges that have at most so many; smaller ones ask some twice."""
        found = []
        for row in range(rows):
            for column in range(columns):
                query = torch.minimum(ranges.first_query + row, ranges.last_query)
                key = torch.minimum(ranges.first_key + column, ranges.last_key)
                found.append(self.other.keeps(Pairs(ranges.batch, ranges.head, query, key, ranges.lengths)))
        kept = torch.stack(torch.broadcast_tensors(*found))
        return Bounds(kept.any(0), kept.all(0))


def _div(position: Tensor, block: int) -> Tensor:
    return position.div(block, rounding_mode="floor")


def _most(first: Tensor, last: Tensor) -> int:
    return int((last - first).max()) + 1 if first.numel() else 1
