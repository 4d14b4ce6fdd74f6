"""SET: drop the weights nearest to 0 of either sign, grow at random."""

import torch
from torch import Tensor

from sparsecomp.reference.selection import select_top
from sparsecomp.training.dynamic.random_growth import RandomGrowth


class SET(RandomGrowth):
    """Mocanu et al. 2018, algorithm 1: the smallest positive and the largest negative weights go."""

    @property
    def share(self) -> float:
        """Always `fraction`, as published."""
        return self.fraction

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
