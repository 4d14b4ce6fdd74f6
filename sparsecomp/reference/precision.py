"""In which dtypes products are taken and summed."""

from contextlib import AbstractContextManager, nullcontext

import torch

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What the kernels read and write beside bytes; they sum in float32 or int32."""


def accumulator(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that sums of these are kept in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Context within which torch's products of tensors like this one keep their dtype."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
