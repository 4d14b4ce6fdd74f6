"""Train a network whose weights are sparse from the start: nine of ten weights never exist.

The pattern is random and stays. A sparse layer's parameter is `values`, a plain tensor, so any optimizer takes it.
Needs scikit-learn, for the digits.
"""

import math

import torch
from torch import nn
from torch.nn import functional

import sparsecomp
from sparsecomp.demo import digits
from sparsecomp.formats import CSR
from sparsecomp.nn import SparseLinear

DENSITY, EPOCHS, BATCH = 0.1, 15, 64


def random_layer(inputs: int, outputs: int) -> SparseLinear:
    """A layer with a random pattern; weights are scaled by the inputs that a row has, not by all of them."""
    pattern = torch.rand(outputs, inputs) < DENSITY
    weight = torch.randn(outputs, inputs) / math.sqrt(DENSITY * inputs)
    return SparseLinear(CSR.from_dense(pattern * weight), torch.zeros(outputs))


def main() -> None:
    torch.manual_seed(0)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(
        nn.Flatten(), random_layer(64, 512), nn.ReLU(), random_layer(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    compiled = torch.compile(model, backend="sparsecomp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    whole = len(x) - len(x) % BATCH  # batches of one size, so that one graph is compiled
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x))[:whole].split(BATCH):
            loss = functional.cross_entropy(compiled(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(sparsecomp.last_report())

    sparse = [layer for layer in model if isinstance(layer, SparseLinear)]
    stored = sum(layer.values.numel() for layer in sparse)
    dense = sum(layer.in_features * layer.out_features for layer in sparse)
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    print(f"{stored:,} of {dense:,} weights exist; accuracy {accuracy:.1%}")
    assert stored < 0.11 * dense
    assert accuracy > 0.93


if __name__ == "__main__":
    main()
