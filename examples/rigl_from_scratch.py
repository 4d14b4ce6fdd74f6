"""Train a network that is sparse from the first step, whose pattern looks for the weights that matter (RigL).

Nine of ten weights never exist. Every 20 steps some of the smallest go, and those come whose gradient is largest. Their
number stays, so the compiled model is compiled once. Needs scikit-learn, for the digits.
"""

import torch
from torch import nn
from torch.nn import functional

import sparsecomp
from sparsecomp import Unstructured
from sparsecomp.demo import digits
from sparsecomp.runtime import RigL

EPOCHS, BATCH = 20, 64


def main() -> None:
    torch.manual_seed(0)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    sparsecomp.sparsify(model, Unstructured(0.9, by="random"), filter=lambda layer, name: name != "5")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rigl = RigL(model, optimizer, every=20, end=EPOCHS * 16)
    before = {name: manager.pattern for name, manager in rigl.managers.items()}
    compiled = torch.compile(model, backend="sparsecomp")
    whole = len(x) - len(x) % BATCH  # batches of one size, so that one graph is compiled
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x))[:whole].split(BATCH):
            optimizer.zero_grad()
            with rigl.watch():  # in the steps that change patterns, the whole gradient is seen
                functional.cross_entropy(compiled(x[rows]), y[rows]).backward()
            if not rigl.update():
                optimizer.step()

    model.eval()
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    for name, manager in rigl.managers.items():
        now = manager.pattern
        print(f"layer {name}: {now.nnz} weights, {(now - before[name]).nnz} others than at the start")
        assert now.nnz == before[name].nnz and now != before[name]
    print(f"accuracy {accuracy:.1%}")
    assert accuracy > 0.93


if __name__ == "__main__":
    main()
