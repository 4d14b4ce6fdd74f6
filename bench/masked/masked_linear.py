"""A pruned layer as people keep it: a linear layer and a mask, multiplied in each forward."""

import torch.nn.functional as F
from torch import Tensor, nn


class MaskedLinear(nn.Module):
    """x times mask · weight, and the bias.

    Attributes:
        mask: of the weight's shape and dtype.
    """

    mask: Tensor

    def __init__(self, linear: nn.Linear, mask: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("mask", mask.to(linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out)."""
        return F.linear(x, self.linear.weight * self.mask, self.linear.bias)
