"""Linear layers of 1 to 64 rows by weights with 50 to 90 % zeros, as at a step of generation: ours beside cuBLAS.

Replayed CUDA graphs over rotated weights, which are read from memory each time. `candidates` times every
configuration of every kernel on a case each, and the best of them on others, to hold the estimates against.
"""

import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.table import markdown_grid
from bench.timing import graph_ms, guarded, relative_error
from sparsecomp.formats import BITMAP, NARROW, SparseMatrix
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.launch.epilogue import output_of
from sparsecomp.lowering.sparse.bitmap_linear import MOST, BitmapChunks, longest_chunk
from sparsecomp.lowering.sparse.gated_pair import PAIRS
from sparsecomp.lowering.sparse.launcher import launcher_of
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.cost import seconds
from sparsecomp.lowering.tuning.template import Candidate, Operation
from sparsecomp.lowering.tuning.trial import first_line
from sparsecomp.ops.sparse.bitmap_linear import bitmap_linear
from sparsecomp.ops.sparse.dense_weight import stored_to_dense
from sparsecomp.ops.sparse.linear import sparse_linear
from sparsecomp.reference.patterns import stored_by_rows

SIZES = ((11008, 4096), (4096, 11008), (28672, 8192))
"""Features out and in."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
ZEROS = (0.5, 0.7, 0.8, 0.9)
FORMATS: tuple[type[SparseMatrix], ...] = (NARROW, BITMAP)
BITMAPS = {"bitmap": 1, "bitmap of twos": 2}
"""Copies that a compiler keeps under the promise, or could, by how many neighbours share a bit."""
_ROTATED = 2e8
"""Bytes of weights that take turns, several times what the L2 cache holds."""
_FOUND = 6
"""Best configurations of a kernel that are tried on other cases."""


class Case(NamedTuple):
    """A layer."""

    out: int
    k: int
    rows: int
    zeros: float

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.out}x{self.k}, {self.zeros:.0%} zeros, {self.rows} rows"


def run() -> Iterator[dict[str, Any]]:
    """A row a case: milliseconds of cuBLAS, of each format and of a bitmap, and the relative error of ours; with one
    row of x also milliseconds to write each format out."""
    for size in SIZES:
        for zeros in ZEROS:
            weights = _weights(Case(*size, 1, zeros))
            for rows in ROWS:
                row = _row(Case(*size, rows, zeros), weights)
                print(row, flush=True)
                yield row


def _weights(case: Case, names: Sequence[str] = ()) -> dict[str, SparseMatrix]:
    """The same weight in each format, or in those of these names."""
    random = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(case.out, case.k, generator=random, device="cuda", dtype=torch.float16) / case.k**0.5
    weight[torch.rand(weight.shape, generator=random, device="cuda") < case.zeros] = 0
    return {kind.__name__: kind.from_dense(weight) for kind in FORMATS if not names or kind.__name__ in names}


def _row(case: Case, weights: dict[str, SparseMatrix]) -> dict[str, Any]:
    row: dict[str, Any] = {"layer": case._asdict(), "ms": {}, "error": {}, "MiB": {}, "written out, ms": {}}
    x = torch.randn(case.rows, case.k, device="cuda", dtype=torch.float16)
    dense = next(iter(weights.values())).to_dense()
    exact = F.linear(x.float(), dense.float()).double()
    row["MiB"]["dense"] = round(dense.nbytes / 2**20, 1)
    guarded(row, "dense", lambda: row["ms"].update(dense=timed([partial(F.linear, x, one) for one in copies(dense)])))
    for name, weight in weights.items():
        if name == BITMAP.__name__ and case.rows > MOST:
            continue  # written out, as a compiler has it
        row["MiB"][name] = round(weight.nbytes / 2**20, 1)
        guarded(row, name, partial(_time_format, row, name, weight, x, exact))
        if case.rows == ROWS[0]:
            guarded(row, f"{name} written out", partial(_time_writing, row, name, weight))
    for name, grain in BITMAPS.items() if case.rows <= MOST else ():
        guarded(row, name, partial(_time_bitmap, row, name, grain, weights["NARROW"], x, exact))
    return row


def _time_writing(row: dict[str, Any], name: str, weight: SparseMatrix) -> None:
    """To write the weight out, as a graph of many rows does in each call."""
    calls: list[Callable[[], Tensor]] = []
    for one in copies_of(weight):
        values, arrays, layout = stored_by_rows(one)
        calls.append(partial(stored_to_dense, values, arrays, layout.written()))
    row["written out, ms"][name] = timed(calls)


def _time_format(row: dict[str, Any], name: str, weight: SparseMatrix, x: Tensor, exact: Tensor) -> None:
    calls: list[Callable[[], Tensor]] = []
    for one in copies_of(weight):
        values, arrays, layout = stored_by_rows(one)
        calls.append(partial(sparse_linear, x, values, arrays, layout.written()))
    _note(row, name, calls, exact)


def _time_bitmap(
    row: dict[str, Any], name: str, grain: int, matrix: SparseMatrix, x: Tensor, exact: Tensor
) -> None:  # fmt: skip
    """By the copy that a compiler keeps under the promise."""
    every = kept_copies(matrix, grain)
    row["MiB"][name] = round(sum(one.nbytes for one in every[0][3]) / 2**20, 1)
    _note(row, name, [partial(bitmap_linear, x, *one) for one in every], exact)


def kept_copies(matrix: SparseMatrix, grain: int) -> list[tuple[Any, ...]]:
    """Operands of `bitmap_linear` behind x, up to the longest chunk, with one after another of rotated copies."""
    values, arrays, layout = stored_by_rows(matrix)
    copy, longest = BitmapChunks(layout.written(), grain)(values, *arrays), longest_chunk(arrays, layout, grain)
    return [
        (values, list(arrays), layout.written(), [*(one.clone() for one in copy[:2]), last], grain, longest)
        for last in copies(copy[2])
    ]


def _note(row: dict[str, Any], name: str, calls: list[Callable[[], Tensor]], exact: Tensor) -> None:
    found = calls[0]()
    row["error"][name] = relative_error(found, exact)
    row["ms"][name] = timed(calls)


def timed(calls: list[Callable[[], Any]]) -> float:
    """Milliseconds of one of these calls."""
    return round(graph_ms(calls, 10), 5)


def copies(tensor: Tensor) -> list[Tensor]:
    """A tensor and so many copies of it that one that has had its turn is not in the cache any more."""
    return [tensor, *(tensor.clone() for _ in range(_count(tensor.nbytes) - 1))]


def copies_of(matrix: SparseMatrix) -> list[SparseMatrix]:
    """As `copies`, of all its arrays."""
    kind, arrays, shape = type(matrix), matrix.arrays.values(), matrix.shape
    return [kind(*(array.clone() for array in arrays), shape=shape) for _ in range(_count(matrix.nbytes))]


def _count(size: int) -> int:
    return max(3, -(-int(_ROTATED) // size))


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of cuBLAS, and how many times as fast each format is, and bitmaps."""
    names = [*(kind.__name__ for kind in FORMATS), *BITMAPS]
    formats = [name for name in names if any(name in row["ms"] for row in rows)]
    grid = [["layer", "zeros", "rows", "cuBLAS, ms", *formats]]
    for row in rows:
        layer, ms = row["layer"], row["ms"]
        cells = [f"{ms[name]:.4f} ({ms['dense'] / ms[name]:.2f})" if name in ms else "–" for name in formats]
        size = f"{layer['out']}x{layer['k']}"
        grid.append([size, f"{layer['zeros']:.0%}", str(layer["rows"]), f"{ms.get('dense', 0):.4f}", *cells])
    return markdown_grid(grid)


