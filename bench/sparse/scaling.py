"""A training step of a sparse MLP on one GPU and on two, beside the dense network, and the bytes that are reduced.

Weak scaling: each GPU has as many rows, so a step that does not wait for the other takes as long. The sparse network is
compiled by this backend, the dense one by stock Inductor, both within DistributedDataParallel with its defaults.
`python -m bench scaling` takes about a minute.
"""

import copy
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from bench.table import markdown_grid
from sparsecomp import Unstructured, sparsify
from sparsecomp.training.distributed import agreed


class Problem(NamedTuple):
    """A network of `layers` square layers of `width` with ReLU between, and a batch of `rows` a GPU."""

    width: int = 4096
    layers: int = 4
    rows: int = 2048
    sparsity: float = 0.95


LARGE, WORLDS = Problem(), (1, 2)
STEPS, WARM = 30, 8


def run(
    problem: Problem = LARGE, worlds: tuple[int, ...] = WORLDS, device: str = "cuda"
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each network and number of processes: milliseconds of a step, bytes reduced and broadcast in it."""
    for world in worlds:
        if device == "cuda" and world > torch.cuda.device_count():
            continue
        with tempfile.TemporaryDirectory() as folder:
            spawn(_process, (world, problem, device, folder), nprocs=world)
            yield from torch.load(Path(folder) / "rows")


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds by network and number of GPUs, and the share of a step on one that a step on more takes."""
    alone = {row["network"]: row["ms"] for row in rows if row["world"] == 1}
    header = ["network", "GPUs", "ms a step", "scaling", "reduced", "broadcast"]
    cells = [
        [row["network"], str(row["world"]), f"{row['ms']:.2f}", f"{alone[row['network']] / row['ms']:.2f}",
         f"{row['reduced'] / 1e6:.1f} MB", f"{row['broadcast'] / 1e6:.1f} MB"]
        for row in rows if row["network"] in alone
    ]  # fmt: skip
    return markdown_grid([header, *cells])


def _process(rank: int, world: int, problem: Problem, device: str, folder: str) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_float32_matmul_precision("high")
    rows = []
    for network in ("dense", "sparse"):
        found = _measured(network, problem, torch.device(device, rank) if device == "cuda" else torch.device(device))
        rows.append({"network": network, "world": world, **problem._asdict(), **found})
        gc.collect()
        torch._dynamo.reset()
    if rank == 0:
        torch.save(rows, Path(folder) / "rows")
    dist.barrier()
    dist.destroy_process_group()


def _network(network: str, problem: Problem) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        part for number in range(problem.layers)
        for part in ([nn.ReLU()] if number else []) + [nn.Linear(problem.width, problem.width)]
    ]  # fmt: skip
    model = nn.Sequential(*layers)
    return sparsify(model, Unstructured(problem.sparsity, by="random")) if network == "sparse" else model


def _measured(network: str, problem: Problem, device: torch.device) -> dict[str, Any]:
    model = _network(network, problem).to(device)
    x, y = torch.randn(2, problem.rows, problem.width, device=device)
    # counted on another one, since a hook in Python would be timed
    reduced, broadcast = _sent(copy.deepcopy(model), x, y)
    forward = DistributedDataParallel(model)
    agreed(forward)
    compiled: Any = torch.compile(forward, backend="sparsecomp" if network == "sparse" else "inductor")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.mse_loss(compiled(x), y).backward()
        optimizer.step()

    times = [_seconds(step, device) for _ in range(WARM + STEPS)][WARM:]
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {"ms": slowest.item() * 1e3, "reduced": reduced, "broadcast": broadcast}


def _seconds(step: Any, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _sent(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[int, int]:
    """Bytes that a step gives to all-reduce, and that its forward broadcasts."""
    forward, sent = DistributedDataParallel(model), list[int]()
    agreed(forward)
    forward.register_comm_hook(sent, _counted)
    functional.mse_loss(forward(x), y).backward()
    return sum(sent), sum(one.nbytes for one in forward.modules_buffers)


def _counted(
    sent: list[int], bucket: dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]
) -> torch.futures.Future[torch.Tensor]:  # fmt: skip
    sent.append(bucket.buffer().nbytes)
    return allreduce_hook(dist.group.WORLD, bucket)  # pyright: ignore[reportArgumentType]
