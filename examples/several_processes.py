"""Train a sparse network in two processes, whose patterns change alike (DistributedDataParallel and RigL).

Two processes on this CPU, by gloo, each with half of each batch; `torchrun` starts them on GPUs. They come to the same
weights and places as one process with whole batches, and send no gradients but those of the weights that there are.
"""

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import sparsecomp
from sparsecomp import Unstructured
from sparsecomp.runtime import RigL

PROCESSES, STEPS, ROWS = 2, 60, 64


def network() -> nn.Sequential:
    torch.manual_seed(0)  # the same in all processes, so that they prune alike
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))
    return sparsecomp.sparsify(model, Unstructured(0.9, by="random"))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A few inputs decide, which a pattern can find."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 32, generator=generator)
    return x, torch.stack([x[:, place] * x[:, place + 1] for place in range(8)], 1)


def reduced(sent: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own all-reduce; it notes how much it is given."""
    sent.append(bucket.buffer().nbytes)
    return allreduce_hook(dist.group.WORLD, bucket)


def train(model: nn.Module, rows: slice, sent: list[int]) -> float:
    forward: Any = model
    if dist.is_initialized():
        forward = DistributedDataParallel(model)
        forward.register_comm_hook(sent, reduced)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rigl = RigL(forward, optimizer, every=10, end=50)  # compares patterns, and has DDP send them no more
    loss = torch.zeros(())
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        with rigl.watch():
            loss = functional.mse_loss(forward(x[rows]), y[rows])
            loss.backward()
        if not rigl.update():
            optimizer.step()
    return loss.item()


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    model, sent = network(), list[int]()
    share = ROWS // PROCESSES
    train(model, slice(rank * share, (rank + 1) * share), sent)
    torch.save((model.state_dict(), sum(sent) / STEPS), f"{folder}/{rank}")
    gc.collect()  # DistributedDataParallel must be gone before its group
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (folder,), nprocs=PROCESSES)
        found = [torch.load(Path(folder) / str(rank)) for rank in range(PROCESSES)]
    alone = network()
    before = alone[0].weight.matrix.to_dense() != 0
    loss = train(alone, slice(None), [])
    (first, bytes_sent), (second, _) = found
    for name, one in alone.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], one, rtol=1e-3, atol=1e-4)
    stored = sum(parameter.nbytes for parameter in alone.parameters())
    dense = sum(parameter.nbytes for parameter in sparsecomp.densify(network()).parameters())
    changed = ((alone[0].weight.matrix.to_dense() != 0) & ~before).sum()
    print(f"two processes have the weights of one, {changed} of them at new places; the last loss is {loss:.3f}")
    print(f"{bytes_sent:.0f} bytes are reduced in a step, of {dense} of the dense network")
    assert changed > 0 and bytes_sent == stored < dense / 4


if __name__ == "__main__":
    main()
