"""Penalties that draw weights to 0, and the step that minimises each exactly where there is one.

A penalty λ · Ω(w) has the proximal step prox(w) = argmin over u of ½ ‖u − w‖² + t · Ω(u), with t = learning rate · λ,
which sets weights to exactly 0 where a gradient only comes near (Parikh & Boyd 2014, section 6.5).
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsecomp.errors import ConfigError
from sparsecomp.reference.precision import accumulator

GROUPS = ("rows", "columns", "blocks")


@runtime_checkable
class Penalty(Protocol):
    """What a weight, or a sparse layer's values, pays for not being 0."""

    @property
    def strength(self) -> float:
        """λ, 0 or more."""
        ...

    def value(self, weight: Tensor) -> Tensor:
        """λ · Ω(weight), a scalar to look at, or to add to a loss."""
        ...

    def prox(self, weight: Tensor, rate: Tensor | float) -> Tensor:
        """The weight after the proximal step at this learning rate; of its dtype."""
        ...


@dataclass(frozen=True)
class _Weighted:
    """What every penalty has: its weight in the loss."""

    strength: float

    def __post_init__(self) -> None:
        check_strength(self.strength)


@dataclass(frozen=True)
class L1(_Weighted):
    """Ω = Σ |w|: single weights become 0 (soft threshold).

    Attributes:
        strength: λ, 0 or more.
    """

    def value(self, weight: Tensor) -> Tensor:
        """See `Penalty`."""
        return self.strength * weight.abs().sum(dtype=accumulator(weight.dtype))

    def prox(self, weight: Tensor, rate: Tensor | float) -> Tensor:
        """See `Penalty`."""
        threshold = torch.as_tensor(rate * self.strength, dtype=weight.dtype, device=weight.device)
        return weight - weight.clamp(-threshold, threshold)


@dataclass(frozen=True)
class GroupLasso(_Weighted):
    """Ω = Σ over groups g of √|g| · ‖w_g‖: whole groups become 0 (Yuan & Lin 2006).

    Attributes:
        strength: λ, 0 or more.
        groups: "rows" (neurons, output channels), "columns" (inputs, input channels) or "blocks" of a matrix.
        size: rows or columns of a group, such as a head's; for blocks (height, width). They divide the weight's sizes.
    """

    groups: str = "rows"
    size: int | tuple[int, int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups not in GROUPS:
            raise ConfigError(f"groups is {self.groups!r}: give one of {', '.join(GROUPS)}")
        sizes = self._sizes
        if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
            raise ConfigError(f"size is {self.size!r}: give a whole number, or for blocks two of them")
        if self.groups != "blocks" and not isinstance(self.size, int):
            raise ConfigError(f"size is {self.size!r}: {self.groups} have one number")

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (self.size, self.size) if isinstance(self.size, int) else tuple(self.size)

    def value(self, weight: Tensor) -> Tensor:
        """See `Penalty`.

        Raises:
            ConfigError: the groups do not divide the weight.
        """
        grouped, dims = self._grouped(weight)
        return self.strength * _members(grouped, dims) ** 0.5 * _norms(grouped, dims).sum()

    def prox(self, weight: Tensor, rate: Tensor | float) -> Tensor:
        """See `Penalty`.

        Raises:
            ConfigError: the groups do not divide the weight.
        """
        grouped, dims = self._grouped(weight)
        norm = _norms(grouped, dims)
        shrunk = norm - rate * self.strength * _members(grouped, dims) ** 0.5
        # where the norm is 0 there is nothing to shrink
        factor = shrunk.clamp(min=0) / norm.where(norm != 0, 1)
        return (grouped * factor).to(weight.dtype).view(weight.shape)

    def _grouped(self, weight: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """A view of the weight, and the dimensions of it that are one group."""
        first, second = self._sizes
        sizes = weight.shape
        divided = {"rows": (first, 1), "columns": (1, second), "blocks": (first, second)}[self.groups]
        fits = weight.dim() == 2 if self.groups == "blocks" else weight.dim() >= 2
        if not fits or sizes[0] % divided[0] or sizes[1] % divided[1]:
            raise ConfigError(f"a weight {tuple(sizes)} has no {self.groups} of size {self.size}")
        height, width = divided
        rest = math.prod(sizes[2:])
        grouped = weight.reshape(sizes[0] // height, height, sizes[1] // width, width, rest)
        dims = {"rows": (1, 2, 3, 4), "columns": (0, 1, 3, 4), "blocks": (1, 3, 4)}[self.groups]
        return grouped, dims


@dataclass(frozen=True)
class Hoyer(_Weighted):
    """Ω = (Σ |w|)² / Σ w², which is the same for any scale of the weight (Yang et al. 2020, Hoyer-Square).

    It has no proximal step in closed form: a gradient step is taken, and what that would carry across 0 becomes 0.

    Attributes:
        strength: λ, 0 or more.
    """

    def value(self, weight: Tensor) -> Tensor:
        """See `Penalty`."""
        total, square = _sums(weight.to(accumulator(weight.dtype)))
        return self.strength * total.square() / square

    def prox(self, weight: Tensor, rate: Tensor | float) -> Tensor:
        """See `Penalty`."""
        wide = weight.to(accumulator(weight.dtype))
        total, square = _sums(wide)
        # dΩ/dw = 2 sign(w) · Σ|w| / Σw² · (1 − |w| · Σ|w| / Σw²): small weights shrink, large ones grow
        ratio = total / square
        step = rate * self.strength * 2 * ratio * (1 - wide.abs() * ratio)
        return (wide - wide.sign() * torch.minimum(step, wide.abs())).to(weight.dtype)


def check_strength(strength: float) -> None:
    """Raise ConfigError unless it is a number of 0 or more."""
    if not isinstance(strength, Real) or isinstance(strength, bool) or not 0 <= float(strength) < float("inf"):
        raise ConfigError(f"strength is {strength!r}: give a number of 0 or more, such as 1e-4")


def _sums(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Σ |w|, and Σ w² or 1 where that is 0."""
    square = weight.square().sum()
    return weight.abs().sum(), square.where(square != 0, 1)


def _norms(grouped: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Of each group, in the place of its members; halves square too coarsely."""
    return torch.linalg.vector_norm(grouped, dim=dims, keepdim=True, dtype=accumulator(grouped.dtype))


def _members(grouped: Tensor, dims: tuple[int, ...]) -> int:
    return math.prod(grouped.shape[dim] for dim in dims)
