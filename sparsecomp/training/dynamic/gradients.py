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
from sparsecomp.reference.precision import accumulator, without_autocast

AT_ONCE = 2**20
"""Elements of the dense gradient that exist at one time."""


class GradientAccumulator:
    """Sums the gradient of a linear layer's whole weight over some batches, as factors.

    Args:
        layer: whose gradient is wanted, (…, columns) to (…, rows).

    Its memory is that of the layer's inputs and of its outputs' gradients in these batches, which are copied: whoever
    reuses a buffer of inputs, or scales gradients in place, changes none of them.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._inputs: list[Tensor] = []
        self._gradients: list[Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take part in the forwards and backwards that run within, which must run eagerly.

        What was summed so far is forgotten where they fail.
        """
        handle = self.layer.register_forward_hook(self._see, with_kwargs=True)
        try:
            yield
        except BaseException:
            self.clear()
            raise
        finally:
            handle.remove()

    @property
    def reached(self) -> bool:
        """Whether a backward reached the layer."""
        return bool(self._inputs)

    def take(self, x: Tensor, gradient: Tensor) -> None:
        """Count a batch: what went into the layer, and the gradient of what left it."""
        for kept, given in ((self._inputs, x), (self._gradients, gradient)):
            kept.append(given.detach().reshape(given.shape[:-1].numel(), given.shape[-1]).clone())

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
            together: what becomes of some rows of the gradient, float32 (of float64 that), before they are ranked:
                such as the mean over the processes of a data-parallel run.

        Raises:
            PatternError: no batch was seen, or there are not so many elements.
        """
        rows, cols = kept.shape
        if not self._inputs:
            raise PatternError("no backward reached the layer: run one in watch(), or an accumulator's watching()")
        if not 0 <= count <= rows * cols - kept.nnz:
            raise PatternError(f"{count} elements were asked for, of {rows * cols - kept.nnz} outside of {kept!r}")
        x, gradient = (torch.cat(given) for given in (self._inputs, self._gradients))
        wide = accumulator(torch.promote_types(x.dtype, gradient.dtype))
        x, gradient = x.to(wide), gradient.to(wide)
        scores, keys = x.new_empty(0), kept.keys.new_empty(0)
        step = max(AT_ONCE // max(cols, 1), 1)
        for first in range(0, rows, step):
            with without_autocast(x):
                block = together(gradient[:, first : first + step].mT @ x)
            found = _outside(block.abs().nan_to_num(nan=-1.0), first * cols, kept)
            places = torch.arange(first * cols, first * cols + block.numel(), dtype=keys.dtype, device=keys.device)
            # those of the rows before come first, so that a stable sort leaves equal ones in order
            best = torch.cat([scores, found]).sort(descending=True, stable=True)
            scores, keys = best.values[:count], torch.cat([keys, places])[best.indices[:count]]
        return Pattern(sort_keys(keys), kept.shape)

    def _see(self, _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        if output.requires_grad:
            (x,) = (*inputs, *named.values())
            x = x.detach()
            output.register_hook(lambda gradient: self.take(x, gradient))


def _outside(scores: Tensor, first: int, kept: Pattern) -> Tensor:
    """The scores of a block that begins with element `first`, flat, and the least where `kept` has the element."""
    flat = scores.flatten()
    # one place more takes those of other blocks
    places = (kept.keys - first).long()
    inside = (places >= 0) & (places < flat.numel())
    marked = torch.zeros(flat.numel() + 1, dtype=torch.bool, device=flat.device)
    marked[places.where(inside, flat.numel())] = True
    return flat.masked_fill(marked[:-1], -torch.inf)
