"""From a problem to its launch: chosen and prepared once, then found in one dictionary lookup."""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sparsecomp.lowering import autotune
from sparsecomp.lowering.template import Operation

P = TypeVar("P", bound=NamedTuple)
R = TypeVar("R")


def run(operation: Operation[P], problem: P, *tensors: Tensor | None) -> None:
    """Carry out ``problem`` on ``tensors`` (the operation's operands and results), with the kernel the tuner chooses.

    Raises:
        TuningError: no kernel takes the problem.
    """
    first = tensors[0]
    assert first is not None
    if first.is_cuda and _measuring_in_capture():
        launch_of(operation, problem, first.device)(*tensors)
    else:
        _remembered(operation, problem, first.device, autotune.scoped_effort())(*tensors)


def recalled(key: Hashable, prepare: Callable[[], R | None]) -> R | None:
    """What `prepare` made of a key once, for calls whose shapes alone take the host as long to look at as a launch.

    Args:
        key: of whatever the result depends on beside the effort in force.
        prepare: called at the first call of a key, and again once the tuning cache's content was replaced.
    """
    known = (key, autotune.scoped_effort())
    try:
        return _recalled[known]
    except KeyError:
        found = prepare()
        if not _measuring_in_capture():
            if len(_recalled) >= _MOST:
                _recalled.clear()
            _recalled[known] = found
        return found


_recalled: dict[Hashable, Any] = {}
_MOST = 8192


def _measuring_in_capture() -> bool:
    """Whether a default only stands because nothing can be measured now."""
    return autotune.scoped_effort() is not None and torch.cuda.is_current_stream_capturing()


def forget() -> None:
    """Choose anew from now on, because the tuning cache's content was replaced."""
    _remembered.cache_clear()
    _recalled.clear()


def launch_of(operation: Operation[P], problem: P, device: torch.device, only: str = "") -> Callable[..., None]:
    """What carries out ``problem`` on its tensors, with the kernel the tuner chooses now, of one template if asked.

    Raises:
        TuningError: no kernel takes the problem.
    """
    candidate = autotune.tuner().choose(operation, problem, device, only).candidate
    return candidate.template.prepare(problem, candidate.config)


@lru_cache(maxsize=8192)
def _remembered(operation: Operation[P], problem: P, device: torch.device, effort: str | None) -> Callable[..., None]:
    return launch_of(operation, problem, device)
