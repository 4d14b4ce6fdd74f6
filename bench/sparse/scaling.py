"""A training step of a network on one GPU and on two, by this backend and beside it, and the bytes that are reduced.

Weak scaling: each GPU has as many rows, so a step that does not wait for the other takes as long. `mlp` is a dense
network compiled by stock Inductor, and a sparse one of its size by this backend; `sew_resnet18` a spiking one, by each.
All are within DistributedDataParallel with its defaults. Most of the time is compiling. So the processes start once,
compile side by side for the larger number of GPUs, and find their graphs in Inductor's cache for the smaller; how long
each took stands in its row.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from bench.spiking import snn_training
from bench.table import markdown_grid
from sparsecomp import Unstructured, sparsify
from sparsecomp.training.distributed import agreed


class Case(NamedTuple):
    """A network, what compiles it, and the shapes of what goes in and comes out on each GPU."""

    network: str
    backend: str
    model: Callable[[torch.device], nn.Module]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    reset: Callable[[nn.Module], object] = id
    """Called before each step."""


def mlp(width: int = 4096, layers: int = 4, rows: int = 2048, sparsity: float = 0.95) -> list[Case]:
    """Square layers with ReLU between, dense and sparse."""
    shape, make = (rows, width), partial(_layers, width, layers)
    return [
        Case("dense", "inductor", partial(make, None), shape, shape),
        Case("sparse", "sparsecomp", partial(make, sparsity), shape, shape),
    ]


def spiking(batch: int = 32, size: int = 112) -> list[Case]:
    """SEW-ResNet-18 of four time steps."""
    steps, name = snn_training.STEPS, "sew_resnet18"
    shapes = (steps, batch, 3, size, size), (steps, batch, 10)
    return [
        Case(f"{name}, {told}", backend, partial(_spiking, name), *shapes, snn_training.reset)
        for told, backend in (("stock", "inductor"), ("sparsecomp", "sparsecomp"))
    ]


NETWORKS: dict[str, Callable[[], list[Case]]] = {"mlp": mlp, "sew_resnet18": spiking}
WORLDS = (1, 2)
STEPS, WARM = 30, 8


def run(
    cases: Sequence[Case], worlds: tuple[int, ...] = WORLDS, device: str = "cuda"
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each network and number of processes: milliseconds of a step, bytes reduced and broadcast in it, and
    seconds until it was compiled."""
    if device == "cuda":
        worlds = tuple(world for world in worlds if world <= torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, (worlds, cases, device, folder), nprocs=max(worlds))
        yield from torch.load(Path(folder) / "rows")


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds by network and number of GPUs, and the share of a step on one that a step on more takes."""
    alone = {row["network"]: row["ms"] for row in rows if row["world"] == 1}
    header = ["network", "GPUs", "ms a step", "scaling", "reduced", "broadcast", "compiled in"]
    cells = [
        [row["network"], str(row["world"]), f"{row['ms']:.2f}", f"{alone[row['network']] / row['ms']:.2f}",
         f"{row['reduced'] / 1e6:.1f} MB", f"{row['broadcast'] / 1e6:.1f} MB", f"{row['compiled s']:.0f} s"]
        for row in rows if row["network"] in alone
    ]  # fmt: skip
    return markdown_grid([header, *cells])


def _process(rank: int, worlds: tuple[int, ...], cases: Sequence[Case], device: str, folder: str) -> None:
    count = max(worlds)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=count)
    where = torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_float32_matmul_precision("high")
        where = torch.device(device, rank)
    groups = {world: dist.new_group(list(range(world))) for world in worlds}
    trained = {
        (world, case): _Trained(case, groups[world], where)
        for case in cases for world in sorted(worlds, reverse=True) if rank < world
    }  # fmt: skip
    rows = []
    for world in worlds:
        for case in cases:
            dist.barrier()  # whoever is not of this world leaves the machine alone
            if rank < world:
                found = trained[world, case].measured()
                rows.append({"network": case.network, "world": world, "inputs": list(case.inputs), **found})
    if rank == 0:
        torch.save(rows, Path(folder) / "rows")
    dist.barrier()
    trained.clear()  # DistributedDataParallel must be gone before its group
    dist.destroy_process_group()


class _Layers(nn.Module):
    """Square layers with ReLU between. A class of its own: Dynamo does not compile an nn.Sequential that
    DistributedDataParallel calls."""

    def __init__(self, width: int, layers: int, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, device=device) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        x = first(x)
        for layer in others:
            x = layer(functional.relu(x))
        return x


def _layers(width: int, layers: int, sparsity: float | None, device: torch.device) -> nn.Module:
    model = _Layers(width, layers, device)
    # on the device, since a CPU takes ten seconds to draw 4 × 4096² places
    return model if sparsity is None else sparsify(model, Unstructured(sparsity, by="random"))


def _spiking(name: str, device: torch.device) -> nn.Module:
    model = snn_training.network(name, snn_training.STEPS).to(device)
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


class _Trained:
    """A case's network in the processes of a group, compiled."""

    def __init__(self, case: Case, group: Any, device: torch.device) -> None:
        begin = time.perf_counter()
        torch.manual_seed(0)
        self.model = case.model(device)
        self.x, self.y = torch.randn(case.inputs, device=device), torch.randn(case.outputs, device=device)
        self.case, self.group = case, group
        self.forward = DistributedDataParallel(self.model, process_group=group)
        agreed(self.forward)
        self.compiled: Any = torch.compile(self.forward, backend=case.backend)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.step()
        self.seconds = time.perf_counter() - begin

    def step(self) -> None:
        self.case.reset(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        functional.mse_loss(self.compiled(self.x), self.y).backward()
        self.optimizer.step()

    def measured(self) -> dict[str, Any]:
        """Milliseconds of the slowest process; then bytes, which a hook in Python counts, that would be timed."""
        device = self.x.device
        times = [_seconds(self.step, device) for _ in range(WARM + STEPS)][WARM:]
        slowest = torch.tensor([statistics.median(times), self.seconds], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group)
        ms, seconds = slowest.tolist()
        sent = list[int]()
        self.forward.register_comm_hook((sent, self.group), _counted)
        self.step()
        broadcast = sum(one.nbytes for one in self.forward.modules_buffers)
        return {"ms": ms * 1e3, "reduced": sum(sent), "broadcast": broadcast, "compiled s": seconds}


def _seconds(step: Any, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _counted(
    state: tuple[list[int], Any], bucket: dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]
) -> torch.futures.Future[Tensor]:  # fmt: skip
    sent, group = state
    sent.append(bucket.buffer().nbytes)
    return allreduce_hook(group, bucket)
