"""How many weights each layer keeps, so that the whole network has one exact sparsity."""

import math
from collections.abc import Mapping, Sequence

from sparsecomp.errors import ScheduleError


def _checked(sparsity: float) -> None:
    if not 0 <= sparsity < 1:
        raise ScheduleError(f"the sparsity is {sparsity}: it lies in [0, 1)")


def uniform_budget(shapes: Mapping[str, Sequence[int]], sparsity: float) -> dict[str, int]:
    """Weights kept in each layer when every layer drops floor(size * sparsity); ScheduleError outside [0, 1)."""
    _checked(sparsity)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    return {name: size - int(size * sparsity) for name, size in sizes.items()}


def erk_budget(shapes: Mapping[str, Sequence[int]], sparsity: float) -> dict[str, int]:
    """Weights kept in each layer by Erdos-Renyi-Kernel (Evci et al. 2020): density = eps * sum(dims) / prod(dims).

    Layers that would pass density 1 are made dense one after the other and the rest shares what is left. The counts
    are rounded by largest remainder, so they sum to round(total * (1 - sparsity)). ScheduleError outside [0, 1).
    """
    _checked(sparsity)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: float(sum(shape)) for name, shape in shapes.items() if sizes[name]}
    kept = dict.fromkeys(shapes, 0)
    left = round(sum(sizes.values()) * (1 - sparsity))
    while raw:
        scale = left / sum(raw.values())
        fullest = max(raw, key=lambda name: raw[name] / sizes[name])
        if scale * raw[fullest] < sizes[fullest]:
            break
        kept[fullest] = sizes[fullest]
        left -= sizes[fullest]
        del raw[fullest]
    else:
        return kept
    exact = {name: scale * share for name, share in raw.items()}
    kept.update({name: int(share) for name, share in exact.items()})
    short = left - sum(int(share) for share in exact.values())
    for name in sorted(exact, key=lambda name: int(exact[name]) - exact[name])[:short]:
        kept[name] += 1
    return kept


BUDGETS = {"uniform": uniform_budget, "erk": erk_budget}
"""How layers share a sparsity: the counts that stay, of the layers' shapes and the sparsity."""
