"""Theta as a parameter of its own: the reference for the form in which it lies in the weight's memory."""

import torch
from torch import Tensor, nn

from sparsecomp.nn.masked.effective_weight import effective_weight, gather_pruned
from sparsecomp.nn.masked.mask import SparseMask


class ResurrectionEmbedding(nn.Module):
    """A vector theta for the pruned elements of a weight: M * W + (1 - M) * Phi(theta).

    Args:
        mask: of the weight; theta has one element a pruned one, in ascending flat order, and follows no later change
            of the mask: make another embedding then.
        theta: to start from, 1-d; zeros by default, which leave the function as it is.
        dtype: of theta by default.
    """

    def __init__(self, mask: SparseMask, theta: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.mask = mask
        zeros = torch.zeros(mask.pruned.shape, dtype=dtype, device=mask.mask.device)
        self.theta = nn.Parameter(zeros if theta is None else theta.detach().clone())

    @classmethod
    def of(cls, weight: Tensor, mask: SparseMask) -> "ResurrectionEmbedding":
        """Theta from the pruned elements of a weight, such as one in its RESU phase."""
        return cls(mask, gather_pruned(weight.detach(), mask))

    def forward(self, weight: Tensor) -> Tensor:
        """W_eff of the weight's shape; MaskError if weight, mask and theta do not belong together."""
        return effective_weight(weight, self.theta, self.mask)
