"""Layers of 1 to 16 rows on one x, as queries, keys and values at a step of generation: one launch of them.

Beside it a launch each, and stock: torch.compile of the dense layers, which are products of cuBLAS's, and of one layer
that has all their rows; max-autotune may write its own kernels. Replayed CUDA graphs over rotated weights, which are
read from memory each time. What the estimate says stands beside it. `candidates` times all configurations.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.parallel import measured
from bench.sparse.few_rows import copies, kept_copies, timed
from bench.table import markdown_grid
from bench.timing import guarded, relative_error
from sparsecomp.formats import CSR, NARROW, NM, SparseMatrix
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.sparse.bitmap_linear import BitmapLinear, random_longest
from sparsecomp.lowering.sparse.bitmap_pair import BITMAP_PAIR
from sparsecomp.lowering.sparse.bitmap_siblings import BITMAP_THREE
from sparsecomp.lowering.sparse.packed_linear import PackedPositions, order_for
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.cost import seconds as seconds_of
from sparsecomp.ops.sparse.bitmap_linear import bitmap_linear
from sparsecomp.ops.sparse.linear import sparse_linear
from sparsecomp.ops.sparse.packed_linear import packed_linear
from sparsecomp.ops.sparse.siblings import siblings
from sparsecomp.passes.cost.siblings import decide_siblings
from sparsecomp.passes.cost.sparse import Product
from sparsecomp.reference.patterns import stored_by_rows

SIZES = (((4096, 4096, 4096), 4096), ((4096, 1024, 1024), 4096), ((11008, 11008), 4096))
"""Features out of each, and in."""
FORMS: dict[str, tuple[tuple[float, ...], tuple[int, ...]]] = {
    "bitmap of twos": ((0.5, 0.7, 0.9), (1, 4, 8, 16)), "NARROW": ((0.7, 0.9), (1, 4)), "2:4": ((0.5,), (1, 2, 8)),
}  # fmt: skip
"""Shares of zeros, and rows of x."""
_TWOS = "bitmap of twos"
GRAIN = 2
"""Neighbours that share a bit of such a bitmap."""
_TUNED = (1, 8)
"""Rows of x for which max-autotune compiles."""

Calls = list[Callable[[], Any]]


class Layers(NamedTuple):
    """Layers that read one x."""

    outs: tuple[int, ...]
    k: int
    zeros: float
    rows: int
    form: str = _TWOS


CASES = tuple(
    Layers(*size, share, rows, form)
    for form, (zeros, every) in FORMS.items() for size in SIZES for share in zeros for rows in every
)  # fmt: skip


def run(workers: int = 8, forms: Iterable[str] = FORMS) -> Iterator[dict[str, Any]]:
    """A row a case: milliseconds of each way, the relative error of ours, and the estimates."""
    for row in measured(prepared, [case for case in CASES if case.form in forms], workers, batch=1):
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
        "apart": lambda: _ours(case, x, weights, False), "together": lambda: _ours(case, x, weights, True),
    }  # fmt: skip
    if case.rows in _TUNED and case.form == _TWOS and case.zeros == FORMS[_TWOS][0][0]:
        makers["max-autotune"] = lambda: _stock(x, dense, {"mode": "max-autotune-no-cudagraphs"})
    for name, make in makers.items():
        guarded(row, name, partial(_check, row, name, make, exact))
    return partial(_row, case, row, makers, weights)


def _weight(case: Layers, out: int, random: torch.Generator) -> SparseMatrix:
    weight = torch.randn(out, case.k, generator=random, device="cuda", dtype=torch.float16) / case.k**0.5
    if case.form == "2:4":
        groups = weight.view(out, -1, 4)
        kept = torch.zeros_like(groups).scatter(-1, groups.abs().topk(2).indices, 1.0)
        return NM.from_dense((groups * kept).view_as(weight), n=2, m=4)
    weight[torch.rand(weight.shape, generator=random, device="cuda") < case.zeros] = 0
    return (CSR if case.form == _TWOS else NARROW).from_dense(weight)


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
        for name, seconds in decide_siblings(products, _grain(case)).seconds.items()
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
    m, share = sum(outs), 1 - FORMS[_TWOS][0][1]
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


def _ours(case: Layers, x: Tensor, weights: list[SparseMatrix], together: bool) -> Calls:
    every = [*zip(*(_given(case, weight) for weight in weights), strict=False)]
    if together:
        return [partial(siblings, x, *_joined(each), _grain(case), max(one.longest for one in each)) for each in every]
    alone = _alone(case.form)
    return [partial(_in_turn, [partial(alone, x, one) for one in each]) for each in every]


class Given(NamedTuple):
    """A layer as the operators take it."""

    values: Tensor
    arrays: Sequence[Tensor]
    layout: str
    kept: Sequence[Tensor] = ()
    longest: int = 0


def _given(case: Layers, weight: SparseMatrix) -> list[Given]:
    """Copies that are rotated."""
    if case.form == _TWOS:
        copied = kept_copies(weight, GRAIN)
        return [Given(values, arrays, layout, kept, longest) for values, arrays, layout, kept, _, longest in copied]
    values, arrays, layout = stored_by_rows(weight)
    kept = [PackedPositions(order_for(case.rows))(arrays[0])] if case.form == "2:4" else []
    rotated = zip(*map(copies, (values, *arrays, *kept)), strict=False)
    own = 1 + len(arrays)
    return [Given(one[0], one[1:own], layout.written(), one[own:]) for one in rotated]


def _alone(form: str) -> Callable[[Tensor, Given], Tensor]:
    if form == _TWOS:
        return lambda x, one: bitmap_linear(x, *one[:4], GRAIN, one.longest)
    if form == "2:4":
        return lambda x, one: packed_linear(x, one.values, one.arrays[0], one.kept[0])
    return lambda x, one: sparse_linear(x, *one[:3])


def _in_turn(calls: Calls) -> list[Any]:
    return [call() for call in calls]


def _joined(each: Sequence[Given]) -> tuple[Any, ...]:
    """Operands of the operator on all of them behind x, up to the biases."""
    arrays, kept = ([one for several in lists for one in several] for lists in
                    ([one.arrays for one in each], [one.kept for one in each]))  # fmt: skip
    return [one.values for one in each], arrays, [one.layout for one in each], kept, []


def _grain(case: Layers) -> int:
    return GRAIN if case.form == _TWOS else 0


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of stock, how many times as fast the others are, and what the estimate gives one launch."""
    ways = ("stock, one layer", "max-autotune", "apart", "together")
    grid = [["features out", "in", "form", "zeros", "rows", "stock, ms", *ways, "gain", "estimated"]]
    for row in sorted(rows, key=lambda row: tuple(map(str, row["layers"].values()))):
        case, ms = Layers(**row["layers"]), row["ms"]
        cells = [
            f"{ms[way]:.4f} ({ms['stock'] / ms[way]:.2f})" if {way, "stock"} <= ms.keys() else "–" for way in ways
        ]
        name = [" + ".join(map(str, case.outs)), str(case.k), case.form, f"{case.zeros:.0%}", str(case.rows)]
        grid.append([*name, f"{ms.get('stock', 0):.4f}", *cells, _gain(ms), _gain(row.get("estimate, ms", {}))])
    return markdown_grid(grid)


def _gain(ms: dict[str, float]) -> str:
    return f"{ms['apart'] / ms['together']:.2f}" if {"apart", "together"} <= ms.keys() else "–"
