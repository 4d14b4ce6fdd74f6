"""The 2:4 workflow: train dense, prune to two of four neighbours, fine-tune what is left, save, load, and go back.

Needs scikit-learn, for the digits.
"""

import copy
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsecomp
from sparsecomp import NM, SparseGPT
from sparsecomp.demo import digits
from sparsecomp.nn import SparseLinear


def build() -> nn.Sequential:
    first, second, last = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), last)


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            loss = functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model(x).argmax(1) == y).float().mean().item()


def all_but_the_last(layer: nn.Module, name: str) -> bool:
    return name != "5"


def main() -> None:
    torch.manual_seed(0)
    x, y, x_test, y_test = digits()
    dense = build()
    train(dense, x, y, epochs=10, rate=2e-3)
    print(f"dense: {accuracy(dense, x_test, y_test):.1%}")

    # by magnitude, no data is needed; SparseGPT reads some and lets what is kept make up for what is gone
    plain = sparsecomp.sparsify(copy.deepcopy(dense), NM(2, 4), filter=all_but_the_last)
    print(f"2:4 by magnitude: {accuracy(plain, x_test, y_test):.1%}")
    batches = list(x[:512].split(128))
    pruned = sparsecomp.sparsify(
        copy.deepcopy(dense), NM(2, 4, by=SparseGPT(damping=0.01)), filter=all_but_the_last, batches=batches
    )
    print(f"2:4 by SparseGPT: {accuracy(pruned, x_test, y_test):.1%}")
    train(pruned, x, y, epochs=2, rate=5e-4)  # only what is stored trains
    print(f"fine-tuned: {accuracy(pruned, x_test, y_test):.1%}")

    # a saved sparse model loads into one that was freshly built and pruned in the same way
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pruned.pt"
        torch.save(pruned.state_dict(), path)
        loaded = sparsecomp.sparsify(build(), NM(2, 4), filter=all_but_the_last)
        loaded.load_state_dict(torch.load(path, weights_only=True))
    plain = sparsecomp.densify(copy.deepcopy(pruned))  # torch's own layers and keys again, with zeros

    compiled = torch.compile(loaded, backend="sparsecomp", options={"frozen": True})
    with torch.no_grad():
        outputs = [model(x_test) for model in (pruned, loaded, plain, compiled)]
    print(sparsecomp.last_report())
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=1e-4, atol=1e-4)
    assert plain.state_dict().keys() == dense.state_dict().keys()
    groups = plain[1].weight.reshape(-1, 4)
    assert int(groups.count_nonzero(dim=1).max()) <= 2
    assert isinstance(loaded[1], SparseLinear)
    assert accuracy(loaded, x_test, y_test) > 0.93


if __name__ == "__main__":
    main()
