"""Tell the compiler what your own neuron gives, where its graph does not show it.

Most neurons need nothing of this: the compiler follows a comparison that becomes numbers. This one adds noise to its
threshold by a function that cannot be traced, so `optimize` keeps it as one call, of which nothing is known. What it
gives, 0 or 1, is then declared.
"""

import torch
from torch import Tensor, nn

import sparsecomp
from sparsecomp.snn import binary


class NoisyNeuron(nn.Module):
    """Fires where the input reaches a threshold that jitters."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        jitter = 0.1 * torch.randn(x.shape, generator=generator)
        spikes = torch.zeros_like(x)
        spikes[x > 0.5 + jitter.to(x.device)] = 1.0
        return spikes


class Registered(NoisyNeuron):
    """The same, and what it gives is declared below."""


# as a decorator: @sparsecomp.register_neuron(domain=binary()); a name works too, for a class that is not imported yet
sparsecomp.register_neuron(Registered, domain=binary())


def network(neuron: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), neuron, nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1), nn.Flatten()
    ).eval()


def main() -> None:
    x = torch.randn(8, 16, 16, 16)
    # forced, so that the rewrite is seen on a CPU too, where it would not pay
    options = {"implementation": "binary"}
    for neuron in (NoisyNeuron(), Registered()):
        model = network(neuron)
        with torch.no_grad():
            optimized = sparsecomp.optimize(model, x, options=options)
            torch.testing.assert_close(optimized(x), model(x), rtol=1e-5, atol=1e-5)
        print(f"{type(neuron).__name__}: {optimized.report}")
        rewritten = [site.module for site in optimized.report.rewritten]
        assert rewritten == (["3"] if isinstance(neuron, Registered) else [])


if __name__ == "__main__":
    main()
