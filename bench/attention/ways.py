"""The two ways in which attention is timed: without gradients, and with them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def two_ways(
    attend: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor
) -> tuple[Callable[[], Tensor], Callable[[], tuple[Tensor, ...]]]:
    """Calls of attention: the result without gradients, and the result with those by all operands."""

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*operands)

    def both() -> tuple[Tensor, ...]:
        out = attend(*operands)
        return out, *torch.autograd.grad(out, operands, grad)

    return forward, both
