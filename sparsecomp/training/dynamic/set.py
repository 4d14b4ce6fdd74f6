"""SET: drop the weights nearest to 0 of either sign, grow at random."""

from zlib import crc32

import torch
from torch import Tensor

from sparsecomp.formats import Pattern
from sparsecomp.formats.indices import sort_keys
from sparsecomp.reference.selection import select_top
from sparsecomp.training.dynamic.dynamic_sparsity import DynamicSparsity


class SET(DynamicSparsity):
    """Mocanu et al. 2018, algorithm 1: the smallest positive and the largest negative weights go."""

    @property
    def share(self) -> float:
        """Always `fraction`, as published."""
        return self.fraction

    def count(self, pattern: Pattern) -> int:
        """No more than there is room for."""
        return min(super().count(pattern), _free(pattern))

    def kept(self, values: Tensor, count: int) -> Tensor:
        """Those far from 0 among those of their sign: as large a share of the negative ones goes as of the others.

        NaN stays, so that a diverged weight is seen.
        """
        order = values.abs().nan_to_num(nan=torch.inf).sort(stable=True).indices
        negative = (values < 0)[order]
        place = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
        for group in (negative, ~negative):
            place = place.where(~group, (group.cumsum(0) - 0.5) / group.sum())
        return select_top(torch.empty_like(place).scatter_(0, order, place), values.numel() - count)

    def grown(self, name: str, old: Pattern, kept: Pattern, count: int) -> Pattern:
        """Uniformly among those not stored before; the same on every device and in every process."""
        generator = torch.Generator().manual_seed(crc32(f"{self.seed} {self.steps} {name}".encode()))
        numbers = _distinct(count, _free(old), generator).to(old.keys)
        # the r-th free element lies behind as many stored ones as have at most r free ones before them
        before = old.keys - torch.arange(old.nnz, dtype=old.keys.dtype, device=old.device)
        return Pattern(sort_keys(numbers + torch.searchsorted(before, numbers, right=True).to(numbers)), old.shape)


def _free(pattern: Pattern) -> int:
    return pattern.shape[0] * pattern.shape[1] - pattern.nnz


def _distinct(count: int, size: int, generator: torch.Generator) -> Tensor:
    """`count` of the numbers below `size`, each set of these as likely as another."""
    if 2 * count > size:
        return torch.randperm(size, generator=generator)[:count]
    found = torch.empty(0, dtype=torch.int64)
    while found.numel() < count:
        found = torch.cat([found, torch.randint(size, (count - found.numel(),), generator=generator)]).unique()
    return found
