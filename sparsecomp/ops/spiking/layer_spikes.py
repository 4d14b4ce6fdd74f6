"""What a layer and its neurons in one operator give, before it is computed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.reference.connect import check_added, check_residual
from sparsecomp.reference.geometry import Window, laid_out
from sparsecomp.reference.layer_current import check_membranes


def fake_spikes(
    counts: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    channels_last: bool, steps: int, residual: Tensor | None, connect: str, added: Tensor | None,
) -> Tensor:  # fmt: skip
    """The spikes (T, N, K, …) int8 that a layer's neurons write, uninitialised; operands are those of `conv_lif`.

    Raises:
        InputError: a residual, or something to add, that does not belong to them, or an unknown `connect`.
    """
    kernel = weight.shape if weight.dim() > 2 else (*weight.shape, 1, 1)
    size = Window.of(kernel, stride, padding, dilation).output_size(counts.shape[2:])
    made = laid_out(counts.new_empty((counts.shape[0], weight.shape[0], *size)), channels_last)
    spikes = made.unflatten(0, (steps, counts.shape[0] // steps))
    check_residual(residual, connect, spikes.shape)
    check_added(added, weight.dtype, spikes.shape)
    return spikes


def of_a_step(v: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """A first state (N, K, …), or (N, K) for maps of one pixel, in the first of these shapes.

    Raises:
        InputError: it has another number of elements.
    """
    if v is None:
        return None
    check_membranes(v.shape, shape)
    return v.reshape(shape)


def fake_currents(spikes: Tensor, weight: Tensor, currents: bool) -> Tensor:
    """What neurons are given, lying as their spikes, in the dtype of the weight; of no elements if not asked for."""
    return torch.empty_like(spikes, dtype=weight.dtype) if currents else weight.new_empty(0)
