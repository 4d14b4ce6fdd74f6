"""Published ways to train a sparse network, as peers of the RESU cycle: small loops over plain PyTorch modules.

The weights of a peer are zero outside their masks after every step, and so are AdamW's moments. The forward pass is
the dense one, so a weight's gradient is the dense gradient, which RigL grows by.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional

from sparsecomp.runtime import erk_budget, select_top
from sparsecomp.training.pruning.scores import magnitude_mask

Batch = tuple[torch.Tensor, torch.Tensor]


class Masked:
    """The weights of a model's linear and convolution layers, their masks, and their optimizer."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.weights = layer_weights(model)
        self.masks = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in self.weights.items()}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def budget(self, sparsity: float) -> dict[str, int]:
        """Weights that each layer keeps, by ERK."""
        return erk_budget({name: weight.shape for name, weight in self.weights.items()}, sparsity)

    @torch.no_grad()
    def clear(self) -> None:
        """Zero the weights and moments outside the masks."""
        for name, weight in self.weights.items():
            pruned = ~self.masks[name]
            moments = self.optimizer.state.get(weight, {})
            for part in (weight, *(moments[key] for key in ("exp_avg", "exp_avg_sq") if key in moments)):
                part.masked_fill_(pruned, 0)


Rule = Callable[[int, Masked], bool]
"""Changes the masks before an optimizer step, whose number it is given; True if that step is left out for it."""


def layer_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of the linear and convolution layers, by their names in the model."""
    return {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def train(model: nn.Module, batches: Iterable[Batch], rule: Rule, lr: float) -> Masked:
    """Train on the batches, one step each, with the masks that the rule sets."""
    masked = Masked(model, lr)
    for step, (x, y) in enumerate(batches):
        masked.optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        if not rule(step, masked):
            masked.optimizer.step()
        masked.clear()
    return masked


def dense(step: int, masked: Masked) -> bool:
    """Prunes nothing."""
    return False


def one_shot(sparsity: float, at: int) -> Rule:
    """Magnitude pruning to the whole sparsity in one step; what follows is fine-tuning."""

    def rule(step: int, masked: Masked) -> bool:
        if step == at:
            _keep_largest(masked, sparsity)
        return False

    return rule


def gradual(sparsity: float, start: int, end: int, every: int) -> Rule:
    """Gradual magnitude pruning (Zhu & Gupta 2017): cubic from 0 at `start` to the whole sparsity at `end`.

    A pruned weight is zero and gets no step, so it has the lowest magnitude and stays pruned.
    """

    def rule(step: int, masked: Masked) -> bool:
        if start <= step <= end and ((step - start) % every == 0 or step == end):
            _keep_largest(masked, sparsity * (1 - (1 - (step - start) / (end - start)) ** 3))
        return False

    return rule


def rigl(
    sparsity: float, end: int, every: int, generator: torch.Generator, by_gradient: bool, share: float = 0.3
) -> Rule:
    """RigL (Evci et al. 2020) from random ERK masks, or the same with random growth.

    Every `every` steps before `end`, each layer drops share / 2 * (1 + cos(pi * step / end)) of its smallest kept
    weights and grows as many of the rest, just-dropped ones included: those with the largest gradient, or random ones.
    Weights that come back from zero start at zero; the change of the masks takes the place of the step.
    """

    def rule(step: int, masked: Masked) -> bool:
        if step == 0:
            for name, keep in masked.budget(sparsity).items():
                masked.masks[name] = _top(torch.rand(masked.weights[name].shape, generator=generator), keep)
            masked.clear()
            # the gradient at hand is that of the dense start
            return True
        if step % every or step >= end:
            return False
        for name, weight in masked.weights.items():
            kept = masked.masks[name]
            count = int(share / 2 * (1 + math.cos(math.pi * step / end)) * int(kept.sum()))
            assert weight.grad is not None
            staying = _top(weight.detach().abs().masked_fill(~kept, -1), int(kept.sum()) - count)
            wanted = weight.grad.abs() if by_gradient else torch.rand(weight.shape, generator=generator)
            grown = _top(wanted.masked_fill(staying, -1), count)
            moments = masked.optimizer.state[weight]
            for key in ("exp_avg", "exp_avg_sq"):
                moments[key].masked_fill_(grown & ~kept, 0)
            masked.masks[name] = staying | grown
        return True

    return rule


def _keep_largest(masked: Masked, sparsity: float) -> None:
    for name, keep in masked.budget(sparsity).items():
        masked.masks[name] = magnitude_mask(masked.weights[name], keep)


def _top(scores: torch.Tensor, count: int) -> torch.Tensor:
    return select_top(scores.reshape(-1), count).reshape(scores.shape)
