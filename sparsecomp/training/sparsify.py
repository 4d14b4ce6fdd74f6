"""One verb for a whole model: its linear layers become sparse ones."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from sparsecomp.errors import FormatError, MaskError
from sparsecomp.nn.masked.existing_mask import bias_of, is_trained
from sparsecomp.nn.masked.layers import RESULinear
from sparsecomp.nn.sparse.linear import SparseLinear
from sparsecomp.training.pruning.calibration import Statistics, TokenMask, calibrate
from sparsecomp.training.pruning.configs import Config
from sparsecomp.training.replacement import refuse_hooks, replace_layers

Filter = Callable[[nn.Module, str], bool]

_TAKEN = (nn.Linear, RESULinear)
"""Exactly these: a derived class may compute something else, and attention reads its projection's weight itself."""


def sparsify(
    model: nn.Module,
    config: Config,
    *,
    filter: Filter | None = None,
    batches: Iterable[Any] | None = None,
    forward: Callable[[Any], Any] | None = None,
    token_mask: TokenMask | None = None,
) -> nn.Module:
    """Prune a model's linear layers and store their weights sparse, in place.

    Args:
        model: whose `nn.Linear` and RESU linear layers are replaced by `sparsecomp.nn.SparseLinear`; its own layers
            are left unchanged. Layers of an `nn.MultiheadAttention` stay.
        config: `Unstructured(0.9)`, `NM(2, 4)`, `Block(16, 0.8)` or `FromMask()`, for masks and zeros that are there.
        filter: of a layer and its name in the model, whether to take it; all by default.
        batches: inputs of the model, for pruners that rank by what reaches a layer (wanda, sparsegpt).
        forward: runs the model on one of them; by default `model(batch)`.
        token_mask: of a batch, a bool tensor that is False at padding.

    Returns:
        The model, or its replacement where it is itself such a layer.

    Raises:
        MaskError: no layer is taken, a taken layer shares its weight with another or has hooks, which would be lost,
            the pruner needs batches, or a layer's weight cannot be ranked. The model is unchanged.
        FormatError: a layer's sizes do not fit the config. The model is unchanged.
    """
    if isinstance(config, type) or not isinstance(config, Config):
        raise MaskError(
            f"config is {config!r}: give one such as Unstructured(0.9), NM(2, 4), Block(16, 0.8) or FromMask()"
        )
    layers = _layers(model, filter)
    _check_unshared(model, layers)
    refuse_hooks(layers)
    statistics = _statistics(model, layers, config, batches, forward or model, token_mask)
    found: dict[nn.Module, nn.Module] = {}
    for name, layer in layers.items():
        try:
            matrix = config.matrix(layer, statistics.get(name, ()))
        except (FormatError, MaskError) as error:
            raise type(error)(f"{name or 'the layer'}: {error}; a filter can leave the layer out") from error
        if matrix is not None and isinstance(getattr(layer, "bias_mask", None), Tensor):
            warnings.warn(
                f"the mask of {name or 'the layer'}'s bias is applied once, here: in training its zeros move",
                stacklevel=2,
            )
        if matrix is not None:
            found[layer] = SparseLinear(matrix, bias_of(layer), is_trained(layer)).train(layer.training)
    return replace_layers(model, found)


def _layers(model: nn.Module, filter: Filter | None) -> dict[str, nn.Linear]:
    layers = {
        name: layer for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and parametrize.type_before_parametrizations(layer) in _TAKEN
    }  # fmt: skip
    taken = {name: layer for name, layer in layers.items() if filter is None or filter(layer, name)}
    if not taken:
        names = ", ".join(list(layers)[:5]) or "none at all"
        raise MaskError(f"no linear layer is taken; the model's are {names}: see named_modules() and the filter")
    return taken


def _check_unshared(model: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for name, layer in layers.items():
        others = [one for one in owners.get(id(layer.weight), []) if one != name]
        if others:
            raise MaskError(
                f"{name} shares its weight with {', '.join(others)}, which a sparse copy would end: "
                "leave it out by a filter, or untie them"
            )


def _statistics(
    model: nn.Module, layers: Mapping[str, nn.Linear], config: Config, batches: Iterable[Any] | None,
    forward: Callable[[Any], Any], token_mask: TokenMask | None,
) -> Statistics:  # fmt: skip
    pruner = config.pruner
    if not pruner.calibrated:
        return {}
    if batches is None:
        raise MaskError(f"{type(pruner).__name__} ranks by what reaches a layer: give batches=, inputs of the model")
    weights: dict[str, Tensor] = {name: layer.weight for name, layer in layers.items()}
    statistics = calibrate(model, batches, forward, token_mask, pruner.products, weights)
    unseen = sorted(weights.keys() - statistics.keys())
    if unseen:
        raise MaskError(
            f"no batch reached {', '.join(unseen)} (or their weights are computed in each call, as by torch's pruning: "
            "prune.remove ends that): give batches that do, or leave them out by a filter"
        )
    return statistics
