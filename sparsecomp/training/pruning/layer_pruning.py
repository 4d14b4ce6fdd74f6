"""Prune and repair one layer, by whichever method the config names.

A packed attention projection is three layers above one another, each with its own input statistics; everything here
works part by part.
"""

from collections.abc import Callable

import torch
from torch import nn

from sparsecomp.reference.selection import select_top
from sparsecomp.training.config import RESUConfig
from sparsecomp.training.pruning import pruners
from sparsecomp.training.pruning.calibration import InputStatistics
from sparsecomp.training.pruning.sparsegpt import sparsegpt
from sparsecomp.training.pruning.stabilisers import bias_shift, dsnot_mask

Parts = tuple[InputStatistics, ...]


def pruned_layer(
    weight: torch.Tensor, keep: int, parts: Parts, config: RESUConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and its bool mask after the config's pruner, with ``keep`` True.

    Only n_of_m, whose count is its groups', and sparsegpt, which rounds its blocks', keep another count. Without
    ``parts`` the ranking is by magnitude. MaskError on NaN.
    """
    if config.n_of_m is not None:
        return weight, pruners.n_of_m_mask(_scores(weight, parts), *config.n_of_m)
    # where nothing is kept, nothing can make up for what is gone
    if not parts or not keep or config.pruner == "magnitude":
        return weight, pruners.magnitude_mask(weight, keep)
    if config.pruner == "wanda":
        return weight, best_of_rows(_scores(weight, parts), keep)
    sparsity = 1 - keep / max(weight.numel(), 1)
    solved = [
        sparsegpt(rows, part.products, sparsity)
        for rows, part in zip(weight.chunk(len(parts)), parts, strict=True)
        if part.products is not None
    ]
    return torch.cat([rows for rows, _ in solved]), torch.cat([mask for _, mask in solved])


def best_of_rows(scores: torch.Tensor, keep: int) -> torch.Tensor:
    """Keep exactly ``keep`` scores, as many in each output row; the remainder goes to the rows with the best next one.

    Bool of the scores' shape. MaskError on NaN.
    """
    if not scores.numel():
        return torch.zeros_like(scores, dtype=torch.bool)
    rows = scores.reshape(len(scores), scores.shape[1:].numel())
    each, rest = divmod(keep, len(rows))
    mask = select_top(rows, each, refuse_nan=True)
    after, column = rows.masked_fill(mask, -torch.inf).max(1, keepdim=True)
    gets = select_top(after.reshape(-1), rest)[:, None]
    mask.scatter_(1, column, mask.gather(1, column) | gets)
    return mask.reshape(scores.shape)


def dsnot(weight: torch.Tensor, mask: torch.Tensor, parts: Parts) -> torch.Tensor:
    """The mask after DSnoT's swaps; ``weight`` is the dense one."""
    scores = _scores(weight, parts)

    def swapped(part: InputStatistics, rows: torch.Tensor, kept: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        return dsnot_mask(rows, kept, score, part.mean, part.variance)

    return _by_parts(parts, swapped, weight, mask, scores)


def lost_output(lost: torch.Tensor, parts: Parts) -> torch.Tensor:
    """The mean output of each row that went with ``lost``, the weight before minus the one after: fp32 (rows,)."""
    none = torch.zeros_like(lost, dtype=torch.bool)
    return _by_parts(parts, lambda part, rows, kept: bias_shift(rows, kept, part.mean), lost, none)


def bias_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """The bias (a view of it) that is added to what the module's weight ``name`` gives; None where there is none."""
    if not isinstance(module, nn.MultiheadAttention):
        return getattr(module, "bias", None)
    if name == "out_proj.weight":
        return module.out_proj.bias
    places = {"q_proj_weight": 0, "k_proj_weight": 1, "v_proj_weight": 2}
    packed = module.in_proj_bias
    return packed if packed is None or name not in places else packed.detach().chunk(3)[places[name]]


def _scores(weight: torch.Tensor, parts: Parts) -> torch.Tensor:
    if not parts:
        return weight.detach().float().abs()
    return _by_parts(parts, lambda part, rows: pruners.wanda_scores(rows, part.norm), weight)


def _by_parts(parts: Parts, method: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """``method`` on the statistics and the rows (flattened to matrices) of each part, above one another."""
    shape = tensors[0].shape
    flat = [tensor.detach().reshape(len(tensor), shape[1:].numel()).chunk(len(parts)) for tensor in tensors]
    found = torch.cat([method(part, *rows) for part, *rows in zip(parts, *flat, strict=True)])
    return found.reshape(shape) if found.dim() == 2 else found
