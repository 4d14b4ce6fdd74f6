"""What all layers with masked weights share: one mask a weight, settled weights in evaluation, states checked first."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sparsecomp.nn.masked.masked_weight import MaskedWeight

Masked = dict[str, tuple[nn.Parameter, MaskedWeight]]
"""Weights and what is known of them, by the names of `named_parameters`."""


def shared_mask(weight: Tensor, known: dict[int, MaskedWeight]) -> MaskedWeight:
    """The mask of a weight: that in `known`, by the weight's id, or a new one, which is added."""
    if id(weight) not in known:
        known[id(weight)] = MaskedWeight(weight)
    return known[id(weight)]


def settled(module: Any, training: bool) -> Any:
    """The layer, with the pruned elements of its SPARSE weights zero in memory unless it is to be trained."""
    if not training:
        for weight, masked in module.masked_weights().values():
            masked.apply_(weight)
    return module


def guard_state(module: nn.Module) -> None:
    """Refuse a bad mask before a weight is loaded; settle what an optimizer left in pruned elements after, and before
    a state is saved, which a plain layer may load."""
    module.register_state_dict_pre_hook(_settle_before_save)
    module.register_load_state_dict_pre_hook(_check_before_load)
    module.register_load_state_dict_post_hook(_settle_after_load)


def _check_before_load(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    for name, part in module.named_modules():
        if isinstance(part, MaskedWeight):
            part.check_state(state, f"{prefix}{name}.")


def _settle_after_load(module: Any, _: Any) -> None:
    settled(module, module.training)


def _settle_before_save(module: Any, *_: Any) -> None:
    settled(module, training=False)
