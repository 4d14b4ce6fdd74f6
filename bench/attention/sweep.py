"""Every configuration of some problems, to hold the estimates against.

Worker processes compile them side by side into Triton's cache; then one process times them.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.timing import graph_ms
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.cost import seconds
from sparsecomp.lowering.tuning.template import Candidate, Operation
from sparsecomp.lowering.tuning.trial import first_line

Row = dict[str, Any]


class Posed(NamedTuple):
    """A problem of an operation with its tensors."""

    name: str
    operation: Operation[Any]
    problem: Any
    tensors: tuple[Tensor | None, ...]

    @property
    def candidates(self) -> list[Candidate[Any]]:
        """All that can run it here."""
        return self.operation.candidates(self.problem, device_of(torch.device("cuda", 0)))


def sweep(problems: Callable[[], Iterator[Posed]], workers: int) -> Iterator[Row]:
    """A row a problem: milliseconds by configuration, the fastest first, and its estimate.

    Args:
        problems: a function of a module.
        workers: processes that compile side by side.
    """
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(_compile, [(problems, share, workers) for share in range(workers)], chunksize=1)
    for posed in problems():
        yield _row(posed)


def _compile(problems: Callable[[], Iterator[Posed]], share: int, workers: int) -> None:
    for posed in problems():
        for candidate in posed.candidates[share::workers]:
            try:
                candidate.template.prepare(posed.problem, candidate.config)(*posed.tensors)
            except Exception as error:
                print(candidate.name, first_line(error), flush=True)


def _row(posed: Posed) -> Row:
    card = card_of(torch.device("cuda", 0))
    estimates = {str(one.config): seconds(one, posed.problem, card) * 1e3 for one in posed.candidates}
    times: dict[str, float] = {}
    for candidate in posed.candidates:
        try:
            call = partial(candidate.template.prepare(posed.problem, candidate.config), *posed.tensors)
            times[str(candidate.config)] = graph_ms([call] * 3, 5)
        except Exception as error:
            print(candidate.name, first_line(error), flush=True)
    fastest = sorted(times, key=lambda name: times[name])
    first = min(times, key=lambda name: estimates[name])
    print(posed.name, flush=True)
    for name in (*fastest[:10], first):
        print(f"  {times[name]:8.4f} ms, estimate {estimates[name]:8.4f}: {name}", flush=True)
    return {"problem": posed.name,
            "ms": {name: [round(times[name], 5), round(estimates[name], 5)] for name in fastest}}  # fmt: skip
