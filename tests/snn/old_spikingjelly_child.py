"""Runs one network of an old spikingjelly eagerly and compiled; prints what the test asserts as JSON.

Started by test_models_old_spikingjelly.py in a process of its own, because two versions cannot be imported in one.
"""

import importlib
import json
import sys
import types

import torch
from snn_zoo import gradients_beside_eager, images, run_beside_eager, sixteenths
from torch import nn


def stub_missing() -> None:
    """What the old versions import beside torch, and these networks do not use."""
    for name in ("torchvision", "torchvision.models", "torchvision.models.utils", "torch.utils.tensorboard"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["torchvision.models.utils"].load_state_dict_from_url = None  # type: ignore[attr-defined]
    sys.modules["torch.utils.tensorboard"].SummaryWriter = None  # type: ignore[attr-defined]


def network(package: str, kind: str) -> nn.Module:
    """conv → neuron → pool → conv → neuron → linear on (T, B, C, H, W)."""
    neuron = importlib.import_module(f"{package}.neuron")
    layer = importlib.import_module(f"{package}.layer")
    if package.endswith("clock_driven"):
        build = getattr(neuron, f"MultiStep{kind}")
        fire = (build(), build())
    else:
        fire = (getattr(neuron, kind)(step_mode="m"), getattr(neuron, kind)(step_mode="m"))
    container = layer.SeqToANNContainer
    return nn.Sequential(
        container(nn.Conv2d(2, 8, 3)), fire[0], container(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3)), fire[1],
        container(nn.Flatten(), nn.Linear(256, 5)),
    )  # fmt: skip


def main(package: str, kind: str) -> None:
    """Evaluation over two calls and a reset, and one training step."""
    stub_missing()
    neurons = (importlib.import_module(f"{package}.neuron").BaseNode,)
    reset = importlib.import_module(f"{package}.functional").reset_net
    calls = [(images(3, 2, 2, 14, 14, seed=seed),) for seed in range(2)]
    run = run_beside_eager(sixteenths(network(package, kind)).eval(), calls, neurons, reset=reset, rounds=2)
    exact = all(torch.equal(expected[0], found[0]) for expected, found in zip(run.expected, run.found, strict=True))
    wanted, step = gradients_beside_eager(sixteenths(network(package, kind)).train(), calls[0], neurons)
    step.assert_close(wanted)
    result = {
        "exact": exact, "flips": run.flips, "rate": max(run.rates), "training flips": step.flips(wanted),
        "rewritten": [run.rewritten(graph) for graph in range(len(run.reports))], "training rewritten": step.rewritten,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
