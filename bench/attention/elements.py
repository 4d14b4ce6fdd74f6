"""Attention over single pairs, and over pairs in some of the blocks, beside torch's own attention by the dense mask.

Times are of CUDA graph replays; ours is what the tuner gives without measuring. Masks and lists are made before.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.attention.sweep import Posed, sweep
from bench.attention.ways import two_ways
from bench.table import markdown_grid
from bench.timing import graph_ms, guarded
from sparsecomp.attention import attend_by_weights, attention_weights
from sparsecomp.formats import CSR
from sparsecomp.lowering.attention.element_attention import ELEMENT_ATTENTION, elements_problem
from sparsecomp.lowering.attention.element_gradients import ELEMENTS_BY_KEY, ELEMENTS_BY_QUERY
from sparsecomp.ops import block_attention, element_attention
from sparsecomp.reference.attention.blocks import blocks_of
from sparsecomp.reference.attention.elements import elements_of_mask
from sparsecomp.reference.attention.scores import Scores

Row = dict[str, Any]
Attention = Callable[..., Tensor]


class Case(NamedTuple):
    """A mask that all heads share: of the blocks of 64 a share holds pairs, and in those a share is kept; bfloat16."""

    blocks: float
    within: float
    batch: int = 4
    heads: int = 16
    length: int = 4096
    depth: int = 64

    def mask(self) -> Tensor:
        """(1, 1, length, length)."""
        random = torch.Generator("cuda").manual_seed(0)
        side = self.length // 64
        some = torch.rand((side, side), generator=random, device="cuda") < self.blocks
        kept = torch.rand((self.length, self.length), generator=random, device="cuda") < self.within
        kept &= some.repeat_interleave(64, 0).repeat_interleave(64, 1)
        return (kept | torch.eye(self.length, dtype=torch.bool, device="cuda"))[None, None]

    def operands(self) -> list[Tensor]:
        """q, k and v, which want gradients, and a gradient of the result."""
        random = torch.Generator("cuda").manual_seed(0)
        shape = (self.batch, self.heads, self.length, self.depth)
        made = [torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        return [one.requires_grad_(at < 3) for at, one in enumerate(made)]


CASES = (Case(1.0, 0.01), Case(1.0, 0.05), Case(0.1, 0.1), Case(0.25, 0.2))


def run() -> Iterator[Row]:
    """The row of each case: milliseconds by rival, and differences."""
    for case in CASES:
        mask, (q, k, v, grad) = case.mask(), case.operands()
        row: Row = {"case": list(case), "kept": round(float(mask.float().mean()), 5), "ms": {}, "difference": {}}
        right: list[Tensor] = []
        for name, make in rivals(mask).items():
            guarded(row, name, partial(_take, row, name, make, (q, k, v), grad, right))
        print(row, flush=True)
        yield row


def rivals(mask: Tensor) -> dict[str, Callable[[], Attention]]:
    """By name, what makes each; all compute the same."""
    return {
        "SDPA, mask": lambda: partial(F.scaled_dot_product_attention, attn_mask=mask),
        "SDPA, mask, compiled": lambda: torch.compile(partial(F.scaled_dot_product_attention, attn_mask=mask)),
        "SDPA, mask, efficient": lambda: partial(_efficient, mask=mask),
        "blocks": lambda: _by_blocks(mask),
        "elements": lambda: _by_elements(mask),
        "three steps": lambda: _by_steps(mask),
    }


def _take(
    row: Row, name: str, make: Callable[[], Attention], operands: tuple[Tensor, ...], grad: Tensor, right: list[Tensor]
) -> None:
    forward, both = two_ways(make(), operands, grad)
    forward()
    found = [one.detach().float() for one in both()]
    right.extend(found[len(right) :])
    row["difference"][name] = [float(f"{((one - other).norm() / other.norm()).item():.2g}")
                               for one, other in zip(found, right, strict=True)]  # fmt: skip
    for what, call in (("forward", forward), ("both", both)):
        row["ms"][f"{name}, {what}"] = round(graph_ms([call] * 2, 10), 4)


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, mask)


def _by_blocks(mask: Tensor) -> Attention:
    blocks = blocks_of(mask)
    return lambda q, k, v: block_attention(q, k, v, blocks)[0]


def _by_elements(mask: Tensor) -> Attention:
    elements = elements_of_mask(mask)
    return lambda q, k, v: element_attention(q, k, v, elements)[0]


def _by_steps(mask: Tensor) -> Attention:
    pairs = CSR.from_dense(mask[0, 0].to(torch.bfloat16))
    return lambda q, k, v: attend_by_weights(attention_weights(q, k, pairs), v, pairs)


def candidates(workers: int) -> Iterator[Row]:
    """Every configuration of the three kernels at 1 % of the pairs; see `bench.attention.sweep`."""
    return sweep(problems, workers)


def problems() -> Iterator[Posed]:
    """What `candidates` times."""
    case = CASES[0]
    q, k, v, grad = (one.detach() for one in case.operands())
    lists, scores = list(elements_of_mask(case.mask())[2:]), Scores(case.depth**-0.5)
    out, logsumexp = torch.ops.sparsecomp.element_attention(q, k, v, lists, scores.scale)
    delta = (grad.float() * out.float()).sum(-1)
    by_q, by_k, by_v, result, sums = map(torch.empty_like, (q, k, v, out, logsumexp))
    for operation, strided, operands in (
        (ELEMENT_ATTENTION, (q, k, v, result), (q, k, v, *lists[:2], None, result, sums)),
        (ELEMENTS_BY_QUERY, (q, k, v, grad, out, by_q),
         (q, k, v, grad, out, logsumexp, None, *lists[:2], None, by_q, torch.empty_like(delta))),
        (ELEMENTS_BY_KEY, (q, k, v, grad, by_k, by_v),
         (q, k, v, grad, logsumexp, delta, *lists[2:], None, by_k, by_v)),
    ):  # fmt: skip
        yield Posed(operation.name, operation, elements_problem(q, k, v, lists, scores, strided), operands)


def table(rows: list[Row]) -> str:
    """Milliseconds by case, and in brackets how many times as fast as the better of torch's with the mask."""
    grid = [["blocks of 64 that hold pairs", "kept", "step", "SDPA, mask", "blocks", "elements", "three steps"]]
    for row in rows:
        for what, step in (("forward", "forward"), ("both", "with gradients")):
            times = {key.removesuffix(f", {what}"): ms for key, ms in row["ms"].items() if key.endswith(f", {what}")}
            dense = min((ms for name, ms in times.items() if name.startswith("SDPA")), default=float("nan"))
            cells = [f"{times[name]:.3g} ({dense / times[name]:.2f})" if name in times else "–"
                     for name in ("blocks", "elements", "three steps")]  # fmt: skip
            grid.append([f"{row['case'][0]:.0%}", f"{row['kept']:.1%}", step, f"{dense:.3g}", *cells])
    return markdown_grid(grid)
