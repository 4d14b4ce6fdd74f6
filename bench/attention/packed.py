"""Packed sequences with the work for their mask, beside torch's varlen attention and FlexAttention; and parts of ours:
scans and dropout.

Times are of CUDA graph replays, but FlexAttention's with its mask, whose making waits for the device: that is timed by
events around both.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.attention.ways import two_ways
from bench.table import markdown_grid
from bench.timing import graph_ms, guarded
from sparsecomp.attention import packed_attention
from sparsecomp.ops import block_attention, packed_blocks, scanned_blocks
from sparsecomp.reference.attention.blocks import blocks_of

HEADS, DEPTH, TOKENS = 16, 64, 32_768


def run() -> Iterator[dict[str, Any]]:
    """Rows of packed sequences, causal or not, and of scans of masks."""
    for ordered in (False, True):
        yield _shown(_packed(ordered))
    yield _shown(_scans())
    yield _shown(_dropped())


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    print(row, flush=True)
    return row


def _packed(ordered: bool) -> dict[str, Any]:
    lengths = 512 + torch.randint(-300, 301, (64,), generator=torch.Generator().manual_seed(0))
    ends = lengths.cumsum(0) * TOKENS // lengths.sum()
    offsets = torch.nn.functional.pad(ends, (1, 0)).int().cuda()
    q, k, v, grad = (torch.randn(TOKENS, HEADS, DEPTH, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    operands = [one.requires_grad_() for one in (q, k, v)]
    row: dict[str, Any] = {"case": "packed, causal" if ordered else "packed", "ms": {}, "difference": {}}
    longest, right = int(offsets.diff().max()), []
    rivals: dict[str, Callable[..., Tensor]] = {
        "ours": partial(_ours, offsets, ordered), "varlen": partial(_varlen, offsets, longest, ordered),
    }  # fmt: skip
    for name, attend in rivals.items():
        guarded(row, name, partial(_take, row, name, attend, operands, grad, right))
    guarded(row, "lists alone", lambda: _alone(row, "lists alone", partial(
        packed_blocks, offsets, offsets, TOKENS, TOKENS, after=0 if ordered else None
    )))  # fmt: skip
    guarded(row, "flex", lambda: _flex(row, operands, ends.cuda(), ordered, right))
    return row


def _ours(offsets: Tensor, ordered: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return packed_attention(q, k, v, offsets, causal=ordered)


def _varlen(offsets: Tensor, longest: int, ordered: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attend: Any = varlen.varlen_attn
    return attend(q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0 if ordered else -1))


def _take(
    row: dict[str, Any], name: str, attend: Callable[..., Tensor], operands: list[Tensor], grad: Tensor,
    right: list[Tensor],
) -> None:  # fmt: skip
    forward, both = two_ways(attend, operands, grad)
    found = [one.detach().float() for one in both()]
    right.extend(found[len(right) :])
    row["difference"][name] = [
        float((one - other).norm() / other.norm()) for one, other in zip(found, right, strict=True)
    ]
    for what, call in (("forward", forward), ("both", both)):
        row["ms"][f"{name}, {what}"] = round(graph_ms([call]), 4)


def _alone(row: dict[str, Any], name: str, call: Callable[[], Any]) -> None:
    row["ms"][name] = round(graph_ms([call]), 4)


def _flex(row: dict[str, Any], operands: list[Tensor], ends: Tensor, ordered: bool, right: list[Tensor]) -> None:
    q, k, v = (one.detach().transpose(0, 1)[None].contiguous() for one in operands)
    document = torch.searchsorted(ends, torch.arange(TOKENS, device="cuda"), right=True)
    make, attend = torch.compile(create_block_mask), torch.compile(flex_attention, dynamic=False)

    def kept(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = document[i] == document[j]
        return same & (i >= j) if ordered else same

    def mask() -> Any:
        return make(kept, None, None, TOKENS, TOKENS, device="cuda")

    found, there = attend(q, k, v, block_mask=mask()), mask()
    row["difference"]["flex"] = float((found[0].transpose(0, 1).float() - right[0]).norm() / right[0].norm())
    row["ms"]["flex, forward, mask made before"] = round(graph_ms([lambda: attend(q, k, v, block_mask=there)]), 4)
    row["ms"]["flex, forward"] = round(_event_ms(lambda: attend(q, k, v, block_mask=mask())), 4)


def _event_ms(call: Callable[[], Any], repeats: int = 20) -> float:
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def _scans() -> dict[str, Any]:
    """Of masks of four batch entries and 4096 tokens."""
    row: dict[str, Any] = {"case": "scan", "ms": {}}
    kept = torch.rand(4, 1, 4096, 4096, device="cuda") < 0.5
    masks = {
        "bool": kept, "padding": kept[:, :, :1], "bfloat16": torch.zeros_like(kept, dtype=torch.bfloat16),
        "float32": torch.zeros_like(kept, dtype=torch.float32), "16 heads": kept.repeat(1, 16, 1, 1),
    }  # fmt: skip
    for name, mask in masks.items():
        guarded(row, name, partial(_alone, row, name, partial(scanned_blocks, mask, 4096, 4096)))
    return row


def _dropped() -> dict[str, Any]:
    """A window of 256 keys and nothing empty, with and without dropout, by kernels alone."""
    row: dict[str, Any] = {"case": "dropout", "ms": {}}
    q, k, v, grad = (torch.randn(4, 16, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    operands = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    place = torch.arange(4096, device="cuda")
    distance = place[:, None] - place
    for name, mask in (("window", (distance >= 0) & (distance <= 256)), ("all", distance < 4096)):
        blocks = blocks_of(mask[None, None])
        for chance in (0.0, 0.1):

            def both(chance: float = chance, blocks: Any = blocks) -> Any:
                out, _ = block_attention(*operands, blocks, dropout=chance)
                return out, *torch.autograd.grad(out, operands, grad)

            guarded(row, f"{name}, {chance}", partial(_alone, row, f"{name}, {chance}, both", both))

            def forward(chance: float = chance, blocks: Any = blocks) -> Any:
                with torch.no_grad():
                    return block_attention(*operands, blocks, dropout=chance)

            guarded(row, f"{name}, {chance}", partial(_alone, row, f"{name}, {chance}, forward", forward))
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Packed sequences, in brackets how many times as fast as FlexAttention with its mask; scans; dropout."""
    by_case = {row["case"]: row["ms"] for row in rows}
    return "\n\n".join((
        _table_of_packed({name: ms for name, ms in by_case.items() if name.startswith("packed")}),
        markdown_grid([["scan of a mask of 4 x 4096 x 4096", "milliseconds"],
                       *([name, f"{ms:.3g}"] for name, ms in by_case.get("scan", {}).items())]),
        _table_of_dropout(by_case.get("dropout", {})),
    ))  # fmt: skip


