"""Which weights stay at the end of a RESU phase: resurrected ones compete apart from the active ones."""

import torch

from sparsecomp.errors import MaskError
from sparsecomp.ops.masked.effective_weight import check_mask
from sparsecomp.ops.masked.elementwise import tournament
from sparsecomp.reference.selection import select_top
from sparsecomp.training.pruning.scores import n_of_m_mask


def amnesty_mask(weight: torch.Tensor, mask: torch.Tensor, keep: int, rate: float) -> torch.Tensor:
    """The new mask, bool of the weight's shape, with exactly `keep` True.

    `weight` is the effective one, with theta in its pruned positions, so all scores |w| come from one tensor. The
    best min(round(rate * keep), number of theta that are not 0) of the pruned positions come back and the best active
    weights fill the rest. A group that is too short is filled from what is left of the other. Equal scores go to the
    lowest index. MaskError for parts that do not fit, NaN or infinity, a count or a rate outside its domain.
    """
    _check(weight, mask, rate)
    return tournament(weight, mask, keep, rate)


def amnesty_n_of_m(weight: torch.Tensor, mask: torch.Tensor, rate: float, keep: int, group: int) -> torch.Tensor:
    """As `amnesty_mask` for groups of which `keep` stay: the best theta compete in their groups with the active.

    So no more than round(rate * K) weights come back, and fewer where active ones are larger. MaskError also if the
    group does not divide the input channels.
    """
    _check(weight, mask, rate)
    scores = weight.detach().abs()
    active = mask.reshape(-1)
    back = _resurrected(scores.reshape(-1), active, round(rate * int(active.sum()))).reshape(mask.shape)
    # an active weight of 0 goes before a pruned one without amnesty
    return n_of_m_mask(scores.masked_fill(~(mask | back), -1), keep, group)


def _check(weight: torch.Tensor, mask: torch.Tensor, rate: float) -> None:
    check_mask(weight, mask)
    if not 0 <= rate <= 1:
        raise MaskError(f"the amnesty rate is {rate}: it lies in [0, 1]")
    if not bool(weight.isfinite().all()):
        raise MaskError("the weight holds NaN or infinity, which have no rank: lower the learning rate and go back")


def _resurrected(scores: torch.Tensor, active: torch.Tensor, most: int) -> torch.Tensor:
    candidates = ~active & (scores > 0)
    return select_top(scores.masked_fill(~candidates, -torch.inf), min(most, int(candidates.sum())))
