"""CUDA implementation of attention over a cache, and the operation behind it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.attention.problem import ADDED_DTYPES, TOLERANCE, HeadStrides, rows_innermost, slopes
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name, random_tensor
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.attention.decode_attention import (
    Sight,
    decode_attention_reference,
    masked_decode_reference,
)
from sparsecomp.reference.attention.scores import Scores

_SIZES = ("batch", "kv_heads", "seen")
_PARAMETERS = ("group", "rows", "page", "depth", "v_depth")


class DecodeAttention(NamedTuple):
    """The sizes, strides and types of a call; see `sparsecomp.ops.decode_attention`.

    Attributes:
        group: query heads to a head of keys.
        rows: queries of a sequence.
        capacity: keys that a sequence has room for.
        page, pages: keys of a page, and pages of the pool; 0 without a table.
        table: numbers from one sequence's row of the table to the next.
        strides: of q, k and v; of a pool, pages stand in the place of a batch.
        dtype: of all dense operands but the logsumexp.
        window: keys before a query's own that it sees, -1 for all; by a mask, what one is thought to keep besides one.
        kept: strides of a mask by batch, head, query and key; none without a mask.
        added: dtype of a mask of numbers that are added to scores; empty for one of booleans.
    """

    batch: int
    kv_heads: int
    group: int
    rows: int
    capacity: int
    page: int
    pages: int
    table: int
    depth: int
    v_depth: int
    strides: tuple[HeadStrides, ...]
    dtype: str
    scale: float
    window: int
    sinks: int
    softcap: float = 0.0
    biased: bool = False
    kept: tuple[int, ...] = ()
    added: str = ""

    @property
    def seen(self) -> int:
        """Keys of a sequence that are read, at most."""
        if self.window < 0:
            return self.capacity
        return min(self.capacity, self.window + self.rows + self.sinks)

    @property
    def queries(self) -> int:
        """Of a head of keys, which all read the same ones."""
        return self.group * self.rows

    @property
    def padded_depth(self) -> int:
        """Side of a tile that holds a query or key."""
        return max(1 << (self.depth - 1).bit_length(), 16)

    @property
    def padded_v_depth(self) -> int:
        """Side of a tile that holds a value."""
        return max(1 << (self.v_depth - 1).bit_length(), 16)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None, sight: Sight, scores: Scores, out: Tensor,
    logsumexp: Tensor, kept: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the result to ``out`` and the logsumexp to ``logsumexp``, both contiguous.

    Args:
        q, k, v: float16, bfloat16 or float32; none is empty.
        lengths, table: int32; with a mask, `lengths` is (batch, 2): the first key and the one behind the last.
        kept: a mask (batch or 1, heads or 1, rows or 1, capacity) of bool, or of numbers that are added to scores.
    """
    q, k, v = map(rows_innermost, (q, k, v))
    table = table if table is None or table.stride(1) == 1 else table.contiguous()
    alibi = None if scores.alibi is None else scores.alibi.contiguous()
    problem = problem_of(q, k, v, table, sight, scores, kept)
    mask = kept.view(torch.uint8) if kept is not None and kept.dtype is torch.bool else kept
    dispatch.launch(DECODE_ATTENTION, problem, q, k, v, lengths.contiguous(), table, alibi, mask, out, logsumexp)


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, sight: Sight, scores: Scores, kept: Tensor | None = None
) -> DecodeAttention:
    """Describe a call of operands whose numbers of a row lie side by side."""
    page, pages, row = (0, 0, 0) if table is None else (k.shape[2], len(k), table.stride(0))
    return DecodeAttention(
        q.shape[0], k.shape[1], q.shape[1] // k.shape[1], q.shape[2],
        k.shape[2] if table is None else page * table.shape[1], page, pages, row, q.shape[3], v.shape[3],
        tuple(HeadStrides(*one.stride()[:3]) for one in (q, k, v)), dtype_name(q), scores.scale, *sight,
        scores.softcap, scores.alibi is not None, () if kept is None else steps_of(kept),
        "" if kept is None or kept.dtype is torch.bool else dtype_name(kept),
    )  # fmt: skip


def steps_of(kept: Tensor) -> tuple[int, ...]:
    """Strides of a mask that broadcasts: 0 where it has one for all."""
    return tuple(0 if size == 1 else stride for size, stride in zip(kept.shape, kept.stride(), strict=True))


