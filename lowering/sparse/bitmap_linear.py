"""Layers of few rows by unstructured weights as an operation, by a bitmap of tiles with their values.

    out = activation(weight @ x.mT + bias + residual)

Such layers take as long as their weights take to read, and to decode. A bit a place and the values alone make these, in
half precision, 0.4 of the dense weight's bytes at 70 % zeros; a bit for two neighbours makes them 0.56, which are
decoded faster. They lie as a kernel decodes them: in tiles of 16 x 16, eight of which, side by side, are a turn; a turn
of sixteen rows is a chunk, copied to a processor as a whole. What is not stored is not multiplied, be the input
infinite.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import (
    Output,
    finished,
    output_from_text,
    output_of,
    output_of_layer,
    random_operands,
)
from sparsecomp.lowering.launch.launch import aligned
from sparsecomp.lowering.launch.strided import (
    dtype_name,
    gather_product,
    name_of,
    order_of,
    random_tensor,
    strides_from,
)
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.lowering.sparse.random_sparse import density_of, random_pattern, row_lengths, sizes_and_entries
from sparsecomp.lowering.sparse.spmm_csr import TOLERANCE, unsupported_dtypes
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.patterns import Layout

MOST = 16
"""Rows of x that a kernel takes."""
STRIP = 16
"""Rows of a tile."""
TILES = 8
"""Of a turn."""
CHUNK = 16 * TILES
"""Columns of a turn."""
LANES = 32
UNIT = 16
"""Bytes that chunks are multiples of, as copies want them."""
_COLUMNS = 8
"""That a lane reads at once: rows of x are so many, or they are not aligned."""
DTYPES = (torch.float16, torch.bfloat16)


class BitmapLinear(NamedTuple):
    """A weight (m, k) times n rows of x; everything but the output is contiguous.

    Attributes:
        nnz: values that are stored.
        grain: neighbours in a row that share a bit, 1 or 2: where one of two is stored, both are.
        longest: bytes of the longest chunk, or more.
        dtype: of values and x.
        output: the output (m, n) and its epilogue.
    """

    m: int
    k: int
    n: int
    nnz: int
    grain: int
    longest: int
    dtype: str
    output: Output

    @property
    def density(self) -> float:
        """Share of places that are stored."""
        return density_of(self.nnz, self.m, self.k)

    @property
    def strips(self) -> int:
        """Of sixteen rows."""
        return -(-self.m // STRIP)

    @property
    def turns(self) -> int:
        """In a row."""
        return -(-self.k // CHUNK)

    @property
    def slot(self) -> int:
        """Bytes that a chunk has room in where it is copied to: a few sizes for all weights, each a kernel."""
        return -(-self.longest // 128) * 128

    @property
    def stored_bytes(self) -> int:
        """Of the chunks, and of where they lie."""
        return stream_bytes(self.m, self.k, self.nnz, self.grain) + 16 * self.strips * self.turns

    @property
    def refusal(self) -> str | None:
        """Why no kernel takes it, None if one does."""
        if not takes_bitmap(self.k, self.n, getattr(torch, self.dtype)):
            return (
                f"{self.n} rows of {self.k} columns of {self.dtype} are multiplied by another kernel: 1 to {MOST}, "
                f"multiples of {_COLUMNS}, float16 or bfloat16"
            )
        return unsupported_dtypes(self.dtype, self.dtype, self.output.dtype)

    @classmethod
    def of_layer(
        cls, m: int, k: int, n: int, nnz: int, grain: int, longest: int, dtype: torch.dtype, has_bias: bool,
        has_residual: bool, activation: str,
    ) -> "BitmapLinear":  # fmt: skip
        """The product of a layer whose operands all have this dtype."""
        output = output_of_layer(n, m, dtype, has_bias, has_residual, activation)
        return cls(m, k, n, nnz, grain, longest, name_of(dtype), output)


def takes_bitmap(k: int, n: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for a layer of so many columns and rows of x."""
    return dtype in DTYPES and 0 < n <= MOST and k > 0 and k % _COLUMNS == 0


