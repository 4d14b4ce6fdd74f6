"""Sparse parameters under data parallelism.

DistributedDataParallel copies parameters and gradients through flat dense buffers, which a SparseTensor has none of.
What is stored is sent instead: the values once, and the gradients' after each backward. Without `synchronize` every
process gets a SparseOperatorError: when it is wrapped, or in the first backward where that does not broadcast.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from sparsecomp.errors import PatternError
from sparsecomp.sparse_tensor import SparseTensor


def synchronize(module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Prepare a module for DistributedDataParallel: call it in every process, before that.

    SparseTensor parameters take the values of the group's first process and average their gradients over the group as
    a backward produces them. DistributedDataParallel is told to leave them alone. With gradient accumulation, each
    backward averages what has accumulated: step only after the last.

    Args:
        module: changed in place.
        group: by default all processes.

    Returns:
        The module.

    Raises:
        PatternError: processes have different patterns.
    """
    found = {name: parameter for name, parameter in module.named_parameters() if isinstance(parameter, SparseTensor)}
    source = dist.get_global_rank(group, 0) if group is not None else 0
    for name, parameter in found.items():
        tensor = cast(SparseTensor, parameter)
        _check_pattern(name, tensor, source, group)
        dist.broadcast(tensor.values(), source, group=group)
        tensor.register_post_accumulate_grad_hook(lambda changed: _average(changed, group))
    ignored: Any = module
    ignored._ddp_params_and_buffers_to_ignore = [*getattr(module, "_ddp_params_and_buffers_to_ignore", ()), *found]
    return module


def _check_pattern(name: str, tensor: SparseTensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Raise PatternError, in every process, unless all store the same elements."""
    sizes = torch.tensor([*tensor.shape, *(array.numel() for array in tensor._pattern.arrays)], device=tensor.device)
    differs = _differs(sizes, source, group)
    if not differs:
        differs = any([_differs(array, source, group) for array in tensor._pattern.arrays])
    if differs:
        raise PatternError(f"processes store different elements of {name}: load one state in all before")


def _differs(array: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> bool:
    theirs = array.clone()
    dist.broadcast(theirs, source, group=group)
    flag = (theirs != array).any().to(torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


def _average(parameter: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    grad = cast(SparseTensor, parameter.grad)
    values = grad.values()
    dist.all_reduce(values, group=group)
    values.div_(dist.get_world_size(group))
