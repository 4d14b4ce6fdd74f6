"""Decoding with a static cache as a user calls it: a step compiled unchanged, beside stock compile, the host included.

Each layer writes a key and a value at the position of its sequence, repeats the heads that a group shares, and attends
to all slots by a mask of that position, which is on the device.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.attention.masked_models import compiled_rivals
from bench.attention.ways import RIVALS, rivals_cells, timed_modes
from bench.table import markdown_grid
from bench.timing import MODES, guarded, time_rivals

_DEPTH = 128


class Case(NamedTuple):
    """Layers with caches of `capacity` keys of each sequence, bfloat16, heads of 128 numbers.

    Attributes:
        window: keys that a query sees, None for all before it.
        filled: share of the slots that hold a key.
        density: the option, as one who knows gives it.
    """

    batch: int
    heads: int
    kv_heads: int
    capacity: int
    window: int | None
    filled: float
    layers: int
    density: float | None = None


CASES = (
    Case(1, 32, 8, 4096, None, 0.5, 4),
    Case(16, 32, 8, 4096, None, 0.5, 4),
    Case(1, 32, 8, 32768, None, 0.99, 4),
    Case(16, 32, 8, 32768, 4096, 0.9, 1),
    Case(1, 32, 8, 32768, 4096, 0.9, 4),
    Case(16, 16, 16, 8192, 1024, 0.9, 2),
    Case(1, 16, 16, 8192, 1024, 0.9, 4),
    Case(16, 16, 16, 8192, None, 0.25, 2),
    Case(16, 16, 16, 8192, None, 0.25, 2, 0.25),
    Case(16, 16, 16, 8192, None, 1.0, 2, 0.25),
    Case(1, 32, 32, 256, None, 0.5, 8),
    Case(8, 32, 32, 256, None, 1.0, 8),
    Case(1, 32, 32, 1024, None, 1.0, 8),
)
"""The tenth is told a share that is wrong; without one, the eighth stays as it is by estimate."""


class Layers(nn.Module):
    """Layers of attention over caches, without projections."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        random = torch.Generator("cuda").manual_seed(0)
        shape = (case.layers, 2, case.batch, case.kv_heads, case.capacity, _DEPTH)
        cache = torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16)
        for layer in range(case.layers):
            self.register_buffer(f"keys_{layer}", cache[layer, 0].clone())
            self.register_buffer(f"values_{layer}", cache[layer, 1].clone())

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """(batch, heads, 1, depth) to the same, at a position (1,) that all sequences share."""
        case = self.case
        slot = torch.arange(case.capacity, device=x.device)
        mask = slot <= position
        mask = mask if case.window is None else mask & (slot > position - case.window)
        for layer in range(case.layers):
            keys, values = (getattr(self, f"{name}_{layer}") for name in ("keys", "values"))
            new = x[:, : case.kv_heads]
            keys.index_copy_(2, position, new)
            values.index_copy_(2, position, new)
            heads = [self._repeated(one) for one in (keys, values)]
            x = x + F.scaled_dot_product_attention(x, *heads, attn_mask=mask[None, None, None])
        return x

    def _repeated(self, one: Tensor) -> Tensor:
        case = self.case
        times = case.heads // case.kv_heads
        wide = one[:, :, None].expand(case.batch, case.kv_heads, times, case.capacity, _DEPTH)
        return one if times == 1 else wide.reshape(case.batch, case.heads, case.capacity, _DEPTH)


def run(modes: tuple[str, ...] = MODES) -> Iterator[dict[str, Any]]:
    """Milliseconds of each case in each mode by `stock` and `sparsecomp`, which take turns, and what was judged."""
    for case in CASES:
        row: dict[str, Any] = {"case": list(case), "training": False, "ms": {}, "sites": {}, "difference": {}}
        for mode in modes:
            guarded(row, mode, partial(_take, row, case, mode))
        print(row, flush=True)
        yield row


def _take(row: dict[str, Any], case: Case, mode: str) -> None:
    torch._dynamo.reset()
    model = Layers(case)
    random = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(case.batch, case.heads, 1, _DEPTH, generator=random, device="cuda", dtype=torch.bfloat16)
    position = torch.tensor([int(case.capacity * case.filled) - 1], device="cuda")

    def call_of(which: str) -> Callable[[], Any]:
        how: dict[str, Any] = {"mode": mode}
        if which == "sparsecomp":
            how = {"backend": "sparsecomp", "options": {"mode": mode, "density": case.density}}
        compiled = torch.compile(copy.deepcopy(model), **how)
        return lambda: compiled(x, position)

    calls = compiled_rivals(row, mode, call_of, "decode_attention")
    with torch.no_grad():
        stock, found = (calls[which]().clone().float() for which in RIVALS)
    row["difference"][mode] = float(f"{((found - stock).norm() / stock.norm()).item():.2g}")
    time_rivals(row, mode, calls, False)


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of each case in each mode; in brackets the speed, of stock's."""
    modes = timed_modes(rows)
    sizes = "batch, heads, heads of k, slots"
    grid = [[f"case ({sizes})", "window", "filled", "layers", "`density`",
             *(f"{who}, {mode}" for mode in modes for who in RIVALS)]]  # fmt: skip
    for row in rows:
        *lengths, window, filled, layers, density = row["case"]
        cells = [f"({', '.join(map(str, lengths))})", "–" if window is None else str(window), f"{filled:.0%}",
                 str(layers), "–" if density is None else str(density)]  # fmt: skip
        grid.append(cells + rivals_cells(row, modes))
    return markdown_grid(grid)
