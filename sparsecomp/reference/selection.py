"""Selection by score as a bool tensor: no data-dependent shape, so nothing waits for the device."""

import torch

from sparsecomp.errors import MaskError


def _checked(scores: torch.Tensor, refuse_nan: bool) -> torch.Tensor:
    # the check reads one flag from the device, so a hot path leaves it out
    if refuse_nan and bool(scores.isnan().any()):
        raise MaskError("the scores hold NaN, which has no rank: find the layer whose weights or inputs diverged")
    return scores.detach().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def select_top(scores: torch.Tensor, count: int, refuse_nan: bool = False) -> torch.Tensor:
    """True at the `count` largest scores along the last dimension, bool of `scores`'s shape.

    Equal scores go to the lowest index, on every device. NaN ranks with minus infinity; with `refuse_nan` it
    raises MaskError, at the price of one host synchronisation. `count` 0 selects nothing; a count outside
    0..size raises MaskError.
    """
    size = scores.shape[-1] if scores.dim() else 1
    if not 0 <= count <= size:
        raise MaskError(f"{count} of {size} elements were asked for: the count lies between 0 and {size}")
    values = _checked(scores, refuse_nan).reshape(*scores.shape[:-1], size)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.zeros_like(values, dtype=torch.bool)
    return chosen.scatter_(-1, order[..., :count], True).reshape(scores.shape)


def select_above(scores: torch.Tensor, threshold: float, refuse_nan: bool = False) -> torch.Tensor:
    """True where a score is above `threshold`, bool of `scores`'s shape; NaN as in `select_top`, never True."""
    return _checked(scores, refuse_nan) > threshold
