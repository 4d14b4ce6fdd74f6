"""Prune step by step and let pruned weights come back (RESU), then store what is left sparse.

A cycle is train, prune, stabilize, RESU, commit. Needs scikit-learn, for the digits.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsecomp
from sparsecomp.demo import digits
from sparsecomp.runtime import RESUConfig, RESUTrainer


def main() -> None:
    torch.manual_seed(0)
    x, y, x_test, y_test = digits()
    data = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    config = RESUConfig(cycles=3, train_steps=150, resu_steps=50, finetune_steps=200, sparsity_end=0.9)
    trainer = RESUTrainer(model, config, loss, data, {"lr": 2e-3})
    history = trainer.fit()
    for cycle in history.cycles:
        print(f"{cycle.sparsity:.0%} sparse, {cycle.resurrected} weights came back, {cycle.surviving} survive")

    model.eval()
    with torch.no_grad():
        masked = model(x_test)
        sparse = sparsecomp.sparsify(model, sparsecomp.FromMask())  # the cycle's masks; layers of CSR weights
        compiled = torch.compile(sparse, backend="sparsecomp")
        outputs = compiled(x_test)
    accuracy = (outputs.argmax(1) == y_test).float().mean().item()
    print(sparsecomp.last_report())
    print(f"accuracy {accuracy:.1%}")
    torch.testing.assert_close(outputs, masked, rtol=1e-4, atol=1e-4)
    stored = sum(layer.values.numel() for layer in (sparse[1], sparse[3]))
    assert stored == round(0.1 * (64 * 128 + 128 * 10))
    assert accuracy > 0.9
    assert all(cycle.resurrected > 0 for cycle in history.cycles)

    plain = sparsecomp.densify(sparse)  # or back to torch's own layers
    assert list(plain.state_dict()) == ["1.weight", "1.bias", "3.weight", "3.bias"]


if __name__ == "__main__":
    main()
