"""Layers of few rows by unstructured weights as an operation, by a bitmap of tiles with their values.

    out = activation(weight @ x.mT + bias + residual)

Such layers take as long as their weights take to read, and to decode. A bit a place and the values alone make these, in
half precision, 0.4 of the dense weight's bytes at 70 % zeros; a bit for two neighbours makes them 0.56, which are
decoded faster. They lie as a kernel decodes them (`sparsecomp.formats.lanes`), a chunk at a time, which is copied to a
processor as a whole. What is not stored is not multiplied, be the input infinite.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.indices import index_dtype_for
from sparsecomp.formats.lanes import (
    CHUNK,
    SIZE,
    STRIP,
    UNIT,
    chunk_count,
    chunks_at,
    entries_of,
    head_bytes,
    lane_elements,
    lane_places,
)
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
_COLUMNS = 8
"""That a lane reads at once: rows of x are so many, or they are not aligned."""
_AROUND = 2 * (UNIT - 1)
"""Bytes of its neighbours that are copied with a chunk's values, at most."""
DTYPES = (torch.float16, torch.bfloat16)


class BitmapLinear(NamedTuple):
    """A weight (m, k), or several with m rows in all, times n rows of x; everything but the output is contiguous.

    Attributes:
        nnz: values that are stored.
        grain: neighbours in a row that share a bit, 1 or 2: where one of two is stored, both are.
        longest: values of the longest chunk, or more; a longer one is multiplied slowly.
        dtype: of values and x.
        index_dtype: of where chunks begin.
        output: the output (m, n) and its epilogue.
        batch: of x; the kernel wants 1.
        parts: rows of each of several weights; see `lowering.sparse.bitmap_siblings`.
    """

    m: int
    k: int
    n: int
    nnz: int
    grain: int
    longest: int
    dtype: str
    index_dtype: str
    output: Output
    batch: int = 1
    parts: tuple[int, ...] = ()

    @property
    def density(self) -> float:
        """Share of places that are stored."""
        return density_of(self.nnz, self.m, self.k)

    @property
    def strips(self) -> int:
        """Of sixteen rows."""
        return sum(-(-rows // STRIP) for rows in self.parts or (self.m,))

    @property
    def most_strips(self) -> int:
        """Of a weight."""
        return -(-max(self.parts or (self.m,)) // STRIP)

    @property
    def turns(self) -> int:
        """In a row."""
        return -(-self.k // CHUNK)

    @property
    def slot(self) -> int:
        """Bytes that a chunk has room in where it is copied to: a few sizes for all weights, each a kernel."""
        return -(-(head_bytes(self.grain) + 2 * self.longest + _AROUND) // 128) * 128

    @property
    def stored_bytes(self) -> int:
        """Of the values, of their places, and of where they lie."""
        return copy_bytes(self.m, self.k, self.nnz, self.grain)

    @property
    def refusal(self) -> str | None:
        """Why no kernel takes it, None if one does."""
        if self.batch != 1 or not takes_bitmap(self.k, self.n, getattr(torch, self.dtype, torch.float64)):
            return (
                f"{self.n} rows of {self.k} columns of {self.dtype}, {self.batch} times, are multiplied by another "
                f"kernel: 1 to {MOST}, multiples of {_COLUMNS}, float16 or bfloat16, once"
            )
        return unsupported_dtypes(self.dtype, self.dtype, self.output.dtype)

    @classmethod
    def of_layer(
        cls, m: int, k: int, n: int, nnz: int, grain: int, longest: int, dtype: torch.dtype, has_bias: bool,
        has_residual: bool, activation: str,
    ) -> "BitmapLinear":  # fmt: skip
        """The product of a layer whose operands all have this dtype."""
        output = output_of_layer(n, m, dtype, has_bias, has_residual, activation)
        return cls(m, k, n, nnz, grain, longest, name_of(dtype), "int32", output)


def takes_bitmap(k: int, n: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for a layer of so many columns and rows of x."""
    return dtype in DTYPES and 0 < n <= MOST and k > 0 and k % _COLUMNS == 0


def copy_bytes(m: int, k: int, nnz: int, grain: int) -> int:
    """Of what `BitmapChunks` gives for any weight of these sizes."""
    chunks = chunk_count((m, k))
    return 2 * _room(m, k, nnz, grain) + chunks * head_bytes(grain) + 4 * (chunks + 1)


def _room(m: int, k: int, nnz: int, grain: int) -> int:
    """Values that any weight of so many has at most, with those filled in beside them."""
    return grain * min(nnz, chunk_count((m, k)) * SIZE // grain)


def longest_chunk(pattern: Sequence[Tensor], layout: Layout, grain: int) -> int:
    """Values of the longest chunk of a weight with these index arrays; reads it from the device."""
    entry = (_stored(pattern, layout)[1] // grain).unique()
    return int(chunks_at(entry, chunk_count(layout.shape), grain).starts.diff().max())


class BitmapChunks(NamedTuple):
    """A weight as the kernel reads it, from values and index arrays.

    Attributes:
        layout: of the arrays, of single elements by rows, from `Layout.written`.
        grain: neighbours in a row that share a bit.
    """

    layout: str
    grain: int

    def __call__(self, values: Tensor, *pattern: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pack.

        Returns:
            starts: (chunks + 1,) int32, or int64 where there are more values, and
            heads: (chunks, `head_bytes`) uint8, of `Chunks`.
            values: in that order, as many as have room, by eights. What is filled in beside a value is 0.0; a zero that
                is stored is -0.0 then.
        """
        layout, grain = Layout.read(self.layout), self.grain
        kept, places = _stored(pattern, layout)
        entry, inverse = (places // grain).unique(return_inverse=True)
        starts, heads = chunks_at(entry, chunk_count(layout.shape), grain)
        room = -(-_room(*layout.shape, values.numel(), grain) // UNIT) * UNIT
        packed, stored = values.new_zeros(room), values[kept]
        packed[grain * inverse + places % grain] = stored if grain == 1 else torch.where(stored == 0, -0.0, stored)
        return starts.to(index_dtype_for(packed.numel())), heads, packed


def _stored(pattern: Sequence[Tensor], layout: Layout) -> tuple[slice, Tensor]:
    """Which values are stored, beside which there is spare capacity, and their places as the kernel's order counts
    them, int64; reads from the device."""
    kept = slice(None)
    if layout.format == "csr":
        pointers, columns = pattern
        kept = slice(*pointers[[0, -1]].tolist())
        pattern = pointers - kept.start, columns[kept]
    row, column = layout.kind.entry_places(pattern, layout.block, layout.shape)
    return kept, lane_places(row, column, layout.shape[1])


def launch_bitmap_linear(
    x: Tensor, copy: Sequence[Tensor], m: int, nnz: int, grain: int, longest: int, bias: Tensor | None,
    residual: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """activation(x @ weight.mT + bias + residual), for an x that `takes_bitmap` accepts.

    Args:
        x: (n, k), contiguous, of the values' dtype; so is what follows.
        copy: of `BitmapChunks`, for a weight (m, k) with so many values, or as the format BITMAP stores it.
        grain, longest: as of `BitmapLinear`.
        bias, residual: (m,) and (n, m), of any dtype that kernels take.

    Raises:
        FormatError: operands that do not belong together.
    """
    n, k = x.shape
    starts, heads, values = checked_copy(copy, m, k, nnz, grain)
    x = aligned(x)  # a lane reads eight numbers at once
    out = allocate((n, m), (m, 1), x.dtype, x.device)
    beside = None if residual is None else residual.mT
    described = output_of(out.mT, bias, "row", beside, activation, 1.0)
    problem = BitmapLinear(m, k, n, nnz, grain, longest, dtype_name(x), dtype_name(starts), described)
    dispatch.launch(BITMAP_LINEAR, problem, starts, heads, values, x, bias, beside, out.mT)
    return out


def checked_copy(copy: Sequence[Tensor], m: int, k: int, nnz: int, grain: int) -> list[Tensor]:
    """These arrays, where copies to shared memory can begin.

    Args:
        copy: as of `launch_bitmap_linear`.

    Raises:
        FormatError: they are of no weight (m, k) with so many values.
    """
    starts, heads, values = copy
    chunks, room = chunk_count((m, k)), _room(m, k, nnz, grain)
    needed = (chunks + 1,), (chunks, head_bytes(grain))
    if (starts.shape, heads.shape) != needed or values.shape[0] < room:
        raise FormatError(
            f"a bitmap of {[tuple(one.shape) for one in copy]} is none of {nnz} values in {m} rows and {k} columns, "
            f"needs {needed} and {room} values or more"
        )
    return [starts, aligned(heads), aligned(values)]


def _signature(problem: BitmapLinear, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "bitmap_linear", device, dtypes=(p.dtype, p.output.dtype), accumulator="float32",
        formats=(f"bitmap {p.grain}",), index=p.index_dtype, layouts=(order_of(p.output.strides, p.n),),
        epilogue=p.output.text, sizes=(("m", p.m), ("k", p.k), ("n", p.n)), parameters=(("slot", p.slot),),
        density=p.density, rows=row_lengths(p.nnz, p.m, 0.0),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> BitmapLinear:
    n = int(dict(signature.sizes)["n"])
    m, k, entries, _ = sizes_and_entries(signature, "m", "k")
    output = output_from_text(signature.epilogue, signature.dtypes[1], strides_from(signature.layouts[0], m, n))
    k = -(-k // _COLUMNS) * _COLUMNS
    grain, slot = int(signature.formats[0].split()[1]), int(signature.parameters[0][1])
    longest = (slot - head_bytes(grain) - _AROUND) // 2
    return BitmapLinear(m, k, n, entries, grain, longest, signature.dtypes[0], signature.index, output)


def random_longest(m: int, k: int, nnz: int, grain: int) -> int:
    """Values of any chunk of a weight whose values lie at random places, at most: six deviations above the mean."""
    share, places = 1 - (1 - density_of(nnz, m, k)) ** grain, SIZE // grain
    return grain * min(places, int(places * share + 6 * (places * share * (1 - share)) ** 0.5) + 1)


def _operands(problem: BitmapLinear, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    pattern = random_pattern(p.m, p.k, p.nnz, 0, "int32", random)
    values = random_tensor((p.nnz,), (1,), p.dtype, random)
    layout = Layout("csr", (1, 1), (p.m, p.k)).written()
    starts, *packed = BitmapChunks(layout, p.grain)(values, pattern.crow, pattern.col)
    x = random_tensor((p.n, p.k), (p.k, 1), p.dtype, random)
    bias, residual, out = random_operands(p.output, (1, p.m, p.n), random)
    first = (starts.to(getattr(torch, p.index_dtype)), *packed, x, bias)
    return *first, residual if residual is None else residual[0], out[0]


def _reference(problem: BitmapLinear, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    starts, heads, packed, x, bias, residual, _ = operands
    assert starts is not None and heads is not None and packed is not None and x is not None
    row, column, values = unpacked(starts, heads, packed, problem.k, problem.grain)
    product = gather_product(row, column, values[None], x.mT[None], problem.m)[0]
    return (finished(problem.output, product, bias, residual),)


def unpacked(starts: Tensor, heads: Tensor, values: Tensor, columns: int, grain: int) -> tuple[Tensor, ...]:
    """Row, column (int64) and number of each value of a copy, in its order; reads from the device."""
    entry = entries_of(heads)
    places = (grain * entry[:, None] + torch.arange(grain, device=entry.device)).flatten()
    row, column = lane_elements(places, columns)
    found = values[: places.numel()]
    stored = torch.ones_like(found, dtype=torch.bool) if grain == 1 else found.view(torch.int16) != 0
    return row[stored], column[stored], found[stored]


BITMAP_LINEAR = Operation(
    "bitmap_linear", _signature, _representative, _operands, (6,), _reference,
    lambda problem: TOLERANCE[problem.output.dtype],
)  # fmt: skip
