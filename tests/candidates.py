"""Configurations of a kernel, held against its operation's reference as the tuner does it."""

from typing import Any

import torch

from sparsecomp.lowering.cache.signature import device_of


def place(device: str) -> torch.device:
    """A device as the tuner names it."""
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def check_candidates(operation: Any, problem: Any, device: str, count: int) -> None:
    """Of all candidates for a problem, `count` that lie evenly among them give what the reference gives."""
    from sparsecomp.lowering.tuning.trial import fault  # loads Triton

    candidates = operation.candidates(problem, device_of(place(device)))
    assert candidates
    for candidate in candidates[:: -(-len(candidates) // count)]:
        assert fault(operation, problem, place(device), candidate) is None, candidate.name
