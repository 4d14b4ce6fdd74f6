"""Starts processes that train together on the CPU, and what they train on.

Each start takes seconds, so a file starts few and has them run many checks, one after another.
"""

import gc
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

import sparsecomp
from sparsecomp import Unstructured
from sparsecomp.nn import masked_weights, wrap_module
from sparsecomp.reference.selection import select_top
from sparsecomp.reference.sharding import whole

Check = Callable[[int, int, Path], None]
"""Of a process's number, how many there are, and a folder that all share."""

ROWS = 8
PATIENCE = timedelta(seconds=40)
"""For which a process waits for another one, which may have failed."""


def start(count: int, checks: Sequence[Check], folder: Path) -> None:
    """Run the checks in `count` processes; AssertionError with the traceback of the first that failed in each."""
    mp.spawn(_process, (count, checks, folder), nprocs=count)
    failures = [path.read_text() for path in sorted(folder.glob("failure*"))]
    assert not failures, "\n".join(failures)


def _process(rank: int, count: int, checks: Sequence[Check], folder: Path) -> None:
    torch.set_num_threads(1)
    store = folder / f"store{count}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=PATIENCE)
    for check in checks:
        try:
            check(rank, count, folder)
            torch._dynamo.reset()
            gc.collect()  # the last owner of a group must not be DistributedDataParallel: its end would never come
            dist.barrier()
        except BaseException:  # what pytest raises is one; the others' patience will end, too
            told = f"{check.__name__} in process {rank} of {count}:\n{traceback.format_exc()}"
            (folder / f"failure{count}.{rank}").write_text(told)
            return
    dist.destroy_process_group()


def network(seed: int = 0) -> nn.Sequential:
    """16 → 33 → 8 features, three of ten weights stored, an odd number of them."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 8))
    return sparsecomp.sparsify(model, Unstructured(0.7, by="random"))


def masked_network() -> nn.Sequential:
    """The same sizes, dense weights of which a third are active."""
    model = dense_network()
    for weight, masked in masked_weights(model).values():
        masked.prune_(weight, select_top(weight.detach().abs().flatten(), weight.numel() // 3).view(weight.shape))
    return model


def dense_network() -> nn.Sequential:
    """The same, with all of them."""
    torch.manual_seed(0)
    return wrap_module(nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 8)))


def batch(step: int, rank: int = 0, count: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A process's rows of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, 16, generator=generator), torch.randn(ROWS, 8, generator=generator)
    rows = slice(rank * ROWS // count, (rank + 1) * ROWS // count)
    return x[rows], y[rows]


def train(
    forward: nn.Module, optimizer: Any, place: tuple[int, int] = (0, 1), steps: int = 3, rule: Any = None
) -> None:  # fmt: skip
    """Some steps, of one process among many (`place`) or of one with all rows."""
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step, *place)
        if rule is None:
            F.mse_loss(forward(x), y).backward()
        else:
            with rule.watch():
                F.mse_loss(forward(x), y).backward()
        if rule is None or not rule.update():
            optimizer.step()


def assert_same(model: nn.Module, alone: nn.Module, **tolerances: float) -> None:
    """All parameters, whole, and all buffers."""
    given = {"rtol": 1e-4, "atol": 1e-5} | tolerances
    for (name, one), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        named = partial("{}: {}".format, name)
        torch.testing.assert_close(whole(one.detach()), whole(other.detach()), **given, msg=named)
    for one, other in zip(model.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(one, other)
