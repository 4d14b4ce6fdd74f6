"""How scores come from products of a query and a key."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.reference.precision import accumulator


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


def gradients_by_lists(
    by_query: Callable[..., Tensor], by_key: Callable[..., tuple[Tensor, Tensor]], operands: Sequence[Tensor],
    grad_logsumexp: Tensor | None, lists: Sequence[Sequence[Tensor]], scoring: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients by q, k and v, in the dtype sums are kept in.

    A score's gradient is p · (grad · v - delta), with p = exp(score - logsumexp) and delta = grad · out less the
    gradient of the logsumexp (FlashAttention, appendix B.4).

    Args:
        by_query, by_key: what gives that of q, and those of k and v, of operands of one dtype.
        operands: the gradient by the result, q, k, v, the result and the logsumexp.
        lists: of the queries and of the keys.
        scoring: how scores come from products.
    """
    sums = accumulator(operands[1].dtype)
    grad, q, k, v, out, logsumexp = (one.to(sums) for one in operands)
    walked = grad, q, k, v, logsumexp, delta_of(grad, out, grad_logsumexp)
    return by_query(*walked, lists[0], scoring), *by_key(*walked, lists[1], scoring)
