"""Gated pairs silu(gate(x)) · up(x) of 1 to 16 rows, as at a step of generation: one launch beside two, and stock.

Stock is torch.compile of the dense pair: two products of cuBLAS's, and a kernel of Inductor's. Replayed CUDA graphs
over rotated weights, which are read from memory each time. What the estimate says of a pair stands beside it.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.parallel import measured
from bench.sparse.few_rows import BITMAPS, copies, copies_of, kept_copies, timed
from bench.table import markdown_grid
from bench.timing import guarded, relative_error
from sparsecomp.formats import CSR, NARROW, NM, SparseMatrix
from sparsecomp.lowering.sparse.bitmap_pair import BITMAP_PAIR
from sparsecomp.lowering.sparse.packed_linear import PackedPositions, order_for
from sparsecomp.ops.sparse.bitmap_linear import bitmap_linear
from sparsecomp.ops.sparse.bitmap_pair import bitmap_pair
from sparsecomp.ops.sparse.gated_pair import gated_pair
from sparsecomp.ops.sparse.linear import sparse_linear
from sparsecomp.ops.sparse.packed_linear import packed_linear, packed_pair
from sparsecomp.passes.cost.gated_pair import decide
from sparsecomp.passes.cost.sparse import Product
from sparsecomp.reference.patterns import stored_by_rows

SIZES = ((11008, 4096), (28672, 8192))
"""Features out and in, of each of the two."""
FORMS: dict[str, tuple[type[SparseMatrix], tuple[float, ...], tuple[int, ...]]] = {
    "NARROW": (NARROW, (0.7, 0.9), (1, 2, 4, 8, 16)), "CSR": (CSR, (0.9,), (2, 4, 8, 16)),
    "2:4": (NM, (0.5,), (1, 2, 8)), "bitmap": (NARROW, (0.5, 0.7), (1, 8)),
    "bitmap of twos": (NARROW, (0.5, 0.7, 0.9), (1, 2, 4, 8, 16)),
}  # fmt: skip
"""Format, shares of zeros, and rows of x; bitmaps are copies that are kept beside it."""


class Pair(NamedTuple):
    """A pair of layers of one size."""

    form: str
    out: int
    k: int
    zeros: float
    rows: int


CASES = tuple(
    Pair(form, *size, share, rows)
    for size in SIZES for form, (_, zeros, every) in FORMS.items() for share in zeros for rows in every
)  # fmt: skip


def run(workers: int = 8, forms: Iterable[str] = FORMS) -> Iterator[dict[str, Any]]:
    """A row a pair: milliseconds of each way, the relative error of ours, and the estimates."""
    for row in measured(prepared, [pair for pair in CASES if pair.form in forms], workers, batch=1):
        print(row, flush=True)
        yield row


def prepared(pair: Pair) -> Callable[[], dict[str, Any]]:
    """What measures a pair, each way of which has run."""
    weights = [_weight(FORMS[pair.form][0], pair.out, pair.k, pair.zeros, seed) for seed in range(2)]
    x = torch.randn(pair.rows, pair.k, device="cuda", dtype=torch.float16)
    row: dict[str, Any] = {"pair": pair._asdict(), "ms": {}}
    dense = [weight.to_dense() for weight in weights]
    gate, up = (F.linear(x.float(), one.float()).double() for one in dense)
    exact = F.silu(gate) * up
    makers: dict[str, Callable[[], list[Callable[[], Tensor]]]] = {
        "stock": lambda: _stock(x, dense), "apart": lambda: _ours(pair, x, weights, False),
        "pair": lambda: _ours(pair, x, weights, True),
    }  # fmt: skip
    for name, make in makers.items():
        guarded(row, name, partial(_check, row, name, make, exact))
    return partial(_row, pair, row, makers, weights)


def _weight(kind: type[SparseMatrix], out: int, k: int, zeros: float, seed: int) -> SparseMatrix:
    random = torch.Generator("cuda").manual_seed(seed)
    weight = torch.randn(out, k, generator=random, device="cuda", dtype=torch.float16) / k**0.5
    if kind is not NM:
        weight[torch.rand(weight.shape, generator=random, device="cuda") < zeros] = 0
        return kind.from_dense(weight)
    groups = weight.view(out, -1, 4)
    groups.scatter_(-1, groups.abs().argsort(-1)[..., :2], 0)
    return NM.from_dense(weight, n=2, m=4)


def _check(
    row: dict[str, Any], name: str, make: Callable[[], list[Callable[[], Tensor]]], exact: Tensor
) -> None:  # fmt: skip
    found = make()[0]()
    row.setdefault("error", {})[name] = relative_error(found, exact)


def _row(
    pair: Pair, row: dict[str, Any], makers: dict[str, Callable[[], list[Callable[[], Tensor]]]],
    weights: list[SparseMatrix],
) -> dict[str, Any]:  # fmt: skip
    for name, make in makers.items():
        if name in row.get("error", {}):
            guarded(row, name, lambda name=name, make=make: row["ms"].update({name: timed(make())}))
    row["estimate, ms"] = {
        "apart" if name == "dense" else "pair": round(seconds * 1e3, 5)
        for name, seconds in _decision(pair, weights).seconds.items()
        if name == "dense" or (name == BITMAP_PAIR.name) == (pair.form in BITMAPS)
    }
    return row


def _dense_pair(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def _stock(x: Tensor, dense: list[Tensor]) -> list[Callable[[], Tensor]]:
    compiled = torch.compile(_dense_pair, dynamic=False)
    return [partial(compiled, x, gate, up) for gate, up in zip(*map(copies, dense), strict=True)]


def _ours(pair: Pair, x: Tensor, weights: list[SparseMatrix], together: bool) -> list[Callable[[], Tensor]]:
    """The pair as one launch, or as two and their product."""
    if pair.form == "2:4":
        both = zip(*(_packed_copies(weight, order_for(pair.rows)) for weight in weights), strict=False)
        if together:
            return [partial(packed_pair, x, *gate, None, *up, None, "silu") for gate, up in both]
        return [
            partial(_apart, partial(packed_linear, x, *gate, activation="silu"), partial(packed_linear, x, *up))
            for gate, up in both
        ]
    calls: list[Callable[[], Tensor]] = []
    if pair.form in BITMAPS:
        return _by_bitmaps(x, weights, BITMAPS[pair.form], together)
    for gate, up in zip(*map(copies_of, weights), strict=False):
        (values, arrays, layout), (other, others, _) = stored_by_rows(gate), stored_by_rows(up)
        weight, second, written = (values, list(arrays)), (other, list(others)), layout.written()
        if together:
            calls.append(partial(gated_pair, x, *weight, None, *second, None, written, "silu"))
        else:
            one = partial(sparse_linear, x, *weight, written, activation="silu")
            calls.append(partial(_apart, one, partial(sparse_linear, x, *second, written)))
    return calls


def _by_bitmaps(x: Tensor, weights: list[SparseMatrix], grain: int, together: bool) -> list[Callable[[], Tensor]]:
    both = zip(*(kept_copies(weight, grain) for weight in weights), strict=False)
    if not together:
        return [
            partial(_apart, partial(bitmap_linear, x, *gate, activation="silu"), partial(bitmap_linear, x, *up))
            for gate, up in both
        ]
    calls: list[Callable[[], Tensor]] = []
    for gate, up in both:
        (*weight, _, longest), (*other, _, most) = gate, up
        calls.append(partial(bitmap_pair, x, *weight, None, *other, None, grain, max(longest, most), "silu"))
    return calls


def _packed_copies(matrix: SparseMatrix, order: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Values, indices, which are not read, and packed positions."""
    indices = matrix.arrays["indices"]
    positions = PackedPositions(order)(indices)
    return [(one, indices, two) for one, two in zip(copies(matrix.values), copies(positions), strict=False)]


