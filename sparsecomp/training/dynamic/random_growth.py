"""Drop the least magnitudes, grow at random: what RigL is compared with."""

from zlib import crc32

import torch
from torch import Tensor

from sparsecomp.formats import Pattern
from sparsecomp.formats.indices import sort_keys
from sparsecomp.training.dynamic.dynamic_sparsity import DynamicSparsity


class RandomGrowth(DynamicSparsity):
    """Magnitudes go as in RigL, and any elements come that were not stored, whose gradients nobody needs."""

    def count(self, pattern: Pattern) -> int:
        """No more than there is room for."""
        return min(super().count(pattern), _free(pattern))

    def grown(self, name: str, old: Pattern, kept: Pattern, count: int) -> Pattern:
        """Uniformly among those not stored before."""
        return drawn(count, old, f"{self.seed} {self.steps} {name}")


def drawn(count: int, outside: Pattern, seed: str) -> Pattern:
    """So many elements that a pattern does not have, uniformly; the same on every device and in every process."""
    generator = torch.Generator().manual_seed(crc32(seed.encode()))
    numbers = _distinct(count, _free(outside), generator).to(outside.keys)
    # the r-th free element lies behind as many stored ones as have at most r free ones before them
    before = outside.keys - torch.arange(outside.nnz, dtype=outside.keys.dtype, device=outside.device)
    places = torch.searchsorted(before, numbers, right=True).to(numbers)
    return Pattern(sort_keys(numbers + places), outside.shape)


def _free(pattern: Pattern) -> int:
    return pattern.shape[0] * pattern.shape[1] - pattern.nnz


def _distinct(count: int, size: int, generator: torch.Generator) -> Tensor:
    """`count` of the numbers below `size`, each set of these as likely as another."""
    if 2 * count > size:
        return torch.randperm(size, generator=generator, device="cpu")[:count]
    found = torch.empty(0, dtype=torch.int64, device="cpu")
    while found.numel() < count:
        some = torch.randint(size, (count - found.numel(),), generator=generator, device="cpu")
        found = torch.cat([found, some]).unique()
    return found
