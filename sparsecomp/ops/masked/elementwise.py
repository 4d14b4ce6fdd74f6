"""Operations on a weight and its mask that wait for no device: Phi and its inverse, masked arithmetic, selection.

Masked arithmetic is torch.where, which is one pass over memory and which Inductor fuses with its neighbours: a kernel
of its own would gain nothing. Scores, thresholds and selection by a known count are in `sparsecomp.runtime`.
"""

import torch
from torch import Tensor

from sparsecomp.errors import MaskError
from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.ops.masked.effective_weight import check_mask, effective_weight, split_pruned
from sparsecomp.reference.masks import leading, select_by_sorting

library.define("select_largest(Tensor scores, Tensor count) -> Tensor", tags=TAGS)


def scatter_pruned(theta: Tensor, mask: Tensor) -> Tensor:
    """Phi: theta (1-d, ascending flat order) at the pruned elements of a bool mask, zero elsewhere; differentiable."""
    return effective_weight(theta.new_zeros(mask.shape), theta, mask)


def gather_pruned(whole: Tensor, mask: Tensor, pruned: int) -> Tensor:
    """The inverse of Phi: the `pruned` elements where a bool mask is False, as a vector; differentiable."""
    return split_pruned(whole, mask, pruned, active=False)[1]


def masked_mul(weight: Tensor, mask: Tensor) -> Tensor:
    """mask * weight, but zero at pruned elements whatever the weight holds there; so is the gradient."""
    check_mask(weight, mask)
    return torch.where(mask, weight, 0)


def masked_add(weight: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """weight + other where the mask is True, weight elsewhere, to the bit.

    The gradient of `other` is zero where it is not added.
    """
    _check_two(weight, other, mask)
    return torch.where(mask, weight + other, weight)


def masked_blend(weight: Tensor, phi: Tensor, mask: Tensor) -> Tensor:
    """mask * weight + (1 - mask) * phi, without its rounding: each element is one of the two.

    Gradients are exact, and zero where an operand is not taken.
    """
    _check_two(weight, phi, mask)
    return torch.where(mask, weight, phi)


def select_largest(scores: Tensor, count: Tensor | int) -> Tensor:
    """True at the `count` largest of a vector, which a 0-d tensor on its device may give; ties to the lowest index.

    NaN ranks with minus infinity, a count outside of 0..size as the nearest of the two. It can be captured in a CUDA
    graph, whose replays read scores and a tensor `count` anew.
    """
    return torch.ops.sparsecomp.select_largest.default(scores.detach(), count_on(scores.device, count))


def count_on(device: torch.device, count: Tensor | int) -> Tensor:
    """A count as operators take it: on the device, where none that is there already is waited for."""
    return count if isinstance(count, Tensor) else torch.full((), count, device=device)


def _select_cuda(scores: Tensor, count: Tensor) -> Tensor:
    from sparsecomp.lowering.masked import select_largest as lowered  # loads Triton

    return lowered.select(scores, count)


def _fake_select(scores: Tensor, count: Tensor) -> Tensor:
    return scores.new_empty(scores.shape, dtype=torch.bool)


def tournament(weight: Tensor, mask: Tensor, keep: int, rate: float) -> Tensor:
    """Which elements stay at the end of a RESU phase: the active and the resurrected compete apart, by |weight|.

    The best min(round(rate * keep), pruned elements that are not 0) of the pruned come back, the best active fill the
    rest, and a group that is too short is filled from what is left of all. Ties go to the lowest index. NaN ranks last;
    `sparsecomp.training.resu.amnesty.amnesty_mask` refuses it, for which it waits for the device.

    Args:
        weight: the effective one, with theta at its pruned elements.
        mask: bool of its shape, True where it was active.
        keep: elements that stay, at most all.
        rate: in [0, 1].

    Returns:
        bool of the weight's shape.
    """
    check_mask(weight, mask)
    if not 0 <= keep <= weight.numel() or not 0 <= rate <= 1:
        raise MaskError(f"keep {keep} of {weight.numel()}, rate {rate}: a count up to the size and a share are needed")
    scores = weight.detach().reshape(-1).abs()
    order = scores.nan_to_num(nan=-1, posinf=torch.inf).sort(descending=True, stable=True).indices
    active = mask.reshape(-1)[order]
    candidates = ~active & (scores > 0)[order]
    chosen = leading(candidates, round(rate * keep))
    chosen |= leading(active, keep - chosen.sum())
    chosen |= leading(~chosen, keep - chosen.sum())
    return torch.zeros_like(chosen).scatter_(0, order, chosen).reshape(weight.shape)


def _check_two(weight: Tensor, other: Tensor, mask: Tensor) -> None:
    check_mask(weight, mask)
    if other.shape != weight.shape or other.dtype != weight.dtype:
        raise MaskError(
            f"the other operand is {other.dtype} {tuple(other.shape)}, the weight {weight.dtype} "
            f"{tuple(weight.shape)}: two of a kind are needed"
        )


implement("select_largest", select_by_sorting, _select_cuda, _fake_select)
