"""From a problem to its launch: chosen and prepared once, then found in one dictionary lookup."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sparsecomp.lowering import autotune
from sparsecomp.lowering.template import Operation

P = TypeVar("P", bound=NamedTuple)


def run(operation: Operation[P], problem: P, *tensors: Tensor | None) -> None:
    """Carry out ``problem`` on ``tensors`` (the operation's operands and results), with the kernel the tuner chooses.

    Raises:
        TuningError: no kernel takes the problem.
    """
    first = tensors[0]
    assert first is not None
    effort = autotune.scoped_effort()
    if effort is not None and first.is_cuda and torch.cuda.is_current_stream_capturing():
        # a default that only stands because nothing can be measured now is not remembered
        _prepare(operation, problem, first.device)(*tensors)
    else:
        _remembered(operation, problem, first.device, effort)(*tensors)


def forget() -> None:
    """Choose anew from now on, because the tuning cache's content was replaced."""
    _remembered.cache_clear()


def _prepare(operation: Operation[P], problem: P, device: torch.device) -> Callable[..., None]:
    candidate = autotune.tuner().choose(operation, problem, device).candidate
    return candidate.template.prepare(problem, candidate.config)


@lru_cache(maxsize=8192)
def _remembered(operation: Operation[P], problem: P, device: torch.device, effort: str | None) -> Callable[..., None]:
    return _prepare(operation, problem, device)
