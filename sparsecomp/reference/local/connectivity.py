"""Which k neurons of an (H, W) grid each neuron of a layer reads: fixed, deterministic, and computed all at once.

Neurons are numbered row by row. A pattern is `local` (the nearest), `random` or `hash` (drawn from the neighbourhood;
the hash gives the same on any machine and version). At an edge the grid wraps around, or cells beyond it count as the
edge's own (clamp). Inputs of a neuron are distinct as long as its neighbourhood has enough of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import ConfigError, FormatError

PATTERNS = ("local", "random", "hash")
WRAP_MODES = ("clamp", "wrap")
_WORD = 2**32
_LOW = _WORD - 1
_MOST = torch.iinfo(torch.int32).max
_CHUNK = 2**14
"""Neurons whose inputs are drawn at a time, so that what is computed on the way stays in the cache."""

_Draw = Callable[[Tensor, int, Tensor], Tensor]
"""Whole numbers below bounds, one a neuron, from the neurons, the turn and the bounds."""


def build_geo_connectivity(
    shape: tuple[int, int], *, k: int, pattern: str = "local", radius: int = 1,
    offsets: Sequence[tuple[int, int]] | None = None, wrap_mode: str = "clamp", seed: int | None = None, layer: int = 0,
    include_self: bool = True, allow_repeats: bool = True, device: torch.device | str | None = None,
) -> Tensor:  # fmt: skip
    """Inputs of each neuron: (H · W, k), int32.

    Args:
        shape: (H, W).
        k: inputs of a neuron.
        pattern: "local", "random" or "hash".
        radius: the neighbourhood is the square of side 2 · radius + 1 around a neuron.
        offsets: of "local", (rows down, columns right) in the order in which they are taken, instead of the square from
            its middle outwards.
        wrap_mode: "clamp" or "wrap".
        seed: of "random" and "hash"; None draws one from torch's generator, as weights are drawn.
        layer: another one draws other inputs from the same seed.
        include_self: whether a neuron's own cell belongs to its square.
        allow_repeats: False refuses a grid in which some neuron's neighbourhood has fewer than k cells.

    Raises:
        ConfigError: a setting is unknown, of another type or outside its domain, or k is above the candidates.
    """
    height, width = check_grid(shape)
    _check(pattern, wrap_mode, k=k, radius=radius)
    if pattern != "local" and offsets is not None:
        raise ConfigError(f"offsets belong to pattern 'local', pattern is {pattern!r}: leave them out")
    around = (2 * radius + 1) ** 2 - (not include_self) if offsets is None else len(offsets)
    most = min(around, height * width - (offsets is None and not include_self))
    if k > most:
        raise ConfigError(f"k is {k}, a neuron has at most {most} candidates on a grid {height} x {width}: lower k, or "
                          "widen radius or offsets")  # fmt: skip
    if height * width * k > _MOST:
        raise ConfigError(f"{height * width} neurons of {k} inputs exceed the {_MOST} weights that int32 can count")
    with torch.device("cpu"):
        if pattern == "local":
            moves = _square(_enough(height, width, k, radius)) if offsets is None else _listed(offsets)
            index = _nearest(height, width, k, moves, wrap_mode, skip=int(offsets is None and not include_self))
        else:
            draw = _generated(seed, layer) if pattern == "random" else _hashed(seed, layer)
            index = _drawn(height, width, k, radius, include_self, wrap_mode, draw)
    if not allow_repeats and (least := int(effective_fan_in(index).min())) < k:
        raise ConfigError(f"a neuron has {least} distinct inputs and k is {k}: lower k, widen the neighbourhood, wrap, "
                          "or allow repeats")  # fmt: skip
    return index.to(torch.get_default_device() if device is None else device)


def effective_fan_in(index: Tensor) -> Tensor:
    """How many distinct inputs each neuron of an index (n_out, k) has: (n_out,), int64."""
    ordered = index.sort(1).values
    return (ordered[:, 1:] != ordered[:, :-1]).sum(1) + 1


def expand_in_indices_to_edges(index: Tensor) -> tuple[Tensor, Tensor]:
    """An index (n_out, k) as a list of edges: inputs and outputs, each (n_out · k,), int32."""
    outputs = torch.arange(index.shape[0], dtype=torch.int32, device=index.device)
    return index.flatten().int(), outputs.repeat_interleave(index.shape[1])


def check_index(index: Any, inputs: int, outputs: int) -> Tensor:
    """The index of a layer as int32, contiguous; waits for the device.

    Raises:
        FormatError: it is no integer tensor (outputs, k), or reads beyond the inputs.
    """
    if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
        given = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise FormatError(f"in_index_per_out is {given}, needs a tensor of int32 or int64")
    if index.dim() != 2 or index.shape[0] != outputs or index.shape[1] < 1 or index.numel() > _MOST:
        raise FormatError(f"in_index_per_out has shape {tuple(index.shape)}, needs ({outputs}, k), k 1 or more, and at "
                          f"most {_MOST} entries")  # fmt: skip
    if not index.is_meta and index.numel():
        least, most = torch.stack(index.aminmax()).tolist()
        if least < 0 or most >= inputs:
            raise FormatError(f"in_index_per_out has entries from {least} to {most}, needs 0 to {inputs - 1}, the "
                              "inputs")  # fmt: skip
    return index.to(torch.int32).contiguous()


def check_grid(shape: Any) -> tuple[int, int]:
    """(H, W) of a grid.

    Raises:
        ConfigError: it is no pair of positive numbers.
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(f"shape is {shape!r}, needs (H, W), two whole numbers of 1 or more")
    return sizes[0], sizes[1]


