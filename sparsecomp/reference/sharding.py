"""Tensors of which each process holds a part, as FSDP2 makes them: the whole, the part, and a tensor parted alike.

What selects among all elements of a weight needs the whole; what acts on each alone acts on the part.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import ReplicaError


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    # whoever has one has loaded the module, which takes a second
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def mesh_of(tensor: Tensor) -> Any:
    """The DeviceMesh of the processes that share a tensor, of one dimension or replicas × shards; None of a plain one.

    Raises:
        ReplicaError: a mesh that splits tensors in several dimensions.
    """
    if not is_sharded(tensor):
        return None
    mesh = tensor.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    *replicated, _ = tensor.placements  # pyright: ignore[reportAttributeAccessIssue]
    if not all(one.is_replicate() for one in replicated):
        raise ReplicaError(
            f"a parameter is spread over {mesh!r}, split in several dimensions: what changes masks and patterns takes "
            "shards in the last one, of replicas in those before"
        )
    return mesh


def whole(tensor: Any) -> Any:
    """All of a tensor, plain; gathered from the processes, which all call this, if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local(tensor: Any) -> Any:
    """This process's part, plain, of the same memory; a plain tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def parted(tensor: Tensor, like: Tensor) -> Tensor:
    """A plain tensor that all processes hold, of the shape of `like`: sharded as that is. Sends nothing."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh_of(like), like.placements, src_data_rank=None)  # pyright: ignore[reportAttributeAccessIssue]


def sharded_as(part: Tensor, like: Any) -> Any:
    """This process's part as one of a tensor that is sharded as `like`; itself, if that is plain. Sends nothing."""
    if not is_sharded(like):
        return part
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
