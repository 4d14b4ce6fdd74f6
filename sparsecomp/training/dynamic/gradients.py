"""The gradient of elements that a sparse layer does not store, without a dense gradient being kept.

What reaches a linear layer and the gradient of what leaves it are kept for one step; their product, the dense gradient,
is looked at some rows at a time, of which only the best candidates are kept.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsecomp.errors import PatternError
from sparsecomp.formats import Pattern
from sparsecomp.formats.indices import sort_keys

AT_ONCE = 2**20
"""Elements of the dense gradient that exist at one time."""


class GradientAccumulator:
    """Sums the gradient of a linear layer's whole weight over some batches, as factors.

    Args:
        layer: whose gradient is wanted, (…, columns) to (…, rows).

    Its memory is that of the layer's inputs and of its outputs' gradients in these batches.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._inputs: list[Tensor] = []
        self._gradients: list[Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take part in the forwards and backwards that run within, which must run eagerly."""
        handle = self.layer.register_forward_hook(self._see)
        try:
            yield
        finally:
            handle.remove()

    def clear(self) -> None:
        """Forget the batches so far."""
        self._inputs.clear()
        self._gradients.clear()

    def candidates(
        self, count: int, kept: Pattern, together: Callable[[Tensor], Tensor] = lambda gradient: gradient
    ) -> Pattern:
        """The elements outside of `kept` whose gradients are the largest in magnitude.

        Equal ones go to the lowest position, and NaN is the least. Nothing waits for the device.

        Args:
            count: how many.
            kept: of the layer's shape.
            together: what becomes of some rows of the gradient, float32, before they are ranked: such as the mean over
                the processes of a data-parallel run.

        Raises:
            PatternError: no batch was seen, or there are not so many elements.
        """
        rows, cols = kept.shape
        if not self._inputs:
            raise PatternError("no backward reached the layer: run one in watch(), or an accumulator's watching()")
        if not 0 <= count <= rows * cols - kept.nnz:
            raise PatternError(f"{count} elements were asked for, of {rows * cols - kept.nnz} outside of {kept!r}")
        x, gradient = (torch.cat(given).float() for given in (self._inputs, self._gradients))
        scores, keys = x.new_empty(0), kept.keys.new_empty(0)
        step = max(AT_ONCE // max(cols, 1), 1)
        for first in range(0, rows, step):
            block = together(gradient[:, first : first + step].mT @ x)
            found = _outside(block.abs().nan_to_num(nan=-1.0), first * cols, kept)
            places = torch.arange(first * cols, first * cols + block.numel(), dtype=keys.dtype, device=keys.device)
            # those of the rows before come first, so that a stable sort leaves equal ones in order
            best = torch.cat([scores, found]).sort(descending=True, stable=True)
            scores, keys = best.values[:count], torch.cat([keys, places])[best.indices[:count]]
        return Pattern(sort_keys(keys), kept.shape)

    def _see(self, _module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        x = inputs[0].detach()

        def take(gradient: Tensor) -> None:
            self._inputs.append(x.reshape(-1, x.shape[-1]))
            self._gradients.append(gradient.detach().reshape(-1, gradient.shape[-1]))

        output.register_hook(take)


def _outside(scores: Tensor, first: int, kept: Pattern) -> Tensor:
    """The scores of a block that begins with element `first`, flat, and the least where `kept` has the element."""
    flat = scores.flatten()
    # one place more takes those of other blocks
    places = (kept.keys - first).long()
    inside = (places >= 0) & (places < flat.numel())
    marked = torch.zeros(flat.numel() + 1, dtype=torch.bool, device=flat.device)
    marked[places.where(inside, flat.numel())] = True
    return flat.masked_fill(marked[:-1], -torch.inf)
