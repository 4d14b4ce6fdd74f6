"""Selections among the elements of a mask, in plain torch; they wait for no device."""

import torch
from torch import Tensor

MOST = 2**31 - 2**16
"""Elements that the kernels' 32-bit ranks can count."""

def select_by_sorting(scores: Tensor, count: Tensor) -> Tensor:
    """`select_largest` in plain torch, on any device."""
    values = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = values.sort(descending=True, stable=True).indices
    first = leading(torch.ones_like(order, dtype=torch.bool), count)
    return torch.zeros_like(first).scatter_(0, order, first)


def leading(able: Tensor, count: Tensor | int) -> Tensor:
    """The first `count` of the True."""
    return able & (able.cumsum(0) <= count)
