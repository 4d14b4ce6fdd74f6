"""A spiking network as people write it by hand: a loop over time, a neuron of a few lines, a surrogate of their own."""

import math

import torch
from torch import Tensor, nn

from sparsecomp.demo import Fire


class Handwritten(nn.Module):
    """Three convolutions and a linear layer on images of 32×32, leaky neurons behind the convolutions.

    Without normalisation, whose statistics are of each step, its weights are as large as makes neurons fire.
    """

    def __init__(self, channels: int = 64, classes: int = 10, norm: bool = False) -> None:
        super().__init__()
        layers = (
            nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False),
        )  # fmt: skip
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.85 / math.sqrt(layer.weight[0].numel() * 0.2))
        self.convolutions = nn.ModuleList(layers)
        self.norms = nn.ModuleList([nn.BatchNorm2d(one.out_channels) if norm else nn.Identity() for one in layers])
        self.head = nn.Linear(2 * channels * 16 * 16, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(T, B, 3, 32, 32) to (T, B, classes)."""
        membranes, out = [0.0] * len(self.convolutions), []
        for step in x:
            for index, layer in enumerate(self.convolutions):
                charge = membranes[index] * 0.5 + self.norms[index](layer(step))
                step = Fire.apply(charge - 1.0)
                membranes[index] = charge * (1 - step.detach())
            out.append(self.head(step.flatten(1)))
        return torch.stack(out)
