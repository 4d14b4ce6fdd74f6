"""Masked attentions that are measured: each as a function of positions, for FlexAttention, and as what it keeps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MaskFunction = Callable[[Any, Any, Any, Any], Any]


class Case(NamedTuple):
    """An attention, bfloat16.

    Attributes:
        kv_heads: heads of keys and values.
        mask_of: makes a function of (batch, head, query, key), which broadcasts; it may read tensors on the GPU.
        blocks: sizes of blocks to measure.
        masked_rivals: whether torch's attention by the dense mask is measured too.
    """

    name: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    depth: int
    mask_of: Callable[["Case"], MaskFunction]
    blocks: tuple[tuple[int, int], ...] = ((128, 128),)
    masked_rivals: bool = False

    def operands(self) -> list[Tensor]:
        """q, k and v, which want gradients, and a gradient of the result."""
        random = torch.Generator("cuda").manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        made = [torch.randn((self.batch, n, self.length, self.depth), generator=random, device="cuda",
                            dtype=torch.bfloat16) for n in heads]  # fmt: skip
        return [one.requires_grad_(at < 3) for at, one in enumerate(made)]

    def dense(self) -> Tensor:
        """The mask (1, 1, length, length) bool, made in slices."""
        mask, keys = self.mask_of(self), torch.arange(self.length, device="cuda")
        rows = [mask(0, 0, torch.arange(at, min(at + 2048, self.length), device="cuda")[:, None], keys[None, :])
                for at in range(0, self.length, 2048)]  # fmt: skip
        return torch.cat(rows)[None, None]


def window(reach: int, causal: bool) -> Callable[[Case], MaskFunction]:
    """Keys up to `reach` away, on both sides or before the query."""
    if causal:
        return lambda case: lambda b, h, q, k: (q - k <= reach) & (q >= k)
    return lambda case: lambda b, h, q, k: (q - k <= reach) & (k - q <= reach)


def _by_table(table: Tensor, side: int) -> MaskFunction:
    return lambda b, h, q, k: table[q // side, k // side]


def big_bird(case: Case) -> MaskFunction:
    """A window of 3 blocks of 64, 2 that all see and that see all, 3 at random."""
    n = case.length // 64
    place = torch.arange(n)
    table = (place[:, None] - place).abs() <= 1
    table[:2] = table[:, :2] = True
    drawn = torch.rand((n, n), generator=torch.Generator().manual_seed(0)).topk(3).indices
    return _by_table(table.scatter_(1, drawn, torch.ones_like(drawn, dtype=torch.bool)).cuda(), 64)


def documents(case: Case) -> MaskFunction:
    """64 documents of 512 ± 300 tokens: a token sees those of its own."""
    lengths = 512 + torch.randint(-300, 301, (64,), generator=torch.Generator().manual_seed(0))
    ends = (lengths.cumsum(0) * case.length // lengths.sum()).cuda()
    document = torch.searchsorted(ends, torch.arange(case.length, device="cuda"), right=True)
    return lambda b, h, q, k: document[q] == document[k]


def with_global(*tokens: int) -> Callable[[Case], MaskFunction]:
    """A window of 256 on both sides, and tokens that see all and that all see (Longformer)."""

    def mask_of(case: Case) -> MaskFunction:
        seen = torch.zeros(case.length, dtype=torch.bool)
        seen[list(tokens)] = True
        seen = seen.cuda()
        return lambda b, h, q, k: ((q - k <= 256) & (k - q <= 256)) | seen[q] | seen[k]

    return mask_of


def random_blocks(empty: float) -> Callable[[Case], MaskFunction]:
    """A boolean mask of which a share of the blocks of 128 is empty, and none of a row's all are."""

    def mask_of(case: Case) -> MaskFunction:
        n = case.length // 128
        table = torch.rand((n, n), generator=torch.Generator().manual_seed(0)) >= empty
        return _by_table((table | torch.eye(n, dtype=torch.bool)).cuda(), 128)

    return mask_of


BLOCKS = ((128, 128), (64, 64))
CASES = (
    Case("window 256", 4, 16, 16, 4096, 64, window(256, False), BLOCKS, True),
    Case("window 256, causal", 4, 16, 16, 4096, 64, window(256, True), BLOCKS),
    Case("window 1024, causal", 1, 32, 8, 32768, 128, window(1024, True), BLOCKS),
    Case("BigBird", 1, 16, 16, 8192, 64, big_bird, ((64, 64),), True),
    Case("documents", 1, 16, 16, 32768, 64, documents, BLOCKS),
    Case("window 256 with global tokens", 1, 8, 8, 32768, 64, with_global(0, 1, 20_000), BLOCKS),
    *(Case(f"mask, {empty:.0%} of blocks empty", 4, 16, 16, 4096, 64, random_blocks(empty), BLOCKS, True)
      for empty in (0.0, 0.5, 0.9)),
)  # fmt: skip
