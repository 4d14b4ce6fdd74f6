"""Theta as a tensor of its own, and its step: the reference for the form in which it lies in the weight's memory."""

from typing import Any

import torch
from torch import Tensor, nn

from sparsecomp.errors import MaskError
from sparsecomp.nn.masked.mask import SparseMask
from sparsecomp.ops.masked.effective_weight import effective_weight
from sparsecomp.ops.masked.elementwise import gather_pruned
from sparsecomp.training.resu.optim import check_settings, check_state


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
        zeros = torch.zeros(mask.pruned_count, dtype=dtype, device=mask.mask.device)
        self.theta = nn.Parameter(zeros if theta is None else theta.detach().clone())

    @classmethod
    def of(cls, weight: Tensor, mask: SparseMask) -> "ResurrectionEmbedding":
        """Theta from the pruned elements of a weight, such as one in its RESU phase."""
        return cls(mask, gather_pruned(weight.detach(), mask.mask, mask.pruned_count))

    def forward(self, weight: Tensor) -> Tensor:
        """W_eff of the weight's shape; errors as of `sparsecomp.ops.effective_weight`."""
        return effective_weight(weight, self.theta, self.mask.mask)


class RESUUpdater:
    """Selective SGD on theta as a vector of its own: elements with C > `tau` move by -lr * g.

    Others stay bit for bit, as no decay or momentum acts. MaskError for a setting outside its domain.
    """

    def __init__(self, theta: Tensor, lr: float, beta: float = 0.9, tau: float = 0.5, delta: float = 1e-12) -> None:
        check_settings(lr=lr, beta=beta, tau=tau, delta=delta)
        self.theta, self.lr, self.beta, self.tau, self.delta = theta, lr, beta, tau, delta
        self.mean = torch.zeros_like(theta, dtype=torch.float32, requires_grad=False)
        self.size = torch.zeros_like(self.mean)
        self.steps = 0
        self.warm_up = round(1 / (1 - beta))

    def consistency(self) -> Tensor:
        """C of each element, fp32 of theta's shape; 0 before the first step."""
        return self.mean.abs() / (self.size + self.delta)

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """Take dL/dtheta, of theta's shape (the gather of dL/dW_eff at P); MaskError for another shape."""
        if gradient.shape != self.theta.shape:
            raise MaskError(f"the gradient is {tuple(gradient.shape)}, theta {tuple(self.theta.shape)}: gather it at P")
        wide = gradient.float()
        self.mean.lerp_(wide, 1 - self.beta)
        self.size.lerp_(wide.abs(), 1 - self.beta)
        self.steps += 1
        if self.steps > self.warm_up:
            moved = (self.theta - self.lr * wide).to(self.theta.dtype)
            self.theta.copy_(torch.where(self.consistency() > self.tau, moved, self.theta))

    def state_dict(self) -> dict[str, Any]:
        """The averages and the number of steps; theta is its owner's."""
        return {"mean": self.mean, "size": self.size, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; MaskError, with nothing taken, if it is of another number of elements."""
        check_state(state, {"mean": self.mean, "size": self.size})
        self.mean.copy_(state["mean"])
        self.size.copy_(state["size"])
        self.steps = state["steps"]
