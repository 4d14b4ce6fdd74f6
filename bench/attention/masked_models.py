"""Models with dense masks as a user calls them: compiled unchanged, beside stock compile, the host included.

Each keeps its mask as a buffer, which is promised to stay, or computes it of positions in each call.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsecomp
from bench.attention.ways import RIVALS, rivals_cells, timed_modes
from bench.parallel import measured
from bench.table import markdown_grid
from bench.timing import MODES, guarded, time_rivals

BATCH, TOKENS, HEADS, DEPTH = 4, 4096, 16, 64
MASKS = {"window": 256, "half": 1400, "causal": TOKENS, "all": None}
"""Keys that a query sees before itself, None for all: about 0.91, 0.69, 0.48 and none of the blocks are empty."""
SPELLINGS = ("function, positions", "function, buffer", "by hand, buffer")


def positions(tokens: int, window: int | None, device: torch.device) -> Tensor:
    """The mask (tokens, tokens), True where a pair is kept."""
    position = torch.arange(tokens, device=device)
    distance = position[:, None] - position
    return distance > -tokens if window is None else (distance >= 0) & (distance <= window)


class Layer(nn.Module):
    """Attention between its projections, or alone."""

    mask: Tensor | None

    def __init__(self, spelling: str, window: int | None, projected: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * DEPTH
        self.by_hand, self.window = spelling.startswith("by hand"), window
        self.inner = nn.Linear(width, 3 * width) if projected else nn.Identity()
        self.outer = nn.Linear(width, width) if projected else nn.Identity()
        kept = positions(TOKENS, window, torch.device("cpu")) if spelling.endswith("buffer") else None
        self.register_buffer("mask", kept)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, features) to the same; three times the features where there are no projections."""
        q, k, v = (one.unflatten(-1, (HEADS, DEPTH)).transpose(1, 2) for one in self.inner(x).chunk(3, -1))
        mask = positions(x.shape[1], self.window, x.device) if self.mask is None else self.mask
        if self.by_hand:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(DEPTH)
            y = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.outer(y.transpose(1, 2).flatten(2))


def run(modes: tuple[str, ...] = MODES, workers: int = 1) -> Iterator[dict[str, Any]]:
    """Milliseconds of each model in each mode by `stock` and `sparsecomp`, which take turns, and what was judged."""
    cases = list(itertools.product(MASKS, SPELLINGS, (False, True), (False, True)))
    for row in measured(partial(prepared, modes=modes), cases, workers, batch=1):
        print(row, flush=True)
        yield row


def prepared(case: tuple[str, str, bool, bool], modes: tuple[str, ...]) -> Callable[[], dict[str, Any]]:
    """What measures a model, compiled in all modes."""
    name, spelling, projected, training = case
    row: dict[str, Any] = {
        "mask": name, "spelling": spelling, "projected": projected, "training": training, "ms": {}, "sites": {},
    }  # fmt: skip
    model = Layer(spelling, MASKS[name], projected).to("cuda", torch.bfloat16)
    width = HEADS * DEPTH * (1 if projected else 3)
    x = torch.randn(BATCH, TOKENS, width, device="cuda", dtype=torch.bfloat16, requires_grad=training)
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    for mode in modes:
        guarded(row, mode, partial(_compile, row, calls, model, x, mode, training))

    def measure() -> dict[str, Any]:
        for mode, both in calls.items():
            guarded(row, mode, partial(time_rivals, row, mode, both, training))
        return row

    return measure


def _compile(
    row: dict[str, Any], calls: dict[str, dict[str, Callable[[], Any]]], model: nn.Module, x: Tensor, mode: str,
    training: bool,
) -> None:  # fmt: skip
    calls[mode] = compiled_rivals(row, mode, lambda which: _call(which, copy.deepcopy(model), x, mode, training))


def compiled_rivals(
    row: dict[str, Any], mode: str, call_of: Callable[[str], Callable[[], Any]], rule: str = "block_attention"
) -> dict[str, Callable[[], Any]]:
    """The calls of stock and of ours, compiled; the row gets what a rule judged."""
    found: dict[str, Callable[[], Any]] = {}
    with torch.set_grad_enabled(row["training"]):
        for which in RIVALS:
            found[which] = call = call_of(which)
            for _ in range(4):  # compiles, records CUDA graphs
                call()
        report = sparsecomp.last_report()
        assert report is not None
        row["sites"][mode] = [site.reason for site in report.sites if site.rule == rule]
    return found


def _call(which: str, model: nn.Module, x: Tensor, mode: str, training: bool) -> Callable[[], Any]:
    if which == "stock":
        compiled = torch.compile(model, mode=mode)
    else:
        compiled = torch.compile(model, backend="sparsecomp", options={"frozen": "buffers", "mode": mode})
    if not training:
        return lambda: compiled(x)
    grad = torch.randn(BATCH, TOKENS, HEADS * DEPTH, device=x.device, dtype=x.dtype)

    def step() -> None:
        compiled(x).backward(grad)
        x.grad = None
        model.zero_grad()

    return step


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of each model in each mode; in brackets the speed, of stock's."""
    modes = timed_modes(rows)
    grid = [["mask", "written as", "projections", "step", *(f"{who}, {mode}" for mode in modes for who in RIVALS)]]
    for row in sorted(rows, key=lambda row: (list(MASKS).index(row["mask"]), row["training"], row["spelling"])):
        step = "training" if row["training"] else "inference"
        cells = [row["mask"], row["spelling"], "with" if row["projected"] else "without", step]
        grid.append(cells + rivals_cells(row, modes))
    return markdown_grid(grid)
