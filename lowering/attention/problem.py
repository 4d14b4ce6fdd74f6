"""What the kernels of attention over listed blocks are told: one description for the result and both its gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch.strided import dtype_name, random_tensor
from sparsecomp.reference.attention.block_attention import Scoring
from sparsecomp.reference.attention.blocks import EMPTY, FULL, blocks_from_map, pack_bits
from sparsecomp.reference.attention.dropout import ALWAYS

TOLERANCE = {"float32": 2e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2}
"""Relative Frobenius error of a result: torch's flash attention, which rounds its weights alike, has the same."""
ADDED_DTYPES = ("", "float32", "float16", "bfloat16")
"""Of what is added to scores; their numbers stand in signatures."""
_LEAST = 2.0**-126
"""Scale that kernels take for 0, by which the -inf of a pair that is left out would become NaN."""
_FARTHEST = 2**24
"""Numbers from a row to the next, of which a tile has 128 at most."""
_SIZES = ("batch", "heads", "q_len", "k_len", "width", "k_width")
_PARAMETERS = ("group", "depth", "v_depth", "block_q", "block_k")


class HeadStrides(NamedTuple):
    """Of (batch, heads, length, depth), whose depth is innermost."""

    batch: int
    head: int
    row: int


P = TypeVar("P", bound=Any)
"""A description of a problem, whatever says which pairs are kept."""


class BlockAttention(NamedTuple):
    """The sizes, strides and types of a product; see ``sparsecomp.ops.attention.block_attention``.

    Attributes:
        group: query heads to a head of keys.
        depth, v_depth: numbers of a query or key, and of a value.
        block_q, block_k: queries and keys of a block.
        width, k_width: blocks that the longest list holds, by rows of queries and of keys.
        by_batch, by_head: whether the lists differ by batch, and by head.
        dtype: of all dense operands but the logsumexp.
        scale: of the scores.
        strides: of the dense operands that an operation takes strided, in its order.
        softcap: as of ``Scoring``; 0 for none.
        biased: whether there is an alibi.
        added: dtype of what is added to scores, empty for none.
        added_strides: of that: batch, head, query and key.
        kept, parts: as of ``Scoring``.
        result: dtype of the result, if it is not that of the operands.
        single: float32 is multiplied in one product of TF32, as torch's is where the user lets it, and not in three.
        added_sizes: of what is added: batch, heads, queries and keys, each 1 where it is added to all alike.
    """

    batch: int
    heads: int
    group: int
    q_len: int
    k_len: int
    depth: int
    v_depth: int
    block_q: int
    block_k: int
    width: int
    k_width: int
    by_batch: bool
    by_head: bool
    dtype: str
    scale: float
    strides: tuple[HeadStrides, ...]
    softcap: float = 0.0
    biased: bool = False
    added: str = ""
    added_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    kept: int = ALWAYS
    parts: int = 0
    result: str = ""
    single: bool = False
    added_sizes: tuple[int, ...] = (1, 1, 1, 1)

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The run-time numbers that kernels take last."""
        strides = (stride for one in self.strides for stride in one)
        sizes = (self.heads, self.q_len, self.k_len, self.scale, self.softcap)
        return (*sizes, self.kept, *self.added_strides, *strides)

    @property
    def lists(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows of the lists of queries, and of keys, from one batch to the next and from one head to the next."""
        heads = self.heads if self.by_head else 1
        rows = (-(-self.q_len // self.block_q), -(-self.k_len // self.block_k))
        by_q, by_k = ((n * heads * self.by_batch, n * self.by_head) for n in rows)
        return by_q, by_k

    def lying(self, place: int) -> HeadStrides:
        """How the operand at a place lies; zeros in a problem that is only estimated, which has no strides."""
        return self.strides[place] if self.strides else HeadStrides(0, 0, 0)

    @property
    def leading(self) -> int:
        """Heads of batch entries that have lists of their own."""
        return (self.batch if self.by_batch else 1) * (self.heads if self.by_head else 1)

    @property
    def dropped(self) -> int:
        """1 with dropout, else 0."""
        return int(self.kept < ALWAYS)

    @property
    def added_bytes(self) -> int:
        """Of a number that is added to a score; 0 without one."""
        return getattr(torch, self.added).itemsize if self.added else 0

    @property
    def padded_depth(self) -> int:
        """Side of a tile that holds a query or key."""
        return max(1 << (self.depth - 1).bit_length(), 16)

    @property
    def padded_v_depth(self) -> int:
        """Side of a tile that holds a value."""
        return max(1 << (self.v_depth - 1).bit_length(), 16)


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Tensor], scoring: Scoring, strided_operands: Sequence[Tensor]
) -> BlockAttention:  # fmt: skip
    """Describe a product of operands of which a kernel takes some by their strides."""
    count, index, k_count, k_index = (blocks[at] for at in (0, 2, 5, 7))
    added, scores = scoring.added, (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return BlockAttention(
        q.shape[0], q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3],
        blocks[4].shape[1], blocks[9].shape[1], index.shape[3], k_index.shape[3], count.shape[0] > 1,
        count.shape[1] > 1, dtype_name(q), max(float(scoring.scale), _LEAST),
        tuple(HeadStrides(*one.stride()[:3]) for one in strided_operands), float(scoring.softcap),
        scoring.alibi is not None, "" if added is None else dtype_name(added), strides_over(added, scores),
        scoring.kept, scoring.parts, added_sizes=(1, 1, 1, 1) if added is None else tuple(added.shape),
    )  # fmt: skip


