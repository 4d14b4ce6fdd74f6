"""Linear layers of 1 to 16 rows by 2:4 weights, as at a step of generation: ours beside cuBLAS and cuSPARSELt.

Replayed CUDA graphs over rotated weights, which are read from memory each time. `candidates` times every
configuration of every kernel on some cases and the best of them on others, to hold the estimates against.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.sparse.few_rows import SIZES, copies, timed
from bench.table import markdown_grid
from bench.timing import guarded, relative_error
from sparsecomp import ops
from sparsecomp.formats import NM
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.sparse import semi_structured
from sparsecomp.lowering.sparse.packed_linear import MOST, PACKED_LINEAR, PackedLinear, PackedPositions, order_for
from sparsecomp.lowering.sparse.semi_structured import spmm_semi_structured
from sparsecomp.lowering.sparse.spmm_nm import spmm_nm
from sparsecomp.lowering.tuning import autotune
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.cost import seconds
from sparsecomp.lowering.tuning.trial import first_line
from sparsecomp.ops.sparse.packed_linear import packed_linear

ROWS = (1, 2, 4, 8, 16)
DTYPES = (torch.float16, torch.bfloat16)
_WHOLE = tuple((*size, rows) for size in SIZES[:2] for rows in (1, 2, 8))
"""Features out and in and rows: all configurations are timed on these."""
_OTHERS = tuple((*size, rows) for size in SIZES for rows in (1, 2, 4, 8) if (*size, rows) not in _WHOLE)
_FOUND = 8
"""Best configurations of a kernel that are tried on other cases."""


class Weights(NamedTuple):
    """A weight as each kernel takes it."""

    dense: Tensor
    values: Tensor
    indices: Tensor

    def positions(self, rows: int) -> Tensor:
        """Packed for so many rows."""
        return PackedPositions(order_for(rows))(self.indices)


def run() -> Iterator[dict[str, Any]]:
    """A row a case: milliseconds of each way, and the relative error of ours."""
    for dtype in DTYPES:
        for size in SIZES:
            weights = _weights(*size, dtype)
            for rows in ROWS:
                row = _row(rows, weights)
                print(row, flush=True)
                yield row


def _weights(out: int, k: int, dtype: torch.dtype) -> Weights:
    random = torch.Generator("cuda").manual_seed(0)
    weight = (torch.randn(out, k, generator=random, device="cuda") / k**0.5).to(dtype)
    groups = weight.view(out, -1, 4)
    groups.scatter_(-1, groups.abs().argsort(-1)[..., :2], 0)
    matrix = NM.from_dense(weight, n=2, m=4)
    return Weights(weight, matrix.values, matrix.indices)


def _row(rows: int, weights: Weights) -> dict[str, Any]:
    dense, values, indices = weights
    positions = weights.positions(rows)
    out, k = dense.shape
    x = torch.randn(rows, k, device="cuda", dtype=dense.dtype)
    row: dict[str, Any] = {
        "layer": {"out": out, "k": k, "rows": rows, "dtype": str(dense.dtype)[6:]}, "ms": {},
        "MiB": {"dense": dense.nbytes / 2**20, "packed": (values.nbytes + positions.nbytes) / 2**20},
    }  # fmt: skip
    ways: dict[str, Callable[[], list[Callable[[], Any]]]] = {
        "dense": lambda: [partial(F.linear, x, one) for one in copies(dense)],
        "ordinary": lambda: _by_columns(spmm_nm, x, weights, 2, 4),
    }  # fmt: skip
    if rows <= MOST:
        exact, found = F.linear(x.double(), dense.double()), packed_linear(x, values, indices, positions)
        row["error"] = relative_error(found, exact)
        ways["packed"] = lambda: [
            partial(packed_linear, x, one, indices, two)
            for one, two in zip(copies(values), copies(positions), strict=False)
        ]
    for name, make in ways.items():
        guarded(row, name, lambda name=name, make=make: row["ms"].update({name: timed(make())}))
    guarded(row, "cuSPARSELt", lambda: row["ms"].update({"cuSPARSELt": _by_the_library(x, weights)}))
    return row


def _by_columns(product: Callable[..., Any], x: Tensor, weights: Weights, *block: int) -> list[Callable[[], Any]]:
    out = torch.empty(x.shape[0], weights.dense.shape[0], device="cuda", dtype=x.dtype).mT
    pairs = zip(*map(copies, (weights.values, weights.indices)), strict=False)
    return [partial(product, values, indices, *block, x.mT, out) for values, indices in pairs]


def _by_the_library(x: Tensor, weights: Weights) -> float:
    """The library's best algorithm for this case, of a weight that is promised to stay."""
    always = mock.patch.object(semi_structured, "slower", lambda problem, device: None)
    semi_structured.refusal.cache_clear()
    with always, ops.frozen_weights():
        calls = _by_columns(spmm_semi_structured, x, weights)
        with autotune.effort_scope("full"):
            if not calls[0]():
                raise RuntimeError("refused")
        found = timed(calls)
    semi_structured.refusal.cache_clear()
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of cuBLAS, and how many times as fast the others are."""
    names = ("packed", "cuSPARSELt", "ordinary")
    grid = [["layer", "dtype", "rows", "cuBLAS, ms", *names]]
    for row in rows:
        layer, ms = row["layer"], row["ms"]
        cells = [f"{ms[name]:.4f} ({ms['dense'] / ms[name]:.2f})" if name in ms else "–" for name in names]
        size = f"{layer['out']}x{layer['k']}"
        grid.append([size, layer["dtype"], str(layer["rows"]), f"{ms.get('dense', 0):.4f}", *cells])
    return markdown_grid(grid)


# -- candidates


def candidates(workers: int) -> Iterator[dict[str, Any]]:
    """A row a case and kernel: milliseconds and estimate by configuration, the fastest first.

    Args:
        workers: processes that compile side by side.
    """
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(_compile, [(case, share, workers) for case in _WHOLE for share in range(workers)], chunksize=1)
    best: dict[str, set[str]] = {}
    for case in _WHOLE:
        for row in _timed(case, None):
            best.setdefault(row["kernel"], set()).update(list(row["ms"])[:_FOUND])
            yield row
    for case in _OTHERS:
        yield from _timed(case, best)


def _problem(out: int, k: int, rows: int) -> PackedLinear:
    return PackedLinear.of_layer(out, k, rows, torch.float16, False, False, "none")


def _tensors(values: Tensor, positions: Tensor, x: Tensor, out: Tensor) -> tuple[Tensor | None, ...]:
    """What a launch for one weight without bias takes."""
    return values, positions, None, None, x, None, None, None, out


def _compile(case: tuple[int, int, int], share: int, workers: int) -> None:
    out, k, rows = case
    weights = _weights(256, k, torch.float16)
    positions = weights.positions(rows)
    problem, x = _problem(256, k, rows), torch.zeros(rows, k, device="cuda", dtype=torch.float16)
    result = torch.empty(rows, 256, device="cuda", dtype=torch.float16).mT
    for one in PACKED_LINEAR.candidates(_problem(*case), device_of(x.device))[share::workers]:
        try:
            one.template.prepare(problem, one.config)(*_tensors(weights.values, positions, x, result))
        except Exception as error:
            print(one.name, first_line(error), flush=True)


def _timed(case: tuple[int, int, int], best: dict[str, set[str]] | None) -> Iterator[dict[str, Any]]:
    out, k, rows = case
    weights, problem = _weights(out, k, torch.float16), _problem(*case)
    positions = weights.positions(rows)
    x = torch.randn(rows, k, device="cuda", dtype=torch.float16)
    result = torch.empty(rows, out, device="cuda", dtype=torch.float16).mT
    exact = F.linear(x, weights.dense).mT.double()
    reference = timed([partial(F.linear, x, one) for one in copies(weights.dense)])
    rotated = list(zip(copies(weights.values), copies(positions), strict=False))
    found: dict[str, dict[str, Any]] = {}
    for candidate in PACKED_LINEAR.candidates(problem, device_of(x.device)):
        name, config = candidate.template.name, str(candidate.config)
        if best is not None and config not in best.get(name, ()):
            continue
        row = found.setdefault(name, {"case": case, "kernel": name, "dense": reference, "ms": {}})
        try:
            launch = candidate.template.prepare(problem, candidate.config)
            result.fill_(torch.nan)
            launch(*_tensors(weights.values, positions, x, result))
            if not (result - exact).norm() <= 2e-3 * exact.norm():
                print(f"{candidate.name} is WRONG", flush=True)
            ms = timed([partial(launch, *_tensors(*one, x, result)) for one in rotated])
        except Exception as error:
            print(candidate.name, first_line(error), flush=True)
            continue
        row["ms"][config] = (ms, round(seconds(candidate, problem, card_of(x.device)) * 1e3, 5))
    for row in found.values():
        row["ms"] = dict(sorted(row["ms"].items(), key=lambda one: one[1][0]))
        print(f"{case}: {row['kernel']}, cuBLAS {reference:.4f}", flush=True)
        for config, (ms, estimate) in list(row["ms"].items())[: 8 if best is None else 3]:
            print(f"  {ms:8.4f} ms ({reference / ms:.2f}), estimate {estimate:8.4f}: {config}", flush=True)
        yield row
