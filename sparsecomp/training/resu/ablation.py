"""What resurrected weights are worth: the loss with them and without them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from sparsecomp.errors import MaskError
from sparsecomp.nn.masked.layers import masked_weights


@dataclass(frozen=True)
class Ablation:
    """`removed` weights were set to 0, and the loss went from `before` to `after`."""

    removed: int
    before: float
    after: float


@torch.no_grad()
def ablate(model: nn.Module, chosen: Mapping[str, torch.Tensor], loss: Callable[[nn.Module], float]) -> Ablation:
    """Evaluate `loss(model)` as it is and with the `chosen` weights at 0; every weight then has its bits again.

    `chosen` is `RESUCycle.resurrected()`: bool of each weight's shape, by the names of `masked_weights(model)`.
    `loss` sees the model in evaluation mode, and its training flags come back. MaskError for a name or shape that
    the model does not have.
    """
    weights = masked_weights(model)
    for name, part in chosen.items():
        if name not in weights or weights[name][0].shape != part.shape or part.dtype != torch.bool:
            raise MaskError(f"{name} ({part.dtype} {tuple(part.shape)}) is no mask of a weight of this model")
    kept = {name: weights[name][0].detach().clone() for name in chosen}
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        before = loss(model)
        for name, part in chosen.items():
            weights[name][0].masked_fill_(part, 0)
        after = loss(model)
    finally:
        for name, value in kept.items():
            weights[name][0].copy_(value)
        for module, training in flags.items():
            module.training = training
    return Ablation(sum(int(part.sum()) for part in chosen.values()), before, after)
