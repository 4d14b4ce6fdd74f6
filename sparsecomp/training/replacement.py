"""Layers of a model put in place of others, wherever the model holds them."""

from collections.abc import Mapping

from torch import nn
from torch.nn.utils.prune import BasePruningMethod

from sparsecomp import _compat
from sparsecomp.errors import MaskError


def replace_layers(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put new layers in place of old ones, in place; the model, or what replaces it."""
    for module in list(model.modules()):
        for name, child in _compat.children_of(module).items():
            if child in new:
                setattr(module, name, new[child])
    return new.get(model, model)


def refresh_pruned(layer: nn.Module) -> None:
    """Write what torch's pruning masks anew to the layer's attributes, as its hooks do before each forward."""
    for hook in _compat.hooks_of(layer):
        if isinstance(hook, BasePruningMethod):
            hook(layer, ())


def refuse_hooks(layers: Mapping[str, nn.Module]) -> None:
    """MaskError for a layer with hooks, but those of torch's pruning: its replacement would not have them."""
    for name, layer in layers.items():
        hooks = [hook for hook in _compat.hooks_of(layer) if not isinstance(hook, BasePruningMethod)]
        if hooks:
            raise MaskError(
                f"{name or 'the layer'} has hooks, such as {hooks[0]}, which its replacement would lose: "
                "remove them first"
            )
