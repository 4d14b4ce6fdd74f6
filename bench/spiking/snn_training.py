"""A training step of spiking networks: milliseconds and the most memory, beside eager and stock `torch.compile`.

A step is forward, cross entropy, backward and fused SGD, channels last, the host included; batch-norm's own statistics
keep random networks firing. Memory is the most that torch holds at once in such steps, with what it held before them
(parameters, gradients and momentum) told beside it: only the rest is what a compiler can save.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsecomp
from bench.parallel import gathered, measured
from bench.spiking.handwritten import Handwritten
from bench.table import markdown_grid
from bench.timing import MODES, guarded, modes_of, time_rivals, wait

RIVALS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "eager": (None, {}), "spikingjelly memopt": (None, {}), "stock": ("inductor", {}), "sparsecomp": ("sparsecomp", {}),
    "sparsecomp memory low": ("sparsecomp", {"memory": "low"}),
    "sparsecomp neurons fuse": ("sparsecomp", {"neurons": "fuse"}),
}  # fmt: skip
"""What compiles the network, and its options; spikingjelly's memory-saving training runs eagerly."""
HANDWRITTEN = ("handwritten", "handwritten_bn")
NETWORKS = {
    "sew_resnet18": (32, 112), "spiking_vgg16_bn": (64, 32), "spikformer": (64, 32),
    **dict.fromkeys(HANDWRITTEN, (64, 32)),
}  # fmt: skip
"""Batch and size of the images."""
PRECISIONS = ("tf32", "amp", "fp32")
STEPS = 4
TURNS = 3
_OF_LIBRARY = ("spikingjelly memopt", "sparsecomp neurons fuse")
"""Not of a network that is written by hand: none of the library's neurons is there, and its own are always fused."""
_BLOCKS = ("BasicBlock", "SpikformerBlock")


class Case(NamedTuple):
    """A network in training, as a rival computes it in a mode of torch.compile."""

    network: str
    precision: str
    steps: int
    batch: int
    mode: str
    rival: str
    device: str = "cuda"


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
        self.optimizer.zero_grad()  # gradients that stay would lie in memory that CUDA graphs write to again


def run(
    modes: Sequence[str] = MODES, names: Sequence[str] = tuple(NETWORKS), precisions: Sequence[str] = PRECISIONS[:2],
    steps: Sequence[int] = (STEPS,), batches: Sequence[int] | None = None, workers: int = 1, threads: int = 1,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row a network, precision, number of steps and batch: milliseconds and MiB by rival and mode.

    Each rival is compiled in a process of its own, `workers` of them at a time; those that are ready take turns.
    """
    cases = [
        Case(name, precision, count, batch, mode, rival)
        for name, precision, count in itertools.product(names, precisions, steps)
        for batch in batches or NETWORKS[name][:1]
        for mode, rival in itertools.product(modes, RIVALS)
        if name not in HANDWRITTEN or rival not in _OF_LIBRARY
    ]
    found = measured(prepared, cases, min(workers, len(cases)), batch=1, threads=threads, turns=TURNS)
    for row in gathered(found, ("network", "precision", "steps", "batch")):
        print(row, flush=True)
        yield row


def prepared(case: Case) -> Callable[[], dict[str, Any]]:
    """What measures a rival in a mode, compiled; its row is a part of the network's."""
    row: dict[str, Any] = {
        "network": case.network, "precision": case.precision, "steps": case.steps, "batch": case.batch,
        "ms": {}, "MiB": {}, "held MiB": {}, "sites": {},
    }  # fmt: skip
    key, ready = f"{case.rival}, {case.mode}", {}
    start = time.monotonic()
    guarded(row, key, partial(_prepare, row, ready, case))
    row["seconds to compile"] = {key: round(time.monotonic() - start, 1)}
    print(f"{case.network}, {key}: ready after {row['seconds to compile'][key]} s", flush=True)

    def measure() -> dict[str, Any]:
        if ready:
            guarded(row, key, partial(time_rivals, row, case.mode, ready, True))
        return row

    return measure


def _prepare(row: dict[str, Any], ready: dict[str, Callable[[], None]], case: Case) -> None:
    wait()
    before, key = torch.cuda.memory_allocated(), f"{case.rival}, {case.mode}"
    step = trained(case)
    for _ in range(4):  # compiles, records CUDA graphs
        step()
    wait()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    wait()
    row["MiB"][key] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    row["held MiB"][key] = round((held - before) / 2**20)
    if RIVALS[case.rival][0] == "sparsecomp":
        report = sparsecomp.last_report()
        assert report is not None
        found = Counter(f"{site.rule}: {site.implementation}" for site in report.rewritten)
        row["sites"][key] = dict(sorted(found.items()))
    ready[case.rival] = step


def trained(case: Case) -> Trained:
    """A rival's network, its weights those of all."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = case.precision != "fp32"
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = network(case.network, case.steps).to(case.device)
    model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    size = NETWORKS[case.network][1]
    x = torch.rand(case.batch, 3, size, size, device=case.device).contiguous(memory_format=torch.channels_last)
    steps_inside = case.network == "spikformer"
    x = x if steps_inside else x.expand(case.steps, *x.shape)
    target = torch.randint(0, 10, (case.batch,), device=case.device)
    target = target.expand(case.steps, case.batch).flatten()
    backend, options = RIVALS[case.rival]
    options = {**options, "neurons": "fuse"} if case.network in HANDWRITTEN else options
    compiled = model
    if case.rival == "spikingjelly memopt":
        _save_memory(model, x)
    elif backend == "sparsecomp":
        compiled = torch.compile(model, backend=backend, options={**options, "mode": case.mode})
    elif backend is not None:
        compiled = torch.compile(model, backend=backend, mode=case.mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    return Trained(model, compiled, optimizer, x, target, case.precision == "amp")


def _save_memory(model: nn.Module, x: Tensor) -> None:
    """spikingjelly's level 1: every block, or neuron of a network without blocks, is checkpointed, spikes as bits."""
    blocks = tuple({type(module) for module in model.modules() if type(module).__name__ in _BLOCKS})
    targets = blocks or (_library("neuron").LIFNode,)
    _library("memopt").optimize_memory(model, targets, lambda net: net(x), level=1)
    _library("functional").reset_net(model)


def network(name: str, steps: int) -> nn.Module:
    """A network of spikingjelly's, multi-step, or one that is written by hand."""
    if name in HANDWRITTEN:
        return Handwritten(norm=name.endswith("_bn"))
    if name == "spikformer":
        return _library("model.spikformer").Spikformer(
            T=steps, img_size_h=32, img_size_w=32, patch_size=4, num_classes=10, embed_dims=384, num_heads=12, depths=4
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
    grid = [["network", "precision", "T", "batch", "mode", *RIVALS]]
    for row in rows:
        case = [row["network"], row["precision"], str(row["steps"]), str(row["batch"])]
        for mode in modes_of(row):
            grid.append([*case, mode, *(_cell(row, rival, mode) for rival in RIVALS)])
    return markdown_grid(grid)


def _cell(row: dict[str, Any], rival: str, mode: str) -> str:
    key, stock = f"{rival}, {mode}", f"stock, {mode}"
    if key not in row["ms"] or key not in row["MiB"]:
        return "–"
    ms, held = row["ms"][key], row["MiB"][key]
    if stock not in row["ms"] or rival == "stock":
        return f"{ms:.3g} ms, {held} MiB"
    return f"{ms:.3g} ms, {held} MiB ({ms / row['ms'][stock]:.2f}, {held / row['MiB'][stock]:.2f})"
