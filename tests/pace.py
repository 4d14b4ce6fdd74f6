"""Times that mean the same after a thousand other tests, with limits that are those of a usual host: a slower one has
as many times longer as it is slower just then."""

import time
import timeit
from collections.abc import Callable

_USUAL = 0.05
"""Processor seconds that such a host takes for the objects below, whose memory is in no cache."""


def limit(seconds: float) -> float:
    """Seconds that this host may take for what the usual one may take so many for."""
    return seconds * max(1.0, min(_making_objects() for _ in range(3)) / _USUAL)


def processor_seconds(call: Callable[[], object]) -> float:
    """Processor seconds that one call takes, none of them for what other tests left to the garbage collector."""
    return timeit.timeit(call, timer=time.process_time, number=1)  # which collects nothing meanwhile


def _making_objects() -> float:
    start = time.process_time()
    made = {number: (number, str(number)) for number in range(200_000)}
    assert len(made) == 200_000
    return time.process_time() - start