# -- candidates

_WHOLE = tuple(Case(*size, rows, 0.7) for rows in (1, 8) for size in ((11008, 4096), (4096, 11008)))
"""All configurations are timed on these."""
_OTHERS = (
    *(Case(*size, rows, 0.9) for size in SIZES[:2] for rows in (1, 2, 4, 8, 16)),
    *(Case(size, 4096, 1, zeros) for size in (4096, 32000) for zeros in (0.7, 0.9)),
)


def candidates(workers: int, names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """A row a case and kernel: milliseconds by configuration, the fastest first, and its estimate.

    Args:
        workers: processes that compile side by side.
        names: of formats, instead of all.
    """
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        shares = [(case, share, workers, names) for share in range(workers) for case in _WHOLE]
        pool.starmap(_compile, shares, chunksize=1)
    best: dict[tuple[str, int], list[str]] = {}
    for case in _WHOLE:
        for row in _timed(case, None, names):
            best[row["kernel"], _kind(case)] = list(row["ms"])[:_FOUND]
            yield row
    for case in _OTHERS:
        yield from _timed(case, best, names)


def _compile(case: Case, share: int, workers: int, names: Sequence[str]) -> None:
    small = case._replace(out=256)
    for operation, problem, tensors in _problems(small, _weights(small, names)):
        found = operation.candidates(problem._replace(m=case.out), device_of(torch.device("cuda", 0)))
        for one in found[share::workers]:
            try:
                one.template.prepare(problem, one.config)(*tensors)
            except Exception as error:
                print(one.name, first_line(error), flush=True)


def _timed(
    case: Case, best: dict[tuple[str, int], list[str]] | None, names: Sequence[str]
) -> Iterator[dict[str, Any]]:  # fmt: skip
    weights, card = _weights(case, names), card_of(torch.device("cuda", 0))
    dense = next(iter(weights.values())).to_dense()
    x = torch.randn(case.rows, case.k, device="cuda", dtype=torch.float16)
    reference = timed([partial(F.linear, x, one) for one in copies(dense)])
    rows: dict[str, dict[str, Any]] = {}
    for operation, problem, _ in _problems(case, weights):
        tensors = [tensors for _, _, tensors in _rotated(case, weights, operation)]
        for candidate in operation.candidates(problem, device_of(torch.device("cuda", 0))):
            name, config = candidate.template.name, _without_columns(candidate)
            if best is not None and config not in best.get((name, _kind(case)), ()):
                continue
            row = rows.setdefault(name, {"case": case.name, "kernel": name, "dense": reference, "ms": {}})
            try:
                launch = candidate.template.prepare(problem, candidate.config)
                ms = timed([partial(launch, *each) for each in tensors])
            except Exception as error:
                print(candidate.name, first_line(error), flush=True)
                continue
            row["ms"][config] = (ms, round(seconds(candidate, problem, card) * 1e3, 5))
    for row in rows.values():
        row["ms"] = dict(sorted(row["ms"].items(), key=lambda one: one[1][0]))
        print(f"{row['case']}: {row['kernel']}, cuBLAS {reference:.4f}", flush=True)
        for config, (ms, estimate) in list(row["ms"].items())[: 8 if best is None else 2]:
            print(f"  {ms:8.4f} ms, estimate {estimate:8.4f}: {config}", flush=True)
        if best is None:
            first = min(row["ms"].items(), key=lambda one: one[1][1], default=None)
            print(f"  first by estimate: {first}", flush=True)
        yield row


def _kind(case: Case) -> int:
    """Which of the cases that are timed whole is most like it."""
    return min(
        range(len(_WHOLE)),
        key=lambda place: abs(math.log2(_WHOLE[place].rows / case.rows)) + abs(math.log2(_WHOLE[place].out / case.out)),
    )


def _without_columns(candidate: Candidate[Any]) -> str:
    """The configuration but for its columns, which follow from the rows of the case."""
    return str({name: value for name, value in candidate.config.items() if name != "BN"})


def _rotated(
    case: Case, weights: dict[str, SparseMatrix], operation: Operation[Any]
) -> Iterator[tuple[Operation[Any], Any, tuple[Tensor | None, ...]]]:  # fmt: skip
    for one in _problems(case, weights, rotated=True):
        if one[0] is operation:
            yield one


def _problems(
    case: Case, weights: dict[str, SparseMatrix], rotated: bool = False
) -> Iterator[tuple[Operation[Any], Any, tuple[Tensor | None, ...]]]:  # fmt: skip
    """Operation, problem and tensors of each format, and of a gated pair in it; of each of its copies if they are to be
    rotated."""
    x = torch.randn(case.rows, case.k, device="cuda", dtype=torch.float16)
    for matrix in weights.values():
        every = copies_of(matrix)
        for one, other in zip(every, [*every[1:], every[0]], strict=True) if rotated else [every[:2]]:
            values, arrays, layout = stored_by_rows(one)
            out = torch.empty(case.rows, case.out, device="cuda", dtype=torch.float16).mT
            described = output_of(out, None, "row", None, "none", 1.0)
            launcher = launcher_of(layout)
            problem = launcher.problem_of(values, layout, x.mT, out, described, arrays[0].dtype, arrays[-1].dtype)
            yield launcher.operations(layout)[0], problem, (*arrays, values, x.mT, None, None, out)
            if layout.format not in PAIRS:
                continue
            second, others, _ = stored_by_rows(other)
            gated = problem._replace(output=described._replace(activation="silu"))
            yield PAIRS[layout.format], gated, (*arrays, values, *others, second, x.mT, None, None, out)
