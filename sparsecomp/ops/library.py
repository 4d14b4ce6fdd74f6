"""The one registration of ``torch.ops.sparsecomp``; each operator file defines its own operators in it."""

import torch

library = torch.library.Library("sparsecomp", "DEF")

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What the kernels read and write beside bytes; they sum in float32 or int32."""
