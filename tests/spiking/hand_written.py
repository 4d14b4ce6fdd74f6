"""Neurons in loops over time steps as people write them, and the currents that they are given."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[..., Any]


def loop(charge: Call, fire: Call, reset: Call, start: Call = torch.zeros_like, join: Call = torch.stack) -> Call:
    """A neuron by its three parts, of currents (T, …): the spikes, joined, and the last membrane."""

    def run(x: Tensor) -> Any:
        v, out = start(x[0]), []
        for t in range(x.shape[0]):
            h = charge(x[t], v)
            out.append(fire(h))
            v = reset(h, out[-1])
        return join(out), v

    return run


def currents(*shape: int, seed: int = 0, special: bool = False) -> Tensor:
    """Random ones, with numbers at the ends of float32 and beyond among them if they are to be special."""
    x = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if special:
        numbers = [float("nan"), float("inf"), -float("inf"), -0.0, 0.7, 1e-45, 3e38, -3e38]
        x.flatten()[: len(numbers)] = torch.tensor(numbers)
        x.flatten()[-len(numbers) :] = torch.tensor(numbers).flip(0)
    return x


class Channels(nn.Module):
    """A decay and a threshold for each channel, as parameters, and a state that is handed in and out.

    Args:
        decay: (4, 1, 1).
        share: of the membrane that stays, by the decay.
        fire: spikes, of the membrane and the threshold.
    """

    def __init__(self, decay: Tensor, share: Call, fire: Call) -> None:
        super().__init__()
        self.decay, self.share, self.fire = nn.Parameter(decay), share, fire
        self.threshold = nn.Parameter(torch.tensor([0.5, 0.7, 0.9, 1.1]).view(4, 1, 1))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = []
        for step in x.unbind():
            v = v * self.share(self.decay) + step
            out.append(self.fire(v, self.threshold))
            v = v - out[-1] * self.threshold
        return torch.stack(out), v
