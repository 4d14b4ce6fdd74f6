"""What other processes write to a model's tensors: collectives, data-parallel training, shared memory."""

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from kept_models import FORMS, RULES, rewriting_backend, shrink
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from write_matrix import Subject, write


def _broadcast(tensor: Tensor) -> None:
    dist.broadcast(tensor.detach().view(torch.uint8) if tensor.dtype is torch.bool else tensor.detach(), 0)


def _reduce(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        dist.all_reduce(tensor.detach())


def _send(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        dist.recv(tensor.detach(), 0) if dist.get_rank() else dist.send(tensor.detach(), 1)


def _to_all(way: Callable[[Tensor], None]) -> Callable[[Subject], None]:
    def act(subject: Subject) -> None:
        for tensor in subject.model.state_dict(keep_vars=True).values():
            way(tensor)

    return act


def _buffers(subject: Subject) -> None:
    parallel = nn.parallel.DistributedDataParallel(subject.model)
    if dist.get_rank() == 0:
        for name in subject.form.masks:
            subject.model.get_buffer(name).copy_(subject.model.get_buffer(name).flip(1))
    parallel(subject.x)


def _zero(subject: Subject) -> None:
    parallel = nn.parallel.DistributedDataParallel(subject.model)
    optimizer = ZeroRedundancyOptimizer(subject.model.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        parallel(subject.x).square().mean().backward()
        optimizer.step()
        subject.evaluate()


ACTS = {
    "broadcast": _to_all(_broadcast),
    "all_reduce": _to_all(_reduce),
    "recv": _to_all(_send),
    "DDP buffers": _buffers,
    "ZeRO": _zero,
}


def worker(rank: int, file: str, shared: dict[str, dict[str, Tensor]]) -> None:
    """One of two processes that write to each other's models.

    Args:
        shared: by form: a state in the memory of both.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    shrink()
    for name, state in shared.items():
        form = FORMS[name]
        torch._dynamo.reset()
        subject = Subject(form.make(), form, rewriting_backend)
        if rank:
            write(subject.model, form.masks, lambda tensor, value: tensor.data.copy_(value))
        subject.evaluate()
        for act in ACTS.values():
            act(subject)
            subject.evaluate()
        subject.model.load_state_dict(state, assign=True)
        subject.evaluate()
        dist.barrier()
        if rank == 0:
            write(subject.model, form.masks, lambda tensor, value: tensor.data.copy_(value))
        dist.barrier()
        subject.evaluate()
    assert "folded dense" in RULES
    gc.collect()  # the last owner of a process group must not be DistributedDataParallel: its end would never come
    dist.destroy_process_group()


@pytest.mark.slow(reason="starts processes")
def test_what_other_processes_write_is_followed(tmp_path):
    shared = {name: form.make().share_memory().state_dict() for name, form in FORMS.items()}
    mp.spawn(worker, args=(str(tmp_path / "store"), shared), nprocs=2)