def _table_of_packed(by_case: dict[str, dict[str, float]]) -> str:
    grid = [["documents", "step", "FlexAttention, mask made before", "FlexAttention", "varlen_attn", "ours",
             "our lists alone"]]  # fmt: skip
    for name, ms in by_case.items():
        for what, step in (("forward", "forward"), ("both", "with gradients")):
            flex = ms.get(f"flex, {what}")
            cells = [ms.get(f"flex, {what}, mask made before"), flex, *(ms.get(f"{who}, {what}") for who in
                     ("varlen", "ours")), ms.get("lists alone")]  # fmt: skip
            gains = [f" ({flex / one:.2f})" if flex and one and place in (2, 3) else ""
                     for place, one in enumerate(cells)]  # fmt: skip
            told = ["–" if one is None else f"{one:.3g}{gain}" for one, gain in zip(cells, gains, strict=True)]
            grid.append([name, step, *told])
    return markdown_grid(grid)


def _table_of_dropout(ms: dict[str, float]) -> str:
    grid = [["kept", "step", "without dropout", "dropout of 0.1"]]
    for kept in dict.fromkeys(key.split(", ")[0] for key in ms):
        for what, step in (("forward", "forward"), ("both", "with gradients")):
            grid.append([kept, step, *(f"{ms[f'{kept}, {chance}, {what}']:.3g}" for chance in (0.0, 0.1))])
    return markdown_grid(grid)
