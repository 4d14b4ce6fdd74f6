"""The two ways in which attention is timed, without gradients and with them, and models of it beside stock compile."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.timing import MODES

RIVALS = ("stock", "sparsecomp")


def two_ways(
    attend: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor
) -> tuple[Callable[[], Tensor], Callable[[], tuple[Tensor, ...]]]:
    """Calls of attention: the result without gradients, and the result with those by all operands."""

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*operands)

    def both() -> tuple[Tensor, ...]:
        out = attend(*operands)
        return out, *torch.autograd.grad(out, operands, grad)

    return forward, both


def timed_modes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Modes in which stock was timed in one of these rows."""
    return [mode for mode in MODES if any(f"stock, {mode}" in row["ms"] for row in rows)]


def rivals_cells(row: dict[str, Any], modes: Sequence[str]) -> list[str]:
    """A row's milliseconds by each rival in each mode; in brackets the speed, of stock's."""
    cells = []
    for mode in modes:
        stock, ours = (row["ms"].get(f"{who}, {mode}") for who in RIVALS)
        gain = f" ({stock / ours:.2f})" if stock and ours else ""
        cells += [f"{stock:.3g}" if stock else "–", (f"{ours:.3g}" if ours else "–") + gain]
    return cells
