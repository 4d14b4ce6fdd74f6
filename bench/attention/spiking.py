"""Attention of spikes with a mask, as a network has it between its neurons: compiled, beside stock compile.

Stock multiplies all pairs and masks them. So does the product of spikes by bytes of this compiler, which is timed where
the rule of this attention is off. Rates of spikes are those of trained networks; no kernel's time hangs on them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

import sparsecomp
from bench.attention.masked_models import positions
from bench.table import markdown_grid
from bench.timing import MODES, guarded, time_rivals

BATCH, HEADS, DEPTH = 4, 8, 64
STEPS = {64: 4, 196: 4, 1024: 4, 4096: 1}
"""Time steps, by tokens."""
CASES = [
    *((64, "causal", "float32", training) for training in (False, True)),
    *((196, "window", "float32", training) for training in (False, True)),
    *((1024, "window", dtype, training) for dtype in ("float32", "float16") for training in (False, True)),
    (1024, "causal", "float32", False), (1024, "all", "float32", False),
    *((4096, mask, "float32", training) for mask in ("window", "causal") for training in (False, True)),
    (4096, "window", "float16", False), (4096, "causal", "float16", True), (4096, "all", "float16", False),
]  # fmt: skip
RATE = 0.15
"""Share of numbers that are spikes."""
WAYS = ("stock", "stock, TF32", "spike_matmul", "sparsecomp", "sparsecomp, TF32")


class Attention(nn.Module):
    """(M ⊙ q kᵀ) v / 8 of spikes (steps, batch, heads, tokens, depth)."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Currents in, a current out."""
        q, k, v = (Spike.apply(one) for one in (q, k, v))
        window = {"window": 128, "causal": q.shape[-2], "all": None}[self.mask]
        kept = positions(q.shape[-2], window, q.device).to(q.dtype)
        return ((q @ k.transpose(-2, -1)) * kept) @ v * 0.125


class Spike(torch.autograd.Function):
    """A threshold whose surrogate gradient is a box."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """1 where a current passes 1, else 0."""
        ctx.save_for_backward(x)
        return (x > 1.0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The gradient where a current is near 1."""
        (x,) = ctx.saved_tensors
        return grads[0] * ((x - 1.0).abs() < 0.5).to(x.dtype)


def run(modes: tuple[str, ...] = MODES) -> Iterator[dict[str, Any]]:
    """Milliseconds of each case in each mode by each of `WAYS`, which take turns, and what was judged."""
    for tokens, mask, dtype, training in CASES:
        row: dict[str, Any] = {
            "tokens": tokens, "mask": mask, "dtype": dtype, "training": training, "ms": {}, "sites": {}
        }  # fmt: skip
        for mode in modes:
            guarded(row, mode, partial(_measure, row, mode))
        print(row, flush=True)
        yield row


def _measure(row: dict[str, Any], mode: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    shape = (STEPS[row["tokens"]], BATCH, HEADS, row["tokens"], DEPTH)
    threshold = NormalDist().inv_cdf(1 - RATE)
    operands = [(torch.randn(shape, device="cuda") / threshold).to(getattr(torch, row["dtype"])) for _ in range(3)]
    for one in operands:
        one.requires_grad_(row["training"])
    grad = torch.randn_like(operands[0])
    ways = [way for way in WAYS if not way.endswith("TF32") or row["dtype"] == "float32"]
    with torch.set_grad_enabled(row["training"]):
        calls = {way: _call(way, row, mode, operands, grad) for way in ways}
    time_rivals(row, mode, calls, row["training"])


def _call(
    way: str, row: dict[str, Any], mode: str, operands: list[Tensor], grad: Tensor
) -> Callable[[], Any]:  # fmt: skip
    tf32 = way.endswith("TF32")
    model = Attention(row["mask"])
    if way.startswith("stock"):
        compiled = torch.compile(model, mode=mode)
    else:
        options: dict[str, Any] = {"mode": mode, "disable": ("spike_attention",) if way == "spike_matmul" else ()}
        compiled = torch.compile(model, backend="sparsecomp", options=options)

    def call() -> None:  # in turns with others
        torch.backends.cuda.matmul.allow_tf32 = tf32
        out = compiled(*operands)
        if row["training"]:
            out.backward(grad)
            for one in operands:
                one.grad = None

    for _ in range(4):  # compiles, records CUDA graphs
        call()
    if way.startswith("sparsecomp"):
        report = sparsecomp.last_report()
        assert report is not None
        row["sites"][f"{way}, {mode}"] = [site.reason for site in report.sites if site.rule == "spike_attention"]
    return call


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of each case by each way in each mode; in brackets the speed, of stock's with the same products."""
    modes = [mode for mode in MODES if any(f"stock, {mode}" in row["ms"] for row in rows)]
    grid = [["tokens", "mask", "dtype", "step", *(f"{way}, {mode}" for mode in modes for way in WAYS)]]
    for row in rows:
        step = "training" if row["training"] else "inference"
        cells = [str(row["tokens"]), row["mask"], row["dtype"], step]
        for mode in modes:
            for way in WAYS:
                ms, stock = (row["ms"].get(f"{one}, {mode}") for one in (way, way.replace("sparsecomp", "stock")))
                gain = f" ({stock / ms:.2f})" if way.startswith("sparsecomp") and ms and stock else ""
                cells.append(f"{ms:.3g}{gain}" if ms else "–")
        grid.append(cells)
    return markdown_grid(grid)
