"""Train weights to exact zeros, then store and compile what is left.

After each of the optimizer's steps a proximal step sets small weights to exactly 0. Needs scikit-learn, for the digits.
"""

import torch
from torch import nn
from torch.nn import functional

import sparsecomp
from sparsecomp import FromMask
from sparsecomp.demo import digits
from sparsecomp.nn import SparseLinear
from sparsecomp.runtime import L1, Proximal

EPOCHS, BATCH = 25, 64


def main() -> None:
    torch.manual_seed(0)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    proximal = Proximal(optimizer, model, L1(2e-3), filter=lambda layer, name: name != "5")
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    proximal.remove()
    zeros = {name: (weight == 0).float().mean().item() for name, weight in proximal.weights.items()}
    print("zeros:", {name: f"{share:.0%}" for name, share in zeros.items()})

    model.eval()
    with torch.no_grad():
        expected = model(x_test)
        sparsecomp.sparsify(model, FromMask(), filter=lambda layer, name: name != "5")
        found = torch.compile(model, backend="sparsecomp")(x_test)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    print(sparsecomp.last_report())
    stored = sum(layer.values.numel() for layer in model if isinstance(layer, SparseLinear))
    accuracy = (expected.argmax(1) == y_test).float().mean().item()
    print(f"{stored:,} weights are left of {64 * 256 + 256 * 256:,}; accuracy {accuracy:.1%}")
    assert all(share > 0.5 for share in zeros.values())
    assert accuracy > 0.93


if __name__ == "__main__":
    main()
