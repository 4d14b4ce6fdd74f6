"""Whether a candidate is right, by the operation's reference, on data that it was not timed on."""

from typing import Any

import torch
from torch import Tensor

from sparsecomp.lowering.tuning.template import Candidate, Operation

_TIMED_SEEDS = (0, 1)
_CHECK_SEED = 2

Operands = tuple[Tensor | None, ...]


def timed_operands(operation: Operation[Any], problem: Any, device: torch.device) -> list[Operands]:
    """Operands to time candidates on in turns."""
    assert operation.operands is not None, f"{operation.name} has several candidates but no operands"
    return [operation.operands(problem, device, seed) for seed in _TIMED_SEEDS]


def fault(operation: Operation[Any], problem: Any, device: torch.device, candidate: Candidate[Any]) -> str | None:
    """What the launch raises, or how its results differ from the reference's beyond the tolerance; else None.

    All operands are fresh: a wrong candidate before this one may have written to any of them.

    Raises:
        Exception: whatever the operation's own functions raise, and `torch.OutOfMemoryError` of the launch.
    """
    assert operation.operands and operation.reference and operation.tolerance, f"{operation.name} has no reference"
    operands = operation.operands(problem, device, _CHECK_SEED)
    expected = operation.reference(problem, operands)
    allowed = operation.tolerance(problem)
    pairs = [(_present(operands, place), right) for place, right in zip(operation.results, expected, strict=True)]
    for result, right in pairs:
        assert result.shape == right.shape, f"{operation.name}'s reference has another shape than its result"
    try:
        candidate.template.prepare(problem, candidate.config)(*operands)
        errors = [relative_error(result, right) for result, right in pairs]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return first_line(error)
    for place, error in zip(operation.results, errors, strict=True):
        if not error <= allowed:  # NaN is not
            return f"relative error {error:.1e} of result {place}, where {allowed:.1e} is allowed"
    return None


def relative_error(result: Tensor, right: Tensor) -> float:
    """Frobenius norm of the difference over that of `right`, in float64; infinite if only `right` is zero."""
    right = right.double()
    difference = float(torch.linalg.vector_norm(result.double() - right))
    if difference == 0:
        return 0.0
    size = float(torch.linalg.vector_norm(right))
    return difference / size if size else float("inf")


def first_line(error: Exception) -> str:
    """The kind of an error, and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _present(operands: Operands, place: int) -> Tensor:
    tensor = operands[place]
    assert tensor is not None, f"operand {place} is a result but None"
    return tensor
