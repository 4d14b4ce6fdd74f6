"""Latency of spiking networks: small batches, one and four time steps, as called, beside stock compile and the ANN.

The ANN is the same network with ReLU in the place of each neuron, on one time step, under stock compile: what spikes
cost a user who could do without. A network that is written by hand, step by step, is also run with its loop over time
fused, and with its layers fused but not its neurons: what the rule `unrolled_neurons` gains. So is its neuron alone, on
currents that are there, where the rule's operator stands beside what Inductor makes of T steps. TF32 is allowed to all.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsecomp
from bench.loop_networks import NETWORKS as LIBRARY
from bench.parallel import gathered, measured
from bench.table import markdown_grid
from bench.timing import MODES, guarded, modes_of, time_rivals

STEPS = (1, 4)
BATCHES = (1, 8)
HAND_WRITTEN = {"hand_written": 32, "neuron": 512}
"""Networks that are called step by step, and the size of their images."""
NAMES = (*HAND_WRITTEN, "spiking_vgg16", "sew_resnet18", "spikformer")
FUSED: dict[str, Any] = {"neurons": "fuse"}
TURNS = 3
RIVALS: dict[str, dict[str, Any] | None] = {
    "stock": None, "ANN": None, "sparsecomp": {}, "loop fused": FUSED,
    "layers fused": {**FUSED, "disable": ["unrolled_neurons"]},
}  # fmt: skip
"""Options of sparsecomp; None is stock compile. The last two are of networks that are called step by step."""


class Case(NamedTuple):
    """A network, how it is called, and where.

    Attributes:
        size: of a square image; None for the network's own.
    """

    name: str
    steps: int
    batch: int
    device: str = "cuda"
    size: int | None = None


class Call(NamedTuple):
    """A case as a rival computes it in a mode."""

    case: Case
    rival: str
    mode: str


class Leaky(nn.Module):
    """A leaky neuron with a soft reset, one step a call."""

    def forward(self, x: Tensor, v: Any) -> tuple[Tensor, Any]:
        """Spikes and the next membrane."""
        v = v * 0.5 + x
        spikes = (v >= 1.0).float()
        return spikes, v - spikes


class Rectifier(nn.Module):
    """A ReLU in the place of a neuron that is called step by step."""

    def forward(self, x: Tensor, v: Any) -> tuple[Tensor, Any]:
        """The rectified input; the state stays as it is."""
        return F.relu(x), v


class HandWritten(nn.Module):
    """Convolutions, batch-norms and leaky neurons in a loop over time, as people write them."""

    def __init__(self, widths: Sequence[int] = (64, 128, 128, 256, 256)) -> None:
        super().__init__()
        sizes = list(itertools.pairwise((3, *widths)))
        self.layers = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=1 + (before < after and before > 3), padding=1, bias=False)
            for before, after in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _, after in sizes)
        self.neurons = nn.ModuleList(Leaky() for _ in sizes)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """(T, B, 3, H, W) to (B, 10)."""
        states: list[Any] = [0.0] * len(self.layers)
        out: Any = 0.0
        for step in x.unbind():
            for place, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
                step, states[place] = self.neurons[place](norm(layer(step)), states[place])
            out = out + self.head(step.mean((2, 3)))
        return out / x.shape[0]


class Alone(nn.Module):
    """A leaky neuron in a loop over time, on currents that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.neuron = Leaky()

    def forward(self, x: Tensor) -> Tensor:
        """(T, …) to the same."""
        v, out = torch.zeros_like(x[0]), []
        for step in x.unbind():
            spikes, v = self.neuron(step, v)
            out.append(spikes)
        return torch.stack(out)