def head_bytes(grain: int) -> int:
    """Of a chunk in front of its values: how much lies before each lane's, and bits of its places."""
    return 2 * LANES + LANES * TILES // grain


def stream_bytes(m: int, k: int, nnz: int, grain: int) -> int:
    """Bytes that chunks of any weight of these sizes have room in, and one without values."""
    chunks, head = -(-m // STRIP) * -(-k // CHUNK), head_bytes(grain)
    most = min(nnz, chunks * _SIZE // grain)
    return -(-(chunks * (head + UNIT) + 2 * grain * most + head) // UNIT) * UNIT


def longest_chunk(pattern: Sequence[Tensor], layout: Layout, grain: int) -> int:
    """Bytes of the longest chunk of a weight with these index arrays; reads it from the device."""
    entry = (_stored(pattern, layout)[1] // grain).unique()
    counts = _counts(entry // (_SIZE // grain), _chunks(layout.shape))
    return head_bytes(grain) + 2 * grain * int(counts.max())


class BitmapChunks(NamedTuple):
    """A weight as the kernel reads it, from values and index arrays.

    Attributes:
        layout: of the arrays, plain and by rows, from `Layout.written`.
        grain: neighbours in a row that share a bit.
        longest: bytes that a chunk has room in where it is copied to. Where one of another pattern than the promised
            one is longer, none is copied, and the kernel does it slowly.
    """

    layout: str
    grain: int
    longest: int

    def __call__(self, values: Tensor, *pattern: Tensor) -> tuple[Tensor, Tensor]:
        """Pack.

        Returns:
            stream: (bytes,) uint8, of as many bytes as `stream_bytes` says. A chunk begins with 32 int16, how many
                values lie before each lane's (by twos of them: how many twos), and a bit for each of a lane's places
                of each tile (or each two), and goes on with values by lane, tile and place. Lane 4 · g + q has of
                tile 2 · p + h of a turn's eight the rows g and g + 8 and the columns c to c + 3,
                c = 32 · p + 8 · q + 4 · h: bits 0 and 1 are row g of the first two, 2 and 3 row g + 8, 4 to 7 those
                of the other two. What is filled in beside a value is 0.0; a zero that is stored is -0.0 then.
            chunks: (2, strips, turns, 2) int32: where each chunk begins, in units of 16 bytes, and how many bytes it
                has; first as they are copied, then as they are.
        """
        layout, grain, device = Layout.read(self.layout), self.grain, values.device
        count, head = _chunks(layout.shape), head_bytes(grain)
        kept, places = _stored(pattern, layout)
        stored = values[kept]
        entry, inverse = (places // grain).unique(return_inverse=True)
        chunk = entry // (_SIZE // grain)
        of_chunk, of_lane = _counts(chunk, count), _counts(entry // (_OF_LANE // grain), LANES * count).view(-1, LANES)
        size = (head + 2 * grain * of_chunk + UNIT - 1) // UNIT * UNIT
        begin = size.cumsum(0) - size
        stream = torch.zeros(stream_bytes(*layout.shape, values.numel(), grain), dtype=torch.uint8, device=device)
        bits = torch.zeros(count * _SIZE // grain // 8, dtype=torch.uint8, device=device)
        bits.index_add_(0, entry // 8, (1 << entry % 8).to(torch.uint8))
        heads = [(of_lane.cumsum(1) - of_lane).to(torch.int16).view(torch.uint8), bits.view(count, -1)]
        stream[(begin[:, None] + torch.arange(head, device=device)).flatten()] = torch.cat(heads, 1).flatten()
        rank = torch.arange(entry.numel(), device=device) - (of_chunk.cumsum(0) - of_chunk)[chunk]
        at = ((begin[chunk] + head) // 2 + grain * rank)[inverse] + places % grain
        stream.view(values.dtype)[at] = stored if grain == 1 else torch.where(stored == 0, -0.0, stored)
        found = torch.stack([begin // UNIT, size], -1)
        # the last bytes of the stream are a chunk without values
        empty = torch.tensor([(stream.numel() - head) // UNIT, head], device=device)
        copied = torch.where(size.max() > -(-self.longest // UNIT) * UNIT, empty, found)
        chunks = torch.stack([copied, found]).to(torch.int32)
        return stream, chunks.view(2, -(-layout.shape[0] // STRIP), -1, 2)


_OF_LANE = 8 * TILES
"""Places of a chunk that a lane has."""
_SIZE = LANES * _OF_LANE
"""Places of a chunk."""


def _chunks(shape: tuple[int, int]) -> int:
    return -(-shape[0] // STRIP) * -(-shape[1] // CHUNK)


def _stored(pattern: Sequence[Tensor], layout: Layout) -> tuple[slice, Tensor]:
    """Which values are stored, beside which there is spare capacity, and their places as the kernel's order counts
    them, int64; reads from the device."""
    kept = slice(None)
    if layout.format == "csr":
        pointers, columns = pattern
        kept = slice(*pointers[[0, -1]].tolist())
        pattern = pointers - kept.start, columns[kept]
    row, column = (one.long() for one in layout.kind.entry_places(pattern, layout.block, layout.shape))
    chunk = row // STRIP * -(-layout.shape[1] // CHUNK) + column // CHUNK
    lane = 4 * (row % 8) + column % 32 // 8
    tile = column % CHUNK // 32 * 2 + column % 8 // 4
    place = column % 4 // 2 * 4 + row % STRIP // 8 * 2 + column % 2
    return kept, ((chunk * LANES + lane) * TILES + tile) * 8 + place


def _counts(numbers: Tensor, most: int) -> Tensor:
    return torch.zeros(most, dtype=torch.int64, device=numbers.device).index_add_(0, numbers, torch.ones_like(numbers))


def launch_bitmap_linear(
    x: Tensor, stream: Tensor, chunks: Tensor, m: int, nnz: int, grain: int, longest: int, bias: Tensor | None,
    residual: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """activation(x @ weight.mT + bias + residual), for an x that `takes_bitmap` accepts.

    Args:
        x: (n, k), contiguous, of the values' dtype; so is what follows.
        stream, chunks, grain, longest: of `BitmapChunks`, for a weight (m, k) with so many values.
        bias, residual: (m,) and (n, m), of any dtype that kernels take.

    Raises:
        FormatError: operands that do not belong together.
    """
    (n, k), needed = x.shape, (2, -(-m // STRIP), -(-x.shape[1] // CHUNK), 2)
    if chunks.shape != needed or stream.numel() != stream_bytes(m, k, nnz, grain):
        raise FormatError(
            f"a stream of {stream.numel()} bytes in chunks {tuple(chunks.shape)} is none of {nnz} values in {m} rows "
            f"and {k} columns, needs {stream_bytes(m, k, nnz, grain)} and {needed}"
        )
    x = aligned(x)  # a lane reads eight numbers at once
    out = allocate((n, m), (m, 1), x.dtype, x.device)
    beside = None if residual is None else residual.mT
    described = output_of(out.mT, bias, "row", beside, activation, 1.0)
    problem = BitmapLinear(m, k, n, nnz, grain, longest, dtype_name(x), described)
    dispatch.launch(BITMAP_LINEAR, problem, stream, chunks, x, bias, beside, out.mT)
    return out


def _signature(problem: BitmapLinear, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "bitmap_linear", device, dtypes=(p.dtype, p.output.dtype), accumulator="float32",
        formats=(f"bitmap {p.grain}",), layouts=(order_of(p.output.strides, p.n),), epilogue=p.output.text,
        sizes=(("m", p.m), ("k", p.k), ("n", p.n)), parameters=(("slot", p.slot),),
        density=p.density, rows=row_lengths(p.nnz, p.m, 0.0),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> BitmapLinear:
    n = int(dict(signature.sizes)["n"])
    m, k, entries, _ = sizes_and_entries(signature, "m", "k")
    output = output_from_text(signature.epilogue, signature.dtypes[1], strides_from(signature.layouts[0], m, n))
    k = -(-k // _COLUMNS) * _COLUMNS
    grain, slot = int(signature.formats[0].split()[1]), int(signature.parameters[0][1])
    return BitmapLinear(m, k, n, entries, grain, slot, signature.dtypes[0], output)


def random_longest(m: int, k: int, nnz: int, grain: int) -> int:
    """Bytes that hold each chunk of a weight whose values lie at random places: six deviations above the mean."""
    share, places = 1 - (1 - density_of(nnz, m, k)) ** grain, _SIZE // grain
    most = min(places, int(places * share + 6 * (places * share * (1 - share)) ** 0.5) + 1)
    return head_bytes(grain) + 2 * grain * most


def _operands(problem: BitmapLinear, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    pattern = random_pattern(p.m, p.k, p.nnz, 0, "int32", random)
    values = random_tensor((p.nnz,), (1,), p.dtype, random)
    layout = Layout("csr", (1, 1), (p.m, p.k)).written()
    packed = BitmapChunks(layout, p.grain, p.longest)(values, pattern.crow, pattern.col)
    x = random_tensor((p.n, p.k), (p.k, 1), p.dtype, random)
    bias, residual, out = random_operands(p.output, (1, p.m, p.n), random)
    return *packed, x, bias, residual if residual is None else residual[0], out[0]


def _reference(problem: BitmapLinear, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    stream, chunks, x, bias, residual, _ = operands
    assert stream is not None and chunks is not None and x is not None
    row, column, values = unpacked(stream, chunks, (problem.m, problem.k), problem.grain, x.dtype)
    product = gather_product(row, column, values[None], x.mT[None], problem.m)[0]
    return (finished(problem.output, product, bias, residual),)


def unpacked(
    stream: Tensor, chunks: Tensor, shape: tuple[int, int], grain: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:  # fmt: skip
    """Row, column (int64) and number of each value, in the order of the stream."""
    begin, turns, device = UNIT * chunks[1].reshape(-1, 2)[:, 0].long(), -(-shape[1] // CHUNK), stream.device
    octets = stream[(begin[:, None] + torch.arange(2 * LANES, head_bytes(grain), device=device)).flatten()]
    entry = (octets[:, None] >> torch.arange(8, device=device, dtype=torch.uint8) & 1).flatten().nonzero()[:, 0]
    chunk = entry // (_SIZE // grain)
    counts = _counts(chunk, begin.numel())
    rank = torch.arange(entry.numel(), device=device) - (counts.cumsum(0) - counts)[chunk]
    side = torch.arange(grain, device=device)
    places = (grain * entry[:, None] + side).flatten()
    at = (((begin[chunk] + head_bytes(grain)) // 2 + grain * rank)[:, None] + side).flatten()
    chunk, lane, tile, place = places // _SIZE, places // _OF_LANE % LANES, places // 8 % TILES, places % 8
    row = chunk // turns * STRIP + place // 2 % 2 * 8 + lane // 4
    column = chunk % turns * CHUNK + tile // 2 * 32 + lane % 4 * 8 + tile % 2 * 4 + place // 4 * 2 + place % 2
    values = stream.view(dtype)[at]
    stored = torch.ones_like(values, dtype=torch.bool) if grain == 1 else values.view(torch.int16) != 0
    return row[stored], column[stored], values[stored]


BITMAP_LINEAR = Operation(
    "bitmap_linear", _signature, _representative, _operands, (5,), _reference,
    lambda problem: TOLERANCE[problem.output.dtype],
)  # fmt: skip
