"""Repair of a layer's output after pruning, without gradients: a bias shift, or DSnoT's swaps (Zhang et al. 2023)."""

import torch

from sparsecomp.errors import MaskError


def bias_shift(weight: torch.Tensor, mask: torch.Tensor, input_mean: torch.Tensor) -> torch.Tensor:
    """What to add to the bias: the sum of W * E[x] over the pruned elements of each row, fp32 of shape (rows,).

    `weight` is the dense (rows, fan_in) weight, `mask` bool of its shape, `input_mean` (fan_in,). The mean
    output is then the dense layer's exactly. MaskError for parts that do not fit.
    """
    return _means(weight, mask, input_mean).masked_fill(mask, 0).sum(1)


def dsnot_mask(
    weight: torch.Tensor,
    mask: torch.Tensor,
    scores: torch.Tensor,
    input_mean: torch.Tensor,
    input_variance: torch.Tensor,
    threshold: float = 0.0,
    power: float = 1.0,
    cycles: int = 50,
) -> torch.Tensor:
    """DSnoT: swap one weight a row and cycle so that the row's mean error e = sum over pruned of W * E[x] shrinks.

    Grows the pruned weight with the largest sign(e) * W * E[x] / Var(x)^power and prunes the kept weight with the
    lowest Wanda score whose W * E[x] has the opposite sign to e. A row stops when |e| <= `threshold` (per token) or
    when a side has no candidate. Every row keeps its count. Shapes as in `bias_shift`; `scores` as the weight.
    MaskError for parts that do not fit. No gradient and no host synchronisation.
    """
    means = _means(weight, mask, input_mean)
    if scores.shape != weight.shape or input_variance.shape != input_mean.shape:
        raise MaskError("scores need the weight's shape, input_variance that of input_mean: compute them on this layer")
    mask = mask.clone()
    if not mask.numel():
        return mask
    gain = means / input_variance.float().clamp_min(torch.finfo(torch.float32).tiny) ** power
    for _ in range(cycles):
        error = means.masked_fill(mask, 0).sum(1, keepdim=True)
        toward = error.sign() * means
        growable, droppable = ~mask & (toward > 0), mask & (toward < 0)
        grown = (error.sign() * gain).masked_fill(~growable, -torch.inf).argmax(1, keepdim=True)
        dropped = scores.float().masked_fill(~droppable, torch.inf).argmin(1, keepdim=True)
        moves = (error.abs() > threshold) & growable.any(1, keepdim=True) & droppable.any(1, keepdim=True)
        mask.scatter_(1, grown, mask.gather(1, grown) | moves)
        mask.scatter_(1, dropped, mask.gather(1, dropped) & ~moves)
    return mask


def _means(weight: torch.Tensor, mask: torch.Tensor, input_mean: torch.Tensor) -> torch.Tensor:
    fits = weight.dim() == 2 and mask.shape == weight.shape and input_mean.shape == weight.shape[1:]
    if not fits or mask.dtype != torch.bool:
        raise MaskError(
            f"weight {tuple(weight.shape)}, {mask.dtype} mask {tuple(mask.shape)}, means {tuple(input_mean.shape)}: "
            "give a (rows, fan_in) weight, a bool mask of its shape and fan_in means"
        )
    return weight.detach().float() * input_mean.float()