def _check(pattern: str, wrap_mode: str, **counts: int) -> None:
    for name, given, known in (("pattern", pattern, PATTERNS), ("wrap_mode", wrap_mode, WRAP_MODES)):
        if given not in known:
            raise ConfigError(f"{name} is {given!r}, needs one of {', '.join(known)}")
    for name, count in counts.items():
        if type(count) is not int or count < (name == "k"):
            raise ConfigError(f"{name} is {count!r}, needs a whole number of {int(name == 'k')} or more")


# -- the nearest


def _enough(height: int, width: int, k: int, radius: int) -> int:
    """The part of the radius that holds k cells and a neuron's own, seen from a corner."""
    needed = 0
    while needed < radius and min(needed + 1, height) * min(needed + 1, width) <= k:
        needed += 1
    return needed


def _square(radius: int) -> Tensor:
    """Moves to the cells of a square, rings from the middle outwards, the nearest of a ring first: (cells, 2)."""
    side = range(-radius, radius + 1)
    moves = [(down, right) for down in side for right in side]
    return torch.tensor(sorted(moves, key=lambda move: (max(map(abs, move)), sum(map(abs, move)))))


def _listed(offsets: Sequence[tuple[int, int]]) -> Tensor:
    """Moves that a user lists.

    Raises:
        ConfigError: they are no pairs of whole numbers.
    """
    moves = [tuple(move) if isinstance(move, Sequence) else () for move in offsets]
    if not all(len(move) == 2 and all(type(step) is int for step in move) for move in moves):
        raise ConfigError(f"offsets are {offsets!r}, need pairs (rows down, columns right) of whole numbers")
    return torch.tensor(moves).view(-1, 2)


def _nearest(height: int, width: int, k: int, moves: Tensor, wrap_mode: str, skip: int) -> Tensor:
    """k distinct cells that the moves lead to, behind the first `skip`. Neurons far from all edges step alike."""
    reach = int(moves.abs().max())
    (rows, row_kind), (cols, col_kind) = _kinds(height, reach), _kinds(width, reach)
    to_row = _into(rows[:, None] + moves[:, 0], height, wrap_mode)
    to_col = _into(cols[:, None] + moves[:, 1], width, wrap_mode)
    cells = _distinct_first((to_row[:, None] * width + to_col).flatten(0, 1), k, skip)
    steps = cells.view(len(rows), len(cols), k) - (rows[:, None] * width + cols)[:, :, None]
    here = torch.arange(height * width, dtype=torch.int32).view(height, width, 1)
    return steps.int()[row_kind[:, None], col_kind].add_(here).flatten(0, 1)


def _kinds(size: int, reach: int) -> tuple[Tensor, Tensor]:
    """Places along an axis that see its ends differently, and for each place the one of them that sees as it does."""
    places = torch.arange(size)
    seen = places.clamp(max=reach) + (places - (size - 1 - reach)).clamp(min=0)
    kinds, kind = seen.unique(return_inverse=True)
    return torch.searchsorted(seen, kinds), kind