def run(
    names: Sequence[str] = NAMES, modes: Sequence[str] = MODES, steps: Sequence[int] = STEPS,
    batches: Sequence[int] = BATCHES, workers: int = 1, threads: int = 1,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each network, number of steps and batch: milliseconds of a call by rival and mode, and firing rates.

    Each rival is compiled in a process of its own, `workers` of them at a time; those that are ready take turns.
    """
    cases = itertools.starmap(Case, itertools.product(names, steps, batches))
    calls = [Call(case, rival, mode) for case in cases for mode in modes for rival in rivals(case)]
    found = measured(prepared, calls, min(workers, len(calls)), batch=1, threads=threads, turns=TURNS)
    for row in gathered(found, ("network", "steps", "batch")):
        print(row, flush=True)
        yield row


def rivals(case: Case) -> Sequence[str]:
    """Who computes a case."""
    return tuple(RIVALS) if case.name in HAND_WRITTEN else ("stock", "ANN", "sparsecomp")


def prepared(call: Call) -> Callable[[], dict[str, Any]]:
    """What measures a rival in a mode, compiled; its row is a part of the case's."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    case = call.case
    row: dict[str, Any] = {"network": case.name, "steps": case.steps, "batch": case.batch, "ms": {}, "sites": {}}
    ready: dict[str, Callable[[], Any]] = {}

    def prepare() -> None:
        net, x = network(case)
        row["rates"] = rates(net, x)
        _prepare(row, ready, call.rival, call.mode, net, x)

    guarded(row, f"{call.rival}, {call.mode}", prepare)

    def measure() -> dict[str, Any]:
        if ready:
            guarded(row, f"{call.rival}, {call.mode}", partial(time_rivals, row, call.mode, ready, False))
        return row

    return measure


def network(case: Case) -> tuple[nn.Module, Tensor]:
    """The network in evaluation, with batch-norm statistics of its input, and the input, channels last."""
    torch.manual_seed(0)
    net, size = _made(case.name)
    size = case.size or size
    net = net.to(case.device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    shape = case.steps, case.batch, 3, size, size
    x = torch.rand(shape, device=case.device).flatten(0, 1).contiguous(memory_format=torch.channels_last)
    x = x.unflatten(0, shape[:2])
    norms = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = None
    with torch.no_grad():
        net.train()(x.repeat(1, max(1, 8 // case.batch), 1, 1, 1))
    _forget(net)
    return net.eval(), x


def _made(name: str) -> tuple[nn.Module, int]:
    """A network and the size of its images."""
    if name in HAND_WRITTEN:
        return (Alone() if name == "neuron" else HandWritten()), HAND_WRITTEN[name]
    return LIBRARY[name].make(), LIBRARY[name].shape[-1]


def ann_of(net: nn.Module) -> nn.Module:
    """A copy with ReLU in the place of each neuron."""
    ann = copy.deepcopy(net)
    for parent in [*ann.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, Leaky):
                setattr(parent, name, Rectifier())
            elif _is_library_neuron(child):
                setattr(parent, name, nn.ReLU())
    return ann


def rates(net: nn.Module, x: Tensor) -> list[float]:
    """Share of ones that each neuron gives, in order, of all steps."""
    found: dict[str, list[float]] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            spikes = output[0] if isinstance(output, tuple) else output
            found.setdefault(name, []).append(float(spikes.mean()))

        return record

    neurons = [(name, m) for name, m in net.named_modules() if isinstance(m, Leaky) or _is_library_neuron(m)]
    handles = [module.register_forward_hook(hook(name)) for name, module in neurons]
    with torch.no_grad():
        net(x)
    _forget(net)
    for handle in handles:
        handle.remove()
    return [round(sum(one) / len(one), 3) for one in found.values()]


def _is_library_neuron(module: nn.Module) -> bool:
    return any(cls.__name__ == "BaseNode" for cls in type(module).__mro__)


def _forget(net: nn.Module) -> None:
    """Begin anew: neurons of spikingjelly keep their membranes."""
    if any(map(_is_library_neuron, net.modules())):
        from spikingjelly.activation_based import functional

        functional.reset_net(net)


def _prepare(
    row: dict[str, Any], calls: dict[str, Callable[[], Any]], rival: str, mode: str, net: nn.Module, x: Tensor
) -> None:  # fmt: skip
    model, options = ann_of(net) if rival == "ANN" else copy.deepcopy(net), RIVALS[rival]
    x = x[:1] if rival == "ANN" else x
    if options is None:
        compiled: Any = torch.compile(model, mode=mode)
    else:
        compiled = torch.compile(model, backend="sparsecomp", options={**options, "mode": mode})
    keeps = any(map(_is_library_neuron, model.modules()))

    def call() -> Any:
        if keeps:
            _forget(model)
        return compiled(x)

    with torch.no_grad():
        for _ in range(4):  # compiles, records CUDA graphs
            call()
    if options is not None:
        report = sparsecomp.last_report()
        assert report is not None
        row["sites"][f"{rival}, {mode}"] = sorted(f"{site.rule}: {site.implementation}" for site in report.rewritten)
    calls[rival] = call


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of a call, and in brackets over stock's in the same mode."""
    grid = [["network", "T", "batch", "mode", *RIVALS]]
    for row in rows:
        for mode in modes_of(row):
            cells = [_cell(row["ms"], rival, mode) for rival in RIVALS]
            grid.append([row["network"], str(row["steps"]), str(row["batch"]), mode, *cells])
    return markdown_grid(grid)


def _cell(ms: dict[str, float], rival: str, mode: str) -> str:
    found, stock = ms.get(f"{rival}, {mode}"), ms.get(f"stock, {mode}")
    if found is None:
        return "–"
    return f"{found:.3g}" if stock is None or rival == "stock" else f"{found:.3g} ({found / stock:.2f})"
