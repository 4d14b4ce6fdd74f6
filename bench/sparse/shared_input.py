"""Layers of 1 to 16 rows on one x, as queries, keys and values at a step of generation: one launch by bitmaps.

Beside it a launch each, and stock: torch.compile of the dense layers, which are products of cuBLAS's, and of one layer
that has all their rows; max-autotune may write its own kernels. Replayed CUDA graphs over rotated weights, which are
read from memory each time. What the estimate says stands beside it. `candidates` times all configurations.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.parallel import measured
from bench.sparse.few_rows import copies, kept_copies, timed
from bench.table import markdown_grid
from bench.timing import guarded, relative_error
from sparsecomp.formats import CSR, SparseMatrix
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.sparse.bitmap_linear import BitmapLinear, random_longest
from sparsecomp.lowering.sparse.bitmap_pair import BITMAP_PAIR
from sparsecomp.lowering.sparse.bitmap_siblings import BITMAP_THREE
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.cost import seconds as seconds_of
from sparsecomp.ops.sparse.bitmap_linear import bitmap_linear
from sparsecomp.ops.sparse.bitmap_siblings import bitmap_siblings
from sparsecomp.passes.cost.bitmap_linear import decide_siblings
from sparsecomp.passes.cost.sparse import Product
from sparsecomp.reference.patterns import stored_by_rows

SIZES = (((4096, 4096, 4096), 4096), ((4096, 1024, 1024), 4096), ((11008, 11008), 4096))
"""Features out of each, and in."""
ZEROS, ROWS = (0.5, 0.7, 0.9), (1, 4, 8, 16)
GRAIN = 2
"""Neighbours that share a bit."""
_TUNED = (1, 8)
"""Rows of x for which max-autotune compiles."""

Calls = list[Callable[[], Any]]


class Layers(NamedTuple):
    """Layers that read one x."""

    outs: tuple[int, ...]
    k: int
    zeros: float
    rows: int


CASES = tuple(Layers(*size, zeros, rows) for size in SIZES for zeros in ZEROS for rows in ROWS)


def run(workers: int = 8) -> Iterator[dict[str, Any]]:
    """A row a case: milliseconds of each way, the relative error of ours, and the estimates."""
    for row in measured(prepared, CASES, workers, batch=1):
        print(row, flush=True)
        yield row


def prepared(case: Layers) -> Callable[[], dict[str, Any]]:
    """What measures a case, each way of which has run."""
    random = torch.Generator("cuda").manual_seed(0)
    weights = [_weight(case, out, random) for out in case.outs]
    x = torch.randn(case.rows, case.k, device="cuda", dtype=torch.float16)
    row: dict[str, Any] = {"layers": case._asdict(), "ms": {}, "error": {}}
    dense = [weight.to_dense() for weight in weights]
    exact = torch.cat([F.linear(x.double(), one.double()) for one in dense], 1)
    makers: dict[str, Callable[[], Calls]] = {
        "stock": lambda: _stock(x, dense, {}), "stock, one layer": lambda: _stock(x, [torch.cat(dense)], {}),
        "apart": lambda: _ours(x, weights, False), "together": lambda: _ours(x, weights, True),
    }  # fmt: skip
    if case.rows in _TUNED and case.zeros == ZEROS[0]:
        makers["max-autotune"] = lambda: _stock(x, dense, {"mode": "max-autotune-no-cudagraphs"})
    for name, make in makers.items():
        guarded(row, name, partial(_check, row, name, make, exact))
    return partial(_row, case, row, makers, weights)


def _weight(case: Layers, out: int, random: torch.Generator) -> SparseMatrix:
    weight = torch.randn(out, case.k, generator=random, device="cuda", dtype=torch.float16) / case.k**0.5
    weight[torch.rand(weight.shape, generator=random, device="cuda") < case.zeros] = 0
    return CSR.from_dense(weight)


def _check(row: dict[str, Any], name: str, make: Callable[[], Calls], exact: Tensor) -> None:
    found = make()[0]()
    row["error"][name] = relative_error(torch.cat(list(found), 1), exact)


def _row(
    case: Layers, row: dict[str, Any], makers: dict[str, Callable[[], Calls]], weights: list[SparseMatrix]
) -> dict[str, Any]:  # fmt: skip
    for name, make in makers.items():
        if name in row["error"]:
            guarded(row, name, lambda name=name, make=make: row["ms"].update({name: timed(make())}))
    products = []
    for matrix in weights:
        values, _, layout = stored_by_rows(matrix)
        products.append(Product(torch.device("cuda"), layout, case.rows, 1, values.numel(), torch.float16, True, False,
                                False, "none", ""))  # fmt: skip
    row["estimate, ms"] = {
        "apart" if name == "dense" else "together": round(seconds * 1e3, 5)
        for name, seconds in decide_siblings(products, GRAIN).seconds.items()
    }
    return row


def candidates() -> Iterator[dict[str, Any]]:
    """A row a kernel and rows of x: milliseconds by configuration, the fastest first, and its estimate; of gated pairs
    too."""
    device, card = torch.device("cuda", 0), card_of(torch.device("cuda", 0))
    for rows in (1, 8, 16):
        for operation, outs in ((BITMAP_PAIR, (11008,)), (BITMAP_PAIR, (4096,)), (BITMAP_THREE, (4096, 4096, 4096))):
            problem = _problem(rows, outs, 4096)
            tensors = [operation.operands(problem, device, seed) for seed in range(5)] if operation.operands else []
            found: dict[str, tuple[float, float]] = {}
            for one in operation.candidates(problem, device_of(device)):
                launch = one.template.prepare(problem, one.config)
                ms = timed([partial(launch, *each) for each in tensors])
                found[str(one.config)] = ms, round(seconds_of(one, problem, card) * 1e3, 5)
            row = {"kernel": operation.name, "outs": outs, "rows": rows, "ms": dict(sorted(found.items(), key=_ms))}
            print(row, flush=True)
            yield row


def _ms(item: tuple[str, tuple[float, float]]) -> float:
    return item[1][0]


def _problem(rows: int, outs: tuple[int, ...], k: int) -> BitmapLinear:
    m, share = sum(outs), 1 - ZEROS[1]
    nnz = round(m * k * share)
    problem = BitmapLinear.of_layer(
        m, k, rows, nnz, GRAIN, random_longest(m, k, nnz, GRAIN), torch.float16, False, False, "none"
    )  # fmt: skip
    return problem._replace(parts=outs) if len(outs) > 1 else problem


def _products(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [F.linear(x, weight) for weight in weights]


def _stock(x: Tensor, dense: list[Tensor], how: dict[str, Any]) -> Calls:
    compiled = torch.compile(_products, dynamic=False, **how)
    return [partial(compiled, x, list(weights)) for weights in zip(*map(copies, dense), strict=False)]


def _ours(x: Tensor, weights: list[SparseMatrix], together: bool) -> Calls:
    every = zip(*(kept_copies(weight, GRAIN) for weight in weights), strict=False)
    if not together:
        return [partial(_in_turn, [partial(bitmap_linear, x, *one) for one in each]) for each in every]
    return [partial(bitmap_siblings, x, *_joined(each)) for each in every]


def _in_turn(calls: Calls) -> list[Any]:
    return [call() for call in calls]


def _joined(each: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
    """Operands of the operator on all of them behind x."""
    values, patterns, layouts, kept, grains, longest = zip(*each, strict=True)
    flat, arrays = ([one for several in lists for one in several] for lists in (patterns, kept))
    return list(values), flat, list(layouts), arrays, [], grains[0], max(longest)


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of stock, how many times as fast the others are, and what the estimate gives one launch."""
    ways = ("stock, one layer", "max-autotune", "apart", "together")
    grid = [["features out", "in", "zeros", "rows", "stock, ms", *ways, "gain", "estimated"]]
    for row in sorted(rows, key=lambda row: tuple(map(str, row["layers"].values()))):
        case, ms = Layers(**row["layers"]), row["ms"]
        cells = [
            f"{ms[way]:.4f} ({ms['stock'] / ms[way]:.2f})" if {way, "stock"} <= ms.keys() else "–" for way in ways
        ]
        name = [" + ".join(map(str, case.outs)), str(case.k), f"{case.zeros:.0%}", str(case.rows)]
        grid.append([*name, f"{ms.get('stock', 0):.4f}", *cells, _gain(ms), _gain(row.get("estimate, ms", {}))])
    return markdown_grid(grid)


def _gain(ms: dict[str, float]) -> str:
    return f"{ms['apart'] / ms['together']:.2f}" if {"apart", "together"} <= ms.keys() else "–"
