"""The mask that a layer already has, by torch's pruning, a parametrization, a RESU phase, or its zeros."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sparsecomp.errors import MaskError
from sparsecomp.nn.masked.masked_weight import MaskedWeight, Mode


def weight_and_mask(layer: nn.Module, name: str = "weight") -> tuple[Tensor, Tensor]:
    """The weight that the layer computes with, detached, and the bool mask of what may be other than zero.

    By `torch.nn.utils.prune` the mask is its buffer, of a parametrization a buffer of the weight's shape whose name
    holds "mask", of a RESU layer its own; without any it is where the weight is not zero.

    Raises:
        MaskError: a RESU layer in the middle of its RESU phase.
    """
    mask = getattr(layer, f"{name}_mask", None)
    original = getattr(layer, f"{name}_orig", None)
    if isinstance(mask, Tensor) and isinstance(original, Tensor):
        kept = mask != 0
        # the attribute is only written by the next forward
        return torch.where(kept, original.detach() * mask, 0), kept
    weight = cast(Tensor, getattr(layer, name)).detach()
    masked: Any = getattr(layer, "masked", None)
    if isinstance(masked, MaskedWeight):
        if masked.mode is Mode.RESU:
            raise MaskError("the layer is in its RESU phase, whose theta a mask would drop: commit it first")
        return masked.effective(weight), masked.mask.mask
    masks = _masks_of_parametrizations(layer, name, weight)
    if masks:
        return weight, torch.stack(masks).all(0)
    return weight, weight != 0


def has_mask(layer: nn.Module, name: str = "weight") -> bool:
    """Whether torch's pruning, a parametrization or RESU gave the weight a mask."""
    masked: Any = getattr(layer, "masked", None)
    return (
        isinstance(getattr(layer, f"{name}_mask", None), Tensor)
        or (isinstance(masked, MaskedWeight) and masked.mode is not Mode.DENSE)
        or bool(_masks_of_parametrizations(layer, name, getattr(layer, name)))
    )


def bias_of(layer: nn.Module) -> nn.Parameter | None:
    """The bias: the parameter itself, or one of what torch's pruning or a parametrization makes of it now, which is
    trained if that is."""
    bias: Tensor | None = getattr(layer, "bias", None)
    if bias is None or isinstance(bias, nn.Parameter):
        return bias
    return nn.Parameter(weight_and_mask(layer, "bias")[0], is_trained(layer, "bias"))


def is_trained(layer: nn.Module, name: str = "weight") -> bool:
    """Whether a parameter that the weight is, or is computed of, takes a gradient."""
    return any(one.requires_grad for path, one in layer.named_parameters() if name in path)


def _masks_of_parametrizations(layer: nn.Module, name: str, weight: Tensor) -> list[Tensor]:
    if not parametrize.is_parametrized(layer, name):
        return []
    own = cast(Any, layer).parametrizations[name]
    return [one != 0 for path, one in own.named_buffers() if "mask" in path and one.shape == weight.shape]
