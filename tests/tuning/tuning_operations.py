"""An operation whose kernels are Python functions that fail when told to, and a stopwatch that shows what it sees."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, nan
from typing import Any, NamedTuple

import pytest
import sympy
import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import KernelSignature
from sparsecomp.lowering.tuning import template
from sparsecomp.lowering.tuning.cost import Cost
from sparsecomp.lowering.tuning.template import Config, Operation, Template

TRIPLE = 3.0


class Triple(NamedTuple):
    """out = 3 x, of `size` numbers, on a device that can do it or not."""

    size: int = 8
    supported: bool = True


def _right(x: Tensor, out: Tensor) -> None:
    torch.mul(x, TRIPLE, out=out)


def _wrong(x: Tensor, out: Tensor) -> None:
    """Right on the data that is timed, all of whose numbers are at least 0."""
    torch.mul(x.abs(), TRIPLE, out=out)


def _idle(x: Tensor, out: Tensor) -> None:
    pass


def _not_a_number(x: Tensor, out: Tensor) -> None:
    _right(x, out)
    out[-1] = nan


def _too_large(x: Tensor, out: Tensor) -> None:
    raise RuntimeError("out of shared memory: 300000 > 232448\nlower the block sizes")


def _out_of_memory(x: Tensor, out: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB")


def _interrupted(x: Tensor, out: Tensor) -> None:
    raise KeyboardInterrupt


FAULTS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "wrong": _wrong, "idle": _idle, "nan": _not_a_number, "raises": _too_large, "memory": _out_of_memory,
    "interrupted": _interrupted,
}  # fmt: skip


class Bench:
    """The operation `triple` with one candidate a tile, and a stopwatch for it.

    Attributes:
        times: milliseconds by tile; also which candidates there are. The cost model expects small tiles to be fast.
        faults: what is the matter with a tile, by the names of `FAULTS`.
        seconds: how long the stopwatch takes for each candidate, on the clock `now`.
        timed: tiles in the order in which they were timed, and `rivals` the best time that each was held against.
        ran: tiles in the order in which they were launched, to be timed or checked or used.
    """

    def __init__(self, times: dict[int, float], faults: dict[int, str] | None = None, seconds: float = 0.0) -> None:
        self.times, self.faults, self.seconds = times, faults or {}, seconds
        self.now = 0.0
        self.timed: list[int] = []
        self.rivals: list[float] = []
        self.ran: list[int] = []
        self.template = Template(
            name="triple", op="triple", sources=(_right,),
            refuse=lambda problem, device: None if problem.supported else "no such thing",
            space=lambda problem, device: [Config(TILE=tile) for tile in self.times],
            cost=Cost(bytes=sympy.Symbol("TILE") * 10**9), prepare=self._prepare,
        )  # fmt: skip
        self.operation: Operation[Any] = Operation(
            "triple", _signature, _representative, _operands, (1,), lambda problem, operands: _reference(*operands),
            lambda problem: 1e-6,
        )  # fmt: skip

    def name(self, tile: int) -> str:
        """The candidate's, in the cache."""
        return f"triple@{self.template.version}:TILE={tile}"

    def measure(self, calls: Sequence[Callable[[], None]], *, best: float = inf, samples: int = 0) -> float:
        """Run each call once and give the candidate's time."""
        for call in calls:
            call()
        self.timed.append(self.ran[-1])
        self.rivals.append(best)
        self.now += self.seconds
        return self.times[self.timed[-1]]

    def clock(self) -> float:
        """Seconds."""
        return self.now

    @contextmanager
    def installed(self) -> Iterator["Bench"]:
        """Make this bench's template the only one of any operation."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(template, "of_operation", lambda op: (self.template,))
            yield self

    def _prepare(self, problem: Triple, config: Config) -> Any:
        tile = config["TILE"]

        def launch(x: Tensor, out: Tensor) -> None:
            self.ran.append(tile)
            FAULTS.get(self.faults.get(tile, ""), _right)(x, out)

        return launch


def _signature(problem: Triple, device: Any) -> KernelSignature:
    return KernelSignature("triple", device, dtypes=("float32",), sizes=(("size", problem.size),))


def _representative(signature: KernelSignature) -> Triple:
    return Triple(int(dict(signature.sizes)["size"]))


def _operands(problem: Triple, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers from 1 on; the data that candidates are checked on holds negative ones too."""
    x = torch.arange(1.0, problem.size + 1, device=device)
    if seed > 1:
        x[::2] *= -1
    return x, torch.full_like(x, nan)


def _reference(x: Tensor, out: Tensor) -> tuple[Tensor, ...]:
    assert out.isnan().all(), "the reference must see the operands before the kernel ran"
    return (x.double() * TRIPLE,)
