"""What the processes of a data-parallel run must agree on: the first one decides, and patterns are compared.

A process whose pattern differs would add its gradients to those of other weights, and nothing would tell. So patterns
are compared by fingerprints when a rule is made and before each change. What fails in one process is an error in all of
them, since one that leaves alone has the others wait for it.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsecomp.errors import ReplicaError
from sparsecomp.nn.local.linear import GeoSparseLinear
from sparsecomp.nn.masked.mask import SparseMask
from sparsecomp.nn.masked.masked_weight import MaskedWeight
from sparsecomp.nn.sparse.stored_weight import StoredWeight
from sparsecomp.reference.sharding import mesh_of

_PIECE = 2**22
"""Elements of a pattern whose fingerprint is taken at one time, in some tensors of int64."""


class Replicas:
    """The processes that train `model` together: those of its DistributedDataParallel, compiled or not, those that
    share its parameters by FSDP2, in replicas or not, or this one alone."""

    def __init__(self, model: nn.Module) -> None:
        self.group = _group_of(model)
        # where numbers are exchanged: a group of GPUs takes none of the host
        self._device = next((one.device for one in chain(model.parameters(), model.buffers())), torch.device("cpu"))

    @property
    def rank(self) -> int:
        """This process's place among them, from 0."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def count(self) -> int:
        """How many they are."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def decided(self, tensor: Tensor) -> Tensor:
        """The first process's `tensor`; all call this with the same shape and dtype."""
        if self.group is None:
            return tensor
        sent = tensor.contiguous().to(torch.uint8) if tensor.dtype == torch.bool else tensor.contiguous()
        dist.broadcast(sent, dist.get_global_rank(self.group, 0), group=self.group)
        return sent.to(tensor.dtype)

    def mean(self, value: Tensor) -> float:
        """The mean of a scalar over the processes; waits for the device."""
        if self.group is None:
            return float(value)
        sent = value.clone()
        dist.all_reduce(sent, group=self.group)
        return float(sent) / self.count

    def any(self, flag: Tensor) -> bool:
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

    @contextmanager
    def as_one(self, device: torch.device) -> Iterator[None]:
        """What raises within in one process raises in all; nothing within may talk to the others.

        Raises:
            ReplicaError: here nothing was wrong, but in another process.
        """
        if self.group is None:
            yield
            return
        error = None
        try:
            yield
        except Exception as found:
            error = found
        if self.any(torch.tensor(error is not None, device=device)) and error is None:
            error = ReplicaError("another process failed at this point: its message says at what")
        if error is not None:
            raise error

    def check_alike(self, held: Mapping[str, Tensor], settings: str = "") -> None:
        """Compare what the processes hold, by fingerprints of 64 bits; waits for the device.

        Args:
            held: index arrays and masks, by name.
            settings: in words, that must be the same too.

        Raises:
            ReplicaError: in all processes, naming what differs in some.
        """
        if self.group is None:
            return
        said = repr((settings, [(name, tuple(one.shape), one.dtype) for name, one in held.items()]))
        # first one number of each, since lists of another length could not be compared
        # and by all: one that holds nothing is not left out, or the others would wait for it
        if self._differ(torch.tensor([_number(said)], device=self._device)):
            raise ReplicaError(
                f"the processes have other settings, or other names, sizes or dtypes of patterns; here: {said[:500]}. "
                "Make model and rule alike in all of them, from the same seed"
            )
        if held and (places := self._differ(torch.stack([hashed(one) for one in held.values()]))):
            names = [name for place, name in enumerate(held) if place in places]
            raise ReplicaError(
                f"{', '.join(names)} differ between the processes, whose gradients would then be of other weights: "
                "prune with the same seed in all of them, or load one checkpoint"
            )

    def _differ(self, numbers: Tensor) -> list[int]:
        """Places at which int64 (count,) of some processes differ."""
        sent = torch.cat([numbers, ~numbers])  # of which the largest are the largest, and what the least are not
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=self.group)
        largest, least = sent.view(2, -1)
        return (largest != ~least).nonzero().flatten().tolist()


