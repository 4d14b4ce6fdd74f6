"""Sparse patterns at random, for timing kernels: as many entries a row as a signature says, as uneven as it says."""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import KernelSignature, Rows, density_bucket, row_bucket

SKEWS = {"even": 0, "mixed": 1, "skewed": 4, "extreme": 32}
"""Deviation over mean of a row's entries that stands for each word of `signature.row_bucket`."""


class RandomPattern(NamedTuple):
    """Entries of a sparse matrix by row; `row` is what `crow` says at length."""

    crow: Tensor
    col: Tensor
    row: Tensor


def row_lengths(entries: int, rows: int, variation: float) -> Rows:
    """The distribution of `entries` over `rows`."""
    return Rows(entries / rows if rows else 0.0, variation)


def density_of(entries: int, rows: int, columns: int) -> float:
    """Share of stored elements, at most 1: a view of part of the rows may know only of the whole's entries."""
    return min(entries / (rows * columns), 1.0) if rows and columns else 0.0


def sizes_and_entries(signature: KernelSignature, rows: str, columns: str) -> tuple[int, int, int, int]:
    """Rows, columns, entries and variation that fall in the buckets of `signature` (sizes named by the arguments).

    Rounded sizes and a rounded density need not agree with the rounded entries a row, so that lower ones are tried.

    Raises:
        ValueError: nothing does.
    """
    sizes = dict(signature.sizes)
    m, k = int(sizes[rows]), int(sizes[columns])
    spread, density = signature.rows, signature.density
    if spread is None or density is None:
        raise ValueError("the entries a row and the density are needed")
    for high, wide, share in product((m, m // 2 + 1), (k, k // 2 + 1), (density, 0.51 * density)):
        entries = min(max(round(high * wide * share), 1), high * wide) if density else 0
        same_rows = row_bucket(row_lengths(entries, high, spread.variation)) == row_bucket(spread)
        if same_rows and density_bucket(density_of(entries, high, wide)) == density_bucket(density):
            return high, wide, entries, SKEWS[row_bucket(spread).split()[1]]
    raise ValueError(f"no {m} x {k} matrix has density {density} and {spread.mean} entries a row")


def random_pattern(
    rows: int, columns: int, entries: int, variation: int, index: str, random: torch.Generator
) -> RandomPattern:
    """Entries at distinct places, ascending in each row; lengths follow a gamma distribution of this variation."""
    device = random.device
    if variation:
        shape = torch.full((rows,), 1.0 / variation**2, dtype=torch.float64, device="cpu")
        seed = int(torch.randint(2**31, (1,), generator=random, device=device))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            weights = torch.distributions.Gamma(shape, 1.0).sample().to(device) + 1e-9
    else:
        weights = torch.ones(rows, dtype=torch.float64, device=device)
    counts = _shares(weights, entries, columns)
    crow = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts, 0, out=crow[1:])
    row = torch.repeat_interleave(torch.arange(rows, device=device), counts, output_size=entries)
    # the i-th of c entries lies in the i-th of c stretches of the row
    place, count = torch.arange(entries, device=device) - crow[row], counts[row]
    low, high = place * columns // count, (place + 1) * columns // count
    uniform = torch.rand(entries, generator=random, device=device, dtype=torch.float64)
    col = low + (uniform * (high - low)).long()
    return RandomPattern(crow.to(getattr(torch, index)), col.to(getattr(torch, index)), row)


def _shares(weights: Tensor, total: int, most: int) -> Tensor:
    """Whole numbers of this sum in proportion to `weights`, none above `most`."""
    counts = (weights / weights.sum() * total).long().clamp_(max=most)
    order = weights.argsort(descending=True, stable=True)
    left = total - int(counts.sum())
    while left:
        open_rows = order[counts[order] < most]
        add = max(left // max(open_rows.numel(), 1), 1)
        chosen = open_rows[: left // add]
        more = (most - counts[chosen]).clamp(max=add)
        counts[chosen] += more
        left -= int(more.sum())
    return counts