def _signature(problem: DecodeAttention, device: Device) -> KernelSignature:
    return KernelSignature(
        "decode_attention", device, dtypes=(problem.dtype,), accumulator="float32",
        sizes=tuple((name, getattr(problem, name)) for name in _SIZES),
        parameters=(*((name, getattr(problem, name)) for name in _PARAMETERS),
                    ("capped", int(problem.softcap > 0)), ("biased", int(problem.biased)),
                    ("masked", int(bool(problem.kept))),
                    *((("added", ADDED_DTYPES.index(problem.added)),) if problem.added else ())),
    )  # fmt: skip


def _representative(signature: KernelSignature) -> DecodeAttention:
    """Of a window as wide as what is seen, in a cache of twice that."""
    sizes, given = ({name: int(n) for name, n in pairs} for pairs in (signature.sizes, signature.parameters))
    batch, heads, rows, page = sizes["batch"], sizes["kv_heads"], given["rows"], given["page"]
    seen = max(sizes["seen"], rows)
    each = -(-2 * seen // page) if page else 0
    pages, capacity = batch * each, each * page if page else 2 * seen
    shapes = ((heads * given["group"], rows, given["depth"]),
              *((heads, page or capacity, given[depth]) for depth in ("depth", "v_depth")))  # fmt: skip
    strides = tuple(HeadStrides(n * length * depth, length * depth, depth) for n, length, depth in shapes)
    return DecodeAttention(
        batch, heads, given["group"], rows, capacity, page, pages, each, given["depth"], given["v_depth"], strides,
        signature.dtypes[0], given["depth"] ** -0.5, seen - rows, 0, 20.0 * given["capped"], bool(given["biased"]),
        (0, 0, 0, 1) if given["masked"] else (), ADDED_DTYPES[given.get("added", 0)],
    )  # fmt: skip


def _operands(problem: DecodeAttention, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    heads = p.kv_heads * p.group
    blocks, length = (p.pages, p.page) if p.page else (p.batch, p.capacity)
    shapes = ((p.batch, heads, p.rows, p.depth), *((blocks, p.kv_heads, length, n) for n in (p.depth, p.v_depth)))
    q, k, v = (random_tensor(shape, (*strides, 1), p.dtype, random)
               for shape, strides in zip(shapes, p.strides, strict=True))  # fmt: skip
    lengths = torch.randint(p.seen, p.capacity + 1, (p.batch,), generator=random, device=device, dtype=torch.int32)
    table = None
    if p.page:
        order = torch.randperm(max(p.batch * p.table, p.pages), generator=random, device=device) % p.pages
        table = order[: p.batch * p.table].view(p.batch, p.table).int()[:, : p.capacity // p.page]
    alibi, kept = slopes(heads, p.capacity, device) if p.biased else None, None
    if p.kept:
        behind = lengths.long()[0]
        place = torch.arange(p.capacity, device=device)
        kept = ((place < behind) & (place >= behind - p.seen))[None, None, None]
        if p.added:
            kept = (place % 7 * 0.25).to(getattr(torch, p.added)).where(kept, -math.inf)
        kept = kept if p.added else kept.view(torch.uint8)
        lengths = torch.stack([(lengths[0] - p.seen).clamp(min=0), lengths[0]]).expand(p.batch, 2).contiguous()
    out = torch.full((*q.shape[:3], p.v_depth), math.nan, dtype=q.dtype, device=device)
    return q, k, v, lengths, table, alibi, kept, out, torch.full(q.shape[:3], math.nan, device=device)


def _reference(problem: DecodeAttention, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    q, k, v, lengths, table, alibi, kept, *_ = operands
    assert q is not None and k is not None and v is not None and lengths is not None
    scores = Scores(problem.scale, problem.softcap, alibi)
    given = q.double(), k.double(), v.double()
    if kept is None:
        sight = Sight(problem.window, problem.sinks)
        out, logsumexp = decode_attention_reference(*given, lengths, table, sight, scores)
    else:
        out, logsumexp = masked_decode_reference(*given, kept if problem.added else kept.bool(), lengths, scores)
    # a norm of infinities says nothing
    return out, logsumexp.masked_fill(logsumexp == -math.inf, 0)


DECODE_ATTENTION = Operation(
    "decode_attention", _signature, _representative, _operands, (7, 8), _reference,
    lambda problem: TOLERANCE[problem.dtype],
)  # fmt: skip
