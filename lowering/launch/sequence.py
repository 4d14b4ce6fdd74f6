"""Several launches that carry out one problem together, with a workspace that lives for one call."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.strided import contiguous_strides
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.lowering.tuning import host

Workspace = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""


class Step(NamedTuple):
    """A launch, and which tensors it takes: positions among the call's tensors followed by the workspaces, or None."""

    launch: Launch
    takes: tuple[int | None, ...]


class Launches:
    """Launches in order, callable with its tensors like one.

    Args:
        workspaces: shape and dtype of each tensor that is allocated, uninitialised, in each call.
        steps: the launches, in order.
    """

    def __init__(self, workspaces: Sequence[Workspace], steps: Sequence[Step]) -> None:
        self.workspaces = [(shape, contiguous_strides(shape), dtype) for shape, dtype in workspaces]
        self.steps = steps
        self.host_seconds = sum(step.launch.host_seconds for step in steps) + host.ALLOCATION * len(workspaces)

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch all on the current stream of the device of the first tensor."""
        first = tensors[0]
        assert first is not None
        own = [allocate(shape, stride, dtype, first.device) for shape, stride, dtype in self.workspaces]
        every = (*tensors, *own)
        for launch, takes in self.steps:
            launch(*[None if position is None else every[position] for position in takes])
