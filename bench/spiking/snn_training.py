"""A training step of spiking networks: milliseconds and the most memory, beside eager and stock `torch.compile`.

A step is forward, cross entropy, backward and fused SGD, channels last, the host included; batch-norm's own statistics
keep random networks firing. Memory is the most that torch holds at once in such steps, with what it held before them
(parameters, gradients and momentum) told beside it: only the rest is what a compiler can save.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.table import markdown_grid
from bench.timing import MODES, guarded, time_rivals, wait

RIVALS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "eager": (None, {}), "stock": ("inductor", {}), "sparsecomp": ("sparsecomp", {}),
    "sparsecomp, memory low": ("sparsecomp", {"memory": "low"}),
}  # fmt: skip
"""What compiles the network, and its options."""
NETWORKS = {"sew_resnet18": (32, 112), "spiking_vgg16_bn": (64, 32), "spikformer": (64, 32)}
"""Batch and size of the images."""
PRECISIONS = ("tf32", "amp")
STEPS = 4


class Trained(NamedTuple):
    """A network in training; called, a step."""

    model: nn.Module
    compiled: Any
    optimizer: torch.optim.Optimizer
    x: Tensor
    target: Tensor
    amp: bool

    def __call__(self) -> None:
        reset(self.model)
        with torch.autocast("cuda", torch.float16) if self.amp else nullcontext():
            loss = F.cross_entropy(self.compiled(self.x).flatten(0, -2), self.target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


def run(modes: tuple[str, ...] = MODES) -> Iterator[dict[str, Any]]:
    """A row a network and precision: milliseconds and MiB by rival and mode."""
    for name in NETWORKS:
        for precision in PRECISIONS:
            row: dict[str, Any] = {"network": name, "precision": precision, "ms": {}, "MiB": {}, "held MiB": {}}
            for mode in modes:
                torch._dynamo.reset()
                steps: dict[str, Callable[[], None]] = {}
                for rival in RIVALS:
                    guarded(row, f"{rival}, {mode}", partial(_prepare, row, steps, rival, mode))
                guarded(row, mode, partial(time_rivals, row, mode, steps, True))
            print(row, flush=True)
            yield row


def _prepare(row: dict[str, Any], steps: dict[str, Callable[[], None]], rival: str, mode: str) -> None:
    wait()
    before = torch.cuda.memory_allocated()
    steps[rival] = step = trained(row["network"], rival, mode, row["precision"] == "amp")
    for _ in range(4):  # compiles, records CUDA graphs
        step()
    wait()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    wait()
    key = f"{rival}, {mode}"
    row["MiB"][key] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    row["held MiB"][key] = round((held - before) / 2**20)


def trained(name: str, rival: str, mode: str, amp: bool) -> Trained:
    """A rival's network, its weights those of all."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = network(name).cuda().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    batch, size = NETWORKS[name]
    x = torch.rand(batch, 3, size, size, device="cuda").contiguous(memory_format=torch.channels_last)
    steps_inside = name == "spikformer"
    x = x if steps_inside else x.expand(STEPS, *x.shape)
    target = torch.randint(0, 10, (batch,), device="cuda")
    target = target.expand(STEPS, batch).flatten()
    backend, options = RIVALS[rival]
    compiled = model
    if backend == "sparsecomp":
        compiled = torch.compile(model, backend=backend, options={**options, "mode": mode})
    elif backend is not None:
        compiled = torch.compile(model, backend=backend, mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    return Trained(model, compiled, optimizer, x, target, amp)


def network(name: str) -> nn.Module:
    """A network of spikingjelly's, multi-step."""
    if name == "spikformer":
        return _library("model.spikformer").Spikformer(
            T=STEPS, img_size_h=32, img_size_w=32, patch_size=4, num_classes=10, embed_dims=384, num_heads=12, depths=4
        )
    neuron = _library("neuron").LIFNode
    if name == "sew_resnet18":
        model = _library("model.sew_resnet").sew_resnet18(cnf="ADD", spiking_neuron=neuron, num_classes=10)
    else:
        model = _library("model.spiking_vgg").spiking_vgg16_bn(spiking_neuron=neuron, num_classes=10)
    _library("functional").set_step_mode(model, "m")
    return model


def reset(model: nn.Module) -> None:
    """Forget the neurons' state, before a batch."""
    _library("functional").reset_net(model)


def _library(name: str) -> Any:
    return import_module(f"spikingjelly.activation_based.{name}")


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds and MiB of a step, and in brackets both over stock's in the same mode."""
    grid = [["network", "precision", "mode", *RIVALS]]
    for row in rows:
        for mode in MODES:
            grid.append([row["network"], row["precision"], mode, *(_cell(row, rival, mode) for rival in RIVALS)])
    return markdown_grid(grid)


def _cell(row: dict[str, Any], rival: str, mode: str) -> str:
    key, stock = f"{rival}, {mode}", f"stock, {mode}"
    if key not in row["ms"] or key not in row["MiB"]:
        return "–"
    ms, held = row["ms"][key], row["MiB"][key]
    if stock not in row["ms"] or rival == "stock":
        return f"{ms:.3g} ms, {held} MiB"
    return f"{ms:.3g} ms, {held} MiB ({ms / row['ms'][stock]:.2f}, {held / row['MiB'][stock]:.2f})"
