"""How long a launch takes: on the device's own clock, with a cold L2, and no longer than it takes to know.

A kernel that finds its operands in L2 from the run before looks faster than it is in a model, so that L2 is overwritten
before each timed call. The flush also keeps the device busy while the host queues the call, whose own time would count
otherwise.
"""

import time
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from statistics import median

import torch

Call = Callable[[], None]

_BATCH = 3
"""Samples between two looks at the clock."""
_HOPELESS = 1.5
"""A candidate whose median is this many times the best so far is given up."""
_SETTLED = 0.01
"""The median has settled when the last three looks at it differ by no more than this share."""


def measure_ms(calls: Sequence[Call], flush: bool = True, *, best: float = inf, samples: int = 60) -> float:
    """Median time of a call in milliseconds, on the current CUDA device and stream.

    Args:
        calls: the same work on different data, called in turns.
        flush: overwrite L2 before each timed call.
        best: time of the fastest rival; a call that is clearly slower is not measured to the end.
        samples: most timed calls.

    Without CUDA it is the time of one call on the host: the interpreter is slow, and its times mean little.
    """
    if not torch.cuda.is_available():
        start = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - start) * 1e3
    for call in calls:  # compiles, and raises what the launch has to raise
        call()
    torch.cuda.synchronize()
    size = 2 * torch.cuda.get_device_properties().L2_cache_size if flush else 0
    scratch = torch.empty(size, dtype=torch.uint8, device="cuda")
    turns = count()

    def draw(number: int) -> list[float]:
        return _timed([calls[next(turns) % len(calls)] for _ in range(number)], scratch)

    return settled_median(draw, best, samples)


def settled_median(draw: Callable[[int], list[float]], best: float, samples: int) -> float:
    """Median of what `draw` gives, a few at a time, until it has settled, is hopeless, or `samples` are drawn."""
    found: list[float] = []
    medians: list[float] = []
    while len(found) < samples:
        found += draw(min(_BATCH, samples - len(found)))
        medians.append(median(found))
        last = medians[-3:]
        if medians[-1] > _HOPELESS * best or len(last) == 3 and max(last) - min(last) <= _SETTLED * min(last):
            break
    return medians[-1]


def _timed(calls: Sequence[Call], scratch: torch.Tensor) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
    for call, (start, end) in zip(calls, events, strict=True):
        scratch.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]
