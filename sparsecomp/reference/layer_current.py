"""What a layer on spikes gives its neurons: what stands between its sums and a neuron's first operation."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from sparsecomp.errors import InputError
from sparsecomp.reference.lif import behind_norm


def joined_current(
    sums: Tensor, mean: Tensor | None, var: Tensor | None, gamma: Tensor | None, beta: Tensor | None, eps: float,
    added: Tensor | None,
) -> Tensor:  # fmt: skip
    """Sums (T, N, K, …) behind a batch-norm in evaluation and a residual, in the dtype of the sums.

    Both compute in float32 at least, and what they give is rounded to that dtype, as torch's operators do.
    """
    dtype = sums.dtype
    wide = torch.promote_types(dtype, torch.float32)
    if mean is not None:
        sums = behind_norm(sums.to(wide), mean, var, gamma, beta, eps).to(dtype)
    if added is not None:
        sums = (sums.to(wide) + added.reshape(sums.shape).to(wide)).to(dtype)
    return sums


def check_membranes(given: Sequence[int], step: Sequence[int]) -> None:
    """InputError unless a first state of a shape has as many elements as a time step, whose last ones of 1 may miss."""
    if prod(given) != prod(step):
        raise InputError(f"membranes {tuple(given)} are not those of a step: {tuple(step)}")
