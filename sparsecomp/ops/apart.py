"""A copy that is one: who writes to it does not write to what it was made of.

Inductor takes `clone` out of a graph where it sees no write. A result that an operator keeps for its gradients and that
is returned has none in the graph: its caller may write to it, and the gradients would read what the caller wrote.
"""

from typing import Any

import torch
from torch import Tensor

from sparsecomp.ops.library import TAGS, differentiable, implement, library

library.define("apart(Tensor x) -> Tensor", tags=TAGS)


def _copy(x: Tensor) -> Tensor:
    return x.clone()


def _fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    """The gradient reads nothing."""


implement("apart", _copy, fake=_fake)
differentiable("apart", _backward, _remember)
