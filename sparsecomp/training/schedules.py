"""How sparsity and amnesty run over the cycles; both reach their end value at the last cycle."""

import math

from sparsecomp.errors import ScheduleError

# progress 0..1 -> share of the way from the start to the end
_SHAPES = {
    "linear": lambda t: t,
    "exponential": lambda t: -math.expm1(-5 * t) / -math.expm1(-5),
    "cosine": lambda t: (1 - math.cos(math.pi * t)) / 2,
    "cubic": lambda t: 1 - (1 - t) ** 3,
    "step": lambda t: math.floor(4 * t) / 4,
}
_ITERATIVE = "iterative"


def _progress(cycle: int, cycles: int) -> float:
    if cycles < 1 or not 0 <= cycle < cycles:
        raise ScheduleError(f"cycle {cycle} of {cycles}: cycles count from 0 to cycles - 1, and one is needed at least")
    return 1.0 if cycles == 1 else cycle / (cycles - 1)


def sparsity_at(cycle: int, cycles: int, start: float, end: float, shape: str = "cubic") -> float:
    """Sparsity of a cycle, from `start` in cycle 0 to `end` in cycle `cycles - 1`, both in [0, 1).

    `shape` is linear, exponential, cosine, step (four equal jumps), iterative (each cycle takes the same share of what
    is left, as in Frankle & Carbin 2019) or cubic (Zhu & Gupta 2017: s_f + (s_i - s_f)(1 - t)^3). A single cycle has
    `end`. Raises ScheduleError for a value outside its domain or an unknown shape.
    """
    if shape not in (*_SHAPES, _ITERATIVE):
        raise ScheduleError(f"the schedule {shape!r} is unknown: choose one of {', '.join((*_SHAPES, _ITERATIVE))}")
    for name, value in (("start", start), ("end", end)):
        if not 0 <= value < 1:
            raise ScheduleError(f"{name} is {value}: a sparsity lies in [0, 1)")
    progress = _progress(cycle, cycles)
    if shape == _ITERATIVE and 0 < progress < 1:
        return 1 - (1 - start) ** (1 - progress) * (1 - end) ** progress
    way = progress if shape == _ITERATIVE else _SHAPES[shape](progress)
    return start * (1 - way) + end * way


def amnesty_rate(cycle: int, cycles: int, start: float, end: float) -> float:
    """Share r(c) of the kept weights that resurrected ones may take: linear from `start` to `end`, both reached.

    Both ends lie in [0, 1]. Raises ScheduleError for a value outside its domain.
    """
    for name, value in (("start", start), ("end", end)):
        if not 0 <= value <= 1:
            raise ScheduleError(f"{name} is {value}: an amnesty rate lies in [0, 1]")
    way = _progress(cycle, cycles)
    return start * (1 - way) + end * way
