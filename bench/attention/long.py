"""Attention over long sequences: how its time grows with their length, and lists that are long beside the rest.

The window of the first part keeps as many pairs of each token at any length. The second part has lists that hold every
block beside short ones, which one program walks over whole, or several in parts, and as `attention` chooses. Times are
of CUDA graph replays; lists are made before.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from bench.attention.cases import MaskFunction
from bench.attention.ways import two_ways
from bench.parallel import measured
from bench.table import markdown_grid
from bench.timing import graph_ms, guarded, relative_error
from sparsecomp.attention import AttentionPattern, GlobalTokens, LocalWindow, attention, big_bird, causal
from sparsecomp.lowering.attention.estimate import longest_lists
from sparsecomp.ops import block_attention

Row = dict[str, Any]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
_LONG = 8192
"""Tokens of a list from which on it is walked over in parts, where that is measured."""


class Case(NamedTuple):
    """An attention of one batch entry, bfloat16.

    Attributes:
        part: of this benchmark: "lengths" or "long lists".
        pattern: what it keeps, which our lists and FlexAttention's are made of.
        mask: the same as a function of positions; None leaves FlexAttention out.
    """

    part: str
    name: str
    heads: int
    kv_heads: int
    queries: int
    keys: int
    depth: int
    pattern: AttentionPattern
    mask: MaskFunction | None

    def operands(self) -> list[Tensor]:
        """q, k and v, which want gradients, and a gradient of the result."""
        random = torch.Generator("cuda").manual_seed(0)
        shapes = [(heads, length) for heads, length in (
            (self.heads, self.queries), (self.kv_heads, self.keys), (self.kv_heads, self.keys),
            (self.heads, self.queries),
        )]  # fmt: skip
        made = [torch.randn((1, *shape, self.depth), generator=random, device="cuda", dtype=torch.bfloat16)
                for shape in shapes]  # fmt: skip
        return [one.requires_grad_(at < 3) for at, one in enumerate(made)]


_TOKENS = (0, 1, 20_000)


def _window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k <= 1024)


def _global(b: Any, h: Any, q: Any, k: Any) -> Any:
    tokens = [(q == token) | (k == token) for token in _TOKENS]
    return ((q - k <= 256) & (k - q <= 256)) | tokens[0] | tokens[1] | tokens[2]


CASES = (
    *(Case("lengths", "window 1024, causal", 32, 8, n, n, 128, LocalWindow(1024, 0), _window)
      for n in (16_384, 32_768, 65_536, 131_072)),
    Case("long lists", "window 256 with 3 global tokens", 8, 8, 32_768, 32_768, 64,
         LocalWindow(256, 256) | GlobalTokens(_TOKENS), _global),
    Case("long lists", "BigBird", 16, 16, 8192, 8192, 64, big_bird(64, window=3, global_blocks=2, random=3), None),
    Case("long lists", "128 queries, causal", 32, 8, 128, 32_768, 128, causal().shifted(32_768 - 128), None),
    Case("long lists", "causal", 16, 16, 16_384, 16_384, 64, causal(), lambda b, h, q, k: q >= k),
)  # fmt: skip
"""The last one's lists are of all lengths: parts can only cost time there."""
PARTS = tuple(dict.fromkeys(case.part for case in CASES))


def run(parts: Sequence[str] = PARTS, workers: int = 1) -> Iterator[Row]:
    """The row of each case: milliseconds by rival, without gradients and with them, and differences.

    Args:
        parts: of `PARTS`.
        workers: processes that compile side by side.
    """
    cases = [place for place, case in enumerate(CASES) if case.part in parts]
    for row in measured(prepared, cases, min(workers, len(cases)), batch=1):
        print(row, flush=True)
        yield row


def prepared(place: int) -> Callable[[], Row]:
    """What measures a case, compiled."""
    case = CASES[place]
    sizes = [1, case.heads, case.kv_heads, case.queries, case.keys, case.depth]
    row: Row = {"place": place, "part": case.part, "case": case.name, "sizes": sizes, "ms": {}, "difference": {}}
    *operands, grad = case.operands()
    right: list[Tensor] = []
    calls: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = []
    for name, make in _rivals(case):
        guarded(row, name, partial(_prepare, row, name, make, operands, grad, right, calls))
    right.clear()

    def measure() -> Row:
        for name, forward, both in calls:
            guarded(row, name, partial(_take, row, name, forward, both))
        return row

    return measure


def _rivals(case: Case) -> Iterator[tuple[str, Callable[[], Attention]]]:
    """By name, what makes each."""
    if case.mask is not None:
        yield "flex", partial(_flex, case, case.mask)
    for side in (64, 128):
        yield f"ours {side}x{side}", partial(_ours, case, side, False)
    if case.part == "long lists":
        for side in (64, 128):
            yield f"ours {side}x{side} in parts", partial(_ours, case, side, True)
    yield "attention", lambda: lambda q, k, v: attention(q, k, v, case.pattern)


def _ours(case: Case, side: int, split: bool) -> Attention:
    blocks = case.pattern.to_blocks(case.queries, case.keys, (side, side), "cuda")
    of_queries, of_keys = (split and longest * side >= _LONG for longest in longest_lists(blocks))
    return lambda q, k, v: block_attention(q, k, v, blocks, in_parts=(of_queries, of_keys))[0]


def _flex(case: Case, mask_mod: MaskFunction) -> Attention:
    mask = case.pattern.to_flex(case.queries, case.keys, device="cuda")
    mask.mask_mod = mask_mod
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    gqa = case.heads != case.kv_heads
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=gqa)


def _prepare(
    row: Row, name: str, make: Callable[[], Attention], operands: list[Tensor], grad: Tensor, right: list[Tensor],
    calls: list[Any],
) -> None:  # fmt: skip
    forward, both = two_ways(make(), operands, grad)
    forward()
    found = [one.detach() for one in both()]
    right.extend(found[len(right) :])
    row["difference"][name] = [relative_error(one, other) for one, other in zip(found, right, strict=True)]
    calls.append((name, forward, both))


def _take(row: Row, name: str, forward: Callable[[], Any], both: Callable[[], Any]) -> None:
    for what, call in (("forward", forward), ("both", both)):
        row["ms"][f"{name}, {what}"] = round(graph_ms([call, call], 8), 4)


def table(rows: list[Row]) -> str:
    """Milliseconds by case, and in brackets how many times as fast as FlexAttention."""
    rows = sorted(rows, key=lambda row: row["place"])
    names = list(dict.fromkeys(key.rsplit(", ", 1)[0] for row in rows for key in row["ms"]))
    titles = ["FlexAttention" if name == "flex" else name for name in names]
    grid = [["case (batch, heads, heads of k, queries, keys, depth)", "step", *titles]]
    for row in rows:
        for what, step in (("forward", "forward"), ("both", "with gradients")):
            flex = row["ms"].get(f"flex, {what}")
            cells = []
            for name in names:
                ms = row["ms"].get(f"{name}, {what}")
                gain = f" ({flex / ms:.2f})" if flex and ms and name != "flex" else ""
                cells.append(f"{ms:.3g}{gain}" if ms else "–")
            grid.append([f"{row['case']} ({', '.join(map(str, row['sizes']))})", step, *cells])
    return markdown_grid(grid)
