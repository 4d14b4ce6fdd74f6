"""Masks that are data, and dropout, as a user calls them: models compiled unchanged, beside stock compile.

Times are with the host. The masks are inputs, and nobody says how many blocks they keep: the mask that keeps all shows
what it costs to scan it for nothing.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.attention.masked_models import compiled_rivals, positions
from bench.attention.ways import RIVALS, rivals_cells, timed_modes
from bench.parallel import measured
from bench.table import markdown_grid
from bench.timing import MODES, guarded, time_rivals

BATCH, TOKENS, HEADS, DEPTH = 4, 4096, 16, 64
MASKS = ("padding", "documents", "all", "dropout")
_LENGTHS = (4096, 2000, 900, 300)
_LAYERS = 2


class Layers(nn.Module):
    """Layers of attention that read one mask."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * DEPTH
        self.inner = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(_LAYERS))
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, features) to the same; without a mask a window of 256 keys, computed of positions."""
        mask = positions(x.shape[1], 256, x.device) if mask is None else mask
        for inner in self.inner:
            q, k, v = (one.unflatten(-1, (HEADS, DEPTH)).transpose(1, 2) for one in inner(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.dropout)
            x = x + y.transpose(1, 2).flatten(2)
        return x


def mask_of(name: str) -> Tensor | None:
    """(batch, 1, queries or 1, keys) bool."""
    place = torch.arange(TOKENS, device="cuda")
    if name == "padding":
        return (place < torch.tensor(_LENGTHS, device="cuda")[:, None])[:, None, None]
    if name == "documents":
        lengths = 512 + torch.randint(-300, 301, (BATCH, 32), generator=torch.Generator().manual_seed(0)).cuda()
        ids = torch.searchsorted(lengths.cumsum(1), place.expand(BATCH, -1).contiguous(), right=True)
        return ((ids[:, :, None] == ids[:, None]) & (place[:, None] >= place))[:, None]
    return None if name == "dropout" else torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="cuda")


def run(modes: tuple[str, ...] = MODES, workers: int = 1) -> Iterator[dict[str, Any]]:
    """Milliseconds of each mask in each mode by `stock` and `sparsecomp`, which take turns, and what was judged."""
    cases = list(itertools.product(MASKS, (False, True)))
    for row in measured(partial(prepared, modes=modes), cases, workers, batch=1):
        print(row, flush=True)
        yield row


def prepared(case: tuple[str, bool], modes: tuple[str, ...]) -> Callable[[], dict[str, Any]]:
    """What measures a mask, compiled in all modes."""
    name, training = case
    mask = mask_of(name)
    row: dict[str, Any] = {"mask": name, "training": training, "ms": {}, "sites": {}}
    if mask is not None:
        row["kept"] = round(_share(mask), 4)
    model = Layers(0.1 if name == "dropout" else 0.0).to("cuda", torch.bfloat16)
    x = torch.randn(BATCH, TOKENS, HEADS * DEPTH, device="cuda", dtype=torch.bfloat16, requires_grad=training)
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    for mode in modes:
        guarded(row, mode, partial(_compile, row, calls, model, (x, mask), mode))

    def measure() -> dict[str, Any]:
        for mode, both in calls.items():
            guarded(row, mode, partial(time_rivals, row, mode, both, training))
        return row

    return measure


def _share(mask: Tensor) -> float:
    """Of blocks that keep something."""
    blocks = mask.expand(-1, -1, TOKENS, -1).unflatten(-1, (-1, 64)).any(-1).unflatten(2, (-1, 64)).any(3)
    return float(blocks.float().mean())


def _compile(
    row: dict[str, Any], calls: dict[str, dict[str, Callable[[], Any]]], model: nn.Module,
    operands: tuple[Tensor, Tensor | None], mode: str,
) -> None:  # fmt: skip
    def call_of(which: str) -> Callable[[], Any]:
        ours: dict[str, Any] = {"mode": mode}
        if which == "sparsecomp":
            ours = {"backend": "sparsecomp", "options": {"mode": mode}}
        return _call(torch.compile(copy.deepcopy(model), **ours), *operands)

    calls[mode] = compiled_rivals(row, mode, call_of)


def _call(compiled: Any, x: Tensor, mask: Tensor | None) -> Callable[[], Any]:
    if not x.requires_grad:
        return lambda: compiled(x, mask)
    grad = torch.randn_like(x)

    def step() -> None:
        compiled(x, mask).backward(grad)
        x.grad = None
        compiled.zero_grad()

    return step


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of each mask in each mode; in brackets the speed, of stock's."""
    modes = timed_modes(rows)
    grid = [["mask", "blocks kept", "step", *(f"{who}, {mode}" for mode in modes for who in RIVALS)]]
    for row in sorted(rows, key=lambda row: (MASKS.index(row["mask"]), row["training"])):
        kept = f"{row['kept']:.0%}" if "kept" in row else "by position"
        grid.append([row["mask"], kept, "training" if row["training"] else "inference", *rivals_cells(row, modes)])
    return markdown_grid(grid)
