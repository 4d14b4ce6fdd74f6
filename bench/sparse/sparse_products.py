"""Products of two sparse matrices on a GPU, float32, as called: beside cuSPARSE's, by torch, and scipy's on the CPU.

Graphs are squared, and pruned weights multiplied with their transposes. `product` is `a @ b`, `bounded` the same in
memory of a given size. At given places there are two cases: as many as `a` stores, beside cuSPARSE's product of which
they are then taken; and all of the product's, whose pattern is known from before, beside cuSPARSE's product, since
torch has none for a known pattern. Of `b` by columns rows of both are walked; else products are added up.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.sparse.matrices import read
from bench.table import markdown_grid
from bench.timing import guarded, in_turns_ms
from sparsecomp.formats import COO, CSC, CSR, bounded_matmul, masked_matmul

GRAPHS = ("bcsstk13.mtx.gz", "ca-CondMat.mtx.gz", "p2p-Gnutella31.mtx.gz")
WEIGHTS = (
    "dlmc_transformer_mag0.9_enc2_ffn1.smtx", "dlmc_transformer_vd0.98_dec5_ffn1.smtx", "dlmc_rn50_mag0.7_b2g2.smtx",
)  # fmt: skip
RANDOM = 4096
MOST = 2**28
"""Pairs of elements that meet, above which `bounded` has no memory for them."""

Calls = dict[str, Callable[[], Any]]


def run(device: str = "cuda", rounds: int = 15) -> Iterator[dict[str, Any]]:
    """One row a pair of matrices: milliseconds of each way, and scipy's."""
    for name, (one, other) in pairs(device):
        meet = int(other.crow.diff()[one.col.long()].sum())
        row: dict[str, Any] = {"case": name, "elements": [one.nnz, other.nnz], "pairs": meet, "ms": {}}
        for group in (whole(one, other, meet), at_known(one, other), masked(one, other)):
            guarded(row, ", ".join(group), lambda row=row, group=group: _timed(row, group, rounds))
        guarded(row, "scipy", lambda row=row, one=one, other=other: _scipys(row, one, other))
        print(row, flush=True)
        yield row


def pairs(device: str) -> Iterator[tuple[str, tuple[CSR, CSR]]]:
    """Operands of the products, float32."""
    folder = Path(os.environ.get("SPARSECOMP_TEST_DATA", "")) / "matrices"
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(RANDOM, RANDOM, generator=generator) < 0.01
    random: Any = CSR.from_dense(torch.randn(RANDOM, RANDOM, generator=generator) * kept).to(device)
    yield f"random {RANDOM}², 1 %, squared", (random, random)
    for name in (*GRAPHS, *WEIGHTS):
        if (folder / name).exists():
            found: Any = read(folder / name).to(CSR).to(torch.float32).to(device)
            squared = found.shape[0] == found.shape[1]
            told = name.removesuffix(".gz").rsplit(".", 1)[0]
            other = found if squared else found.mT.to(CSR)
            yield f"{told}, {'squared' if squared else 'with its transpose'}", (found, other)


def whole(one: CSR, other: CSR, meet: int) -> Calls:
    """The product, wherever it stores something."""
    a, b = one.to_torch(), other.to_torch()
    calls: Calls = {"cuSPARSE": lambda: a @ b, "product": lambda: one @ other}
    if meet <= MOST:
        calls["bounded"] = lambda: bounded_matmul(one, other, max(meet, 1))
    return calls


def at_known(one: CSR, other: CSR) -> Calls:
    """The product where its pattern is known from before."""
    places = one @ other
    columns = other.to(CSC)
    return {
        "known": lambda: masked_matmul(one, other, places),
        "known, by columns": lambda: masked_matmul(one, columns, places),
    }


def masked(one: CSR, other: CSR) -> Calls:
    """The product at what a matrix of its shape stores: the first one's elements, or as many of the product's."""
    if one.shape[1] == other.shape[1]:
        places = one
    else:
        found = one @ other
        row, col = (index[:: max(found.nnz // one.nnz, 1)] for index in found._positions())
        places = COO.from_triplets(row, col, torch.ones(row.shape[0], device=row.device), found.shape).to(CSR)
    columns = other.to(CSC)
    a, b = one.to_torch(), other.to_torch()
    keys = keys_of(places.crow, places.col, places.shape[1])
    return {
        "cuSPARSE, then the mask": lambda: _taken(a @ b, keys), "masked": lambda: masked_matmul(one, other, places),
        "masked, by columns": lambda: masked_matmul(one, columns, places),
    }  # fmt: skip


def keys_of(crow: Tensor, col: Tensor, cols: int) -> Tensor:
    """A number for each element of a matrix by rows: row times columns plus column."""
    row = torch.repeat_interleave(crow.diff(), output_size=col.numel())
    return row.long() * cols + col


def _taken(product: Tensor, keys: Tensor) -> Tensor:
    """The elements of a product, sorted in rows or not, at these places."""
    own = keys_of(product.crow_indices(), product.col_indices(), product.shape[1])
    own, order = own.sort()
    places = torch.searchsorted(own, keys).clamp_(max=own.numel() - 1)
    return product.values()[order[places]].where(own[places] == keys, 0)


def _timed(row: dict[str, Any], calls: Calls, rounds: int) -> None:
    row["ms"] |= dict(zip(calls, in_turns_ms(list(calls.values()), rounds=rounds), strict=True))


def _scipys(row: dict[str, Any], one: CSR, other: CSR) -> None:
    a, b = one.to("cpu").to_scipy(), other.to("cpu").to_scipy()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        (a @ b).sort_indices()
        times.append(time.perf_counter() - start)
    row["ms"]["scipy"] = round(min(times) * 1e3, 3)


COLUMNS = (
    ("product", "cuSPARSE"), ("bounded", "cuSPARSE"), ("known", "cuSPARSE"), ("known, by columns", "cuSPARSE"),
    ("masked", "cuSPARSE, then the mask"), ("masked, by columns", "cuSPARSE, then the mask"),
)  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown: milliseconds, and in brackets how often ours fits in its peer's."""
    peers = list(dict.fromkeys(peer for _, peer in COLUMNS))
    lines = [["case", "scipy", *peers, *(name for name, _ in COLUMNS)]]
    for row in rows:
        ms = row["ms"]
        ours = [
            f"{ms[name]:.3g} ({ms[peer] / ms[name]:.2f})" if name in ms and peer in ms else "" for name, peer in COLUMNS
        ]
        lines.append([row["case"], *(f"{ms[name]:.3g}" if name in ms else "" for name in ("scipy", *peers)), *ours])
    return markdown_grid(lines)
