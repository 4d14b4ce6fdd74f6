"""The pruners, objects with their settings: what each needs of a layer's inputs, and what it makes of the weight."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsecomp.errors import MaskError, typed_arguments
from sparsecomp.reference.selection import select_top
from sparsecomp.training.pruning.calibration import InputStatistics
from sparsecomp.training.pruning.scores import magnitude_mask, n_of_m_mask, wanda_scores
from sparsecomp.training.pruning.sparsegpt import sparsegpt, sparsegpt_n_of_m

Parts = tuple[InputStatistics, ...]
"""Statistics of a layer's inputs: one, or three for the rows of a packed attention projection; empty if unknown."""

Pruned = tuple[Tensor, Tensor]
"""A weight and its bool mask."""


@runtime_checkable
class Pruner(Protocol):
    """A way to prune one weight, of a linear layer (rows, fan_in) or a convolution (K, C, R, S).

    Without statistics (empty ``parts``) each ranks by magnitude. MaskError on NaN.
    """

    calibrated: ClassVar[bool]
    """Whether it reads statistics of the layer's inputs."""
    products: ClassVar[bool]
    """Whether it reads their products too, fan_in squared numbers a layer."""

    def prune(self, weight: Tensor, keep: int, parts: Parts) -> Pruned:
        """The weight, perhaps with new values, and its bool mask with ``keep`` True."""
        ...

    def prune_groups(self, weight: Tensor, keep: int, group: int, parts: Parts) -> Pruned:
        """The same with ``keep`` of each ``group`` neighbours along the input (dimension 1)."""
        ...


@typed_arguments(MaskError)
@dataclass(frozen=True)
class Magnitude:
    """Keep the largest |w| of the layer (Han et al. 2015)."""

    calibrated: ClassVar[bool] = False
    products: ClassVar[bool] = False

    def prune(self, weight: Tensor, keep: int, parts: Parts) -> Pruned:
        """See `Pruner`."""
        return weight, magnitude_mask(weight, keep)

    def prune_groups(self, weight: Tensor, keep: int, group: int, parts: Parts) -> Pruned:
        """See `Pruner`."""
        return weight, n_of_m_mask(weight.detach().float().abs(), keep, group)


@typed_arguments(MaskError)
@dataclass(frozen=True)
class Random:
    """Keep any elements, drawn from torch's generator: where training that is sparse from the first step begins."""

    calibrated: ClassVar[bool] = False
    products: ClassVar[bool] = False

    def prune(self, weight: Tensor, keep: int, parts: Parts) -> Pruned:
        """See `Pruner`."""
        return weight, magnitude_mask(torch.rand(weight.shape, device=weight.device), keep)

    def prune_groups(self, weight: Tensor, keep: int, group: int, parts: Parts) -> Pruned:
        """See `Pruner`."""
        return weight, n_of_m_mask(torch.rand(weight.shape, device=weight.device), keep, group)


@typed_arguments(MaskError)
@dataclass(frozen=True)
class Wanda:
    """Keep the largest |w| times the norm of its input, as many in each output row (Sun et al. 2023)."""

    calibrated: ClassVar[bool] = True
    products: ClassVar[bool] = False

    def prune(self, weight: Tensor, keep: int, parts: Parts) -> Pruned:
        """See `Pruner`."""
        if not parts or not keep:
            return Magnitude().prune(weight, keep, parts)
        return weight, best_of_rows(wanda_scores_by_parts(weight, parts), keep)

    def prune_groups(self, weight: Tensor, keep: int, group: int, parts: Parts) -> Pruned:
        """See `Pruner`."""
        return weight, n_of_m_mask(wanda_scores_by_parts(weight, parts), keep, group)


