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
    if residual.dtype is not torch.int8 or _filled(residual, shape) != tuple(shape):
        given = f"a residual of {residual.dtype} {tuple(residual.shape)}"
        raise InputError(f"{given}: give int8 of the shape of the spikes, {tuple(shape)}")


def check_added(added: Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """InputError unless something, if there is such, can be added to what neurons of a shape are given in a dtype."""
    if added is not None and (added.dtype not in (torch.int8, dtype) or _filled(added, shape) != tuple(shape)):
        given = f"to add {added.dtype} {tuple(added.shape)}"
        raise InputError(f"{given}: give int8 or {dtype} of the shape of the spikes, {tuple(shape)}")


def _filled(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    return (*x.shape, *(1,) * (len(shape) - x.dim()))
