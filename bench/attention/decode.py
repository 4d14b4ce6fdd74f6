"""Decoding over a long cache by a window, beside FlexAttention and torch's own attention, and the time of its bytes.

Times are of CUDA graph replays; ours is what the tuner gives without measuring. A cache is larger than L2.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.attention.sweep import Posed, sweep
from bench.table import markdown_grid
from bench.timing import bandwidth, graph_ms, guarded
from sparsecomp.attention import decode_attention
from sparsecomp.lowering.attention.decode_attention import DECODE_ATTENTION, problem_of
from sparsecomp.reference.attention.decode_attention import Sight
from sparsecomp.reference.attention.scores import Scores

Row = dict[str, Any]


class Case(NamedTuple):
    """A cache of `capacity` keys of each sequence, all but a few of them filled, bfloat16; `rows` queries of each."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    capacity: int
    depth: int
    window: int | None

    @property
    def seen(self) -> int:
        """Keys of a sequence that are read."""
        return self.filled if self.window is None else min(self.window + self.rows, self.filled)

    @property
    def filled(self) -> int:
        """Keys of a sequence, not a whole number of tiles."""
        return self.capacity - self.capacity // 16 - 5

    @property
    def bytes(self) -> int:
        """Of the keys and values that are seen."""
        return 4 * self.batch * self.kv_heads * self.seen * self.depth

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and lengths."""
        random = torch.Generator("cuda").manual_seed(0)
        shapes = ((self.batch, self.heads, self.rows, self.depth),
                  *((self.batch, self.kv_heads, self.capacity, self.depth),) * 2)  # fmt: skip
        q, k, v = (torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        return q, k, v, torch.full((self.batch,), self.filled, dtype=torch.int32, device="cuda")


CASES = (
    Case(16, 32, 8, 1, 65536, 128, 4095),
    Case(1, 32, 8, 1, 65536, 128, 4095),
    Case(16, 32, 8, 4, 65536, 128, 4095),
    Case(16, 32, 32, 1, 65536, 64, 1023),
    Case(1, 32, 8, 1, 65536, 128, None),
)


def run() -> Iterator[Row]:
    """The row of each case: milliseconds by rival, those of its bytes by a copy's rate, and differences."""
    for case in CASES:
        row: Row = {"case": list(case), "ms": {}, "difference": {}}
        row["bytes"] = round(case.bytes / bandwidth() * 1e3, 5)
        operands, right = case.operands(), []
        for name, make in rivals(case).items():
            guarded(row, name, partial(_take, row, name, make, operands, right))
        print(row, flush=True)
        yield row


def rivals(case: Case) -> dict[str, Callable[..., Any]]:
    """By name, what makes each of the operands; all compute the same."""
    found: dict[str, Callable[..., Any]] = {"SDPA of the window": partial(_sliced, case)}
    found["SDPA, mask over the cache"] = partial(_masked, case)
    found["FlexAttention"] = partial(_flex, case)
    found["ours"] = partial(_ours, case)
    found |= {f"ours, pages of {page}": partial(_paged, case, page) for page in (16, 64, 256)}
    return found


def _take(row: Row, name: str, make: Callable[..., Any], operands: tuple[Tensor, ...], right: list[Tensor]) -> None:
    call = make(*operands)
    with torch.no_grad():
        out = call()
        right.append(out.float())
        row["difference"][name] = float(f"{((out.float() - right[0]).norm() / right[0].norm()).item():.2g}")
        row["ms"][name] = round(graph_ms([call] * 3), 5)


def _ours(case: Case, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Callable[[], Tensor]:
    return lambda: decode_attention(q, k, v, lengths, window=case.window)[0]


def _paged(case: Case, page: int, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Callable[[], Tensor]:
    """Pages in disorder, each (page, heads, depth)."""
    each = case.capacity // page
    order = torch.randperm(case.batch * each, generator=torch.Generator().manual_seed(0)).cuda()
    pools = []
    for one in (k, v):
        pages = one.unflatten(2, (each, page)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        pools.append(torch.empty_like(pages).index_copy_(0, order, pages).transpose(1, 2))
    table = order.view(case.batch, each).int()
    keys, values = pools
    return lambda: decode_attention(q, keys, values, lengths, table=table, window=case.window)[0]


def _seen(case: Case, query: Tensor, key: Tensor) -> Tensor:
    position = query + case.filled - case.rows
    return (key <= position) & (position - key <= (case.capacity if case.window is None else case.window))


def _mask(case: Case) -> Tensor:
    return _seen(case, torch.arange(case.rows, device="cuda")[:, None], torch.arange(case.capacity, device="cuda"))


def _sliced(case: Case, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Callable[[], Tensor]:
    """What the host could do that knows the lengths, if they are all the same."""
    part = slice(case.filled - case.seen, case.filled)
    k, v, mask = k[:, :, part], v[:, :, part], _mask(case)[:, part] if case.rows > 1 else None
    return lambda: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def _masked(case: Case, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Callable[[], Tensor]:
    """What a model with a static cache does."""
    mask = _mask(case)
    return lambda: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def _flex(case: Case, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Callable[[], Tensor]:
    mask = create_block_mask(
        lambda b, h, query, key: _seen(case, query, key), None, None, case.rows, case.capacity, device="cuda"
    )
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def candidates(workers: int) -> Iterator[Row]:
    """Every configuration in some cases, contiguous and in pages; see `bench.attention.sweep`."""
    return sweep(problems, workers)


def problems() -> Iterator[Posed]:
    """What `candidates` times: of a cache twice as long as the window, since each worker has one."""
    for case, page in ((CASES[0], 0), (CASES[0], 16), (CASES[1], 0)):
        case = case._replace(capacity=8192)
        q, k, v, lengths = case.operands()
        table = None
        if page:
            each = case.capacity // page
            k, v = (one.unflatten(2, (each, page)).permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous().transpose(1, 2)
                    for one in (k, v))  # fmt: skip
            table = torch.arange(case.batch * each, device="cuda", dtype=torch.int32).view(case.batch, each)
        window = -1 if case.window is None else case.window
        problem = problem_of(q, k, v, table, Sight(window, 0), Scores(case.depth**-0.5))
        out, logsumexp = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
        yield Posed(f"{tuple(case)}, pages of {page}", DECODE_ATTENTION, problem,
                    (q, k, v, lengths, table, None, None, out, logsumexp))  # fmt: skip


def table(rows: list[Row]) -> str:
    """Milliseconds by case, and in brackets how many times as long as its bytes take."""
    names = list(dict.fromkeys(name for row in rows for name in row["ms"]))
    grid = [["case (batch, heads, heads of k, queries, cache, depth), window", "its bytes", *names]]
    for row in rows:
        *sizes, window = row["case"]
        cells = [f"{row['ms'][name]:.4f} ({row['ms'][name] / row['bytes']:.2f})" if name in row["ms"] else "–"
                 for name in names]  # fmt: skip
        grid.append([f"({', '.join(map(str, sizes))}), {window}", f"{row['bytes']:.4f}", *cells])
    missing = [f"{name} is left out of ({', '.join(map(str, row['case'][:-1]))}): {why.rstrip(':')}."
               for row in rows for name, why in row.get("left out", {}).items()]  # fmt: skip
    return "\n\n".join([markdown_grid(grid), *missing])
