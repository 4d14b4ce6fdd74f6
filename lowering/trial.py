"""Runs a candidate on data of its own, to be timed, and to be checked before it may be chosen."""

from collections.abc import Callable
from functools import cached_property, partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from sparsecomp.lowering.template import Candidate, Operation

_TIMED_SEEDS = (0, 1)
_CHECK_SEED = 2

Operands = tuple[Tensor | None, ...]


class Trial:
    """One problem of an operation on a device, with its operands and right results, made when they are needed.

    Timing and checking use different operands: a kernel that is right on the data it was timed on is not thereby right.
    """

    def __init__(self, operation: Operation[Any], problem: Any, device: torch.device) -> None:
        assert operation.operands is not None, f"{operation.name} has no operands to be timed on"
        assert operation.reference is not None and operation.tolerance is not None, f"{operation.name} has no reference"
        self._operands = partial(operation.operands, problem, device)
        self._reference = partial(operation.reference, problem)
        self._results = operation.results
        self._tolerance = operation.tolerance(problem)
        self._problem = problem

    def calls(self, candidate: Candidate[Any]) -> list[Callable[[], None]]:
        """The candidate's launch on several sets of operands."""
        launch = candidate.template.prepare(self._problem, candidate.config)
        return [partial(launch, *operands) for operands in self._timed]

    def fault(self, candidate: Candidate[Any]) -> str | None:
        """How the candidate's results differ from the reference's beyond the tolerance; None if they do not.

        Raises:
            Exception: whatever the launch raises.
        """
        operands, poison, expected = self._check
        for position, fresh in zip(self._results, poison, strict=True):
            _present(operands, position).copy_(fresh)
        candidate.template.prepare(self._problem, candidate.config)(*operands)
        for position, right in zip(self._results, expected, strict=True):
            error = relative_error(_present(operands, position), right)
            if not error <= self._tolerance:
                return f"relative error {error:.1e} of result {position}, where {self._tolerance:.1e} is allowed"
        return None

    @cached_property
    def _timed(self) -> list[Operands]:
        return [self._operands(seed) for seed in _TIMED_SEEDS]

    @cached_property
    def _check(self) -> tuple[Operands, list[Tensor], tuple[Tensor, ...]]:
        operands = self._operands(_CHECK_SEED)
        poison = [_present(operands, position).clone() for position in self._results]
        return operands, poison, self._reference(operands)


def relative_error(result: Tensor, right: Tensor) -> float:
    """Frobenius norm of the difference over that of ``right``, in float64; infinite if only ``right`` is zero.

    Raises:
        ValueError: the shapes differ.
    """
    if result.shape != right.shape:
        raise ValueError(f"a result of shape {tuple(result.shape)} against a reference of {tuple(right.shape)}")
    right = right.double()
    difference = float(torch.linalg.vector_norm(result.double() - right))
    if difference == 0:
        return 0.0
    size = float(torch.linalg.vector_norm(right))
    return difference / size if size else inf


def _present(operands: Operands, position: int) -> Tensor:
    tensor = operands[position]
    assert tensor is not None, f"operand {position} is a result but None"
    return tensor