def strides_over(added: Tensor | None, scores: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Strides of what broadcasts to scores, by which it can be read as if it were as large."""
    batch, head, query, key = (0, 0, 0, 0) if added is None else added.expand(scores).stride()
    return batch, head, query, key


def read_beside(scoring: Scoring) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What kernels take of a scoring: the slopes, what is added, the seed."""
    return None if scoring.alibi is None else scoring.alibi.contiguous(), scoring.added, scoring.seed


def scoring_of(problem: BlockAttention, taken: Sequence[Tensor | None]) -> Scoring:
    """How the problem's scores come from products, with what `read_beside` gives."""
    alibi, added, seed = taken
    return Scoring(problem.scale, problem.softcap, alibi, added, seed, problem.kept, parts=problem.parts)


def taken_of(problem: BlockAttention, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What `read_beside` gives, of a problem: slopes small enough for every head to see far; zeros to add, as in blocks
    that are kept whole; a seed."""
    p = problem
    alibi = slopes(p.heads, p.k_len, device) if p.biased else None
    added = torch.zeros((1, 1, 1, 1), dtype=getattr(torch, p.added), device=device) if p.added else None
    seed = torch.tensor([2**40 + 7], device=device) if p.kept < ALWAYS else None
    return alibi, added, seed


def slopes(heads: int, k_len: int, device: torch.device) -> Tensor:
    """An alibi by which every head sees far."""
    return torch.arange(1, heads + 1, device=device) * (0.5 / k_len)


def rows_innermost(tensor: Tensor) -> Tensor:
    """(…, depth) with the numbers of a row side by side, and rows of a tile no farther apart than 32 bits count."""
    beside = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return tensor if beside and tensor.stride(-2) < _FARTHEST else tensor.contiguous()


def result_like(out: Tensor) -> Tensor:
    """What a kernel can write in place of ``out``: itself where the numbers of a row are side by side."""
    beside = out.stride(-1) == 1 or out.shape[-1] == 1
    return out if beside else torch.empty_like(out, memory_format=torch.contiguous_format)


def signature(op: str, problem: BlockAttention, device: Device) -> KernelSignature:
    """Of a problem of one of the operations; how the operands are strided and what the lists share costs nothing."""
    dtypes = (problem.dtype, problem.result) if problem.result else (problem.dtype,)
    return KernelSignature(
        op, device, dtypes=dtypes, accumulator="float32", index="int32",
        sizes=tuple((name, getattr(problem, name)) for name in _SIZES),
        parameters=(*((name, getattr(problem, name)) for name in _PARAMETERS),
                    ("capped", int(problem.softcap > 0)), ("biased", int(problem.biased)),
                    ("added", ADDED_DTYPES.index(problem.added)), ("dropped", problem.dropped),
                    *((("parts", problem.parts),) if problem.parts else ()),
                    *((("single", 1),) if problem.single else ())),
    )  # fmt: skip


def representative(signature: KernelSignature, shapes: str) -> BlockAttention:
    """A problem of a signature.

    Args:
        shapes: a letter for each strided operand: `q`, `k` or `v`, or `o` for what has q's length and v's depth.
    """
    sizes, given = ({name: int(n) for name, n in pairs} for pairs in (signature.sizes, signature.parameters))
    sizes["width"] = min(sizes["width"], -(-sizes["k_len"] // given["block_k"]))
    sizes["k_width"] = min(sizes["k_width"], -(-sizes["q_len"] // given["block_q"]))
    heads = max(sizes["heads"] // given["group"], 1) * given["group"]
    problem = BlockAttention(
        sizes["batch"], heads, given["group"], sizes["q_len"], sizes["k_len"], given["depth"], given["v_depth"],
        given["block_q"], given["block_k"], sizes["width"], sizes["k_width"], False, False, signature.dtypes[0],
        given["depth"] ** -0.5, (), 20.0 * given["capped"], bool(given["biased"]), ADDED_DTYPES[given["added"]],
        kept=ALWAYS - 6554 * given["dropped"], parts=given.get("parts", 0), result="".join(signature.dtypes[1:]),
        single=bool(given.get("single", 0)),
    )  # fmt: skip
    return contiguous(problem, shapes)


def contiguous(problem: P, shapes: str) -> P:
    """A problem of contiguous operands, one a letter."""
    lying = [dense_shapes(problem)[letter] for letter in shapes]
    strides = tuple(HeadStrides(heads * rows * depth, rows * depth, depth) for _, heads, rows, depth in lying)
    return problem._replace(strides=strides)


def dense_shapes(problem: Any) -> dict[str, tuple[int, int, int, int]]:
    """By the letters of ``representative``, of any problem of attention."""
    p = problem
    kv_heads = p.heads // p.group
    return {
        "q": (p.batch, p.heads, p.q_len, p.depth), "k": (p.batch, kv_heads, p.k_len, p.depth),
        "v": (p.batch, kv_heads, p.k_len, p.v_depth), "o": (p.batch, p.heads, p.q_len, p.v_depth),
    }  # fmt: skip


def dense_operands(problem: Any, shapes: str, random: torch.Generator) -> list[Tensor]:
    """Normally distributed operands, one a letter, by the problem's strides."""
    return [random_tensor(dense_shapes(problem)[letter], (*strides, 1), problem.dtype, random)
            for letter, strides in zip(shapes, problem.strides, strict=True)]  # fmt: skip


def banded_blocks(problem: BlockAttention, random: torch.Generator) -> list[Tensor]:
    """Lists of a band as wide as the problem's, whose edges are kept in part, and nothing past the lengths."""
    p, device = problem, random.device
    q_blocks, k_blocks = (-(-n // block) for n, block in ((p.q_len, p.block_q), (p.k_len, p.block_k)))
    row = torch.arange(q_blocks, device=device)[:, None]
    offset = torch.arange(k_blocks, device=device) - row * k_blocks // q_blocks + p.width // 2
    listed = (offset >= 0) & (offset < p.width)
    listed &= listed.cumsum(0) <= p.k_width
    part = (offset == 0) | (offset == p.width - 1)
    last_row = (row == q_blocks - 1) & bool(p.q_len % p.block_q)
    last_column = (torch.arange(k_blocks, device=device) == k_blocks - 1) & bool(p.k_len % p.block_k)
    kind = torch.where(part | last_row | last_column, (last_row * 2 + last_column).int(), FULL)
    block_map = torch.where(listed, kind, EMPTY).int()[None, None]
    block_map = block_map.expand(p.batch if p.by_batch else 1, p.heads if p.by_head else 1, -1, -1)
    kept = torch.rand((4, p.block_q, p.block_k), generator=random, device=device) < 0.5
    kept[2:, (p.q_len - 1) % p.block_q + 1 :] = False
    kept[1::2, :, (p.k_len - 1) % p.block_k + 1 :] = False
    blocks = list(blocks_from_map(block_map, pack_bits(kept), p.q_len, p.k_len, (p.block_q, p.block_k))[4:])
    for at, width in ((2, p.width), (3, p.width), (7, p.k_width), (8, p.k_width)):
        blocks[at] = torch.nn.functional.pad(blocks[at], (0, width - blocks[at].shape[3]))
    return blocks