def agreed(model: nn.Module, settings: str = "") -> Replicas:
    """The processes of `model`, whose patterns and masks were found equal; and DistributedDataParallel sends them no
    more.

    Called by all processes, at any time after the model is within DistributedDataParallel or `fully_shard`; rules that
    change patterns call it by themselves. From then on a forward sends only the model's other buffers, such as batch
    norm's. A pattern that is changed later must be changed alike in all processes.

    Args:
        model: perhaps compiled; alone, all is well.
        settings: in words, that must be the same in all processes.

    Raises:
        ReplicaError: in all processes: patterns, masks or settings differ.
    """
    replicas = Replicas(model)
    replicas.check_alike(patterns_of(bare(model)), settings)
    if (shared := _replicated(model)) is not None:
        names = (
            f"{name}.{buffer}" if name else buffer for name, module in shared.module.named_modules()
            if isinstance(module, _PATTERNED) for buffer in module._buffers
        )  # fmt: skip
        # read before each forward, beside what a user had left out
        ignored = shared.parameters_to_ignore = {*shared.parameters_to_ignore, *names}
        shared.modules_buffers = [one for name, one in shared.module.named_buffers() if name not in ignored]
    return replicas


_PATTERNED = (StoredWeight, GeoSparseLinear, SparseMask, MaskedWeight)
"""Modules whose buffers say which weights there are."""


def patterns_of(model: nn.Module) -> dict[str, Tensor]:
    """Index arrays and masks of a model's layers, by the names of `named_buffers`; not what follows from others."""
    return {
        f"{name}.{buffer}" if name else buffer: array for name, module in model.named_modules()
        if isinstance(module, _PATTERNED) for buffer, array in module.named_buffers(recurse=False)
        if not buffer.startswith("transposed_")
    }  # fmt: skip


def hashed(array: Tensor) -> Tensor:
    """A number of the integers or bools of a tensor and their order: int64, of no dimension, on its device."""
    flat, total = array.detach().reshape(-1), torch.zeros((), dtype=torch.int64, device=array.device)
    for first in range(0, flat.numel(), _PIECE):
        piece = flat[first : first + _PIECE].long()
        mixed = piece * -7046029254386353131 + torch.arange(first + 1, first + 1 + len(piece), device=array.device)
        for shift, odd in ((30, -4658895280553007687), (27, -7723592293110705685)):  # the mixing of SplitMix64
            mixed = (mixed ^ (mixed >> shift)) * odd
        total += (mixed ^ (mixed >> 31)).sum()
    return total


def bare(model: nn.Module) -> nn.Module:
    """The model within DistributedDataParallel and torch.compile: its names and state are those of a checkpoint."""
    while (inner := _within(model)) is not None:
        model = inner
    return model


def _within(model: nn.Module) -> nn.Module | None:
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def _replicated(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that a model is or that torch.compile was given."""
    found: nn.Module | None = model
    while found is not None and not isinstance(found, DistributedDataParallel):
        found = _within(found)
    return found


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    if (shared := _replicated(model)) is not None:
        return shared.process_group
    # whoever has called fully_shard has loaded the module, which takes a second
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not any(isinstance(one, fsdp.FSDPModule) for one in model.modules()):
        return None
    meshes = [mesh for one in model.parameters() if (mesh := mesh_of(one)) is not None]
    return _group_of_mesh(meshes[0]) if meshes else None


def _group_of_mesh(mesh: Any) -> dist.ProcessGroup | None:
    """All processes of a mesh, its replicas too: one group, so that one order of sums decides in all of them."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this process is one of them
    return group


def _number(said: str) -> int:
    """63 bits of a text, the same in every process."""
    return int.from_bytes(sha256(said.encode()).digest()[:8]) >> 1
