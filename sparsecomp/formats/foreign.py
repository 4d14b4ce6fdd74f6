"""Arrays that go to scipy and come from it; scipy is loaded when it is asked for."""

from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import ExtraError, FormatError


def scipy_sparse() -> Any:
    """The module `scipy.sparse`.

    Raises:
        ExtraError: scipy is not installed.
    """
    try:
        from scipy import sparse
    except ImportError as error:
        raise ExtraError("to_scipy needs scipy: pip install scipy") from error
    return sparse


def to_numpy(values: Tensor, *indices: Tensor) -> tuple[Any, ...]:
    """Arrays on the CPU, of which the values are float32 if they were narrower.

    Raises:
        FormatError: the values have a batch dimension, which scipy has not.
    """
    if values.dim() not in (1, 3):
        raise FormatError(f"values have shape {tuple(values.shape)}, scipy has no batches: use unbatch")
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    return tuple(array.detach().cpu().contiguous().numpy() for array in (wide, *indices))


def tensor_of(array: Any) -> Tensor:
    """A copy of a numpy array, in the machine's byte order."""
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