def _into(place: Tensor, size: int, wrap_mode: str) -> Tensor:
    return place.remainder(size) if wrap_mode == "wrap" else place.clamp(0, size - 1)


def _distinct_first(cells: Tensor, k: int, skip: int) -> Tensor:
    """k distinct of each row, in their order, behind the first `skip`; where there are fewer, those again in turn."""
    ordered, place = cells.sort(dim=1, stable=True)
    repeated = torch.zeros_like(cells, dtype=torch.bool)
    repeated.scatter_(1, place[:, 1:], ordered[:, 1:] == ordered[:, :-1])
    distinct = repeated.byte().sort(dim=1, stable=True).indices
    count = (~repeated).sum(1, keepdim=True) - skip
    return cells.gather(1, distinct.gather(1, skip + torch.arange(k) % count))


# -- drawn from the neighbourhood


def _drawn(
    height: int, width: int, k: int, radius: int, include_self: bool, wrap_mode: str, draw: _Draw
) -> Tensor:  # fmt: skip
    """k of each neuron's square, distinct where it has as many cells."""
    (top, high), (left, wide) = (_span(size, radius, wrap_mode) for size in (height, width))
    index = torch.empty((height * width, k), dtype=torch.int32)
    for neuron in torch.arange(height * width).split(_CHUNK):
        row, col = torch.div(neuron, width, rounding_mode="floor"), neuron % width
        top_of, left_of, wide_of = top[row], left[col], wide[col]
        chosen = _subsets(high[row] * wide_of - int(not include_self), k, neuron, draw)
        if not include_self:
            chosen += chosen >= (row - top_of) * wide_of + (col - left_of)
        down, right = torch.div(chosen, wide_of, rounding_mode="floor"), chosen % wide_of
        index[neuron[0] : neuron[-1] + 1] = ((top_of + down) % height * width + (left_of + right) % width).mT
    return index


def _subsets(count: Tensor, k: int, neuron: Tensor, draw: _Draw) -> Tensor:
    """k of 0 to count - 1 a neuron, by Floyd's sampling; all of them in turn where there are fewer: (k, neurons)."""
    chosen = count.new_empty((k, count.numel()))
    for turn in range(k):
        last = count - k + turn
        found = draw(neuron, turn, last + 1)
        found = torch.where((chosen[:turn] == found).any(0), last, found)
        chosen[turn] = torch.where(count < k, turn % count, found)
    return chosen


def _span(size: int, radius: int, wrap_mode: str) -> tuple[Tensor, Tensor]:
    """Where the neighbourhood of each place along an axis begins, and how many places it has."""
    place = torch.arange(size)
    if wrap_mode == "wrap":
        return place - min(radius, size // 2), torch.full((size,), min(2 * radius + 1, size))
    begin = (place - radius).clamp(min=0)
    return begin, (place + radius).clamp(max=size - 1) - begin + 1


def _generated(seed: int | None, layer: int) -> _Draw:
    """By torch's generator on the CPU."""
    generator = torch.Generator().manual_seed(_key(seed, layer))

    def draw(neuron: Tensor, turn: int, bound: Tensor) -> Tensor:
        return (torch.rand(bound.shape, generator=generator, dtype=torch.float64) * bound).long()

    return draw


def _hashed(seed: int | None, layer: int) -> _Draw:
    """By a hash of seed, layer, neuron and turn."""
    key = _key(seed, layer)

    def draw(neuron: Tensor, turn: int, bound: Tensor) -> Tensor:
        return _mixed(_mixed(neuron ^ key) + turn) * bound >> 32

    return draw


def _key(seed: int | None, layer: int) -> int:
    """One word of seed and layer."""
    seed = int(torch.randint(_WORD, ())) if seed is None else seed
    parts = torch.tensor([seed % _WORD, seed // _WORD % _WORD, layer % _WORD])
    key = torch.zeros((), dtype=torch.int64)
    for part in parts:
        key = _mixed(key * 31 + part)
    return int(key)


def _mixed(word: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 (Appleby, 2011) on words of 32 bits that int64 holds."""
    word = word & _LOW
    word = (word ^ (word >> 16)) * 0x85EBCA6B & _LOW
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & _LOW
    return word ^ (word >> 16)
