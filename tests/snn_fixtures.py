"""Spiking models of every style and library, and the graphs that Dynamo makes of them."""

import copy
import sys
import types
from typing import Any

import torch
from rewriting import Surrogate
from torch import fx, nn


def capture(model: nn.Module, *inputs: Any, train: bool = False) -> list[tuple[fx.GraphModule, list[Any]]]:
    """Dynamo's torch-level graphs of one call, each with copies of the inputs it was called with."""
    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        def call(*args: Any) -> Any:
            graphs.append((gm, [a.detach().clone() if isinstance(a, torch.Tensor) else copy.copy(a) for a in args]))
            return gm(*args)

        return call

    torch._dynamo.reset()
    model.train(train)
    with torch.no_grad() if not train else torch.enable_grad():
        torch.compile(model, backend=backend)(*inputs)
    return graphs


def _step(v: torch.Tensor) -> torch.Tensor:
    return Surrogate.apply(v - 0.5)  # type: ignore[no-any-return]


def _heaviside(v: torch.Tensor) -> torch.Tensor:
    return torch.heaviside(v - 0.5, torch.tensor(1.0))


def _straight_through(v: torch.Tensor) -> torch.Tensor:
    soft = torch.sigmoid(4 * (v - 0.5))
    hard = (v > 0.5).float()
    return (hard - soft).detach() + soft


FIRE = {"function": _step, "heaviside": _heaviside, "straight_through": _straight_through}
GATHER = ("stack", "cat", "setitem", "empty", "attribute")


class HandLIF(nn.Module):
    """conv → batch-norm → hand-written LIF over T steps → conv.

    `fire` picks how a spike is made, `gather` how the steps become one tensor of shape (T, B, C, H, W).
    """

    def __init__(self, fire: str = "function", gather: str = "stack", pool: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.second = nn.Conv2d(3, 2, 3)
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()
        self.fire, self.gather = FIRE[fire], gather

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current = self.norm(self.first(x.flatten(0, 1))).unflatten(0, x.shape[:2])
        return self.second(self.pool(self.spikes(current).flatten(0, 1)))

    def spikes(self, current: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(current) if self.gather == "setitem" else torch.empty_like(current)
        v, steps = torch.zeros_like(current[0]), []
        for t in range(current.shape[0]):
            v = 0.5 * v + current[t]
            spike = self.fire(v)
            v = v * (1 - spike)
            steps.append(spike)
            if self.gather in ("setitem", "empty"):
                out[t] = spike
        if self.gather in ("setitem", "empty"):
            return out
        if self.gather == "cat":
            return torch.cat([step.unsqueeze(0) for step in steps])
        self.last = steps[-1]
        return torch.stack(steps)


class NeuronConv(nn.Module):
    """A library's neuron, then a convolution."""

    def __init__(self, neuron: nn.Module, channels: int = 2) -> None:
        super().__init__()
        self.neuron, self.conv = neuron, nn.Conv2d(channels, 2, 3)

    def forward(self, x: torch.Tensor, *state: Any) -> torch.Tensor:
        out = self.neuron(x, *state)
        spikes = out[0] if isinstance(out, tuple | list) else out
        return self.conv(spikes.flatten(0, 1) if spikes.dim() == 5 else spikes)


def stub_torchvision(monkeypatch: Any) -> None:
    """Model zoos import torchvision for its download helpers and layers' names; the tests need neither."""
    for name in ("torchvision", "torchvision.models", "torchvision.models.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["torchvision.models.utils"].load_state_dict_from_url = None  # type: ignore[attr-defined]
