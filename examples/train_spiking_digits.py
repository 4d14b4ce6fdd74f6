"""Train a spiking network on handwritten digits, then compile it and compare.

The neuron is written in plain PyTorch. The compiler finds its spikes by reading the graph: there is nothing to declare.
Needs scikit-learn, for the digits.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsecomp
from sparsecomp.demo import digits

STEPS, EPOCHS, BATCH = 4, 4, 64


class Fire(torch.autograd.Function):
    """A step forward, a smooth bump backward."""

    @staticmethod
    def forward(ctx, membrane: Tensor) -> Tensor:
        ctx.save_for_backward(membrane)
        return (membrane >= 1).float()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (membrane,) = ctx.saved_tensors
        return gradient / (1 + (torch.pi * (membrane - 1)).square())


class Neurons(nn.Module):
    """Leaky integrate-and-fire over the first dimension, time."""

    def forward(self, currents: Tensor) -> Tensor:
        membrane, spikes = torch.zeros_like(currents[0]), []
        for current in currents:
            membrane = 0.5 * membrane + current
            spikes.append(Fire.apply(membrane))
            membrane = membrane * (1 - spikes[-1])
        return torch.stack(spikes)


class Net(nn.Module):
    """Pixels (B, 1, 8, 8) to firing rates of ten classes (B, 10); 16 neurons vote for a class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 160)
        self.neurons = Neurons()

    def forward(self, x: Tensor) -> Tensor:
        current = 2 * self.first(x.flatten(1))
        spikes = self.neurons(current.expand(STEPS, *current.shape))
        spikes = self.neurons(self.second(spikes))
        return self.neurons(self.third(spikes)).mean(0).unflatten(1, (10, 16)).mean(2)


def main() -> None:
    torch.manual_seed(0)
    x, y, x_test, y_test = digits()
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            loss = functional.cross_entropy(10 * net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    net.eval()
    compiled = torch.compile(net, backend="sparsecomp")
    with torch.no_grad():
        eager, ours = net(x_test).argmax(1), compiled(x_test).argmax(1)
    print(sparsecomp.last_report())  # on a CPU the layers stay dense, and this says so
    print(sparsecomp.explain(net, x_test, implementation="binary").summary)

    accuracy = (ours == y_test).float().mean().item()
    different = int((eager != ours).sum())
    print(f"accuracy {accuracy:.1%}; {different} of {len(y_test)} predictions differ from eager")
    assert accuracy > 0.9
    assert different <= 0.01 * len(y_test)  # a membrane at the threshold may fire in one and not in the other
    found = [site for site in sparsecomp.explain(net, x_test).sites if site.rule == "spike_linear"]
    assert {site.module for site in found if site.density is not None} >= {"second", "third"}  # spikes were found


if __name__ == "__main__":
    main()
