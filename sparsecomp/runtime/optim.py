"""The step on theta: only weights whose gradients agree over time move, so that noise resurrects little."""

import torch

from sparsecomp.errors import MaskError


class RESUUpdater:
    """Selective SGD on theta with C = |m| / (v + delta), m and v the moving averages of g and |g|; C is in [0, 1].

    C is 1 at the first step whatever the gradient, so nothing moves during the first round(1 / (1 - beta)) steps.
    After it, elements with C > ``tau`` move by -lr * g; the others stay bit for bit, as no decay or momentum acts.
    Pure noise has a mean C of about 0.23 at beta = 0.9. MaskError for a setting outside its domain.
    """

    def __init__(
        self, theta: torch.Tensor, lr: float, beta: float = 0.9, tau: float = 0.5, delta: float = 1e-12
    ) -> None:
        if not (lr >= 0 and 0 <= beta < 1 and 0 <= tau <= 1 and delta > 0):
            raise MaskError(f"lr {lr}, beta {beta}, tau {tau}, delta {delta}: lr >= 0, beta in [0, 1), tau in [0, 1]")
        self.theta, self.lr, self.beta, self.tau, self.delta = theta, lr, beta, tau, delta
        self.mean = torch.zeros_like(theta, dtype=torch.float32, requires_grad=False)
        self.size = torch.zeros_like(self.mean)
        self.steps = 0
        self.warm_up = round(1 / (1 - beta))

    def consistency(self) -> torch.Tensor:
        """C of each element, fp32 of theta's shape; 0 before the first step."""
        return self.mean.abs() / (self.size + self.delta)

    @torch.no_grad()
    def step(self, gradient: torch.Tensor) -> None:
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
