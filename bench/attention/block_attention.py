"""Attention over listed blocks beside FlexAttention and torch's own attention, forward and with gradients.

Times are of CUDA graph replays; ours is what the tuner gives without measuring. Masks and lists are made before.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.attention.cases import CASES, Case
from bench.attention.ways import two_ways
from bench.parallel import measured
from bench.table import markdown_grid
from bench.timing import graph_ms, guarded
from sparsecomp.ops import block_attention
from sparsecomp.reference.attention.blocks import blocks_of

Row = dict[str, Any]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(names: Sequence[str] | None = None, workers: int = 1) -> Iterator[Row]:
    """The row of each case: milliseconds by rival, 1e12 operations a second on kept pairs, and differences.

    Args:
        names: of cases, None for all.
        workers: processes that compile side by side.
    """
    wanted = [place for place, case in enumerate(CASES) if names is None or case.name in names]
    for row in measured(prepared, wanted, min(workers, len(wanted)), batch=1):
        print(table_of(row), flush=True)
        yield row


def prepared(place: int) -> Callable[[], Row]:
    """What measures a case, compiled."""
    case = CASES[place]
    sizes = (case.batch, case.heads, case.kv_heads, case.length, case.depth)
    row: Row = {"case": case.name, "sizes": sizes, "ms": {}, "difference": {}, "rate": {}}
    q, k, v, grad = case.operands()
    mask = case.dense()
    row["kept"] = round(kept := float(mask.float().mean()), 5)
    operations = 4 * case.batch * case.heads * case.length**2 * case.depth * kept
    right: list[Tensor] = []
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    for name, make in rivals(case, mask).items():
        guarded(row, name, partial(_prepare, row, name, make, (q, k, v), grad, right, calls))
    right.clear()

    def measure() -> Row:
        for name, both in calls.items():
            for what, call in both.items():
                products = 3.5 if what == "both" else 1.0
                key = f"{name}, {what}"
                guarded(row, key, partial(_take, row, key, call, products * operations))
        return row

    return measure


def rivals(case: Case, mask: Tensor) -> Mapping[str, Callable[[], Attention]]:
    """By name, what makes each: all but the dense ones compute the same."""
    found: dict[str, Callable[[], Attention]] = {
        f"flex {block}": partial(_flex, case, block) for block in ((128, 64) if case.name == "BigBird" else (128,))
    }
    found |= {f"ours {q}x{k}": partial(_ours, mask, (q, k)) for q, k in case.blocks}
    if case.masked_rivals:
        found["SDPA, mask"] = lambda: partial(_dense, mask=mask)
        found["SDPA, mask, compiled"] = lambda: torch.compile(partial(_dense, mask=mask))
    found["dense flash"] = lambda: partial(_dense, backend=SDPBackend.FLASH_ATTENTION)
    found["dense cuDNN"] = lambda: partial(_dense, backend=SDPBackend.CUDNN_ATTENTION)
    return found


def _prepare(
    row: Row, name: str, make: Callable[[], Attention], operands: tuple[Tensor, ...], grad: Tensor,
    right: list[Tensor], calls: dict[str, dict[str, Callable[[], Any]]],
) -> None:  # fmt: skip
    forward, both = two_ways(make(), operands, grad)
    forward()
    found = [one.detach() for one in both()]
    if not name.startswith("dense"):
        right.extend(found[len(right) :])
        pairs = zip(found, right, strict=True)
        row["difference"][name] = [float(f"{((one - other).norm() / other.norm()).item():.2g}") for one, other in pairs]
    calls[name] = {"forward": forward, "both": both}


def _take(row: Row, key: str, call: Callable[[], Any], operations: float) -> None:
    ms = graph_ms([call, call], 10 if operations > 1e12 else 20)
    row["ms"][key] = round(ms, 4)
    row["rate"][key] = round(operations / ms / 1e9, 1)


def _ours(mask: Tensor, block: tuple[int, int]) -> Attention:
    blocks = blocks_of(mask, block)
    return lambda q, k, v: block_attention(q, k, v, blocks)[0]


def _flex(case: Case, block: int) -> Attention:
    make = torch.compile(create_block_mask) if case.length > 8192 else create_block_mask
    mask = make(case.mask_of(case), None, None, case.length, case.length, device="cuda", BLOCK_SIZE=block)
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    gqa = case.heads != case.kv_heads
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=gqa)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, backend: SDPBackend | None = None
) -> Tensor:  # fmt: skip
    gqa = q.shape[1] != k.shape[1]
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=gqa)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)


def table_of(row: Row) -> str:
    """A row for those who watch: times, rates on kept pairs and speed over the better FlexAttention."""
    lines = [f"{row['case']} {row['sizes']}, kept {row['kept']:.2%}"]
    for what in ("forward", "both"):
        times = {key: ms for key, ms in row["ms"].items() if key.endswith(f", {what}")}
        flex = min((ms for key, ms in times.items() if key.startswith("flex")), default=float("nan"))
        lines += [f"  {key:32} {ms:9.4f} ms {row['rate'][key]:8.1f} TFLOP/s of kept pairs  {flex / ms:5.2f}x flex"
                  for key, ms in times.items()]  # fmt: skip
    lines += [f"  difference of {name}: {found}" for name, found in row["difference"].items()]
    return "\n".join([*lines, *(f"  left out: {name}: {why}" for name, why in row.get("left out", {}).items())])


def table(rows: list[Row]) -> str:
    """Milliseconds by case, and in brackets how many times as fast as FlexAttention."""
    names = ("ours 64x64", "ours 128x128", "SDPA, mask, compiled", "dense cuDNN")
    grid = [["case (batch, heads, heads of k, tokens, depth)", "kept", "step", "FlexAttention", *names]]
    for row in rows:
        for what, step in (("forward", "forward"), ("both", "with gradients")):
            times = {key.removesuffix(f", {what}"): ms for key, ms in row["ms"].items() if key.endswith(f", {what}")}
            flex = min((ms for key, ms in times.items() if key.startswith("flex")), default=math.nan)
            cells = [f"{times[name]:.3g} ({flex / times[name]:.2f})" if name in times else "–" for name in names]
            sizes = ", ".join(map(str, row["sizes"]))
            grid.append([f"{row['case']} ({sizes})", f"{row['kept']:.1%}", step, f"{flex:.3g}", *cells])
    return markdown_grid(grid)
