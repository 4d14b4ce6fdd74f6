"""Patterns and products of two sparse matrices beside scipy, on one core: what changes patterns costs besides training.

Calls take turns in one process, and the best of several counts. Products are of the real matrices in the folder that
`SPARSECOMP_TEST_DATA` names, beside random ones. On a GPU, patterns beside torch's radix sort of the same numbers.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch

from bench.cpu import in_turns_ms
from bench.sparse.matrices import read
from bench.table import markdown_grid
from bench.timing import in_turns_ms as gpu_in_turns_ms
from sparsecomp.formats import CSR, Pattern

ENTRIES, SIZE, RANDOM = 10_000_000, 20_000, 4096
GRAPHS = ("bcsstk13.mtx.gz", "ca-CondMat.mtx.gz", "p2p-Gnutella31.mtx.gz")


def run(entries: int = ENTRIES, size: int = SIZE, rounds: int = 5) -> Iterator[dict[str, Any]]:
    """One row a case: milliseconds of ours and of scipy's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # scipy's products and sorts use one core
    try:
        for case, calls in (*pattern_cases(entries, size), *product_cases()):
            ours, theirs = in_turns_ms(calls, rounds)
            row = {"case": case, "sparsecomp": ours, "scipy": theirs}
            print(row, flush=True)
            yield row
    finally:
        torch.set_num_threads(threads)


def run_on_gpu(entries: int = ENTRIES, size: int = SIZE, rounds: int = 15) -> Iterator[dict[str, Any]]:
    """One row an operation on patterns: milliseconds as called, and of a sort of all the numbers that it reads."""
    one, other = (_random_pattern(entries, size, seed).to("cuda") for seed in (0, 1))
    both = torch.cat([one.keys, other.keys])
    both = both[torch.randperm(both.numel(), device="cuda")]
    shuffled = both[: one.nnz].clone()
    told = f"{entries / 1e6:g} M entries"
    calls: dict[str, tuple[Callable[[], Any], torch.Tensor]] = {
        "union": (lambda: one | other, both), "intersection": (lambda: one & other, both),
        "difference": (lambda: one - other, both), "symmetric difference": (lambda: one ^ other, both),
        "transpose": (lambda: one.mT, shuffled),
    }  # fmt: skip
    for case, (call, numbers) in calls.items():
        ours, theirs = gpu_in_turns_ms([call, lambda numbers=numbers: numbers.sort()], rounds=rounds)
        row = {"case": f"{case}, {told}", "sparsecomp": ours, "radix sort": theirs}
        print(row, flush=True)
        yield row


Case = tuple[str, tuple[Callable[[], Any], Callable[[], Any]]]


def pattern_cases(entries: int, size: int) -> Iterator[Case]:
    """Set operations on two patterns of as many random entries."""
    one, other = (_random_pattern(entries, size, seed) for seed in (0, 1))
    a, b = _scipys(one), _scipys(other)
    told = f"{entries / 1e6:g} M entries"
    yield f"union, {told}", (lambda: one | other, lambda: a + b)
    yield f"intersection, {told}", (lambda: one & other, lambda: a * b)
    yield f"difference, {told}", (lambda: one - other, lambda: a > b)
    yield f"symmetric difference, {told}", (lambda: one ^ other, lambda: a != b)
    yield f"transpose, {told}", (lambda: one.mT, lambda: a.T.tocsr())


def product_cases() -> Iterator[Case]:
    """A @ A of real matrices, and of a random one."""
    folder = Path(os.environ.get("SPARSECOMP_TEST_DATA", "")) / "matrices"
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(RANDOM, RANDOM, generator=generator)
    dense *= torch.rand(RANDOM, RANDOM, generator=generator) < 0.01
    matrices = {f"random {RANDOM}², 1 %": CSR.from_dense(dense)}
    for name in GRAPHS:
        if (folder / name).exists():
            found = read(folder / name).to(CSR)
            matrices[name.split(".")[0]] = found.to(torch.float32)
    for name, matrix in matrices.items():
        theirs = matrix.to_scipy()
        yield f"square of {name}", (lambda one=matrix: one @ one, lambda one=theirs: _sorted(one @ one))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown: milliseconds, and how often ours fits in the peer's."""
    (peer,) = rows[0].keys() - {"case", "sparsecomp"}
    lines = [["case", "sparsecomp", peer, f"{peer} ÷ sparsecomp"]]
    for row in rows:
        ours, theirs = row["sparsecomp"], row[peer]
        lines.append([row["case"], f"{ours:.3g}", f"{theirs:.3g}", f"{theirs / ours:.2f}"])
    return markdown_grid(lines)


def _random_pattern(entries: int, size: int, seed: int) -> Pattern:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(size * size, (entries,), generator=generator)
    return Pattern.from_positions(keys // size, keys % size, (size, size))


def _sorted(matrix: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """With columns that ascend in each row, as ours always do."""
    matrix.sort_indices()
    return matrix


def _scipys(pattern: Pattern) -> scipy.sparse.csr_array:
    """The pattern as scipy would hold it: with a byte at each place."""
    ones = np.ones(pattern.nnz, dtype=np.int8)
    return _sorted(scipy.sparse.csr_array((ones, (pattern.row.numpy(), pattern.col.numpy())), shape=pattern.shape))
