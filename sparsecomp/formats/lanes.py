"""In which order a product by a bitmap decodes a matrix, and what it is told of each chunk.

Tensor cores want a tile's values in the registers of 32 lanes. A matrix that lies as the lanes take it is decoded
without an index: a bit says of each place whether it is stored, and the values of a lane follow each other.

A tile is 16 x 16; eight of them, side by side, are a turn, and a turn of sixteen rows, a strip, is a chunk. Lane
4 · g + q has of tile 2 · p + h of a turn's eight the rows g and g + 8 and the columns c to c + 3, where c is
32 · p + 8 · q + 4 · h: places 0 and 1 are row g of the first two columns, 2 and 3 row g + 8, 4 to 7 those of the other
two. Chunks lie strip by strip, and their places by lane and tile.
"""

from typing import NamedTuple

import torch
from torch import Tensor

STRIP = 16
"""Rows of a tile."""
TILES = 8
"""Of a turn."""
CHUNK = 16 * TILES
"""Columns of a turn."""
LANES = 32
OF_LANE = 8 * TILES
"""Places of a chunk that a lane has."""
SIZE = LANES * OF_LANE
"""Places of a chunk."""
UNIT = 8
"""Values that copies begin at a multiple of: 16 bytes of half precision."""


class Chunks(NamedTuple):
    """Where stored values lie that are in the order of lanes.

    Attributes:
        starts: (chunks + 1,) int64: those of chunk c are starts[c] to starts[c + 1] - 1.
        heads: (chunks, `head_bytes`) uint8: 32 int16, where each lane's values begin, counted from the multiple of
            `UNIT` at starts[c] or before; then by lane and tile a bit for each place, or for each two.
    """

    starts: Tensor
    heads: Tensor


def head_bytes(grain: int = 1) -> int:
    """Of a chunk: where its lanes begin, and a bit for each of its places, or for so many neighbours."""
    return 2 * LANES + LANES * TILES // grain


def chunk_count(shape: tuple[int, int]) -> int:
    """Of a matrix of these rows and columns."""
    return -(-shape[0] // STRIP) * -(-shape[1] // CHUNK)


def lane_places(row: Tensor, column: Tensor, columns: int) -> Tensor:
    """How many places lie before that of each element, int64."""
    row, column = row.long(), column.long()
    chunk = row // STRIP * -(-columns // CHUNK) + column // CHUNK
    lane = 4 * (row % 8) + column % 32 // 8
    tile = column % CHUNK // 32 * 2 + column % 8 // 4
    place = column % 4 // 2 * 4 + row % STRIP // 8 * 2 + column % 2
    return ((chunk * LANES + lane) * TILES + tile) * 8 + place


def lane_elements(places: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Row and column of each place."""
    chunk, within = places // SIZE, places % SIZE
    strip, turn = chunk // (turns := -(-columns // CHUNK)), chunk % turns
    first, second = _within(torch.arange(SIZE, device=places.device))
    return strip * STRIP + first[within], turn * CHUNK + second[within]


def _within(places: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of places of a chunk."""
    lane, tile, place = places // OF_LANE, places // 8 % TILES, places % 8
    row = place // 2 % 2 * 8 + lane // 4
    return row, tile // 2 * 32 + lane % 4 * 8 + tile % 2 * 4 + place // 4 * 2 + place % 2


def chunks_at(entries: Tensor, count: int, grain: int = 1) -> Chunks:
    """The chunks of a matrix that stores these.

    Args:
        entries: places over `grain`, each once.
        count: of chunks.
        grain: neighbours in a row that share a bit, 1 or 2: where one of two is stored, both are.
    """
    of_lane = _counts(entries // (OF_LANE // grain), LANES * count).view(-1, LANES) * grain
    starts = torch.nn.functional.pad(of_lane.sum(1).cumsum(0), (1, 0))
    bits = torch.zeros(count * SIZE // grain // 8, dtype=torch.uint8, device=entries.device)
    bits.index_add_(0, entries // 8, (1 << entries % 8).to(torch.uint8))
    begins = (_lane_starts(starts, of_lane)).to(torch.int16).view(torch.uint8)
    return Chunks(starts, torch.cat([begins, bits.view(count, SIZE // grain // 8)], 1))


def _lane_starts(starts: Tensor, of_lane: Tensor) -> Tensor:
    """Where each lane's values begin, of which there are `of_lane` (chunks, lanes)."""
    return of_lane.cumsum(1) - of_lane + (starts[:-1] % UNIT)[:, None]


def entries_of(heads: Tensor, count: int | None = None) -> Tensor:
    """Those that heads have a bit for, in order; nothing is read from a device where it is known how many these are."""
    bits = bits_of(heads)
    found = bits.nonzero() if count is None else torch.nonzero_static(bits, size=count, fill_value=0)
    return found.squeeze(1)


def bits_of(heads: Tensor) -> Tensor:
    """(entries,) uint8, whether each is stored."""
    octets = heads[:, 2 * LANES :].reshape(-1, 1)
    return (octets >> torch.arange(8, dtype=torch.uint8, device=heads.device) & 1).flatten()


def laid_by_rows(places: Tensor, shape: tuple[int, int]) -> Tensor:
    """What belongs to each place, in the order of lanes, as a dense matrix of this shape."""
    (rows, columns), turns = shape, -(-shape[1] // CHUNK)
    row = torch.arange(STRIP, device=places.device).repeat_interleave(CHUNK)
    order = lane_places(row, torch.arange(CHUNK, device=places.device).repeat(STRIP), CHUNK)
    chunks = places.view(-1, SIZE).gather(1, order.expand(places.numel() // SIZE, SIZE))
    strips = chunks.view(-1, turns, STRIP, CHUNK).transpose(1, 2)
    return strips.reshape(-1, turns * CHUNK)[:rows, :columns].contiguous()


def begins_of(heads: Tensor) -> Tensor:
    """(chunks, lanes) int16: where each lane's values begin."""
    # copied in any case: a view of wider numbers must not begin in the middle of one
    return heads[:, : 2 * LANES].clone(memory_format=torch.contiguous_format).view(torch.int16)


def _counts(numbers: Tensor, most: int) -> Tensor:
    """How many of `numbers` are 0, 1, … up to `most` - 1, int64."""
    return torch.zeros(most, dtype=torch.int64, device=numbers.device).index_add_(0, numbers, torch.ones_like(numbers))
