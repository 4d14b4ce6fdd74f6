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
from sparsecomp.formats.indices import pointers_of, sort_keys
from sparsecomp.ops.masked.elementwise import select_largest
from sparsecomp.ops.sparse.sddmm import sddmm
from sparsecomp.reference.patterns import Layout
from sparsecomp.reference.precision import accumulator, without_autocast

AT_ONCE = 2**20
"""Elements of the dense gradient that exist at one time; on a GPU, where each block costs launches, a quarter of it."""

Together = Callable[[Tensor], Tensor]


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
        self, count: int, kept: Pattern, together: Together | None = None, rows: Tensor | None = None
    ) -> Pattern:
        """The elements outside of `kept` whose gradients are the largest in magnitude.

        Equal ones go to the lowest position, and NaN is the least. Nothing waits for the device.

        Args:
            count: how many.
            kept: of the layer's shape.
            together: what becomes of some rows of the gradient, float32 (of float64 that), before they are ranked:
                such as the mean over the processes of a data-parallel run.
            rows: bool (rows,), those whose elements are looked at, which have so many; by default all.

        Raises:
            PatternError: no batch was seen, or there are not so many elements.
        """
        others = kept.shape[0] * kept.shape[1] - kept.nnz
        if not 0 <= count <= others:
            raise PatternError(f"{count} elements were asked for, of {others} outside of {kept!r}")
        scores, keys = None, kept.keys.new_empty(0)
        for first, block in self._scores(kept, together):
            found = block if rows is None else block.masked_fill(~rows[first : first + len(block), None], -torch.inf)
            # those of the rows before come first, and stay in order
            found = found.flatten() if scores is None else torch.cat([scores, found.flatten()])
            most = min(count, found.numel())
            best = torch.nonzero_static(select_largest(found, most), size=most).squeeze(1)
            own = (best + (first * kept.shape[1] - keys.numel())).to(keys.dtype)
            keys = own if not keys.numel() else keys[best.clamp(max=keys.numel() - 1)].where(best < keys.numel(), own)
            scores = found[best]
        return Pattern(keys, kept.shape)

    def candidates_among(self, count: int, among: Pattern, together: Together | None = None) -> Pattern:
        """The elements of `among` whose gradients are the largest in magnitude, of which alone they are computed.

        Args:
            count: how many.
            among: of the layer's shape.
            together: as of `candidates`, of gradients (nnz,); and so are ties and NaN. Nothing waits for the device.

        Raises:
            PatternError: no batch was seen, or `among` has not so many elements.
        """
        if not 0 <= count <= among.nnz:
            raise PatternError(f"{count} elements were asked for, of {among!r}")
        x, gradient = (factor.to(accumulator(factor.dtype)) for factor in self._factors())
        pointers = pointers_of(among.row, among.shape[0], among.keys.dtype)
        with without_autocast(x):
            found = sddmm(gradient.mT, x.mT, (pointers, among.col), Layout("csr", (1, 1), among.shape))
        found = found if together is None else together(found)
        scores = found.abs().nan_to_num(nan=-1.0)
        best = scores.sort(descending=True, stable=True).indices[:count]
        return Pattern(sort_keys(among.keys[best]), among.shape)

    def candidates_of_rows(self, counts: Tensor, kept: Pattern, together: Together | None = None) -> Pattern:
        """The elements outside of `kept` whose gradients are the largest of their row; waits for the device.

        Args:
            counts: (rows,), how many of each row, which has so many.
            kept, together: as of `candidates`, and so are ties and NaN.

        Raises:
            PatternError: no batch was seen.
        """
        found = [kept.keys.new_empty(0)]
        for first, block in self._scores(kept, together):
            order = block.sort(dim=1, descending=True, stable=True).indices
            wanted = torch.arange(block.shape[1], device=block.device) < counts[first : first + len(block), None]
            chosen = torch.zeros_like(wanted).scatter_(1, order, wanted)
            found.append(_places(first, block, kept)[chosen.flatten()])
        return Pattern(torch.cat(found), kept.shape)

    def _scores(self, kept: Pattern, together: Together | None) -> Iterator[tuple[int, Tensor]]:
        """Magnitudes of the gradient, some rows at a time, with the first of these: -1 for NaN, less within `kept`."""
        rows, cols = kept.shape
        x, gradient = self._factors()
        inside = torch.zeros(rows * cols, dtype=torch.bool, device=kept.device).index_fill_(0, kept.keys.long(), True)
        step = max(AT_ONCE // max(cols, 1), rows // 4 if x.is_cuda else 0, 1)
        for first in range(0, rows, step):
            block = _wide_product(gradient[:, first : first + step].mT, x)
            block = block if together is None else together(block)
            block = block.abs_().nan_to_num_(nan=-1.0)
            yield first, block.masked_fill_(inside[first * cols :][: block.numel()].view_as(block), -torch.inf)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """What went in (batches, columns) and the gradients of what left (batches, rows), of one dtype."""
        if not self._inputs:
            raise PatternError("no backward reached the layer: run one in watch(), or an accumulator's watching()")
        x, gradient = (torch.cat(given) for given in (self._inputs, self._gradients))
        dtype = torch.promote_types(x.dtype, gradient.dtype)
        return x.to(dtype), gradient.to(dtype)

    def _see(self, _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        if output.requires_grad:
            (x,) = (*inputs, *named.values())
            x = x.detach()
            output.register_hook(lambda gradient: self.take(x, gradient))


def _wide_product(one: Tensor, other: Tensor) -> Tensor:
    """one @ other in the dtype of sums."""
    wide = accumulator(one.dtype)
    with without_autocast(one):
        if one.is_cuda and one.dtype is not wide:  # by tensor cores, which sum in float32
            return torch.mm(one, other, out_dtype=wide)
        return one.to(wide) @ other.to(wide)


def _places(first: int, block: Tensor, kept: Pattern) -> Tensor:
    """The keys of a block's elements, whose first row is `first`."""
    begin = first * kept.shape[1]
    return torch.arange(begin, begin + block.numel(), dtype=kept.keys.dtype, device=kept.device)
