"""SparseGPT (Frantar & Alistarh 2023): prune a layer and let the kept weights make up for what is gone.

Where Wanda only ranks, this solves: each pruned column's error is spread over the columns after it by the inverse of
H = 2 X X^T, so it costs one Cholesky factor a layer and no gradient. A weight is a linear layer's (rows, fan_in) or a
convolution's (K, C, R, S), with the products of its `unfolded` input.
"""

from collections.abc import Callable

import torch

from sparsecomp.errors import MaskError
from sparsecomp.reference.selection import select_top
from sparsecomp.training.pruning.scores import n_of_m_mask

_BLOCK = 128
"""Columns ranked together, and updated together in one product, as published."""


def input_products(tokens: torch.Tensor) -> torch.Tensor:
    """H = 2 X X^T over all tokens, fp32 (float64 for float64) of shape (fan_in, fan_in); `tokens` is (..., fan_in).

    The products of several batches add up. Leave padding out, as for `input_norms`.
    """
    wide = tokens.detach().to(torch.promote_types(tokens.dtype, torch.float32)).reshape(-1, tokens.shape[-1])
    return 2 * wide.T @ wide


def sparsegpt(
    weight: torch.Tensor, products: torch.Tensor, sparsity: float, damping: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pruned weight, in the weight's shape and dtype, and its bool mask; `weight` itself stays.

    Each block of 128 columns drops int(size * sparsity) of its weights over all rows. `products` is
    `input_products` of the layer's input, `damping` the share of its mean diagonal that is added to the diagonal.
    Columns of inputs that were always zero become zero. MaskError for products of another size or with NaN or
    infinity, NaN in the weight, a sparsity outside [0, 1) or a damping that is not positive.
    """
    if not 0 <= sparsity < 1:
        raise MaskError(f"the sparsity is {sparsity}: it lies in [0, 1)")

    def best(scores: torch.Tensor) -> torch.Tensor:
        keep = scores.numel() - int(scores.numel() * sparsity)
        return select_top(scores.reshape(-1), keep, refuse_nan=True).reshape(scores.shape)

    flat = weight.reshape(weight.shape[0], weight.shape[1:].numel())
    pruned, mask = _solve(flat, products, damping, _BLOCK, best)
    return pruned.reshape(weight.shape), mask.reshape(weight.shape)


def sparsegpt_n_of_m(
    weight: torch.Tensor, products: torch.Tensor, keep: int, group: int, damping: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sparsegpt`, keeping `keep` of each `group` neighbours along the input channels (dimension 1).

    MaskError as there, and if the group does not divide the input channels.
    """
    if group < 1 or weight.shape[1] % group:
        raise MaskError(f"groups of {group} do not divide {weight.shape[1]} input channels: leave this layer dense")
    # columns in an order in which the members of a group are neighbours
    last = weight.movedim(1, -1)
    flat = last.reshape(last.shape[0], last.shape[1:].numel())
    order = torch.arange(flat.shape[1], device=weight.device).reshape(weight.shape[1], -1).T.reshape(-1)
    _check_products(products, flat.shape[1])
    solved = _solve(flat, products[order][:, order], damping, group, lambda scores: n_of_m_mask(scores, keep, group))
    pruned, mask = (part.reshape(last.shape).movedim(-1, 1).contiguous() for part in solved)
    return pruned, mask


def _solve(
    flat: torch.Tensor,
    products: torch.Tensor,
    damping: float,
    stretch: int,
    best: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prune column after column; `best` picks the kept weights of the next `stretch` columns by their scores."""
    _check_products(products, flat.shape[1])
    factor = _factor(products, damping).to(torch.promote_types(flat.dtype, torch.float32))
    work = flat.detach().to(factor.dtype).masked_fill(products.diagonal() == 0, 0)
    mask = torch.ones_like(work, dtype=torch.bool)
    block = max(_BLOCK // stretch, 1) * stretch
    for first in range(0, work.shape[1], block):
        last = min(first + block, work.shape[1])
        errors = torch.zeros_like(work[:, first:last])
        for column in range(first, last):
            if (column - first) % stretch == 0:
                ahead = slice(column, min(column + stretch, last))
                mask[:, ahead] = best((work[:, ahead] / factor.diagonal()[ahead]).square())
            error = work[:, column].masked_fill(mask[:, column], 0) / factor[column, column]
            errors[:, column - first] = error
            work[:, column + 1 : last] -= error[:, None] * factor[column, column + 1 : last]
            work[:, column].masked_fill_(~mask[:, column], 0)
        work[:, last:] -= errors @ factor[first:last, last:]
    return work.to(flat.dtype), mask


def _factor(products: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the damped inverse, float64; a dead input has 1 in H."""
    if not damping > 0:
        raise MaskError(f"the damping is {damping}: it must be positive, or H may have no inverse")
    # float64: two factors and an inverse lose half the digits of an ill-conditioned H, and this runs once a layer
    damped = products.to(torch.float64, copy=True)
    diagonal = damped.diagonal()
    diagonal += (diagonal == 0).double()
    diagonal += damping * diagonal.mean()
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)


def _check_products(products: torch.Tensor, fan_in: int) -> None:
    if products.shape != (fan_in, fan_in) or not bool(products.isfinite().all()):
        raise MaskError(
            f"products {tuple(products.shape)} for a fan-in of {fan_in}: give input_products of this layer's input, "
            "with no NaN or infinity"
        )
