"""How scores come from products of a query and a key."""

from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """softcap · tanh(scale · product / softcap) + alibi · (position of the key - position of the query).

    Attributes:
        scale: of the products.
        softcap: 0 for none, which leaves scale · product.
        alibi: (heads,), None for none.
    """

    scale: float
    softcap: float = 0.0
    alibi: Tensor | None = None

    def of(self, product: Tensor, distance: Tensor, slope: Tensor | None) -> tuple[Tensor, Tensor]:
        """The scores, and their derivatives by the products.

        Args:
            distance: of the key from the query.
            slope: the alibi of each product's head; None for none. Both broadcast.
        """
        if self.softcap:
            capped = torch.tanh(product * (self.scale / self.softcap))
            score, by_product = capped * self.softcap, (1 - capped * capped) * self.scale
        else:
            score, by_product = product * self.scale, product.new_full((), self.scale)
        if slope is not None:
            score = score + slope.to(score.dtype) * distance
        return score, by_product


def delta_of(grad: Tensor, out: Tensor, grad_logsumexp: Tensor | None = None) -> Tensor:
    """What is taken from each gradient of a query's weights (batch, heads, q_len): FlashAttention, appendix B.4."""
    delta = (grad * out).sum(-1)
    return delta if grad_logsumexp is None else delta - grad_logsumexp
