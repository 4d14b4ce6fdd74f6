"""How a block's spikes are joined with what skips the block: what kernels, the operator and its rule all go by.

Fang et al., Deep Residual Learning in Spiking Neural Networks (2021, arXiv:2102.04159), has the functions;
here they are of tensors of bytes.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sparsecomp.errors import InputError

CONNECTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda spikes, residual: residual + spikes,
    "and": lambda spikes, residual: residual * spikes,
    "iand": lambda spikes, residual: residual * (1 - spikes),
}
"""Each of spikes in {0, 1} and a residual of whole numbers, both int8; what passes a byte wraps around."""


def connected(spikes: Tensor, residual: Tensor, connect: str) -> Tensor:
    """Spikes joined with a residual of their shape, in their layout."""
    return torch.empty_like(spikes, dtype=torch.int8).copy_(CONNECTIONS[connect](spikes, residual))


def check_residual(residual: Tensor | None, connect: str, shape: Sequence[int]) -> None:
    """InputError unless a residual, if there is one, can be joined with spikes of a shape, whose last ones may miss."""
    if connect not in CONNECTIONS:
        raise InputError(f"connect={connect!r}: use one of {', '.join(CONNECTIONS)}")
    if residual is None:
        return
    filled = (*residual.shape, *(1,) * (len(shape) - residual.dim()))
    if residual.dtype is not torch.int8 or filled != tuple(shape):
        given = f"a residual of {residual.dtype} {tuple(residual.shape)}"
        raise InputError(f"{given}: give int8 of the shape of the spikes, {tuple(shape)}")