@typed_arguments(MaskError)
@dataclass(frozen=True)
class SparseGPT:
    """Prune column after column and let what is kept make up for it (Frantar & Alistarh 2023).

    Its blocks of 128 columns round their counts.

    Attributes:
        damping: share of the products' mean diagonal that is added to the diagonal, positive.
    """

    damping: float = 0.01
    calibrated: ClassVar[bool] = True
    products: ClassVar[bool] = True

    def __post_init__(self) -> None:
        is_number = isinstance(self.damping, Real) and not isinstance(self.damping, bool)
        if not is_number or not 0 < self.damping < math.inf:
            raise MaskError(f"damping is {self.damping!r}: give a positive number, such as 0.01")

    def prune(self, weight: Tensor, keep: int, parts: Parts) -> Pruned:
        """See `Pruner`."""
        if not parts or not keep:  # where nothing is kept, nothing can make up for what is gone
            return Magnitude().prune(weight, keep, parts)
        sparsity = 1 - keep / max(weight.numel(), 1)
        return self._solved(weight, parts, lambda rows, products: sparsegpt(rows, products, sparsity, self.damping))

    def prune_groups(self, weight: Tensor, keep: int, group: int, parts: Parts) -> Pruned:
        """See `Pruner`."""
        if not parts:
            return Magnitude().prune_groups(weight, keep, group, parts)
        return self._solved(
            weight, parts, lambda rows, products: sparsegpt_n_of_m(rows, products, keep, group, self.damping)
        )

    def _solved(self, weight: Tensor, parts: Parts, solve: Callable[[Tensor, Tensor], Pruned]) -> Pruned:
        solved = [
            solve(rows, part.products)
            for rows, part in zip(weight.chunk(len(parts)), parts, strict=True)
            if part.products is not None
        ]
        return torch.cat([rows for rows, _ in solved]), torch.cat([mask for _, mask in solved])


PRUNERS: dict[str, Pruner] = {
    "magnitude": Magnitude(), "random": Random(), "wanda": Wanda(), "sparsegpt": SparseGPT()
}  # fmt: skip
"""By the names that configs take."""


def pruner_of(by: str | Pruner) -> Pruner:
    """The pruner itself, or the one of that name with its usual settings.

    Raises:
        MaskError: no such name, or no pruner.
    """
    if isinstance(by, Pruner) and not isinstance(by, type):
        return by
    if not isinstance(by, str) or by not in PRUNERS:
        raise MaskError(f"by is {by!r}: give one of {', '.join(map(repr, PRUNERS))} or a pruner such as Wanda()")
    return PRUNERS[by]


def wanda_scores_by_parts(weight: Tensor, parts: Parts) -> Tensor:
    """Wanda's scores, of the weight's shape in fp32; magnitudes where the inputs are not known."""
    if not parts:
        return weight.detach().float().abs()
    return by_parts(parts, lambda part, rows: wanda_scores(rows, part.norm), weight)


def best_of_rows(scores: Tensor, keep: int) -> Tensor:
    """Keep exactly ``keep`` scores, as many in each output row; the remainder goes to the rows with the best next one.

    Bool of the scores' shape. MaskError on NaN.
    """
    if not scores.numel():
        return torch.zeros_like(scores, dtype=torch.bool)
    rows = scores.reshape(len(scores), scores.shape[1:].numel())
    each, rest = divmod(keep, len(rows))
    mask = select_top(rows, each, refuse_nan=True)
    after, column = rows.masked_fill(mask, -torch.inf).max(1, keepdim=True)
    gets = select_top(after.reshape(-1), rest)[:, None]
    mask.scatter_(1, column, mask.gather(1, column) | gets)
    return mask.reshape(scores.shape)


def by_parts(parts: Parts, method: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``method`` on the statistics and the rows (flattened to matrices) of each part, above one another."""
    shape = tensors[0].shape
    flat = [tensor.detach().reshape(len(tensor), shape[1:].numel()).chunk(len(parts)) for tensor in tensors]
    found = torch.cat([method(part, *rows) for part, *rows in zip(parts, *flat, strict=True)])
    return found.reshape(shape) if found.dim() == 2 else found
