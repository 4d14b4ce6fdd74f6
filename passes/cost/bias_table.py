"""Whether the gradient by a table is faster summed by our kernel or as Inductor scatters it, number by number.

What it scatters into one row waits in a line: a table of few rows takes as long as the row that is read most.
"""

from typing import NamedTuple

import torch

from sparsecomp.lowering.cache.signature import NO_TRITON, Device, has_triton
from sparsecomp.lowering.launch.strided import name_of
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import Target, target_of
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.sparse import fastest_candidate

_WAITED = 3e-8
"""Seconds for each place that reads the row which is read most: 31 to 43 ns where a table of 257 rows is read by the
distances of 512, 2048 and 4096 tokens, those from 128 on alike (`bench/results/trained_biases.json`, one H200)."""


class ReadTable(NamedTuple):
    """Rows of a trained table, read at places that an index names.

    Attributes:
        device: where it runs.
        places, rows, features: sizes.
        busiest: places that read the row that is read most.
        dtype, index_dtype: of the table, and of the index.
        replayed, products, target: as of `sparsecomp.passes.cost.sparse.Product`.
    """

    device: torch.device
    places: int
    rows: int
    features: int
    busiest: float
    dtype: torch.dtype
    index_dtype: torch.dtype
    replayed: bool
    products: int
    target: Target | None = None

    @property
    def described(self) -> str:
        """For the report."""
        read = f"{self.rows} rows are read at {self.places} places"
        return f"{read}, one of them at {self.busiest:.0f}"

    def waited(self, time: Time) -> float:
        """Seconds that a caller waits for the gradient, if it takes this time."""
        return time.waited(self.replayed, host.besides(True, self.products))


def decide(table: ReadTable) -> Decision:
    """The faster way by estimate: `table_rows`, or as torch does it, which is `dense`."""
    if not has_triton():
        return Decision("dense", f"no estimate. {NO_TRITON}")
    return _compare(table, *(table.target or target_of(table.device)))


def _compare(table: ReadTable, device: Device, card: Card) -> Decision:
    from sparsecomp.lowering.attention.bias_table import TABLE_GRADIENT, TableGradient

    p = table
    problem = TableGradient(
        p.places, p.rows, p.features, 1, p.places, -1, name_of(p.index_dtype), name_of(p.dtype)
    )  # fmt: skip
    summed, _ = fastest_candidate(TABLE_GRADIENT.candidates(problem, device), problem, p, card)
    # our kernel reads an index that Inductor computes where it scatters
    indexed = Time(p.places * p.index_dtype.itemsize / card.bandwidth, 0.0)
    times = {"table_rows": summed.plus(indexed), "dense": _scattered(p, card)}
    return fastest({name: p.waited(time) for name, time in times.items()})


def _scattered(table: ReadTable, card: Card) -> Time:
    p = table
    traffic = p.features * (p.places * p.dtype.itemsize + p.rows * (8 + p.dtype.itemsize))
    return Time(traffic / card.bandwidth + p.busiest * _WAITED + 2 * card.launch, 2 * host.LAUNCH)
