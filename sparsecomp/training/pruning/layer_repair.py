"""Repair one layer after it was pruned.

A packed attention projection is three layers above one another, each with its own input statistics; everything here
works part by part.
"""

import torch
from torch import nn

from sparsecomp.training.pruning.calibration import InputStatistics
from sparsecomp.training.pruning.pruners import Parts, by_parts, wanda_scores_by_parts
from sparsecomp.training.pruning.stabilisers import bias_shift, dsnot_mask


def dsnot(weight: torch.Tensor, mask: torch.Tensor, parts: Parts) -> torch.Tensor:
    """The mask after DSnoT's swaps; `weight` is the dense one."""
    scores = wanda_scores_by_parts(weight, parts)

    def swapped(part: InputStatistics, rows: torch.Tensor, kept: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        return dsnot_mask(rows, kept, score, part.mean, part.variance)

    return by_parts(parts, swapped, weight, mask, scores)


def lost_output(lost: torch.Tensor, parts: Parts) -> torch.Tensor:
    """The mean output of each row that went with `lost`, the weight before minus the one after: fp32 (rows,)."""
    none = torch.zeros_like(lost, dtype=torch.bool)
    return by_parts(parts, lambda part, rows, kept: bias_shift(rows, kept, part.mean), lost, none)


def added_bias(module: nn.Module, name: str) -> torch.Tensor | None:
    """The bias (a view of it) that is added to what the module's weight `name` gives; None where there is none."""
    if not isinstance(module, nn.MultiheadAttention):
        return getattr(module, "bias", None)
    if name == "out_proj.weight":
        return module.out_proj.bias
    places = {"q_proj_weight": 0, "k_proj_weight": 1, "v_proj_weight": 2}
    packed = module.in_proj_bias
    return packed if packed is None or name not in places else packed.detach().chunk(3)[places[name]]