def _apart(gate: Callable[[], Tensor], up: Callable[[], Tensor]) -> Tensor:
    return gate() * up()


def _decision(pair: Pair, weights: list[SparseMatrix]) -> Any:
    products = []
    for matrix, activation in zip(weights, ("silu", "none"), strict=True):
        values, _, layout = stored_by_rows(matrix)
        products.append(Product(torch.device("cuda"), layout, pair.rows, 1, values.numel(), torch.float16, True, False,
                                False, activation, ""))  # fmt: skip
    grain = BITMAPS.get(pair.form, 0)
    return decide(products[0], products[1], (grain, grain))


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of stock, how many times as fast ours are, and what the estimate gives the pair over its layers."""
    grid = [["layers", "format", "zeros", "rows", "stock, ms", "two launches", "one launch", "gain", "estimated"]]
    for row in sorted(rows, key=_place):
        pair, ms, estimate = Pair(**row["pair"]), row["ms"], row.get("estimate, ms", {})
        name = [f"{pair.out}x{pair.k}", pair.form, f"{pair.zeros:.0%}", str(pair.rows)]
        cells = [
            f"{ms[way]:.4f} ({ms['stock'] / ms[way]:.2f})" if {way, "stock"} <= ms.keys() else "–"
            for way in ("apart", "pair")
        ]
        grid.append([*name, f"{ms.get('stock', 0):.4f}", *cells, _gain(ms), _gain(estimate)])
    return markdown_grid(grid)


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    pair = Pair(**row["pair"])
    return pair.out, list(FORMS).index(pair.form), pair.zeros, pair.rows


def _gain(ms: dict[str, float]) -> str:
    return f"{ms['apart'] / ms['pair']:.2f}" if {"apart", "pair"} <= ms.keys() else "–"
