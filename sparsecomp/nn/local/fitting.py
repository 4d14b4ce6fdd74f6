"""Training of a small network on tensors that are all there: what the estimators do in `fit` and `partial_fit`."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsecomp.errors import ConfigError

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD,
}  # fmt: skip


def optimizer_of(kind: str, net: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """An optimizer by name.

    Raises:
        ConfigError: an unknown name, or a rate below 0.
    """
    if kind not in OPTIMIZERS:
        raise ConfigError(f"optimizer is {kind!r}, needs one of {', '.join(OPTIMIZERS)}")
    if lr < 0 or weight_decay < 0:
        raise ConfigError(f"lr is {lr}, weight_decay {weight_decay}: both need 0 or more")
    made: Any = OPTIMIZERS[kind]
    return made(net.parameters(), lr=lr, weight_decay=weight_decay)


@dataclass(frozen=True)
class Fitter:
    """A network, its optimizer and loss, and the batches' order, which torch's own generator draws.

    Args:
        call: the network, or what it was compiled to.
    """

    net: nn.Module
    call: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]
    batch_size: int

    def epoch(self, x: Tensor, y: Tensor) -> float:
        """One pass over all rows in a new order; the mean loss."""
        self.net.train()
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for rows in torch.randperm(len(x), device="cpu").to(x.device).split(self.batch_size):
            loss = self.loss(self.call(x[rows]), y[rows])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.detach() * len(rows)
        return total.item() / len(x)

    @torch.no_grad()
    def judge(self, x: Tensor, y: Tensor) -> float:
        """The loss on rows that are not trained on."""
        self.net.eval()
        return self.loss(self.net(x), y).item()


@dataclass
class EarlyStopping:
    """Stops when the loss has not fallen for `patience` epochs, and gives the best weights back."""

    net: nn.Module
    patience: int
    best: float = float("inf")
    waited: int = 0
    kept: dict[str, Any] = field(default_factory=dict)

    def stops(self, loss: float) -> bool:
        """Whether this epoch was the last."""
        if loss < self.best:
            self.best, self.waited, self.kept = loss, 0, copy.deepcopy(self.net.state_dict())
        else:
            self.waited += 1
        return self.waited >= self.patience

    def restore(self) -> None:
        """The weights of the best epoch, if there was one."""
        if self.kept:
            self.net.load_state_dict(self.kept)


def epochs_of(
    fitter: Fitter, rows: tuple[Tensor, Tensor], most: int, held_out: tuple[Tensor, Tensor] | None, patience: int | None
) -> Iterator[dict[str, float]]:
    """Train for at most so many epochs; yields the losses of each as it ends.

    Args:
        rows, held_out: inputs and targets, to train on and to judge by.
        patience: stop when the loss on `held_out` has not fallen for so many epochs; None does not stop.
    """
    stopping = None if patience is None else EarlyStopping(fitter.net, patience)
    for _ in range(most):
        losses = {"loss": fitter.epoch(*rows)}
        if held_out is not None:
            losses["validation_loss"] = fitter.judge(*held_out)
        yield losses
        if stopping is not None and stopping.stops(losses["validation_loss"]):
            break
    if stopping is not None:
        stopping.restore()
