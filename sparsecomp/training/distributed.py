"""What the processes of a data-parallel run must agree on: the first one decides."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Replicas:
    """The processes that train `model` together: those of its DistributedDataParallel, or this one alone."""

    def __init__(self, model: nn.Module) -> None:
        self.group = model.process_group if isinstance(model, DistributedDataParallel) else None

    @property
    def rank(self) -> int:
        """This process's place among them, from 0."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def count(self) -> int:
        """How many they are."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def decided(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first process's `tensor`; all call this with the same shape and dtype."""
        if self.group is None:
            return tensor
        sent = tensor.contiguous().to(torch.uint8) if tensor.dtype == torch.bool else tensor.contiguous()
        dist.broadcast(sent, dist.get_global_rank(self.group, 0), group=self.group)
        return sent.to(tensor.dtype)

    def mean(self, value: torch.Tensor) -> float:
        """The mean of a scalar over the processes; waits for the device."""
        if self.group is None:
            return float(value)
        sent = value.clone()
        dist.all_reduce(sent, group=self.group)
        return float(sent) / self.count

    def any(self, flag: torch.Tensor) -> bool:
        """Whether the flag of any process is True; waits for the device."""
        if self.group is None:
            return bool(flag)
        sent = flag.to(torch.int32)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=self.group)
        return bool(sent)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.group is not None:
            dist.barrier(self.group)


def bare(model: nn.Module) -> nn.Module:
    """The model within DistributedDataParallel and torch.compile: its names and state are those of a checkpoint."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner
