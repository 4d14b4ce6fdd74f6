"""From a problem to its launch: chosen and prepared once, then found in one dictionary lookup."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sparsecomp.lowering.tuning import autotune
from sparsecomp.lowering.tuning.template import Operation

P = TypeVar("P", bound=NamedTuple)
R = TypeVar("R")

_FORGET: list[Callable[[], None]] = []


def recorded(make: Callable[..., R]) -> Callable[..., R]:
    """`make`, of a device and other hashable arguments, whose results are kept until :func:`forget`."""

    @lru_cache(maxsize=8192)
    def remembered(effort: str | None, *arguments: Any) -> R:
        return make(*arguments)

    def find(device: torch.device, *arguments: Any) -> R:
        effort = autotune.scoped_effort()
        if effort is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # a default that only stands because nothing can be measured now is not remembered
            return make(device, *arguments)
        return remembered(effort, device, *arguments)

    _FORGET.append(remembered.cache_clear)
    return find


def launch(operation: Operation[P], problem: P, *tensors: Tensor | None) -> None:
    """Carry out `problem` on `tensors` (the operation's operands and results), with the kernel the tuner chooses.

    Raises:
        TuningError: no kernel takes the problem.
    """
    first = tensors[0]
    assert first is not None
    alike = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
    _found(first.device, operation, problem, "", alike)(*tensors)


def prepared(
    operation: Operation[P], problem: P, device: torch.device, only: str = "", alike: tuple[object, ...] = ()
) -> Callable[..., None]:
    """What :func:`launch` calls with the tensors of `problem` on `device`.

    Args:
        only: name of the template to choose among, if that takes the problem; any if empty.
        alike: what the tensors have in common beside the problem, such as a dtype that it does not say.
    """
    return _found(device, operation, problem, only, alike)


def chosen_by() -> tuple[object, str | None]:
    """What decides, beside a problem, which kernel it gets: equal as long as the answer is the same."""
    return _choices(), autotune.scoped_effort()


@lru_cache(maxsize=1)
def _choices() -> object:
    return object()


_FORGET.append(_choices.cache_clear)


def forget() -> None:
    """Choose anew from now on, because the tuning cache's content was replaced."""
    for clear in _FORGET:
        clear()


@recorded
def _found(
    device: torch.device, operation: Operation[Any], problem: Any, only: str, alike: tuple[object, ...]
) -> Callable[..., None]:
    """One for tensors that are alike: a kept launch takes those of the same dtypes, None in the same places."""
    candidate = autotune.tuner().choose(operation, problem, device, only).candidate
    return candidate.template.prepare(problem, candidate.config)
