"""The one registration of ``torch.ops.sparsecomp``; each operator file defines its own operators in it."""

from contextlib import AbstractContextManager, nullcontext

import torch

library = torch.library.Library("sparsecomp", "DEF")

TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
"""Of an operator whose implementation relies on the strides that its fake gives, or that it was traced with."""

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What the kernels read and write beside bytes; they sum in float32 or int32."""


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Context within which torch's products of tensors like this one keep their dtype."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
