"""Attention with a bias by relative positions that is trained, as a user calls it: compiled unchanged, beside stock
compile, and beside FlexAttention, whose score function reads the same table.

A training step gives the gradients of queries, keys, values and the table; the host is included.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import sparsecomp
from bench.parallel import measured
from bench.table import markdown_grid
from bench.timing import guarded, in_turns_ms, relative_error

RIVALS = ("stock", "sparsecomp", "FlexAttention")


class Case(NamedTuple):
    """Operands (batch, heads, length, depth) in bfloat16, and the keys that a query sees before itself; -1 for all,
    behind it too."""

    name: str
    batch: int
    heads: int
    length: int
    depth: int
    window: int = -1


CASES = (
    Case("encoder", 8, 12, 512, 64),
    Case("long encoder", 4, 16, 2048, 64),
    Case("causal", 4, 16, 2048, 64, 2048),
    Case("window", 4, 16, 4096, 64, 256),
    Case("image windows", 2048, 4, 49, 32),
)


class Biased(nn.Module):
    """Attention whose scores get a number of a table by distance and head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.window, self.farthest = case.window, min(case.length, 128)
        self.table = nn.Parameter(0.5 * torch.randn(2 * self.farthest + 1, case.heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, length, depth) to the same."""
        position = torch.arange(q.shape[2], device=q.device)
        distance = position[:, None] - position
        near = distance.clamp(-self.farthest, self.farthest) + self.farthest
        bias = F.embedding(near, self.table).permute(2, 0, 1)[None].to(q.dtype)
        if self.window >= 0:
            bias = bias.masked_fill((distance < 0) | (distance > self.window), float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, bias)


class BiasedByFlex(Biased):
    """The same, written for FlexAttention, whose block mask is made before."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)

        def kept(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (query - key <= case.window)

        self.mask = None
        if case.window >= 0:
            self.mask = create_block_mask(kept, None, None, case.length, case.length, device="cuda")

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, length, depth) to the same."""
        table, farthest = self.table, self.farthest

        def biased(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + table[(query - key).clamp(-farthest, farthest) + farthest, head].to(score.dtype)

        found = flex_attention(q, k, v, score_mod=biased, block_mask=self.mask)
        assert isinstance(found, Tensor)
        return found


def run(workers: int = 1, **options: Any) -> Iterator[dict[str, Any]]:
    """Milliseconds of each case by each rival, in inference and in training, and what was judged.

    Args:
        workers: processes that compile side by side.
        options: of our backend.
    """
    for row in measured(partial(prepared, options=options), range(len(CASES)), workers, batch=1):
        print(row, flush=True)
        yield row


def prepared(place: int, options: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """What measures a case, compiled."""
    case = CASES[place]
    random = torch.Generator("cuda").manual_seed(0)
    shape = (case.batch, case.heads, case.length, case.depth)
    q, k, v, grad = (torch.randn(shape, device="cuda", generator=random).bfloat16() for _ in range(4))
    row: dict[str, Any] = {"case": case.name, "sizes": case[1:], "ms": {}, "difference": {}, "sites": []}
    calls: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "both": {}}
    right: list[Tensor] = []
    for which in RIVALS:
        guarded(row, which, partial(_prepare, row, which, case, (q, k, v, grad), options, calls, right))
    right.clear()

    def measure() -> dict[str, Any]:
        for what, every in calls.items():
            times = in_turns_ms(list(every.values()))
            row["ms"] |= {f"{which}, {what}": ms for which, ms in zip(every, times, strict=True)}
        return row

    return measure


def _prepare(
    row: dict[str, Any], which: str, case: Case, operands: tuple[Tensor, ...], options: dict[str, Any],
    calls: dict[str, dict[str, Callable[[], Any]]], right: list[Tensor],
) -> None:  # fmt: skip
    *given, grad = operands
    given = [one.clone().requires_grad_() for one in given]
    model = (BiasedByFlex if which == "FlexAttention" else Biased)(case).cuda()
    how: dict[str, Any] = {"backend": "sparsecomp", "options": options} if which == "sparsecomp" else {}
    compiled = torch.compile(model, dynamic=False, **how)

    def forward() -> Tensor:
        with torch.no_grad():
            return compiled(*given)

    def both() -> tuple[Tensor, ...]:
        out = compiled(*given)
        return out, *torch.autograd.grad(out, (*given, model.table), grad)

    forward()
    if which == "sparsecomp":
        row["sites"] += _judged()
    found = [one.detach() for one in both()]
    if which == "sparsecomp":
        row["sites"] += _judged()
    right.extend(found[len(right) :])
    pairs = zip(found, right, strict=True)
    row["difference"][which] = [relative_error(one.float(), other.float()) for one, other in pairs]
    calls["forward"][which], calls["both"][which] = forward, both


def _judged() -> list[str]:
    report = sparsecomp.last_report()
    assert report is not None
    sites = [site for site in report.sites if site.rule in ("block_attention", "bias_table")]
    return [f"{'' if site.rewritten else 'stays: '}{site.rule}: {site.reason}" for site in sites]


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds by case; in brackets the speed, of stock's."""
    grid = [["case (batch, heads, tokens, depth; window)", "step", *RIVALS]]
    for row in sorted(rows, key=lambda row: [case.name for case in CASES].index(row["case"])):
        for what, step in (("forward", "inference"), ("both", "training")):
            times = {which: row["ms"].get(f"{which}, {what}") for which in RIVALS}
            cells = [f"{ms:.3g} ({times['stock'] / ms:.2f})" if ms and times["stock"] else "–" for ms in times.values()]
            grid.append([f"{row['case']} {tuple(row['sizes'])}", step, *cells])
    return markdown_grid(grid)
