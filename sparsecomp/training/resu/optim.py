"""The step on theta: only weights whose gradients agree over time move, so that noise resurrects little.

C = |m| / (v + delta), with m and v the moving averages of g and |g|, tells how much a gradient agrees with itself; it
lies in [0, 1]. C is 1 at the first step whatever the gradient, so nothing moves during the first round(1 / (1 - beta))
steps. Pure noise has a mean C of about 0.23 at beta = 0.9.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import MaskError
from sparsecomp.nn.masked.mask import positions_of
from sparsecomp.ops.masked.selective_step import selective_step


class RESUSelective:
    """Selective AdamW on theta in its weight's memory, where `pruned`: flat positions, or a bool tensor of its shape.

    Three float32 numbers a pruned element are kept: m (also Adam's first moment, so `betas[0]` is C's beta), v, and
    the second moment. With `whole`, m and the second moment are kept at the pruned places of these two tensors of the
    weight's shape, float32 and contiguous, such as another optimizer's moments. Selected are the elements with
    C > `tau`, or with `select` "top" the share `amount` of largest C (at least one of any; ties to the lowest
    position). Selected ones decay by 1 - lr * weight_decay and move by Adam's step; all others stay bit for bit. The
    number of steps is on the device, so a step can be captured. With a bool tensor the averages have its shape, and
    `follow` takes another one without waiting for the device.

    Raises:
        MaskError: a setting outside its domain.
    """

    def __init__(
        self, pruned: Tensor, *, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, tau: float = 0.5, delta: float = 1e-12, select: str = "threshold",
        amount: float = 0.1, whole: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        check_settings(lr=lr, beta=betas[0], tau=tau, delta=delta)
        if select not in ("threshold", "top") or not 0 <= amount <= 1 or not 0 <= betas[1] < 1:
            raise MaskError(f"select {select!r}, amount {amount}, betas {betas}: threshold or top, a share, below 1")
        if not (eps >= 0 and weight_decay >= 0):
            raise MaskError(f"eps {eps}, weight_decay {weight_decay}: neither is negative")
        self.pruned, self.lr, self.betas, self.eps, self.weight_decay = pruned, lr, betas, eps, weight_decay
        self.tau, self.delta, self.select, self.amount = tau, delta, select, amount
        self.whole = whole
        self.slots = {
            name: torch.zeros(pruned.shape, dtype=torch.float32, device=pruned.device)
            for name in (("size",) if whole is not None else ("mean", "size", "square"))
        }
        self.steps = torch.zeros((), dtype=torch.int64, device=pruned.device)

    @property
    def warm_up(self) -> int:
        """Steps before anything moves."""
        return round(1 / (1 - self.betas[0]))

    def consistency(self) -> Tensor:
        """C of each pruned element, fp32; 0 before the first step."""
        mean = self.slots["mean"] if self.whole is None else self.whole[0]
        if self._by_mask:
            mean, size = mean[self.pruned], self.slots["size"][self.pruned]
        else:
            size = self.slots["size"]
            mean = mean if self.whole is None else mean.view(-1).index_select(0, self.pruned)
        return mean.abs() / (size + self.delta)

    @property
    def _by_mask(self) -> bool:
        return self.pruned.dtype is torch.bool

    @torch.no_grad()
    def follow(self, pruned: Tensor) -> None:
        """Take the pruned elements (bool) that there are now: if they are others, all averages begin anew."""
        self.steps.masked_fill_((pruned != self.pruned).any(), 0)
        self.pruned.copy_(pruned)

    @torch.no_grad()
    def step(self, weight: Tensor, gradient: Tensor) -> None:
        """Move theta within `weight`, of any memory format, by dL/dW_eff of its shape."""
        if gradient.shape != weight.shape:
            raise MaskError(f"the gradient is {tuple(gradient.shape)}, the weight {tuple(weight.shape)}: give dL/dW")
        self.steps += 1
        mean, square = self.whole or (self.slots["mean"], self.slots["square"])
        selective_step(
            weight, gradient, self.pruned, mean, self.slots["size"], square, self.steps, lr=self.lr, betas=self.betas,
            eps=self.eps, weight_decay=self.weight_decay, tau=self.tau, delta=self.delta, warm_up=self.warm_up,
            count=self._places() if self.select == "top" else None,
            whole=self.whole is not None or self._by_mask,
        )  # fmt: skip

    def _places(self) -> Tensor | int:
        if self._by_mask:
            return (self.pruned.sum().double() * self.amount).ceil().long()
        return math.ceil(self.amount * self.pruned.numel())

    def state_dict(self) -> dict[str, Tensor]:
        """The averages, the number of steps and what is pruned, as they are kept; theta is in its weight."""
        return {"pruned": self.pruned, "steps": self.steps, **self.slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; MaskError, with nothing taken, if it is of other positions."""
        own = self.state_dict()
        if self._by_mask and isinstance(state.get("pruned"), Tensor) and state["pruned"].dtype is not torch.bool:
            state = self._spread(state)
        check_state(state, own)
        if not torch.equal(state["pruned"].to(self.pruned.device), own["pruned"]):
            raise MaskError("the state is of another mask, with other positions: load the model, with its masks, first")
        self.steps.copy_(state["steps"])
        for name, slot in self.slots.items():
            slot.copy_(state[name])

    def _spread(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state of the pruned positions alone, as 0.1 wrote it, in the shape of the mask."""
        places = positions_of(self.pruned)
        compact = {"pruned": places, **{name: places for name in self.slots}}
        check_state(state, {name: one.new_empty(one.shape) for name, one in compact.items()})
        if not torch.equal(state["pruned"].to(places), places):
            raise MaskError("the state is of another mask, with other positions: load the model, with its masks, first")
        spread = {name: slot.masked_scatter(self.pruned, state[name].to(slot)) for name, slot in self.slots.items()}
        return {**state, **spread, "pruned": self.pruned}


def check_settings(*, lr: float, beta: float, tau: float, delta: float) -> None:
    """MaskError for a setting of theta's step outside its domain."""
    if not (lr >= 0 and 0 <= beta < 1 and 0 <= tau <= 1 and delta > 0):
        raise MaskError(f"lr {lr}, beta {beta}, tau {tau}, delta {delta}: lr >= 0, beta in [0, 1), tau in [0, 1]")


def check_state(state: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    """MaskError for a saved state whose tensors are not like one's own."""
    for name, tensor in own.items():
        saved = state.get(name)
        if not isinstance(saved, Tensor) or saved.shape != tensor.shape:
            has = tuple(saved.shape) if isinstance(saved, Tensor) else type(saved).__name__
            raise MaskError(f"{name} of the state is {has}, theta's {tuple(tensor.shape)}: it is of another mask")
